"""Saving and loading of bitsandbytes' 8-bit Adam moments, bit for bit.

One scale covers 256 neighbouring elements of the tensor that a rank steps. That tensor depends on the ZeRO stage and
the number of ranks, so only the ranks that wrote such moments can load them.
In: a rank's fragments. Out: named tensors of codes and scales, or the restored states.
Source: bitsandbytes 0.50, optim/optimizer.py (`init_state` of `Optimizer2State`).
"""

from collections.abc import Iterator

import torch

from rlplan.errors import SpecError
from rlplan.memory.trainers.optimizers import quantized_bytes
from rlplan.runtime.checkpoints.fragments import TrainedFragments
from rlplan.runtime.checkpoints.stored_states import view_bytes
from rlplan.runtime.checkpoints.tensor_file import TensorFile

STATES = ("state1", "state2", "absmax1", "absmax2")
"""The codes of both moments and their scales. A small tensor has fp32 moments and no scales."""


def iterate_moments(states: TrainedFragments) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (name, tensor) of everything that Adam keeps in 8 bits; nothing before its first step, or in fp32."""
    if states.has_eight_bits:
        for index, owner in enumerate(states.owners):
            state = states.adam.state[owner]
            yield from ((f"eight_bit/{index}/{key}", state[key]) for key in STATES if key in state)


def num_bytes(states: TrainedFragments) -> int:
    """Bytes of the 8-bit moments once Adam has stepped."""
    return sum(quantized_bytes(owner.numel()) for owner in states.owners) if states.has_eight_bits else 0


def bring_back(states: TrainedFragments, own: TensorFile | None, num_steps: int) -> None:
    """Create the moments of each tensor and fill them. own: the file that this rank wrote.

    Raises: SpecError when the file comes from other ranks.
    """
    group = states.adam.param_groups[0]
    listed = group["params"]
    for owner in states.owners:
        group["params"] = [owner]  # ZeRO-3 lists a tensor in its group only during the step
        states.adam.init_state(group, owner, 0, 0)
        states.adam.state[owner]["step"] = num_steps
    group["params"] = listed
    for name, tensor in iterate_moments(states):
        stored = None if own is None else own.tensors.get(name)
        if own is None or stored is None or stored.numel != tensor.numel():
            raise SpecError(
                "the checkpoint's 8-bit Adam moments were written by another layout of ranks",
                where="checkpoint",
                rule="the same number of ranks and ZeRO stage: one scale covers 256 elements of a rank's tensor",
                way_out="resume with that hardware.num_devices and training.zero_stage",
            )
        on_cpu = tensor if tensor.device.type == "cpu" else torch.empty_like(tensor, device="cpu")
        own.read_into(name, 0, view_bytes(on_cpu))
        if on_cpu is not tensor:
            tensor.copy_(on_cpu)
