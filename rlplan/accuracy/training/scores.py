"""Passes without gradient: `logprob_peak` and `logprob_steady`, of a policy, a reference or a value model on one GPU.

In: a point, as benchmarks/gpu writes them. Out: what the formulas say of it.
Left out: several GPUs, engines that score (vLLM's prompt_logprobs): refused.
"""

from rlplan.accuracy.named_models import model_of
from rlplan.accuracy.points import MeasuredPoint, Statistic
from rlplan.accuracy.registry import CannotPredict, Prediction, predicts
from rlplan.accuracy.settings import gpu_of
from rlplan.accuracy.training.points import in_its_unit
from rlplan.accuracy.training.run import stated_loss
from rlplan.accuracy.training.settings import RunSettings, num_ranks, read_precision, read_tokens
from rlplan.memory.machine.allocator import reserved_bytes
from rlplan.memory.model.block_families import blocks_of
from rlplan.memory.trainers.micro_batch import score_peak_bytes
from rlplan.memory.trainers.shape import MicroBatchShape
from rlplan.spec.base import shorten
from rlplan.spec.model import ModelSpec
from rlplan.spec.models.adapters import value_head_parameters
from rlplan.vocabulary import Loss, MemoryKind

SCALAR_ROLES = ("value", "reward")
ROLES = ("policy", "reference", *SCALAR_ROLES)


@predicts("logprob_peak")
def predict_score_peak(point: MeasuredPoint) -> Prediction:
    """The peak of a pass that gives log-probs or values: weights, and one layer or the logits.

    Counts: `score_peak_bytes`; the context where nvidia-smi was read.
    """
    settings = RunSettings(point)
    role, model = _role(settings), model_of(point)
    shape = _shape(settings, role, model)
    peak = score_peak_bytes(shape)
    weights = _weight_bytes(settings, role, model)
    snapshot = {MemoryKind.WEIGHTS: weights, MemoryKind.LOGITS: peak}
    statistic = point.measured.statistic
    if statistic in (Statistic.RESERVED, Statistic.PROCESS):
        snapshot[MemoryKind.FRAGMENTATION] = reserved_bytes(weights + peak, 0) - weights - peak
    if statistic is Statistic.PROCESS:
        profile = gpu_of(point)
        if profile is None:
            raise CannotPredict("the GPU is not known, and with it the context that nvidia-smi counts")
        snapshot[MemoryKind.CONTEXT] = profile.overheads.context.value
    return in_its_unit(point, snapshot)


@predicts("logprob_steady")
def predict_score_steady(point: MeasuredPoint) -> Prediction:
    """What a scorer holds between passes: its weights."""
    settings = RunSettings(point)
    return in_its_unit(point, {MemoryKind.WEIGHTS: _weight_bytes(settings, _role(settings), model_of(point))})


def _role(settings: RunSettings) -> str:
    """Whose pass it is. Raises: CannotPredict for other roles, several GPUs, and the cut-down models of a dry run."""
    role = settings.word("role", "policy").lower()
    if role not in ROLES:
        raise CannotPredict(f"role {shorten(role)} is none of {', '.join(ROLES)}")
    if num_ranks(settings) > 1 or settings.degree("tp") > 1:
        raise CannotPredict("only passes on one GPU are modelled")
    return role


def _weight_bytes(settings: RunSettings, role: str, model: ModelSpec) -> int:
    parameters = value_head_parameters(model) if role in SCALAR_ROLES else model.parameters
    return read_precision(settings, has_master=False).stored * sum(parameter.numel for parameter in parameters)


def _shape(settings: RunSettings, role: str, model: ModelSpec) -> MicroBatchShape:
    first, *more = blocks_of(model)
    tokens = read_tokens(settings)
    loss = stated_loss(settings.word("loss")) or Loss.BY_ROWS
    loss = Loss.NONE if role in SCALAR_ROLES else loss
    return MicroBatchShape(
        first.block,
        first.num,
        model.vocab_size,
        tokens.num,
        num_head_tokens=tokens.num
        - tokens.sequences * (loss in (Loss.IN_PLACE, Loss.BY_ROWS)),  # the last token predicts nothing
        element_bytes=read_precision(settings, has_master=False).compute,
        loss=loss,
        more=tuple(more),
    )
