"""Adam's moments in 8 bits: bitsandbytes' states of each tensor that a rank steps, saved and read as they are.

In: a rank's fragments. Out: named tensors of codes and scales; or the states as they were when those were written.
A scale is of 256 neighbours in the tensor that is stepped, which depends on the ZeRO stage and on the number of ranks:
so these moments are read back by the ranks that wrote them, to the bit, and by no others.
Source: bitsandbytes 0.50, optim/optimizer.py (`init_state` of `Optimizer2State`).
"""

from collections.abc import Iterator

import torch

from rlplan.errors import SpecError
from rlplan.memory.trainers.optimizers import quantized_bytes
from rlplan.runtime.checkpoints.fragments import TrainedFragments
from rlplan.runtime.checkpoints.stored_states import memory_of
from rlplan.runtime.checkpoints.tensor_file import TensorFile

STATES = ("state1", "state2", "absmax1", "absmax2")
"""The codes of both moments, and their scales; fp32 moments and no scales of a small tensor."""


def moments_of(states: TrainedFragments) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, tensor) of everything that Adam keeps in 8 bits; nothing before its first step, or in fp32."""
    if states.has_eight_bits:
        for index, owner in enumerate(states.owners):
            held = states.adam.state[owner]
            yield from ((f"eight_bit/{index}/{key}", held[key]) for key in STATES if key in held)


def num_bytes(states: TrainedFragments) -> int:
    """Bytes of all these once Adam has stepped."""
    return sum(quantized_bytes(owner.numel()) for owner in states.owners) if states.has_eight_bits else 0


def bring_back(states: TrainedFragments, own: TensorFile | None, num_steps: int) -> None:
    """Make the states of each tensor and fill them. own: what this rank wrote. Raises: SpecError for another one's."""
    group = states.adam.param_groups[0]
    listed = group["params"]
    for owner in states.owners:
        group["params"] = [owner]  # stage 3 names what is stepped inside the step alone
        states.adam.init_state(group, owner, 0, 0)
        states.adam.state[owner]["step"] = num_steps
    group["params"] = listed
    for name, tensor in moments_of(states):
        stored = None if own is None else own.tensors.get(name)
        if own is None or stored is None or stored.numel != tensor.numel():
            raise SpecError(
                "the checkpoint's moments in 8 bits are of other ranks",
                where="checkpoint",
                rule="as many ranks and the ZeRO stage that wrote them: a scale is of 256 elements in a rank's tensor",
                way_out="resume with that hardware.num_devices and training.zero_stage",
            )
        whole = tensor if tensor.device.type == "cpu" else torch.empty_like(tensor, device="cpu")
        own.read_into(name, 0, memory_of(whole))
        if whole is not tensor:
            tensor.copy_(whole)
