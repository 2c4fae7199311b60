"""Predictor of `throughput_train`: tokens per second, seconds per step or MFU of published training runs.

In: a point. Out: the step of its job's plan in the point's unit. Left out: data loading, checkpoints, failures.
"""

import re
from typing import Any

from rlplan.accuracy.named_models import find_point_model
from rlplan.accuracy.points import MeasuredPoint
from rlplan.accuracy.predict import plan_point_job, predict_seconds
from rlplan.accuracy.predictions import CannotPredict, Prediction
from rlplan.accuracy.settings import KEYS
from rlplan.accuracy.training.job import is_bridge, training_job
from rlplan.accuracy.training.settings import (
    RunSettings,
    num_ranks,
)
from rlplan.accuracy.training.trainers import FOUNDRY, MEGATRON, PRIME_RL, TORCHTITAN, Trainer, find_trainer
from rlplan.planner.answers.model_flops import count_model_flops, read_peak_flops_per_s
from rlplan.planner.measured_errors import find_stratum
from rlplan.planner.plan import Plan
from rlplan.spec.model import ModelSpec
from rlplan.spec.models.parts import NONE

PRECISIONS = ("precision", "dtype", "fp8", "float8", "attn", "mode", "quant")
"""Settings that may name the dtype of the layers' matmuls."""
ULTRA = 300e9
"""Parameters that separate Nemotron 3 Super (fewer) from Ultra (more)."""
STAGES = {"full_shard": 3, "hybrid_shard": 3, "shard_grad_op": 2, "no_shard": 0}
"""ZeRO stages by FSDP's names."""
LAYERS_OF_QWEN_235B = 94
"""Layers of the one model whose recipe for H100 sends a row per expert (`alltoall`)."""
SLOW_DISK = 1e9
"""Bytes per second at which a slow shared disk is written. Assumed, for the far end of an interval."""
LENGTHS_READ_ONCE = "2026-06-15"
"""Day on which prime-rl stopped to read lengths back token by token (fa21395a6)."""
GPUS_OF_A_HOST = 8
"""GPUs per x86 host of the published runs."""


def predict_throughput(point: MeasuredPoint) -> Prediction:
    """Throughput of a published training run."""
    plan = plan_point_job(step_job(point))
    seconds = predict_seconds(plan)
    value = convert_to_unit(point.measured.unit, plan, seconds)
    written_s = 0.0
    if plan.job.host_waits == "tokens" and plan.job.training.lora is None:  # RL that writes its weights in every step
        written_s = 2 * find_point_model(point).num_parameters / SLOW_DISK
        RunSettings(point).assume("weights written for engines", f"0 to {written_s:.0f} s, not predicted")
    return Prediction(value, stratum=find_stratum(plan, point.quantity), spread=1 + written_s / seconds)


def step_job(point: MeasuredPoint) -> dict[str, Any]:
    """The job of a timed step. Raises: CannotPredict where a setting that decides the time is missing."""
    point = add_usual(point)
    settings, trainer, model = RunSettings(point), find_trainer(point), find_point_model(point)
    job = training_job(point)
    training: dict[str, Any] = job["training"]
    stage = _read_zero_stage(settings, trainer)
    if stage is not None and training["backend"] == "megatron":
        training["zero_stage"] = stage
    elif stage is not None and training["backend"] == "fsdp2" and stage < 3:
        raise CannotPredict(f"FSDP that shards like ZeRO-{stage}: with fsdp2 a job shards everything")
    if trainer is MEGATRON and (ahead := _count_predicted_ahead(settings, model)):
        training["predicts_ahead"] = ahead
    if trainer is MEGATRON and not is_bridge(settings) and model.architecture != "GPT2LMHeadModel":
        training["reduce_dtype"] = "float32"
    training["kernels"] = training.get("kernels", {}) | _choose_kernels(settings, trainer, model)
    if trainer is PRIME_RL and settings.word("docker", LENGTHS_READ_ONCE) < LENGTHS_READ_ONCE:
        job["framework"] = "prime_rl@0.3"
        is_rl = "rl" in re.findall(r"[a-z]+", settings.word("task").lower())
        training["kernels"]["host_waits"] = "tokens" if is_rl else "layers"
    return job


def convert_to_unit(unit: str, plan: Plan, seconds: float) -> float:
    """A step's throughput in a source's unit. Raises: CannotPredict."""
    word = unit.lower().replace(" per ", "/").replace(" ", "")
    word = re.sub(r"sec(ond)?s?(?![a-z])", "s", word)
    workload = plan.job.workload
    num_sequences = workload.num_rollouts_per_step
    divisor = plan.num_devices if re.search(r"/(gpu|device|chip|card|accelerator)", word) else 1
    if re.match(r"(k?tokens?|k?tok|tps|wps|words)", word):
        divisor = plan.num_devices if word.startswith("tps") and "total" not in word else divisor
        return num_sequences * workload.max_seq_len / seconds / divisor / (1000 if word.startswith("k") else 1)
    if re.match(r"(samples?|sequences?|seqs?)", word):
        return num_sequences / seconds / divisor
    if re.match(r"(ms|millis)", word):
        return 1000 * seconds
    if re.match(r"s(/|$)", word):
        return seconds
    flops = count_model_flops(plan) / seconds / plan.num_devices
    if re.match(r"p?tflop|teraflop", word):
        return flops / 1e12
    if "mfu" in word or (word.startswith("%") and "peak" in word):
        return 100 * flops / read_peak_flops_per_s(plan)
    raise CannotPredict(f"unit {unit!r} is no throughput that is known")


def add_usual(point: MeasuredPoint) -> MeasuredPoint:
    """A point with assumed values for settings that throughput tables leave out.

    A pipeline's micro-batch is one sequence, and recomputation may stand in `mode`.
    """
    usual: dict[str, Any] = {}
    read = RunSettings(point)
    if read.first(KEYS["batch"]) is None and read.degree("pp", "pipeline_parallel") > 1:
        usual["micro_batch"] = 1
    if read.first(KEYS["batch"]) is None and "micro_batch" not in usual and (key := read.first(KEYS["global_batch"])):
        steps = read.first(KEYS["accumulation"])
        ranks = _count_ranks(read)
        usual["micro_batch"] = max(1, read.read_count(key) // ranks // (read.read_count(steps) if steps else 1))
    if read.first(KEYS["sequence"]) is None and (length := find_trainer(point).length):
        usual["seq"] = length
    mode = str(read.raw("mode") or "").lower()
    if read.first(KEYS["recompute"]) is None and "recompute" in mode:
        usual["recompute"] = mode
    if read.raw("ep") is None and "deepep" in read.word("kernels").lower():
        usual["ep"] = num_ranks(read)  # DeepEP dispatches tokens among expert-parallel ranks
    for key, value in usual.items():
        read.assume(key, value)
    return point.model_copy(update={"settings": point.settings | usual})


def _count_ranks(settings: RunSettings) -> int:
    degree = settings.degree("tp", "tensor_parallel") * settings.degree("cp", "context_parallel")
    return max(1, num_ranks(settings) // degree)


def _read_zero_stage(settings: RunSettings, trainer: Trainer) -> int | None:
    """The ZeRO stage that settings of FSDP or Megatron imply; None without any. Raises: CannotPredict."""
    sharding = str(settings.raw("sharding") or settings.raw("sharding_strategy") or "").lower()
    if sharding in STAGES:
        return STAGES[sharding]
    if trainer is not MEGATRON:
        return None
    if settings.first(("fsdp",)) and settings.read_count("fsdp", at_least=0) > 1:
        raise CannotPredict("Megatron-FSDP: with megatron a job shards the optimizer states or nothing")
    is_distributed = settings.says("distributed_optimizer", "use_distributed_optimizer")
    return int(bool(is_distributed or is_bridge(settings) or "distributed" in settings.word("optimizer").lower()))


def _choose_kernels(settings: RunSettings, trainer: Trainer, model: ModelSpec) -> dict[str, Any]:
    """Keys of `training.kernels` for time, from the point or from a recipe of Megatron-Bridge."""
    kernels: dict[str, Any] = {}
    words = " ".join(str(settings.raw(key)).lower() for key in PRECISIONS)
    has_fp8 = bool(settings.says("float8", "fp8")) or re.search(r"fp8(?! false)|float8", words) is not None
    if "fp4" in words:
        kernels["matmuls"] = "fp4"
    elif has_fp8:
        rows, blocks = re.search(r"row-?_?wise", words), "mx" in words
        kernels["matmuls"] = "fp8_rowwise" if rows else "mxfp8" if blocks and trainer is not MEGATRON else "fp8"
    if (attention := _read_attention(settings)) is not None:
        kernels["attention"] = attention
    if settings.word("overlap").lower().startswith("none"):
        kernels["overlaps_step"] = False
    if trainer is MEGATRON and model.architecture == "GPT2LMHeadModel":  # its papers predate FlashAttention
        return kernels | {"attention": "unfused"}
    if trainer is MEGATRON:
        return kernels | _choose_recipe_kernels(settings, model)
    if trainer is FOUNDRY:  # low-precision norms, and Triton's first flash attention
        kernels |= {"is_compiled": True, "attention": "flash_1"}
    if trainer is TORCHTITAN and (settings.says("async_tp") or "async" in settings.word("tp_comm").lower()):
        kernels["overlaps_tp"] = True
    return kernels


def _read_attention(settings: RunSettings) -> str | None:
    """The named attention kernel; None without one."""
    key = settings.first(("attn", "attention", "attn_implementation", "kernels"))
    word = str(settings.raw(key)).lower() if key else ""
    if re.search(r"flex\W?att", word):
        return "flex"
    return "flash_3" if re.search(r"fa\W?[34]|flash\w*[ _]?[34]|cudnn", word) else None


def _choose_recipe_kernels(settings: RunSettings, model: ModelSpec) -> dict[str, Any]:
    """Kernel settings of Megatron-Bridge's recipes where a point does not state them.

    The recipes send a token to each host once (HybridEP, DeepEP). They overlap expert communication with another
    micro-batch from container 26.06, or with interleaved stages and experts on several x86 hosts. They use CUDA graphs
    on GB200 and GB300, and from 26.04 on x86 hosts without a pipeline. Megatron-Core overlaps nothing for hybrid
    models, and their graphs exclude experts. Source: Megatron-Bridge src/megatron/bridge/perf_recipes (2026-08).
    """
    has_recipe, kernels = is_bridge(settings), dict[str, Any]()
    container = tuple(int(part) for part in re.findall(r"\d+", settings.word("container"))[:2])
    is_grace, is_hybrid = re.search(r"gb\d00", settings.gpu.lower()) is not None, NONE in model.attention_kinds
    ep, pp = settings.degree("ep", "expert_parallel"), settings.degree("pp", "pipeline_parallel")
    hides = container >= (26, 6) or (
        not is_grace and settings.degree(*KEYS["virtual_stages"]) > 1 and ep > GPUS_OF_A_HOST
    )
    dispatcher, graphs = settings.word("dispatcher").lower(), settings.word("cuda_graphs").lower()
    hides = "overlap" in dispatcher if dispatcher else hides
    hides = hides if (stated := settings.says("ep_overlap")) is None else stated
    if graphs:
        has_graphs = _read_graphs(graphs)
    else:
        has_graphs = has_recipe and (is_grace or (container >= (26, 4) and pp == 1))
        has_graphs = has_graphs and not is_hybrid
    by_copies = model.num_layers == LAYERS_OF_QWEN_235B and "h100" in settings.gpu.lower()
    if re.search("hybrid|deep", dispatcher) if dispatcher else has_recipe and not by_copies:
        kernels["expert_dispatcher"] = "deepep" if "deep" in dispatcher else "hybridep"
    fuses_router = settings.says("moe_router_fusion", "router_fusion")
    return kernels | {
        "overlaps_experts": bool(stated) or (has_recipe and hides and not is_hybrid),
        "has_cuda_graphs": has_graphs,
        "fuses_router": has_recipe if fuses_router is None else fuses_router,
    }


def _read_graphs(scopes: str) -> bool | str:
    """The part of an expert layer that CUDA graphs hold, by the names of their scopes.

    >>> [_read_graphs(scopes) for scopes in ("attn+moe_router", "moe_router+moe_preprocess", "attention+mamba", "none")]
    [True, 'router', 'attention', False]
    """
    has_router, has_attention = re.search("moe|full", scopes), re.search("attn|attention|full", scopes)
    if has_router:
        return True if has_attention else "router"
    return "attention" if has_attention else False


def _count_predicted_ahead(settings: RunSettings, model: ModelSpec) -> int:
    """Multi-token-prediction depth of a Megatron-Bridge recipe.

    It is 1 for DeepSeek-V3 unless the note says `w/o MTP`, 1 for Nemotron 3 Super, and 2 for Ultra.
    Source: Megatron-Bridge models/deepseek/deepseek_v3_bridge.py (`num_nextn_predict_layers`) and
    perf_recipes/nemotronh (2026-08).
    """
    experts, word = model.experts, settings.word("note").lower()
    if not is_bridge(settings) or re.search(r"w/o mtp|without mtp|no mtp", word) or experts is None:
        return 0
    if model.architecture == "DeepseekV3ForCausalLM":
        return 1
    if NONE in model.attention_kinds and experts.latent_size:
        return 2 if model.num_parameters > ULTRA else 1
    return 0
