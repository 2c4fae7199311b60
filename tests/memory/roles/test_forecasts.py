"""Memory of trainer, scorer and engine on a GPU, action by action: hand-worked sums, and what stays while they wait."""

import pytest

from rlplan.dataflow.choice import EngineChoice, TrainerChoice
from rlplan.dataflow.schedule import Action
from rlplan.memory.machine.host import pinned_bytes
from rlplan.memory.roles.engine import EngineOnGpu, Incoming
from rlplan.memory.roles.rank import MicroBatchTokens, TrainedRole
from rlplan.memory.roles.scorer import FrozenRole, ScorerOnGpu
from rlplan.memory.roles.trainer import TrainerOnGpu
from rlplan.spec.hardware.profile import GpuOverheads
from rlplan.spec.models.catalogue import find_model
from rlplan.spec.parts.training import LoraSpec
from rlplan.spec.resolved import SettledRollout, SettledTraining
from rlplan.vocabulary import ActionKind, Loss, MemoryKind, Phase, Placement, Role, Stream

MODEL = find_model("Qwen/Qwen2.5-0.5B")
P = MODEL.num_parameters
SHORT, LONG = MicroBatchTokens(1000, 500, accumulates=False), MicroBatchTokens(4000, 2000, accumulates=False)


def action(kind: ActionKind) -> Action:
    return Action(kind.value, kind, Role.POLICY, Phase.TRAIN, "shared", Stream.TRAINING, ())


def trainer(
    overheads: GpuOverheads,
    stage: int = 3,
    ranks: int = 8,
    micro_batch: MicroBatchTokens = SHORT,
    role: Role = Role.POLICY,
    lora: LoraSpec | None = None,
    **choice: bool,
) -> TrainerOnGpu:
    chosen = {"gradient_checkpointing": False, "offloads_optimizer": False, "offloads_parameters": False, **choice}
    training = SettledTraining(lora=lora)
    return TrainerOnGpu(
        TrainedRole(
            role, MODEL, training, TrainerChoice(stage, micro_batch=1, **chosen), micro_batch, ranks, overheads, 1 << 29
        )
    )


def test_zero_3_holds_sixteen_bytes_a_parameter_over_its_ranks(overheads: GpuOverheads) -> None:
    sizes = trainer(overheads).predict_resident(action(ActionKind.OPTIMIZER_STEP), "steady")
    states = sum(size for kind, size in sizes.items() if kind not in (MemoryKind.CONTEXT, MemoryKind.COMM_BUFFERS))
    assert states == pytest.approx(16 * P / 8, rel=0.01)
    assert sizes[MemoryKind.CONTEXT] == 100
    assert sizes[MemoryKind.COMM_BUFFERS] == 20 + 2 * 50_000_000  # NCCL, and one bucket of bf16


def test_a_single_rank_needs_no_communicator(overheads: GpuOverheads) -> None:
    sizes = trainer(overheads, stage=0, ranks=1).predict_resident(action(ActionKind.OPTIMIZER_STEP), "steady")
    assert MemoryKind.COMM_BUFFERS not in sizes
    assert sizes[MemoryKind.WEIGHTS] == 2 * P


def test_a_offloaded_trainer_leaves_its_context_and_takes_its_states_to_the_host(overheads: GpuOverheads) -> None:
    offloaded = trainer(overheads)
    offload = action(ActionKind.OFFLOAD_ROLE)
    awake = offloaded.predict_resident(action(ActionKind.OPTIMIZER_STEP), "steady")
    assert offloaded.predict_resident(offload, "steady") == {MemoryKind.CONTEXT: 100, MemoryKind.COMM_BUFFERS: 20}
    on_host = offloaded.predict_host(offload, "steady")
    assert on_host[MemoryKind.WEIGHTS] == pinned_bytes(awake[MemoryKind.WEIGHTS])
    assert sum(awake.values()) - 120 <= sum(on_host.values()) < 2 * sum(awake.values())


def test_an_offloaded_optimizer_lives_on_the_host_for_good(overheads: GpuOverheads) -> None:
    offloaded = trainer(overheads, offloads_optimizer=True)
    sizes = offloaded.predict_resident(action(ActionKind.TRAIN_FORWARD_BACKWARD), "steady")
    assert MemoryKind.OPTIMIZER not in sizes
    assert offloaded.predict_host(action(ActionKind.TRAIN_FORWARD_BACKWARD), "steady")[MemoryKind.OPTIMIZER] == (
        pytest.approx(8 * P / 8, rel=0.01)
    )


def test_longer_micro_batches_and_no_recomputation_need_more(overheads: GpuOverheads) -> None:
    train = action(ActionKind.TRAIN_FORWARD_BACKWARD)

    def peak(**changes: object) -> int:
        return sum(trainer(overheads, **changes).predict_peak(train, "steady").values())  # type: ignore[arg-type]

    assert peak(micro_batch=SHORT, gradient_checkpointing=True) < peak(micro_batch=SHORT) < peak(micro_batch=LONG)
    assert peak(micro_batch=LONG, gradient_checkpointing=True) < peak(micro_batch=LONG)


def test_a_value_model_has_no_logits(overheads: GpuOverheads) -> None:
    train = action(ActionKind.TRAIN_FORWARD_BACKWARD)
    value = trainer(overheads, role=Role.VALUE)
    assert MemoryKind.LOGITS not in value.ranks[0].snapshots["loss"]
    assert MemoryKind.LOGITS in trainer(overheads).ranks[0].snapshots["loss"]
    assert sum(value.predict_peak(train, "steady").values()) < sum(
        trainer(overheads).predict_peak(train, "steady").values()
    )


def test_adapters_train_a_few_parameters_beside_a_frozen_model(overheads: GpuOverheads) -> None:
    sizes = trainer(overheads, stage=2, lora=LoraSpec(rank=8)).predict_resident(
        action(ActionKind.OPTIMIZER_STEP), "steady"
    )
    assert sizes[MemoryKind.WEIGHTS] == pytest.approx(2 * P, rel=0.02)
    assert sizes[MemoryKind.OPTIMIZER] < 0.02 * 8 * P


def test_the_first_step_has_no_moments_before_its_optimizer_step(overheads: GpuOverheads) -> None:
    train = action(ActionKind.TRAIN_FORWARD_BACKWARD)
    assert MemoryKind.OPTIMIZER not in trainer(overheads).predict_peak(train, "first")
    assert MemoryKind.OPTIMIZER in trainer(overheads).predict_peak(train, "steady")


@pytest.mark.parametrize(("is_sharded", "share"), [(True, 8), (False, 1)])
def test_a_frozen_model_is_whole_or_a_share_and_leaves_when_offloaded(
    overheads: GpuOverheads, is_sharded: bool, share: int
) -> None:
    scorer = ScorerOnGpu(
        FrozenRole(Role.REFERENCE, MODEL, 2, Loss.IN_PLACE, SHORT, 8, overheads, is_sharded=is_sharded)
    )
    score, offload = action(ActionKind.SCORE), action(ActionKind.OFFLOAD_ROLE)
    weights = scorer.predict_resident(score, "steady")[MemoryKind.WEIGHTS]
    assert weights == pytest.approx(2 * P / share, rel=0.02)
    assert MemoryKind.WEIGHTS not in scorer.predict_resident(offload, "steady")
    assert scorer.predict_host(offload, "steady") == {MemoryKind.WEIGHTS: pinned_bytes(weights)}
    assert scorer.predict_peak(score, "steady")[MemoryKind.LOGITS] >= 500 * MODEL.vocab_size * 6  # bf16 and fp32


def engine(overheads: GpuOverheads, level: int = 2, kv_cache: int = 10**9, tp: int = 1) -> EngineOnGpu:
    placement = Placement.COLOCATED if level else Placement.DISAGGREGATED
    return EngineOnGpu(
        MODEL, SettledRollout(), EngineChoice(tp, level), placement, overheads, Incoming(1 << 29), kv_cache
    )


@pytest.mark.parametrize(("level", "on_host"), [(1, True), (2, False)])
def test_a_sleeping_engine_keeps_context_and_graphs(overheads: GpuOverheads, level: int, on_host: bool) -> None:
    forecast, sleep = engine(overheads, level), action(ActionKind.SLEEP_ENGINE)
    assert set(forecast.predict_resident(sleep, "steady")) == {MemoryKind.CONTEXT, MemoryKind.CUDA_GRAPHS}
    assert (MemoryKind.WEIGHTS in forecast.predict_host(sleep, "steady")) is on_host


def test_weights_come_back_before_the_kv_cache(overheads: GpuOverheads) -> None:
    forecast = engine(overheads)
    for kind in (ActionKind.WAKE_WEIGHTS, ActionKind.SYNC_WEIGHTS):
        sizes = forecast.predict_resident(action(kind), "steady")
        assert MemoryKind.WEIGHTS in sizes
        assert MemoryKind.KV_CACHE not in sizes
    assert forecast.predict_resident(action(ActionKind.WAKE_KV_CACHE), "steady")[MemoryKind.KV_CACHE] == 10**9


def test_an_engine_of_its_own_devices_receives_weights_in_a_bucket(overheads: GpuOverheads) -> None:
    sync = action(ActionKind.SYNC_WEIGHTS)
    assert MemoryKind.SYNC_STAGING in engine(overheads, level=0).predict_peak(sync, "steady")
    assert MemoryKind.SYNC_STAGING not in engine(overheads).predict_peak(sync, "steady")


def test_tensor_parallel_ranks_share_the_weights(overheads: GpuOverheads) -> None:
    assert engine(overheads, tp=2).weight_bytes == pytest.approx(engine(overheads).weight_bytes / 2, rel=0.05)
    assert engine(overheads, tp=2).asleep[MemoryKind.COMM_BUFFERS] == 10
