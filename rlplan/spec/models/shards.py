"""The part of a model on one rank under tensor, expert and pipeline parallelism.

In: a ModelSpec and a Layout. Out: tensors of each stage. Left out: optimizer sharding (ZeRO, FSDP), stages that split a
layer, interleaved stages.

Symbols: t tp, e ep, p pp, L layers, k key heads, V vocabulary.
"""

from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate

from rlplan.errors import SpecError
from rlplan.spec.model import Component, ModelSpec, Parameter
from rlplan.spec.models.dimensions import Layout
from rlplan.units import ceil_div

_IN_LAYERS = (Component.ATTENTION, Component.MLP, Component.SHARED_EXPERTS, Component.ROUTER)


def split_layers(num_layers: int, pp: int) -> tuple[range, ...]:
    """The layers of each pipeline stage.

    Counts: L // p each. The remaining layers go to the stages before the last, one per stage, starting from the back.
    Source: vLLM 0.25 distributed/utils.py get_pp_indices. Differs: Megatron refuses what does not divide.

    >>> [len(layers) for layers in split_layers(30, 4)]
    [7, 8, 8, 7]
    """
    if pp > num_layers:
        raise SpecError(
            f"pp {pp} is more than num_layers {num_layers}",
            where="pp",
            rule="every stage has a layer",
            way_out=f"choose pp of at most {num_layers}",
        )
    sizes = [num_layers // pp] * pp
    for back in range(2, num_layers % pp + 2):
        sizes[-back] += 1
    starts = [sum(sizes[:stage]) for stage in range(pp)]
    return tuple(range(start, start + size) for start, size in zip(starts, sizes, strict=True))


def count_head_layers(model: ModelSpec) -> float:
    """Cost of the head in layers, by the matmuls of a token: V h over the active parameters of an average layer."""
    counts = model.numel_by_component
    layers = sum(counts.get(component, 0) for component in _IN_LAYERS)
    if model.experts is not None:
        layers += counts.get(Component.EXPERTS, 0) * model.experts.num_active // model.experts.num_experts
    return model.vocab_size * model.hidden_size * model.num_layers / layers


@lru_cache(maxsize=1024)
def has_even_stages(model: ModelSpec, pp: int) -> bool:
    """Whether all stages of a training pipeline except the last have the same number of layers.

    Megatron-Core takes a number for the first and the last stage, and splits the rest evenly.
    """
    return len({len(layers) for layers in split_training_stages(model, pp)[:-1]}) <= 1


def split_training_stages(model: ModelSpec, pp: int, *, has_head: bool = True) -> tuple[range, ...]:
    """The layers of each stage of a training pipeline; the last stage has fewer, since it has the head.

    Counts: candidates are all numbers of layers on the last stage for which no stage has more than L / p, rounded up.
    Preferred are those that leave the other stages equal, since verl, NeMo-RL and slime cannot express others; then the
    one with the fastest slowest stage; then the largest. has_head: false for a value model.
    Source: Megatron-Core 0.14, `num_layers_in_last_pipeline_stage`.

    >>> from rlplan.spec.models.catalogue import find_model
    >>> v3, mixture = find_model("deepseek-ai/DeepSeek-V3"), find_model("Qwen/Qwen3-235B-A22B")
    >>> [len(layers) for layers in split_training_stages(v3, 4)]  # slime's --decoder-last-pipeline-num-layers 13
    [16, 16, 16, 13]
    >>> [len(layers) for layers in split_training_stages(mixture, 8)][-2:]  # verl: 10 in the last
    [12, 10]
    >>> len(split_training_stages(v3, 16)[-1])  # verl: 1
    1
    """
    num_layers = model.num_layers
    even = split_layers(num_layers, pp)
    if pp == 1:
        return even
    extra, most = count_head_layers(model) if has_head else 0.0, ceil_div(num_layers, pp)

    def badness(last: int) -> tuple[bool, float, int]:
        largest = ceil_div(num_layers - last, pp - 1)
        return (num_layers - last) % (pp - 1) > 0, max(largest, last + extra), -last

    last = min((x for x in range(1, most + 1) if 1 <= ceil_div(num_layers - x, pp - 1) <= most), key=badness)
    ends = list(accumulate(len(layers) for layers in split_layers(num_layers - last, pp - 1)))
    return tuple(range(start, end) for start, end in zip((0, *ends), (*ends, num_layers), strict=True))


def list_stage_tensors(
    model: ModelSpec, layout: Layout, stage: int, stages: Sequence[range] | None = None
) -> tuple[Parameter, ...]:
    """Every tensor that one rank of a pipeline stage holds. Raises: SpecError for sizes that do not divide.

    stages: the layers of each stage, if they are not split evenly.

    Counts: k/t key heads but at least one (replicated when t > k). Norms, routers, MLA's latent projections and the
    vision tower are whole. Experts are split over e, each over `etp` ranks (default: over t with e = 1, else whole).
    The vocabulary is padded and split over t. Embeddings are on the first stage, the head is on the last, which repeats
    a tied table if there are several stages.
    """
    stages = stages or split_layers(model.num_layers, layout.pp)
    if not 0 <= stage < len(stages):
        raise SpecError(
            f"stage {stage} does not exist",
            where="stage",
            rule=f"0 to {len(stages) - 1}",
            way_out="choose another stage",
        )
    return model.list_rank_tensors(layout, stages[stage], has_first=stage == 0, has_last=stage == len(stages) - 1)
