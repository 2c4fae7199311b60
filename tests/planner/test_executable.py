"""A plan for GPUs becomes a job with every choice made, whose plan says the same bytes."""

from pathlib import Path
from typing import Any

import pytest

from rlplan.emit.vllm import engine_arguments
from rlplan.errors import EmitError, NoFeasiblePlanError, SpecError
from rlplan.planner.cpu.candidates import list_choices
from rlplan.planner.executable import check_executable, require_executable
from rlplan.planner.plan import Plan
from rlplan.planner.search import find_best_plan
from rlplan.spec.files.job_file import job_from, load_job
from rlplan.vocabulary import ActionKind, MemoryKind, Placement, Transport
from tests.factories import EXAMPLES

DATA = {
    "data": {
        "prompts": str(EXAMPLES / "data" / "sort_digits" / "train.jsonl"),
        "heldout": str(EXAMPLES / "data" / "sort_digits" / "heldout.jsonl"),
    },
    "rewards": [{"kind": "answer_matcher"}],
}
SMALL = {
    "policy": "Qwen/Qwen2.5-1.5B",
    "hardware": "8xH100",
    "workload": {"num_prompts_per_step": 32, "max_prompt_len": 512, "max_response_len": 512},
    "training": {"ulysses": 1, "tp": 1},
    **DATA,
}


def budget(**parts: Any) -> Plan:
    data: dict[str, Any] = dict(SMALL)
    for key, part in parts.items():
        data[key] = {**data.get(key, {}), **part} if isinstance(part, dict) else part
    return find_best_plan(job_from(data))


def kinds(plan: Plan) -> list[ActionKind]:
    return [action.kind for action in plan.schedule.step]


COLOCATED = {"placement": "colocated", "offload": "host", "offload_roles": "all"}
CASES = {
    "hybrid": {"placement": {"placement": "hybrid"}},
    "colocated, all offloaded": {"placement": COLOCATED},
    "colocated, weights kept": {"placement": COLOCATED, "rollout": {"sleep_level": 1, "tp": 2}},
    "colocated, frozen offloaded": {
        "placement": {"placement": "colocated", "offload": "host", "offload_roles": "frozen"}
    },
    "disaggregated": {"placement": {"placement": "disaggregated", "num_generation_devices": 4}},
    "disaggregated over disk": {
        "placement": {"placement": "disaggregated", "num_generation_devices": 4, "transport": "disk"}
    },
    "asynchronous": {"placement": {"placement": "disaggregated", "num_generation_devices": 4, "max_staleness": 2}},
    "offloaded": {"placement": {"placement": "hybrid"}, "training": {"zero_stage": 3, "offloads_optimizer": True}},
    "weights offloaded": {
        "placement": {"placement": "hybrid"},
        "training": {"zero_stage": 3, "offloads_optimizer": True, "offloads_parameters": True},
    },
    "ppo on two hosts": {"algorithm": "ppo", "hardware": "2xdgx-h100", "placement": {"placement": "hybrid"}},
}


@pytest.mark.parametrize("parts", CASES.values(), ids=CASES)
def test_the_job_s_plan_is_where_the_budget_put_it_and_holds_as_much(parts: dict[str, Any]) -> None:
    chosen = budget(**parts)
    plan = require_executable(chosen)
    step = chosen.choice.arrangement
    assert plan.schedule.placement is step.placement
    assert plan.zero_stage == chosen.choice.trainer.zero_stage
    assert plan.schedule.find_layout("policy_trainer").dp == step.num_training
    engine = plan.schedule.find_layout("rollout_engine")
    assert engine.dp * engine.tp == step.num_generation
    assert plan.job.rollout.kv_cache_memory == chosen.kv.kv_cache_memory_bytes  # type: ignore[union-attr]
    own, theirs = plan.ledger, chosen.ledger
    for device in theirs.devices:
        expected = theirs.device_peak(device).num_bytes
        assert own.device_peak(device).num_bytes == expected, device


def test_an_example_holds_to_the_byte_what_its_budget_says() -> None:
    chosen = find_best_plan(load_job(EXAMPLES / "ppo-70b-64xh100.yaml"))
    plan = require_executable(chosen)
    peak = plan.ledger.device_peak("cuda:0")
    assert (peak.num_bytes, peak.action_id) == (chosen.binding.num_bytes, "train_forward_backward/0")
    assert len(plan.schedule.processes) == 5 * 64
    assert plan.timing is not None
    assert plan.timing == chosen.timing


def test_a_colocated_engine_sleeps_and_wakes_in_three_actions() -> None:
    plan = require_executable(budget(placement=COLOCATED))
    chain = kinds(plan)
    assert chain.index(ActionKind.SLEEP_ENGINE) < chain.index(ActionKind.RELOAD_ROLE)
    after = chain[chain.index(ActionKind.WAKE_WEIGHTS) :]
    assert after[:4] == [
        ActionKind.WAKE_WEIGHTS,
        ActionKind.SYNC_WEIGHTS,
        ActionKind.OFFLOAD_ROLE,
        ActionKind.WAKE_KV_CACHE,
    ]
    assert ActionKind.STOP_ENGINE not in chain


def test_parked_frozen_roles_are_there_only_while_they_score() -> None:
    plan = require_executable(budget(placement={"placement": "hybrid", "offload": "host", "offload_roles": "frozen"}))
    names = [action.id for action in plan.schedule.step]
    first = names.index("reload_role/reference")
    assert names[first : first + 3] == ["reload_role/reference", "score/reference", "offload_role/reference"]
    assert "offload_role/policy" not in names
    assert "offload_role/reference" in [action.id for action in plan.schedule.start]


def test_every_rank_hands_over_to_the_engine_on_its_own_gpu() -> None:
    plan = require_executable(budget(placement={"placement": "hybrid"}))
    assert plan.job.sync_transport is Transport.CUDA_IPC
    sync = next(action for action in plan.schedule.step if action.kind is ActionKind.SYNC_WEIGHTS)
    assert len(sync.processes) == 16


def test_generation_runs_ahead_where_the_budget_lets_it() -> None:
    plan = require_executable(budget(**CASES["asynchronous"]))
    assert plan.schedule.async_rollouts is not None
    assert plan.schedule.async_rollouts.max_staleness == 2
    assert plan.job.sync_transport is Transport.NCCL


def test_models_are_looked_for_under_their_ids() -> None:
    job = require_executable(budget(roles={"reward": {"path": "Qwen/Qwen2.5-0.5B"}})).job
    here = Path.cwd() / "models" / "Qwen"
    assert job.policy.path == str(here / "Qwen2.5-1.5B")
    assert job.roles.reward.path == str(here / "Qwen2.5-0.5B")
    assert job.load_model().hidden_size == 1536  # from the catalogue: the folder is not there


@pytest.mark.parametrize(("lacks", "words"), [("data", "no training data"), ("rewards", "one of the three is needed")])
def test_what_a_run_needs_and_a_plan_does_not_is_named(lacks: str, words: str) -> None:
    plan = require_executable(budget(**{lacks: None if lacks == "data" else []}))
    with pytest.raises(SpecError, match=words):
        check_executable(plan.job, "the plan")


@pytest.mark.parametrize(
    ("parts", "error", "words"),
    [
        ({"training": {"backend": "megatron"}}, EmitError, "framework verl@"),
        ({"hardware": "4xH100 + 4xL40S", "placement": {"placement": "disaggregated"}}, EmitError, "hardware"),
        ({"training": {"master_dtype": "bfloat16"}}, EmitError, "master_dtype"),
        ({"training": {"optimizer": "muon"}}, EmitError, "muon"),
        ({"policy": "Qwen/Qwen3-30B-A3B"}, EmitError, "policy.path"),
    ],
)
def test_what_the_runtime_lacks_is_said(parts: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        require_executable(budget(**parts))


def test_a_job_that_contradicts_itself_on_gpus_is_refused() -> None:
    job = require_executable(budget(placement={"placement": "hybrid"})).job
    for change, words in (
        ({"transport": Transport.NCCL}, "shared GPUs use cuda_ipc"),
        ({"sync_senders": "one"}, "needs each"),
    ):
        other = job.model_copy(update={"placement": job.placement.model_copy(update=change)})
        (rejection,) = list_choices(other)[1]
        assert rejection.placement is Placement.HYBRID
        assert words in rejection.reason


def test_a_colocated_engine_that_never_sleeps_is_not_offered() -> None:
    with pytest.raises(NoFeasiblePlanError):
        budget(rollout={"sleep_level": 0}, placement={"placement": "colocated"})


@pytest.mark.parametrize(("placement", "copies"), [({"placement": "hybrid"}, True), (COLOCATED, False)])
def test_checkpoints_lie_in_the_host_s_memory_until_they_are_written(placement: dict[str, Any], copies: bool) -> None:
    """A pinned copy of every rank's master weights and moments, or none where phases time-share memory."""
    plan = require_executable(budget(placement=placement, checkpoints={"every": 1}))
    saving = next(action for action in plan.schedule.step if action.id == "save_states")
    assert saving.kind is (ActionKind.SAVE_STATES if copies else ActionKind.WRITE_STATES)
    rows = [row for row in plan.ledger.rows if row.kind is MemoryKind.CHECKPOINT_STAGING]
    assert bool(rows) is copies
    trained = sum(parameter.numel for parameter in plan.job.load_model().parameters)
    least = 12 * trained // plan.schedule.find_layout("policy_trainer").dp
    assert all(row.space == "host" and least <= row.resident_bytes < 2 * least + 4096 for row in rows)
    assert plan.timing is not None
    cost = plan.timing.cost("step", "save_states")
    assert cost is not None
    assert cost.seconds > 0


def test_adapters_alone_are_handed_over_beside_open_requests() -> None:
    lora = {"training": {"lora": {"rank": 16}}}
    ahead = {"placement": "disaggregated", "num_generation_devices": 4, "max_staleness": 2}
    plan = budget(**lora, placement=ahead)
    assert (plan.choice.sync_mode, plan.choice.arrangement.is_async) == ("adapter", True)
    assert plan.choice.engine.adapter_versions == 3
    assert engine_arguments(require_executable(plan).job)["max_loras"] == 3
    # Slots of rank 16 in bf16: 18,464,768 elements beside 28 layers, 2 x 16 x (151,936 + 1,536) beside the tables.
    assert engine_staging(plan) == 3 * 2 * (18_464_768 + 4_911_104) // plan.choice.engine.tp
    waits = budget(**lora, placement={**ahead, "sync_content": "adapter", "partial_rollouts": False})
    assert (waits.choice.arrangement.is_async, waits.choice.engine.adapter_versions) == (True, 1)


def engine_staging(plan: Plan) -> int:
    """Bytes that a rank of an engine holds for adapters on its GPU while it generates."""
    where = ("rollout_engine/0", "generate", MemoryKind.SYNC_STAGING, "steady")
    rows = [row for row in plan.ledger.rows if (row.process, row.action_id, row.kind, row.run_phase) == where]
    (size,) = [row.resident_bytes for row in rows if row.space == "device"]
    return size


def test_a_gpu_and_a_host_that_share_their_memory_are_short_of_it_together() -> None:
    """Each fits into 119 GiB alone: 4B without gradient checkpointing on a GB10."""
    job = job_from({"policy": "Qwen/Qwen3-4B", "hardware": "1xgb10"}, ["training.gradient_checkpointing=false"])
    plan = find_best_plan(job, with_others=False)
    assert [short.is_of_host for short in plan.shortages] == [True]
    with pytest.raises(NoFeasiblePlanError, match="of the memory that a GPU shares with its host"):
        require_executable(plan)
