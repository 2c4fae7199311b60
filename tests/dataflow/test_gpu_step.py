"""The schedule of a step on GPUs: who works, who sleeps and who waits on the host."""

from dataclasses import replace

import pytest

from rlplan.dataflow.gpu_step import GpuStep, build_gpu_schedule
from rlplan.vocabulary import ActionKind, Placement, Role, Stream

FULL = GpuStep(
    Placement.COLOCATED,
    8,
    8,
    trained_roles=(Role.POLICY, Role.VALUE),
    frozen_roles=(Role.REFERENCE, Role.REWARD),
    sleeps=True,
    parks=True,
)


def ids(step: GpuStep) -> list[str]:
    return [action.id for action in build_gpu_schedule(step).step]


def test_a_hybrid_step_of_grpo_has_no_switches() -> None:
    step = GpuStep(Placement.HYBRID, 8, 8, frozen_roles=(Role.REFERENCE,))
    assert ids(step) == ["generate", "score/reference", "train_forward_backward", "optimizer_step", "sync_weights"]


def test_the_engine_wakes_weights_first_then_takes_the_new_ones_and_its_kv_cache_last() -> None:
    names = ids(FULL)
    wake = [name for name in names if name in ("wake_weights", "sync_weights", "offload_role/policy", "wake_kv_cache")]
    assert wake == ["wake_weights", "sync_weights", "offload_role/policy", "wake_kv_cache"]
    assert names.index("sleep_engine") == 1


def test_roles_come_and_go_one_after_the_other() -> None:
    names = ids(FULL)
    for role in ("reference", "reward", "value"):
        assert names.index(f"reload_role/{role}") < names.index(f"score/{role}") < names.index(f"offload_role/{role}")
    assert names.index("offload_role/value") < names.index("reload_role/policy")


def test_every_action_waits_for_the_one_before() -> None:
    for _, actions in build_gpu_schedule(FULL).parts:
        assert actions[0].after == ()
        assert [action.after for action in actions[1:]] == [(action.id,) for action in actions[:-1]]


def test_disaggregated_groups_have_their_own_devices() -> None:
    schedule = build_gpu_schedule(GpuStep(Placement.DISAGGREGATED, 5, 3))
    assert [group.devices for group in schedule.groups] == [
        ("cuda:0", "cuda:1", "cuda:2", "cuda:3", "cuda:4"),
        ("cuda:5", "cuda:6", "cuda:7"),
    ]
    assert dict(schedule.processes) == {"policy_trainer/0": "cuda:0", "rollout_engine/0": "cuda:5"}


def test_given_answers_need_no_engine() -> None:
    step = GpuStep(Placement.HYBRID, 8, 8, frozen_roles=(Role.REFERENCE,), has_rollouts=False)
    assert ids(step) == ["score/reference", "train_forward_backward", "optimizer_step"]


@pytest.mark.parametrize("num_mini_batches", [1, 2])
def test_log_probs_are_taken_anew_where_there_are_several_optimizer_steps(num_mini_batches: int) -> None:
    step = GpuStep(Placement.HYBRID, 8, 8, num_mini_batches=num_mini_batches)
    assert ("score/policy" in ids(step)) is (num_mini_batches > 1)
    steps = [action for action in build_gpu_schedule(step).step if action.kind is ActionKind.OPTIMIZER_STEP]
    assert len(steps) == num_mini_batches


ASYNC = GpuStep(Placement.DISAGGREGATED, 5, 3, frozen_roles=(Role.REFERENCE,), max_staleness=1)


def test_asynchronous_generation_waits_for_nothing_and_the_hand_over_for_both() -> None:
    schedule = build_gpu_schedule(ASYNC)
    after = {action.id: action.after for action in schedule.step}
    assert after["generate"] == after["score/reference"] == ()
    assert after["train_forward_backward"] == ("score/reference",)
    assert set(after["sync_weights"]) == {"optimizer_step", "generate"}
    streams = {action.id: action.stream for action in schedule.step}
    assert streams["generate"] is Stream.GENERATION
    assert streams["optimizer_step"] is Stream.TRAINING


def test_what_may_overlap_is_said_by_the_schedule() -> None:
    beside = {("generate", other) for other in ("score/reference", "train_forward_backward", "optimizer_step")}
    assert set(build_gpu_schedule(ASYNC).concurrent) == beside
    assert build_gpu_schedule(replace(ASYNC, max_staleness=0)).concurrent == ()


def test_generation_beside_training_on_the_same_devices_is_a_bug() -> None:
    with pytest.raises(AssertionError, match="devices of its own"):
        build_gpu_schedule(replace(ASYNC, placement=Placement.HYBRID))


@pytest.mark.parametrize(("placement", "first"), [(Placement.DISAGGREGATED, 8), (Placement.COLOCATED, 4)])
def test_frozen_roles_may_have_devices_of_their_own(placement: Placement, first: int) -> None:
    step = GpuStep(placement, 4, 4, frozen_roles=(Role.REFERENCE,), num_scoring=2)
    schedule = build_gpu_schedule(step)
    groups = {group.name: group.devices for group in schedule.groups}
    assert groups[step.scoring_group] == groups["scoring"] == (f"cuda:{first}", f"cuda:{first + 1}")
    assert dict(schedule.processes)["scorer/reference/0"] == f"cuda:{first}"
    assert schedule.layout("scorer", Role.REFERENCE).dp == step.num_frozen == 2


def test_frozen_roles_alone_may_wait_on_the_host() -> None:
    names = ids(GpuStep(Placement.HYBRID, 8, 8, frozen_roles=(Role.REFERENCE,), parks_frozen=True))
    assert [name for name in names if "role" in name] == ["reload_role/reference", "offload_role/reference"]
    assert names.index("reload_role/reference") + 1 == names.index("score/reference")
