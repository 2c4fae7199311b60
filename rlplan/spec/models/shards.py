"""What a rank holds of a model that is cut over tensor-, expert- and pipeline-parallel ranks.

In: a ModelSpec and a Layout. Out: tensors of each stage. Left out: optimizer sharding (ZeRO, FSDP), uneven
hand-made stages.

Symbols: t tp, e ep, p pp, L layers, k key heads, V vocabulary.
"""

from rlplan.errors import SpecError
from rlplan.spec.model import ModelSpec, Parameter
from rlplan.spec.models.dimensions import Layout


def stage_layers(num_layers: int, pp: int) -> tuple[range, ...]:
    """The layers of each pipeline stage.

    Counts: L // p each; what is left over goes to the stages before the last, one each, from the back.
    Source: vLLM 0.25 distributed/utils.py get_pp_indices. Differs: Megatron refuses what does not divide.

    >>> [len(layers) for layers in stage_layers(30, 4)]
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


def stage_tensors(model: ModelSpec, layout: Layout, stage: int) -> tuple[Parameter, ...]:
    """Every tensor that one rank of a pipeline stage holds. Raises: SpecError for sizes that do not divide.

    Counts: k/t key heads but at least one (replicated when t > k); norms, routers, MLA's latent projections and the
    vision tower whole; experts over e (or, with e = 1, each cut over t); the vocabulary padded and cut over t;
    embeddings on the first stage, the head on the last, which repeats a tied table if there is more than one stage.
    """
    stages = stage_layers(model.num_layers, layout.pp)
    if not 0 <= stage < len(stages):
        raise SpecError(
            f"stage {stage} does not exist",
            where="stage",
            rule=f"0 to {len(stages) - 1}",
            way_out="choose another stage",
        )
    return model.held_tensors(layout, stages[stage], has_first=stage == 0, has_last=stage == len(stages) - 1)
