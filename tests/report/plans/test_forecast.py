"""A plan on a clock holds what its ledger holds, and lasts as long as its timing says."""

from functools import cache
from itertools import pairwise
from pathlib import Path

import pytest

from rlplan.memory.ledger import Bound
from rlplan.planner.plan import Plan
from rlplan.planner.search import find_best_plan
from rlplan.report import timeline
from rlplan.report.drawn.scenes import collect_lanes
from rlplan.report.plans.forecast import Forecast, forecast
from rlplan.report.run_folder import read_run_folder
from rlplan.spec.files.job_file import load_job
from rlplan.units import MIB
from tests.factories import EXAMPLES, gpu_job
from tests.report.factory import HOST_PROCESSES, RunShape, make_run

GPU_EXAMPLES = ("grpo-7b-8xh100", "ppo-70b-64xh100", "grpo-lora-8b-1xrtx4090", "dpo-8b-8xa100")
SPLIT = "placement.placement=disaggregated"


@cache
def example(name: str) -> Plan:
    return find_best_plan(load_job(EXAMPLES / f"{name}.yaml", ()))


@cache
def split() -> Plan:
    return find_best_plan(gpu_job({"policy": "Qwen/Qwen2.5-0.5B", "hardware": "4xH100"}, (SPLIT,)))


def make_budgets() -> list[Plan]:
    return [*map(example, GPU_EXAMPLES), split()]


@pytest.mark.parametrize("bound", ["low", "expected", "high"])
def test_a_device_holds_at_most_the_peak_that_its_ledger_states(bound: Bound) -> None:
    for budget in make_budgets():
        predicted = forecast(budget, "plan.json")
        for device in budget.ledger.devices:
            levels = timeline.predicted_levels(predicted, ("device",), bound, device)
            assert levels.total(levels.processes).max() == budget.ledger.device_peak(device, bound).num_bytes


def test_a_host_holds_at_most_the_peak_that_its_ledger_states() -> None:
    for budget in make_budgets():
        levels = [
            timeline.predicted_levels(forecast(budget, "plan.json"), ("host",), device=host)
            for host in budget.ledger.hosts
        ]
        assert max(level.total(level.processes).max() for level in levels) == budget.ledger.host_peak().num_bytes


def test_a_steady_step_begins_at_zero_and_lasts_as_long_as_it_is_timed() -> None:
    for budget in make_budgets():
        predicted = forecast(budget, "plan.json")
        steady = next(window for window in predicted.windows if window.title == "Every later step")
        assert (steady.start_s, steady.end_s, steady.is_timed) == (0.0, budget.seconds, True)
        times = {span.action_id: (span.start_s, span.end_s) for span in predicted.trace.spans if span.step == 2}
        rare = {action.id: 2 * (budget.seconds,) for action in budget.schedule.step if action.every > 1}
        timed = {action.action_id: (action.start_s, action.end_s) for action in budget.timing.step.actions}
        assert times == rare | timed


def test_a_moment_that_binds_is_among_the_windows() -> None:
    for budget in make_budgets():
        titles = {window.title for window in forecast(budget, "plan.json").windows}
        wanted = {"start": "Start", "first": "First step", "steady": "Every later step", "finish": "Finish"}
        assert wanted[budget.binding.run_phase] in titles
        assert wanted[budget.ledger.host_peak().run_phase] in titles


def test_in_order_every_action_is_as_long_as_any_other() -> None:
    predicted = forecast(example("grpo-7b-8xh100"), "plan.json").drop_seconds()
    assert {span.end_s - span.start_s for span in predicted.trace.spans} == {1.0}
    assert not any(window.is_timed for window in predicted.windows)
    beside = 1  # rewards are judged while the reference scores
    assert predicted.windows[1].end_s == len(example("grpo-7b-8xh100").schedule.step) - beside


def test_no_process_does_two_things_at_once() -> None:
    for budget in make_budgets():
        predicted = forecast(budget, "plan.json")
        for lane in collect_lanes(predicted):
            ordered = sorted(lane.bars, key=lambda bar: bar[1:])
            assert all(earlier[2] <= other[1] + 1e-9 for earlier, other in pairwise(ordered))


def test_lanes_of_one_group_lie_together() -> None:
    predicted = forecast(split(), "plan.json")
    groups = [lane.group for lane in collect_lanes(predicted)]
    assert groups == sorted(groups, key=["training", "generation", "host"].index)
    assert set(groups) == {"training", "generation", "host"}


@pytest.fixture(name="job")
def _job(tmp_path: Path) -> Forecast:
    return forecast(read_run_folder(make_run(tmp_path / "run", RunShape())).plan, "plan.json")


def test_the_plan_of_a_job_holds_what_its_run_was_predicted_to_hold(job: Forecast) -> None:
    levels = timeline.predicted_levels(job)
    assert levels.total(levels.processes).max() == job.ledger.host_peak().num_bytes
    for process, size in HOST_PROCESSES.items():
        assert set(levels.total([process])) == {size}, f"{size / MIB} MiB from beginning to end"
