"""The report of a simulation: lanes of every engine, memory of the steps that were traced, ages of rollouts."""

import json
from pathlib import Path

import pytest

from benchmarks.simulated.linear_speed import LinearSpeed
from rlplan.errors import SpecError
from rlplan.planner.answers.simulated_plan import drop_evaluation, simulate_plan
from rlplan.planner.plan import Plan
from rlplan.planner.search import find_best_plan
from rlplan.report import timeline
from rlplan.report.drawn import bars
from rlplan.report.drawn.memory import memory_by_device
from rlplan.report.drawn.scenes import collect_lanes
from rlplan.report.plans.simulated import SimulatedPlan, find_phase, read_simulated_plan, simulation_page
from rlplan.report.plans.write import write_simulation_report
from rlplan.simulate.engine import EngineLimits
from rlplan.simulate.result import SimulationResult
from rlplan.simulate.run import simulate
from rlplan.simulate.setting import Asynchrony, SimulationSetting, StepRollouts
from rlplan.vocabulary import ActionKind, Phase
from tests.factories import gpu_job

DISAGGREGATED = ("placement.placement=disaggregated", "rollout.tp=1", "placement.num_generation_devices=3")


@pytest.fixture(name="plan", scope="module")
def _budget() -> Plan:
    return find_best_plan(gpu_job({"policy": "Qwen/Qwen2.5-0.5B", "hardware": "4xH100"}, DISAGGREGATED))


@pytest.fixture(name="result", scope="module")
def _result(plan: Plan) -> SimulationResult:
    engines = plan.choice.arrangement.num_generation
    work = plan.asked.workload
    rollouts = StepRollouts(16, 8, work.usual_prompt_len, work.lengths, engines, EngineLimits(256, 1 << 16, 16))
    setting = SimulationSetting(
        schedule=drop_evaluation(plan.schedule),
        costs={name: cost for name, cost in plan.costs.items() if name != "generate"},
        rollouts=rollouts,
        speed=LinearSpeed(base_s=0.01, prefill_token_s=1e-6),
        num_steps=5,
        asynchrony=Asynchrony(1.0, interrupts=True, is_bound=True),
        ledger=plan.ledger,
    )
    return simulate(setting, seed=3)


def simulation(result: SimulationResult) -> SimulatedPlan:
    return read_simulated_plan(json.loads(json.dumps(result.as_json())), Path("result.json"))


def test_every_engine_has_a_lane_on_the_devices_of_its_group(result: SimulationResult, plan: Plan) -> None:
    again = simulation(result)
    lanes = collect_lanes(again)
    engines = [lane for lane in lanes if lane.process.startswith("rollout_engine/")]
    assert len(engines) <= plan.choice.arrangement.num_generation, "those that do the same share a lane"
    assert {lane.group for lane in engines} == {"generation"}
    assert {lane.group for lane in lanes if lane.process.startswith("policy_trainer")} == {"training"}


def test_rollouts_that_run_ahead_of_the_first_step_are_drawn(result: SimulationResult) -> None:
    again = simulation(result)
    drawn = {bar for lane in collect_lanes(again) for bar in lane.bars}
    assert drawn == {(span.action_id, span.start_s, span.end_s) for span in result.trace.spans}


def test_memory_of_a_steady_step_is_that_of_the_ledger(result: SimulationResult, plan: Plan) -> None:
    again = simulation(result)
    for device in plan.ledger.devices:
        levels = timeline.predicted_levels(again, ("device",), device=device)
        window = again.steady_windows[0]
        touched = (levels.edges[1:] > window.start_s) & (levels.edges[:-1] < window.end_s)
        shown = levels.total(levels.processes)[touched]
        totals = plan.ledger.device_totals(device).items()
        assert shown.max() == max(size for (run_phase, _), size in totals if run_phase == "steady")


def test_a_simulated_plan_is_drawn_below_its_capacity(plan: Plan) -> None:
    chart = memory_by_device(simulation(simulate_plan(plan, num_steps=2)), ())
    assert {scene["capacity"] for scene in chart["scenes"]} == {plan.ledger.device_capacity}


def test_the_page_says_what_the_result_says(result: SimulationResult) -> None:
    page = simulation_page(simulation(result))
    busy = {tile.title: tile.value for tile in page.tiles if tile.title.startswith("Busy")}
    assert set(busy) == {"Busy: training", "Busy: generation"}
    assert sum(row.seconds for row in page.phases) * len(result.step_s) == pytest.approx(sum(result.phase_s.values()))
    assert sum(row.share for row in page.phases) == pytest.approx(1.0)


def test_bars_of_ages_add_up_to_all_tokens(result: SimulationResult) -> None:
    rows = bars.staleness(result.token_staleness, result.rollout_staleness).rows
    assert sum(row.segments[0].size for row in rows) == pytest.approx(2.0), "tokens and rollouts"


def test_a_simulation_becomes_a_page(result: SimulationResult, tmp_path: Path) -> None:
    (tmp_path / "result.json").write_text(json.dumps(result.as_json()))
    files = write_simulation_report(tmp_path / "result.json", tmp_path / "report")
    assert files
    page = files.page.read_text()
    assert "Simulated, not measured" in page
    assert ("versions old" in page) == any(result.rollout_staleness)


def test_a_simulation_without_a_trace_is_a_page_all_the_same(result: SimulationResult, tmp_path: Path) -> None:
    data = result.as_json()
    data["trace"] = {"origin": "predicted", "spans": [], "samples": []}
    (tmp_path / "result.json").write_text(json.dumps(data))
    files = write_simulation_report(tmp_path / "result.json", tmp_path / "report")
    assert files
    assert "Simulated, not measured" in files.page.read_text()


def test_a_damaged_simulation_is_refused(result: SimulationResult, tmp_path: Path) -> None:
    data = {**result.as_json(), "schema_version": 99}
    (tmp_path / "result.json").write_text(json.dumps(data))
    with pytest.raises(SpecError, match="schema version 99"):
        write_simulation_report(tmp_path / "result.json", tmp_path / "report")


def test_every_kind_of_action_has_a_phase(plan: Plan) -> None:
    for action in plan.schedule.step:
        assert find_phase(action.id) is action.phase
    assert find_phase(ActionKind.SLEEP_ENGINE) is Phase.SWITCH
