"""The shared frozen base of a LoRA job, which trainer and rollout engine hold once: the layout of its tensors.

The trainer's row counts the memory, and the engine's parameters are views of it. Each tensor begins on a cache line.
vLLM stacks projections of one input along their first dimension, so each of the trainer's tensors is a contiguous slice
of rows.

In: a ModelSpec and the bytes of an element. Out: the start of each of vLLM's tensors and its members on the trainer's
side, the bytes of all, or the reason why a model's weights differ between the two. Left out: tensor parallelism,
quantized weights, and the other conditions on a job (planner/checks/engine_base.py).
"""

from dataclasses import dataclass
from functools import lru_cache

from rlplan.memory.serving.weights import list_fused_members
from rlplan.spec.model import ModelSpec, Parameter
from rlplan.spec.models.parts import LINEAR
from rlplan.units import round_up

CACHE_LINE = 64


@dataclass(frozen=True)
class SharedTensor:
    """One parameter of the engine."""

    name: str
    """Name in `list_engine_tensors`."""
    shape: tuple[int, ...]
    start: int
    """Offset in bytes."""
    num_bytes: int
    members: tuple[Parameter, ...]
    """The trainer's tensors that are stacked in it. Rows of a vocabulary table are padded."""


@lru_cache(maxsize=8)
def build_shared_layout(model: ModelSpec, element_bytes: int) -> tuple[SharedTensor, ...]:
    """The engine's tensors in the order of `list_engine_tensors`, each starting on the next cache line."""
    layout, end = [], 0
    for tensor, members in list_fused_members(model):
        size = tensor.numel * element_bytes
        layout.append(SharedTensor(tensor.name, tensor.shape, end, size, members))
        end = round_up(end + size, CACHE_LINE)
    return tuple(layout)


def shared_base_bytes(model: ModelSpec, element_bytes: int) -> int:
    """Bytes of the memory that trainer and engine share.

    Counts: `engine_parameter_bytes`, each tensor rounded up to 64 bytes. Differs: the trainer's own base has no padded
    rows in its vocabulary tables.

    >>> from rlplan.spec.models.catalogue import find_model
    >>> shared_base_bytes(find_model("Qwen/Qwen3-0.6B"), 2)  # 2 * 596,049,920: 151,936 words are 64 * 2374
    1192099840
    """
    last = build_shared_layout(model, element_bytes)[-1]
    return round_up(last.start + last.num_bytes, CACHE_LINE)


def find_unshareable_part(model: ModelSpec) -> str:
    """The part of a model that vLLM stores differently from the trainer; empty if every weight is the same on both
    sides.

    Source: vLLM 0.32.0: fused_moe/ packs experts, attention/mla takes `kv_b_proj` apart, the convolutions of linear
    attention are packed (layers/utils.py), models/gpt2.py transposes.
    """
    return next(
        (
            what
            for what, has_it in (
                ("experts", model.experts is not None),
                ("latent attention", model.latent_attention is not None),
                ("linear attention", LINEAR in model.attention_kinds),
                ("transposed projections", model.architecture == "GPT2LMHeadModel"),
                ("weights that are fp32 in every dtype", any(tensor.is_buffer for tensor in model.tensors)),
            )
            if has_it
        ),
        "",
    )
