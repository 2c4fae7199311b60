"""The rehearsal before step 1 is compared with the plan; a plan that does not fit is changed, or refused."""

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import cast

import pytest

from rlplan.dataflow.schedule import Action
from rlplan.emit.bundle import write_bundle
from rlplan.emit.execution import execution_spec
from rlplan.planner.plan import Plan, read_plan
from rlplan.planner.search import find_next_plan, find_plan
from rlplan.runtime.driver.cycle import Cycle
from rlplan.runtime.driver.rehearsal import MisfitError, check_fits, compare
from rlplan.runtime.driver.steps import ActionRunner
from rlplan.runtime.fault_tolerance.supervision import predict_release
from rlplan.runtime.measure.memory_meter import Measurement
from rlplan.runtime.rollout.experience import blank_sample
from rlplan.units import GIB, MIB
from tests.factories import ask_job, make_plan
from tests.runtime.conftest import finish, start

ACTIONS = ("train_forward_backward", "optimizer_step")
ONE_TRAINER = {"hardware.num_devices": 1, "algorithm.kl_coef": 0}
TRAINERS = ("policy_trainer/0", "policy_trainer/1")


def test_the_rehearsed_sample_has_every_score_that_a_real_one_may_have() -> None:
    sample = blank_sample(3, 2)
    assert (len(sample.prompt_tokens), len(sample.response_tokens), sample.num_learned) == (3, 2, 2)
    scores = (sample.logprobs, sample.reference_logprobs, sample.teacher_logprobs, sample.old_logprobs)
    assert {len(each) for each in (*scores, sample.advantages, sample.values, sample.returns)} == {2}


def test_the_plan_says_at_most_what_a_process_holds_in_the_rehearsed_actions() -> None:
    plan = make_plan()
    (result,) = compare(plan.ledger, {"policy_trainer/0": 700 * MIB}, ACTIONS)
    assert result.measured_bytes == 700 * MIB
    assert result.predicted_bytes == plan.ledger.process_peak("policy_trainer/0").num_bytes
    assert result.host == "host"


def test_what_the_others_hold_counts_too() -> None:
    plan = make_plan(**{"hardware.memory": "4GiB"})
    rehearsed = compare(plan.ledger, dict.fromkeys(TRAINERS, 1 * GIB), ACTIONS)
    check_fits(plan.ledger, rehearsed, {"rollout_engine/0": 2 * GIB, "policy_trainer/0": 3 * GIB})
    with pytest.raises(MisfitError, match=r"host needs 5\.00 GiB for one micro-batch .*, 4\.00 GiB available"):
        check_fits(plan.ledger, rehearsed, {"rollout_engine/0": 3 * GIB})


def test_hosts_are_judged_apart() -> None:
    ledger = replace(
        make_plan(**{"hardware.memory": "4GiB"}).ledger, host_of_device=(("cpu:0", "host:0"), ("cpu:1", "host:1"))
    )
    rehearsed = compare(ledger, dict.fromkeys(TRAINERS, 3 * GIB), ACTIONS)
    assert [result.host for result in rehearsed] == ["host:0", "host:1"]
    check_fits(ledger, rehearsed, {})
    with pytest.raises(MisfitError, match=r"host:1 needs 5\.00 GiB"):
        check_fits(ledger, rehearsed, {"rollout_engine/0": 2 * GIB})


class RecordedRunner:
    """An ActionRunner and a Starter whose processes hold 1 GiB whatever they do."""

    def __init__(self, plan: Plan) -> None:
        self.spec = self.starter = self.worker_group = self
        self.schedule, self.said = plan.schedule, list[str]()
        self.model_folder_for_role = lambda role: "start"

    def everywhere(self, action: Action, call: Callable[[int], Sequence[str]]) -> tuple[None, list[Measurement]]:
        return None, self.done(call(0)[0], action)

    def find_handler(self, action: Action) -> Callable[[Action, int], list[Measurement]]:
        return lambda action, step: self.done(action.id, action)

    def done(self, what: str, action: Action) -> list[Measurement]:
        self.said.append(what)
        return [Measurement(process, 0.0, 1.0, 2 * GIB, 1 * GIB, {}, {}) for process in action.processes]


def rehearsed_cycle(placement: str, **overrides: object) -> tuple[list[str], list[str]]:
    """(what was asked of the processes, in order; the processes that are held against the plan)."""
    plan = make_plan(**{"placement.placement": placement, **overrides})
    runner = RecordedRunner(plan)
    everything = dict.fromkeys([process for process, _ in plan.schedule.processes], 64 * GIB)
    cycle = Cycle(cast(ActionRunner, runner), plan.ledger, dict(everything), dict(everything))
    compared = [process for _, peaks in cycle.play() for process in peaks]
    assert cycle.resident["policy_trainer/0"] == 1 * GIB
    return runner.said, compared


def test_where_phases_share_time_a_whole_cycle_ends_with_an_engine_that_has_the_start_weights() -> None:
    calls, compared = rehearsed_cycle("colocated", **{"placement.offload": "disk"})
    assert calls == [
        *("stop_engine", "reload_role/reference", "offload_role/reference", "reload_role/policy"),
        *("rehearse", "reset", "save_weights", "offload_role/policy", "start_engine"),
    ]
    assert compared == [*TRAINERS, "rollout_engine/0"]


def test_where_they_do_not_the_trainers_rehearse_beside_the_engine() -> None:
    assert rehearsed_cycle("hybrid") == (["rehearse", "reset"], [*TRAINERS])


def test_a_rehearsed_stop_frees_what_the_start_had_taken() -> None:
    ledger = make_plan(**{"placement.placement": "colocated"}).ledger
    freed = {step: predict_release(ledger, "stop_engine", step, "rollout_engine/0") for step in (0, 1)}
    assert 0 < freed[0] <= freed[1], "the first generation takes more"


def test_fallbacks_take_the_mildest_change_first_and_end() -> None:
    plan, changes = make_plan(**{"workload.micro_batch_size_per_gpu": 4}), []
    while step := find_next_plan(plan):
        change, plan = step
        changes.append(change)
        assert len(changes) < 20
    assert changes[:2] == ["training.max_tokens_per_micro_batch=40", "training.max_tokens_per_micro_batch=20"]
    assert [change.partition("=")[0] for change in changes[3:]] == ["rollout.kv_cache_memory"] * len(changes[3:])
    assert len(changes) == len(set(changes))


def test_a_fallback_keeps_placement_and_stage() -> None:
    plan = make_plan(**{"placement.placement": "disaggregated"})
    step = find_next_plan(plan)
    assert step
    assert step[1].schedule.placement == plan.schedule.placement
    assert step[1].zero_stage == plan.zero_stage


@pytest.mark.parametrize(("importance", "is_asked"), [("auto", False), ("truncate", True), ("none", False)])
def test_a_fallback_does_not_ask_for_a_correction_that_the_job_left_open(
    importance: str, is_asked: bool, tmp_path: Path
) -> None:
    """Neither as it is made, nor through the files that a run goes on from, also where it falls back once more."""
    choices = {"training.dtype": "bfloat16", "algorithm.importance": importance}
    plan = find_plan(ask_job(**{"workload.micro_batch_size_per_gpu": 4, **choices}))
    for index in range(2):
        step = find_next_plan(plan)
        assert step
        assert execution_spec(step[1]).accepts_mismatch is is_asked
        write_bundle(step[1], tmp_path / str(index))
        plan = read_plan(tmp_path / str(index) / "plan.json")
        assert plan.job.algorithm.importance == ("none" if importance == "none" else "truncate")
        assert execution_spec(plan).accepts_mismatch is is_asked
        assert json.loads((tmp_path / str(index) / "execution.json").read_text())["accepts_mismatch"] is is_asked


@pytest.mark.engine
@pytest.mark.nightly  # in `make test` a stand-in for a GPU runs out: tests/runtime/device/test_whole_runs.py
def test_a_run_that_does_not_fit_goes_on_with_a_smaller_micro_batch_and_says_so(tmp_path: Path) -> None:
    """The plan's own capacity is made less than the processes take, which the rehearsal is the first to see."""
    plan = make_plan(**{"workload.num_steps": 1, "workload.num_heldout_prompts": 8, **ONE_TRAINER})
    small = replace(plan.ledger, host_capacity=1 * GIB)
    write_bundle(plan.model_copy(update={"ledger": small}), tmp_path / "bundle")
    run = finish(start("run", str(tmp_path / "bundle"), "--out", str(tmp_path / "run")), tmp_path / "run")
    assert run.exit_code == 0, run.stderr
    (alarm,) = [json.loads(line) for line in (run.folder / "alarms.jsonl").read_text().splitlines()]
    assert alarm["kind"] == "change"
    assert alarm["change"] == "training.max_tokens_per_micro_batch=40"
    assert "1.00 GiB available; going on with training.max_tokens_per_micro_batch=40" in alarm["text"]
    assert "going on with" in run.stderr
    assert read_plan(run.folder / "plan.json").job.workload.micro_batch_size_per_gpu == 2
    preflight = json.loads((run.folder / "preflight.json").read_text())
    assert preflight["changes"] == ["training.max_tokens_per_micro_batch=40"]
    for result in preflight["rehearsed"]:
        assert 0 <= result["predicted_bytes"] / result["measured_bytes"] - 1 < 0.15, result
    assert {span.step for span in run.trace.spans} == {0, 1, -1}
