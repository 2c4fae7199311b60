"""What rules of thumb say of published measurements, beside the formulas' predictions.

In: a measured point. Out: the rule's value in the point's unit, or None where the point's settings cannot be read.
Left out: kinds of points for which no such rule is in use.

    peak of training    16 bytes a trained parameter, 2 a frozen one, over the GPUs; 34 h T a layer, with recomputation
                        34 h T of one layer and 2 h T of each
    training throughput 6 FLOPs a parameter and token, 8 with recomputation, at 0.4 of the peak in 16 bits
    time per token      weights, and the caches of all requests at half of their responses, read once at the whole
                        bandwidth of the ranks
    engine asleep       0.5 GiB, a CUDA context

Source: Rajbhandari et al. 2020 (16 bytes); Korthikanti et al. 2022 (34 bytes a token and element of h); Kaplan et al.
2020 (6 FLOPs). The rest is what people calculate with before they run a job.
"""

from rlplan.accuracy.points import MeasuredPoint
from rlplan.accuracy.registry import CannotPredict, Prediction
from rlplan.accuracy.serving.latency import server_of
from rlplan.accuracy.settings import Settings, unit_bytes
from rlplan.accuracy.timed_hardware import cluster_of
from rlplan.accuracy.training.run import read_run
from rlplan.accuracy.training.throughput import in_unit, read_step
from rlplan.errors import SpecError
from rlplan.memory.serving.kv import cache_pool
from rlplan.memory.serving.weights import engine_layout, engine_weight_bytes
from rlplan.memory.trainers.shape import Recompute
from rlplan.timing.network.cluster import Cluster
from rlplan.timing.training.flops import linear_flops
from rlplan.units import GIB
from rlplan.vocabulary import Dtype

TRAINED_BYTES, FROZEN_BYTES = 16, 2
LAYER_BYTES, INPUT_BYTES = 34, 2
PEAK_SHARE = 0.4
CONTEXT = GIB // 2


def rule_of_thumb(point: MeasuredPoint) -> Prediction | None:
    """The rule's answer; None where there is no rule, or the point says too little for it."""
    rule = RULES.get(point.kind)
    try:
        return None if rule is None else Prediction(rule(point))
    except (CannotPredict, SpecError):
        return None


def _peak(point: MeasuredPoint) -> float:
    run = read_run(point)
    trained = sum(one.numel for one in run.adapters.parameters) if run.adapters else run.model.num_parameters
    frozen = run.model.num_parameters if run.adapters else 0
    states = (TRAINED_BYTES * trained + FROZEN_BYTES * frozen) / (1 if run.replicates else run.num_ranks)
    row = run.tokens.num * run.model.hidden_size / (run.tp * run.cp * run.ulysses)
    layers = run.model.num_layers / run.pp
    is_computed_again = run.recompute is not Recompute.NONE
    kept = LAYER_BYTES + INPUT_BYTES * layers if is_computed_again else LAYER_BYTES * layers
    return (states + row * kept) / unit_bytes(point)


def _throughput(point: MeasuredPoint) -> float:
    step, cluster = read_step(point), cluster_of(point)
    passes = 3 if step.setting.recompute is Recompute.NONE else 4
    flops = passes * linear_flops(step.setting.model) * step.num_tokens
    seconds = flops / (cluster.num_gpus * PEAK_SHARE * cluster.flops_per_s(Dtype.BFLOAT16))
    return in_unit(point.measured.unit, step, seconds, cluster)


def _time_per_token(point: MeasuredPoint) -> float:
    settings, server = Settings(point), server_of(point)
    cut = server.cut
    weights = engine_weight_bytes(server.model, engine_layout(cut.tp, 1, cut.ep, 1), 2, cut.scheme, 0)
    pool = cache_pool(server.model, tp=cut.tp, element_bytes=cut.kv_element_bytes)
    blocks = pool.blocks_of_sequence(settings.count("isl") + settings.count("osl") // 2)
    read = weights + server.concurrency / cut.replicas * blocks * pool.bytes_per_block
    return 1000 * read / Cluster(server.gpu, cut.tp, cut.tp).memory_bytes_per_s


def _asleep(point: MeasuredPoint) -> float:
    return CONTEXT / unit_bytes(point)


RULES = {
    "train_peak": _peak,
    "throughput_train": _throughput,
    "serving_tpot": _time_per_token,
    "sleeping_engine_residual": _asleep,
}
"""By kind of point."""
