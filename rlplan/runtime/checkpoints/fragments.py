"""Fragments: the ranges of trained parameters that a rank updates, and where their fp32 state is stored.

A whole tensor is its fragments side by side, so a checkpoint made of fragments can be loaded with any number of ranks
and any ZeRO stage. All ranks' fragments together contain every trained element once. With AutoTP, each rank's shard of
a layer has a name of its own.
In: a DeepSpeed engine. Out: fragments, each a range of one parameter's elements.
Left out: 8-bit moments (eight_bit.py).
Source: DeepSpeed 0.19.8, utils/tensor_fragment.py (`_hp_mapping`), runtime/zero/stage3.py (`grad_position`),
runtime/fp16/unfused_optimizer.py.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from rlplan.memory.trainers.checkpoints import SAVED_KINDS, cut_evenly

MASTER, *MOMENTS = SAVED_KINDS


@dataclass(frozen=True)
class Fragment:
    """A run of consecutive elements of one flattened parameter that one rank updates."""

    name: str
    """The parameter's name."""

    start: int
    """Index of the fragment's first element in the parameter."""

    numel: int
    owner: torch.Tensor
    """The fp32 tensor that the optimizer steps; Adam's moments have the same offset in its states."""

    offset: int
    """Index of the fragment's first element in `owner`."""

    def view(self, tensor: torch.Tensor) -> torch.Tensor:
        """View this fragment in a tensor of the owner's size."""
        return tensor.detach().view(-1).narrow(0, self.offset, self.numel)


class TrainedFragments:
    """The fragments of one rank.

    held: the fragments that it updates. saved: those that it writes. They differ only if every rank updates all
    elements (ZeRO-0): then each rank writes an equal part.
    """

    def __init__(self, engine: Any) -> None:
        self.engine, self._zero = engine, engine.optimizer
        self.adam = getattr(engine.optimizer, "optimizer", engine.optimizer)
        self.num_parts = max(1, engine.autotp_size())  # DeepSpeed returns 0 without AutoTP
        self.part = part_name(torch.distributed.get_rank() % self.num_parts, self.num_parts)
        # the attributes by which DeepSpeed's ZeRO-3 and ZeRO-1/2 optimizers differ from those without partitions
        is_cut = hasattr(self._zero, "fp32_partitioned_groups_flat") or hasattr(
            self._zero, "single_partition_of_fp32_groups"
        )
        self.held = tuple(self._find())
        self.saved = self.held if is_cut else tuple(_cut_for_rank(self.held, self.num_parts))

    @property
    def trained(self) -> dict[str, Any]:
        """Trained parameters by name, in the module's order; with AutoTP this rank's shards."""
        return {name + self.part: p for name, p in self.engine.module.named_parameters() if p.requires_grad}

    @property
    def has_eight_bits(self) -> bool:
        """Whether the optimizer is a bitsandbytes one with 8-bit moments."""
        return type(self.adam).__module__.startswith("bitsandbytes")

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kinds of state that are saved as fragments."""
        return (MASTER,) if self.has_eight_bits else SAVED_KINDS

    @property
    def owners(self) -> tuple[torch.Tensor, ...]:
        """The fp32 tensors that the optimizer steps on this rank."""
        return tuple({id(fragment.owner): fragment.owner for fragment in self.held}.values())

    def shapes(self) -> dict[str, list[int]]:
        """Shapes of the trained parameters: full ones under ZeRO-3, the shard's with AutoTP."""
        return {name: list(getattr(p, "ds_shape", p.shape)) for name, p in self.trained.items()}

    def values(self, kind: str, fragment: Fragment) -> torch.Tensor | None:
        """View one fragment's values of a kind; None for moments before Adam's first step."""
        tensor = fragment.owner if kind == MASTER else self.adam.state[fragment.owner].get(kind)
        return None if tensor is None else fragment.view(tensor)

    @property
    def num_steps(self) -> int:
        steps = {int(state["step"]) for state in self.adam.state.values() if "step" in state}
        assert len(steps) <= 1, f"Adam has taken different numbers of steps: {steps}"
        return steps.pop() if steps else 0

    def make_moments(self, num_steps: int) -> None:
        """Create zero moments for every owner, as Adam does in its first step, and set the step count."""
        for owner in self.owners:
            state = self.adam.state[owner]
            for kind in MOMENTS:
                if kind not in state:
                    state[kind] = torch.zeros_like(owner, dtype=torch.float32, memory_format=torch.preserve_format)
            # DeepSpeed's CPU Adam counts its steps in an int, torch's Adam in a tensor
            if isinstance(state.get("step"), int):
                state["step"] = num_steps
            else:
                state["step"] = torch.tensor(float(num_steps), dtype=torch.float32)

    def _find(self) -> Iterator[Fragment]:
        if hasattr(self._zero, "fp32_partitioned_groups_flat"):
            return self._find_in_zero_3()
        if hasattr(self._zero, "single_partition_of_fp32_groups"):
            return self._find_in_flat_buffers()
        return self._find_whole_tensors()

    def _find_in_zero_3(self) -> Iterator[Fragment]:
        """ZeRO-3 splits every tensor into equal shares, with padding at its end."""
        zero = self._zero
        for name, parameter in self.trained.items():
            group, offset, size = zero.grad_position[zero.get_param_id(parameter)]
            start = size * zero._get_param_partition_rank(parameter)
            numel = min(size, parameter.ds_numel - start)
            if numel > 0:  # the share of the last ranks may be padding only
                yield Fragment(name, start, numel, zero.fp32_partitioned_groups_flat[group], offset)

    def _find_in_flat_buffers(self) -> Iterator[Fragment]:
        """ZeRO-1 and 2: the range of every tensor in this rank's partition of a group's flat buffer."""
        for name, parameter in self.trained.items():
            mapping = parameter._hp_mapping
            if mapping is None:  # the parameter is in another rank's partition
                continue
            owner = self._zero.single_partition_of_fp32_groups[mapping.param_group_index]
            start, numel = mapping.lp_fragment_address.start, mapping.lp_fragment_address.numel
            yield Fragment(name, start, numel, owner, mapping.hp_fragment_address.start)

    def _find_whole_tensors(self) -> Iterator[Fragment]:
        """ZeRO-0: each trained parameter's own fp32 tensor, or the fp32 copy that a 16-bit optimizer keeps."""
        lows = [p for group in getattr(self._zero, "fp16_groups", ()) for p in group]
        highs = [p for group in getattr(self._zero, "fp32_groups", ()) for p in group]
        copies = {id(low): high for low, high in zip(lows, highs, strict=True)}
        for name, parameter in self.trained.items():
            yield Fragment(name, 0, parameter.numel(), copies.get(id(parameter), parameter), 0)


def part_name(rank: int, num_parts: int) -> str:
    """Suffix of the names of a tensor-parallel rank's shards; empty without tensor parallelism.

    >>> part_name(1, 2), part_name(0, 1)
    ('~1-of-2', '')
    """
    return f"~{rank}-of-{num_parts}" if num_parts > 1 else ""


def _cut_for_rank(fragments: Sequence[Fragment], num_parts: int) -> Iterator[Fragment]:
    """Cut out this rank's equal part of fragments that every data-parallel rank holds."""
    total = sum(fragment.numel for fragment in fragments)
    # DeepSpeed numbers the ranks of a tensor parallel group consecutively (utils/groups.py)
    num_ranks, rank = torch.distributed.get_world_size() // num_parts, torch.distributed.get_rank() // num_parts
    first, last = cut_evenly(total, num_ranks, rank)
    before = 0
    for fragment in fragments:
        start, end = max(first - before, 0), min(last - before, fragment.numel)
        if start < end:
            yield Fragment(fragment.name, start, end - start, fragment.owner, start)
        before += fragment.numel
