"""Predictions: what rlplan's formulas say of a case, before it is measured.

In: a case, the GPU's profile where one is known. Out: numbers under the names that the measurement will use; a name
that is missing is not predicted. Left out: `reserved` and `process`, which `rlplan accuracy` derives from the points.
"""

from benchmarks.gpu.cases import LORA_RANK, Case
from rlplan.memory.model.block_families import list_blocks
from rlplan.memory.model.frozen import Frozen, describe_adapters
from rlplan.memory.model.logits import rows_bytes
from rlplan.memory.serving.kv import kv_elements_per_token
from rlplan.memory.serving.weights import build_engine_layout, engine_weight_bytes, rotary_table_bytes
from rlplan.memory.trainers.micro_batch import score_peak_bytes
from rlplan.memory.trainers.optimizers import Optimizer, optimizer_bytes
from rlplan.memory.trainers.shape import MicroBatchShape, Recompute
from rlplan.memory.trainers.sharding import Sizes, build_zero_state, measure_sizes
from rlplan.memory.trainers.step_peak import RankState, find_largest, take_snapshots
from rlplan.memory.trainers.zero import ZeroSettings, ZeroStates
from rlplan.spec.hardware.profile import ComputeDtype, GpuProfile
from rlplan.spec.model import ModelSpec, Parameter, model_from_config
from rlplan.spec.models.adapters import list_lora_parameters, list_value_parameters
from rlplan.vocabulary import Loss, MemoryKind

BYTES = 2
"""Bytes of an element: everything is in bf16."""


def predict(case: Case, profile: GpuProfile | None) -> dict[str, float]:
    """Everything that is predicted of a case."""
    if case.action in ("train", "packed-step"):
        return _training(case)
    if case.action.startswith("score-"):
        return _scoring(case)
    if case.action in ("engine", "sleep"):
        return _serving(case, profile)
    return _device(case, profile)


def needed_bytes(case: Case, profile: GpuProfile | None) -> dict[str, float]:
    """Bytes that must be free on the device and on the host before the case is tried."""
    predicted = predict(case, profile)
    context = profile.overheads.context.value if profile else 0
    device = predicted.get("allocated_bytes", predicted.get("weight_bytes", 0))
    cache = case.kv_bytes if case.gives_kv_bytes else 0
    return {"device": device + cache + context, "host": predicted.get("host_bytes", 0)}


def _training(case: Case) -> dict[str, float]:
    model = load_model(case)
    adapters = list_lora_parameters(model, LORA_RANK) if case.method == "lora" else ()
    frozen = model.parameters if adapters else ()
    sizes = measure_sizes(
        model.parameters,
        model.num_layers,
        is_tied=model.has_tied_embeddings,
        adapters=adapters,
        frozen_bytes=BYTES * sum(parameter.numel for parameter in frozen),
    )
    shape = _shape(case, model, describe_adapters(adapters, BYTES) if adapters else None)
    if case.stage is None:
        rank_state, host = _rank_state_under_torch(sizes), 0
    else:
        rank_state, host = _rank_state_under_deepspeed(case, adapters or model.parameters, frozen)
    answer: dict[str, float] = {
        "allocated_bytes": sum(find_largest(take_snapshots(rank_state, shape).values()).values()),
        "resident_bytes": sum(rank_state.resident.values()),
    }
    if host:
        answer |= {"host_bytes": host, "device_and_host_bytes": answer["resident_bytes"] + host}
    return answer


def _rank_state_under_torch(sizes: Sizes) -> RankState:
    """Plain torch: weights, gradients and both moments in one type; a step that is not fused is below the passes."""
    table, trained = BYTES * sizes.table, BYTES * sizes.num_trainable
    return RankState(
        {
            MemoryKind.WEIGHTS: trained + sizes.frozen_bytes,
            MemoryKind.OPTIMIZER: optimizer_bytes(Optimizer.ADAMW, sizes.trainable, BYTES),
        },
        gradients=trained,
        head_gradient=table,
        layer_gradient=BYTES * sizes.layer,
        table_gradient=table,
        is_tied=sizes.is_tied,
    )


def _rank_state_under_deepspeed(
    case: Case, trainable: tuple[Parameter, ...], frozen: tuple[Parameter, ...]
) -> tuple[RankState, int]:
    settings = ZeroSettings(
        stage=case.stage or 0,
        num_ranks=1,
        reduce_bucket_size=case.bucket_size,
        offloads_optimizer=case.offload != "none",
        offloads_parameters=case.offload == "all",
    )
    states = ZeroStates(settings, tuple(trainable), tuple(frozen))
    return build_zero_state(states), states.after_step().host_bytes


def _scoring(case: Case) -> dict[str, float]:
    model = load_model(case)
    is_value = case.action == "score-value"
    parameters = list_value_parameters(model) if is_value else model.parameters
    weights = BYTES * sum(parameter.numel for parameter in parameters)
    shape = _shape(case, model, None, Loss.NONE)
    peak = score_peak_bytes(shape)
    if not is_value:  # the last token predicts nothing; the head's input lies beside its rows of logits
        num_rows = case.num_tokens - 1
        head = rows_bytes(num_rows, model.vocab_size, BYTES)
        peak = max(peak, 2 * num_rows * model.hidden_size * BYTES + head)
    return {"allocated_bytes": weights + peak, "resident_bytes": weights}


def _shape(case: Case, model: ModelSpec, frozen: Frozen | None, loss: Loss | None = None) -> MicroBatchShape:
    loss = loss or Loss(case.loss)
    first, *more = list_blocks(model)
    return MicroBatchShape(
        first.block,
        first.num,
        model.vocab_size,
        case.num_tokens,
        num_head_tokens=case.num_tokens,
        element_bytes=BYTES,
        recompute=Recompute.FULL if case.recomputes else Recompute.NONE,
        loss=loss,
        frozen=frozen,
        more=tuple(more),
    )


def _serving(case: Case, profile: GpuProfile | None) -> dict[str, float]:
    """Weights on vLLM, bytes of a token's keys and values; with a cache of given size its tokens, and what sleep frees.

    Assumes: asleep and without graphs nothing but the context stays.
    """
    model = load_model(case)
    weights = engine_weight_bytes(model, build_engine_layout(), BYTES) + rotary_table_bytes(model, BYTES)
    per_token = BYTES * sum(kv_elements_per_token(model).values())
    answer: dict[str, float] = {"weight_bytes": weights, "kv_bytes_per_token": per_token}
    if case.gives_kv_bytes:
        tokens = case.kv_bytes // (per_token * case.block_size) * case.block_size
        answer["kv_tokens"] = tokens
        for level in (1, 2) if case.action == "sleep" else ():
            answer[f"freed_by_level_{level}_bytes"] = weights + tokens * per_token
            if profile:
                answer[f"asleep_at_level_{level}_bytes"] = profile.overheads.context.value
    return answer


def _device(case: Case, profile: GpuProfile | None) -> dict[str, float]:
    """Rates in the profile: peaks of the datasheet, of which a measurement reaches a part."""
    if profile is None:
        return {}
    if case.action == "memory":
        return {
            "total_bytes": profile.memory.value,
            "context_bytes": profile.overheads.context.value,
            "granularity_bytes": profile.overheads.allocator_granularity.value,
        }
    if case.action == "matmul":
        rates = {dtype: profile.dense_flops_per_s.get(dtype) for dtype in ComputeDtype}
        return {f"{dtype.value}_best_flops_per_s": rate.value for dtype, rate in rates.items() if rate}
    if case.action == "copy":
        rate = profile.memory_bytes_per_s
        return {"device_bytes_per_s": rate.value} if rate else {}
    link = profile.host_link
    names = ("host_to_device_pinned_bytes_per_s", "device_to_host_pinned_bytes_per_s")
    return dict.fromkeys(names, link.bytes_per_s.value) if case.action == "host-link" and link else {}


def load_model(case: Case) -> ModelSpec:
    """The shape of the case's model."""
    return model_from_config(case.config, where=f"benchmarks/gpu: {case.id}")
