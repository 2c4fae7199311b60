"""Weight resharding of FSDP2 and Megatron: weights are gathered and sent tensor by tensor.

In: a model, a trainer, ranks, the bucket. Out: bytes that a trainer's rank needs in addition to its weights. Left out:
rlplan's own runtime (packets.py), quantization during the sync.

Source: verl's `per_tensor_generator` (utils/megatron_utils.py; "per tensor weight resharding", docs/perf/dpsk.md),
slime's update_weight (a buffer of `update_weight_buffer_size`), Megatron-Bridge's `export_hf_weights`.
"""

from functools import lru_cache

from rlplan.spec.model import Component, ModelSpec, Parameter
from rlplan.vocabulary import Backend


@lru_cache(maxsize=256)
def find_largest_units(model: ModelSpec, backend: Backend, ep: int = 1) -> tuple[int, int]:
    """(elements of the largest tensor that is sent, of the largest that is gathered at a time).

    Counts: Megatron's experts are separate matrices, and each rank of an expert parallel group contributes one; gate
    and up are one tensor. FSDP2's experts are stacked (transformers 5), and `full_tensor()` gathers the whole stack.

    >>> from rlplan.spec.models.catalogue import find_model
    >>> find_largest_units(find_model("deepseek-ai/DeepSeek-V3"), "megatron", 64)  # a table; 64 times 2 x 2048 x 7168
    (926679040, 1879048192)
    """
    stacks, others = list[Parameter](), list[Parameter]()
    for tensor in model.parameters:
        (stacks if tensor.component is Component.EXPERTS and len(tensor.shape) == 3 else others).append(tensor)
    # Bridges send gate and up as one tensor.
    dense = max(*(tensor.numel for tensor in others), 2 * model.intermediate_size * model.hidden_size)
    if backend != "megatron":
        largest = max((dense, *(stack.numel for stack in stacks)))
        return largest, largest
    expert = max((stack.numel // stack.shape[0] for stack in stacks), default=0)
    return max(dense, expert), max(dense, ep * expert)


def bridge_bucket_bytes(model: ModelSpec, backend: Backend, element_bytes: int, bucket_bytes: int) -> int:
    """Bytes of the bucket for whole tensors: the configured bound, or the largest tensor.

    >>> from rlplan.spec.models.catalogue import find_model
    >>> bridge_bucket_bytes(find_model("deepseek-ai/DeepSeek-V3"), "megatron", 2, 512 << 20)  # 129280 x 7168 x 2
    1853358080
    """
    largest, _ = find_largest_units(model, backend)
    return max(element_bytes * largest, min(bucket_bytes, element_bytes * model.num_parameters))


def gathered_part_bytes(model: ModelSpec, backend: Backend, element_bytes: int, ep: int = 1) -> int:
    """Bytes of the parts of one tensor that are gathered from all ranks, in addition to the assembled tensor."""
    return element_bytes * find_largest_units(model, backend, ep)[1]
