"""The report of a plan: its files, pictures that say the right words, a page that stands alone."""

import json
import re
from functools import cache
from pathlib import Path

import pytest

from rlplan.planner.measured_errors import predict_step_interval
from rlplan.planner.plan import Plan
from rlplan.planner.plan_parts import Verdict
from rlplan.planner.search import find_best_plan
from rlplan.report.plans.forecast import forecast
from rlplan.report.plans.plan_page import plan_page
from rlplan.report.plans.write import draw, write_plan_report
from rlplan.report.run_folder import read_run_folder
from rlplan.units import format_bytes, format_seconds
from rlplan.vocabulary import format_name
from tests.factories import gpu_job
from tests.report.factory import RunShape, make_run


@cache
def budget(*overrides: str, gpus: str = "2xH100") -> Plan:
    return find_best_plan(gpu_job({"policy": "Qwen/Qwen2.5-0.5B", "hardware": gpus}, overrides))


def test_a_plan_becomes_a_page_its_data_and_a_trace(tmp_path: Path) -> None:
    files = write_plan_report(budget(), "plan.json", tmp_path / "report")
    names = sorted(path.name for path in (tmp_path / "report").iterdir())
    assert names == ["report.html", "report.json", "trace.json"]
    assert json.loads(files.summary.read_text())["title"] == "Qwen/Qwen2.5-0.5B on 2x h100-sxm"


def test_the_page_stands_alone_and_names_no_path_of_this_machine(tmp_path: Path) -> None:
    page = write_plan_report(budget(), "plan.json", tmp_path / "report").page.read_text()
    assert str(tmp_path) not in page
    assert re.findall(r'(?:src|href)="(?!data:)', page) == []
    assert "nothing on this page was measured" in page


def test_a_chart_says_what_binds_and_how_much_there_is() -> None:
    chart = draw(forecast(budget(), "plan.json")).timeline["others"][0]
    scene, peak = chart["scenes"][0], budget().ledger.device_peak("cuda:0").num_bytes
    assert f"predicted peak {format_bytes(peak)}" in scene["words"]
    assert scene["capacity"] == budget().binding_capacity
    assert sum(kind["at_peak"] for kind in scene["kinds"]) == peak
    longest = max(budget().timing.step.actions, key=lambda action: action.cost.seconds)
    notes = {action["name"]: action.get("note") for action in chart["actions"]}
    assert notes[format_name(longest.action_id)] == f"{longest.cost.bound_by}-bound"
    assert chart["windows"][chart["first"]]["title"] == "Every later step"


def test_a_step_in_seconds_is_drawn_with_an_equal_width_for_each_action_too() -> None:
    views = draw(forecast(budget(), "plan.json")).timeline["others"]
    assert [view["name"] for view in views] == ["in seconds", "an equal width for each action"]


def test_the_legend_of_a_chart_holds_every_kind_that_is_drawn() -> None:
    large = find_best_plan(gpu_job({"policy": "Qwen/Qwen2.5-7B", "hardware": "8xH100"}))
    kinds = {str(row.kind) for row in large.ledger.rows if row.space == "device" and row.peak_bytes}
    peak = {str(kind) for _, _, kind, size in large.ledger.device_peak("cuda:0").rows if size}
    assert kinds - peak, "the question is only put where the peak does not hold every kind"
    for view in draw(forecast(large, "plan.json")).timeline["others"]:
        assert {kind["kind"] for kind in view["scenes"][0]["kinds"]} == kinds


def test_every_phase_and_resource_has_a_legend_entry() -> None:
    drawing = draw(forecast(budget(), "plan.json"))
    phases = {phase["name"] for phase in drawing.timeline["others"][0]["phases"]}
    assert {str(action.phase) for action in budget().schedule.step} <= phases
    waits = {name for row in plan_page(budget()).phases for name, seconds in row.parts.items() if seconds}
    assert {format_name(name) for name in waits} <= set(drawing.waits.legend)


def test_the_page_says_how_far_seconds_may_be_off_what_is_needed_and_what_was_assumed() -> None:
    page, plan = plan_page(budget()), budget()
    low, high = predict_step_interval(plan) or (0.0, 0.0)
    assert dict(page.facts)["Step time"].startswith(f"{format_seconds(low)} to {format_seconds(high)} a step")
    assert format_bytes(plan.needed_bytes) in dict(page.facts)["GPU memory"]
    assert plan_page(budget(gpus="4xrtx4090")).notes == budget(gpus="4xrtx4090").notes != ()


def test_a_step_of_several_groups_has_a_scene_of_each() -> None:
    chart = draw(forecast(budget("placement.placement=disaggregated"), "plan.json")).timeline["others"][0]
    assert [scene["title"] for scene in chart["scenes"]][:2] == ["The GPU, training", "The GPU, generation"]


def test_seconds_of_the_phases_add_up_to_the_step() -> None:
    page = plan_page(budget())
    assert sum(row.seconds for row in page.phases) == pytest.approx(budget().seconds)
    assert sum(row.share for row in page.phases) == pytest.approx(1.0)
    assert all(sum(row.parts.values()) == pytest.approx(row.seconds, rel=0.01) for row in page.phases)


def test_the_table_of_actions_reaches_the_ledgers_steady_peak() -> None:
    page = plan_page(budget())
    fullest = max(row.device_bytes or 0 for row in page.actions)
    steady = {key: size for key, size in budget().ledger.device_totals("cuda:0").items() if key[0] == "steady"}
    assert fullest == max(steady.values())
    assert [row.action for row in page.actions] == [action.id for action in budget().schedule.step]


def test_bytes_by_kind_add_up_to_their_place() -> None:
    for place in plan_page(budget()).places:
        assert sum(row.num_bytes for row in place.kinds) == place.num_bytes
        assert all(row.provenance for row in place.kinds)


def test_a_plan_that_does_not_fit_says_what_is_too_small_and_what_would_help() -> None:
    small = budget("training.zero_stage=2", "hardware.memory=4GiB", gpus="1xRTX4090")
    page = plan_page(small)
    assert small.verdict is Verdict.DOES_NOT_FIT
    assert page.state[0] == "bad"
    assert "Too small: a GPU" in page.state[1]
    assert [row.name for row in page.remedies] == [remedy.change for remedy in small.remedies]
    assert [row.seconds for row in page.remedies] == [remedy.seconds for remedy in small.remedies]
    assert all(remedy.learns_less in row.reason for row, remedy in zip(page.remedies, small.remedies, strict=True))


def test_a_jobs_page_has_bytes_of_every_process(tmp_path: Path) -> None:
    plan = read_run_folder(make_run(tmp_path / "run", RunShape())).plan
    page = plan_page(plan)
    assert {place.name for place in page.places} == {"The fullest host", *plan.ledger.processes}
    (chart,) = draw(forecast(plan, "plan.json")).timeline["others"]
    assert chart["name"] == "in order"
    assert not any(window["timed"] for window in chart["windows"])
