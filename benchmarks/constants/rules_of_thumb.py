"""Rules of thumb against published measurements, beside the formulas' predictions.

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

from rlplan.accuracy.named_models import find_point_model
from rlplan.accuracy.points import MeasuredPoint
from rlplan.accuracy.predict import plan_point_job, validate_job
from rlplan.accuracy.predictions import CannotPredict, Prediction
from rlplan.accuracy.serving_points import latency_job
from rlplan.accuracy.settings import unit_bytes
from rlplan.accuracy.training.job import training_job
from rlplan.accuracy.training.throughput import convert_to_unit, step_job
from rlplan.errors import SpecError
from rlplan.memory.serving.engine import predict_engine_memory
from rlplan.memory.serving.weights import engine_weight_bytes
from rlplan.planner.answers.model_flops import read_peak_flops_per_s
from rlplan.planner.serving import ServingJob
from rlplan.spec.model import Parameter
from rlplan.spec.models.adapters import list_lora_parameters
from rlplan.timing.training.flops import linear_flops
from rlplan.units import GIB

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
    job, model = training_job(point), find_point_model(point)
    training, work = job["training"], job["workload"]
    adapters: tuple[Parameter, ...] = ()
    if (lora := training.get("lora")) is not None:
        adapters = list_lora_parameters(model, lora["rank"], lora["target_modules"])
    trained = sum(tensor.numel for tensor in adapters) if adapters else model.num_parameters
    frozen = model.num_parameters if adapters else 0
    num_ranks = 1 if training.get("fsdp_size") == 1 else job["hardware"]["num_devices"]
    states = (TRAINED_BYTES * trained + FROZEN_BYTES * frozen) / num_ranks
    num_tokens = work["micro_batch_size_per_gpu"] * (work["max_prompt_len"] + work["max_response_len"])
    row = num_tokens * model.hidden_size / (training["tp"] * training["cp"] * training["ulysses"])
    layers = model.num_layers / training["pp"]
    kept = LAYER_BYTES + INPUT_BYTES * layers if training["gradient_checkpointing"] else LAYER_BYTES * layers
    return (states + row * kept) / unit_bytes(point)


def _throughput(point: MeasuredPoint) -> float:
    plan = plan_point_job(step_job(point))
    passes = 4 if plan.choice.trainer.gradient_checkpointing else 3
    num_tokens = plan.job.workload.num_rollouts_per_step * plan.job.workload.max_seq_len
    flops = passes * linear_flops(plan.job.load_model()) * num_tokens
    seconds = flops / (plan.num_devices * PEAK_SHARE * read_peak_flops_per_s(plan))
    return convert_to_unit(point.measured.unit, plan, seconds)


def _time_per_token(point: MeasuredPoint) -> float:
    server = ServingJob(validate_job(latency_job(point)))
    weights = engine_weight_bytes(server.model, server.cut.layout, 2, server.quantization, 0)
    memory = predict_engine_memory(server.model, server.settings)
    blocks = memory.pool.blocks_of_sequence(server.work.usual_prompt_len + server.work.usual_response_len // 2)
    read = weights + server.loop.num_clients / server.attention_dp * blocks * memory.pool.bytes_per_block
    return 1000 * read / server.pool.cluster.memory_bytes_per_s


def _asleep(point: MeasuredPoint) -> float:
    return CONTEXT / unit_bytes(point)


RULES = {
    "train_peak": _peak,
    "throughput_train": _throughput,
    "serving_tpot": _time_per_token,
    "sleeping_engine_residual": _asleep,
}
"""The rule of thumb for each kind of point."""
