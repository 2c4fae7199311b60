"""The report of a plan: its files, pictures that say the right words, a page that stands alone."""

import json
import re
from functools import cache
from pathlib import Path

import pytest
from matplotlib.figure import Figure

from rlplan.planner.plan import Plan, read_plan
from rlplan.planner.plan_parts import Verdict
from rlplan.planner.search import best_plan
from rlplan.report import style
from rlplan.report.plans.forecast import forecast
from rlplan.report.plans.plan_page import plan_page
from rlplan.report.plans.write import draw, render, write_report_of
from rlplan.report.run_folder import read_run_folder
from rlplan.units import format_bytes, format_seconds
from tests.factories import gpu_job
from tests.report.factory import RunShape, make_run


@cache
def budget(*overrides: str, gpus: str = "2xH100") -> Plan:
    return best_plan(gpu_job({"policy": "Qwen/Qwen2.5-0.5B", "hardware": gpus}, overrides))


def words(figure: Figure) -> str:
    figure.canvas.draw()
    return " | ".join(text.get_text() for text in figure.findobj(lambda part: hasattr(part, "get_text")))


def test_a_plan_for_gpus_becomes_a_page_and_three_pictures(tmp_path: Path) -> None:
    files = write_report_of(budget(), "plan.json", tmp_path / "report")
    names = sorted(path.name for path in (tmp_path / "report").iterdir())
    assert names == ["actions.png", "gantt.png", "report.html", "report.json", "timeline.png", "trace.pftrace"]
    assert all(path.stat().st_size > 2000 for path in files.page.parent.iterdir())
    assert json.loads(files.summary.read_text())["title"] == "Qwen/Qwen2.5-0.5B on 2x h100-sxm"


def test_a_job_without_seconds_has_no_second_picture_of_its_memory(tmp_path: Path) -> None:
    make_run(tmp_path / "run", RunShape())
    out = tmp_path / "report"
    write_report_of(budget(), "plan.json", out)
    write_report_of(read_plan(tmp_path / "run" / "plan.json"), "plan.json", out)
    assert sorted(path.name for path in out.iterdir()) == [
        "gantt.png",
        "report.html",
        "report.json",
        "timeline.png",
        "trace.pftrace",
    ]


def test_the_page_stands_alone_and_names_no_path_of_this_machine(tmp_path: Path) -> None:
    page = write_report_of(budget(), "plan.json", tmp_path / "report").page.read_text()
    assert str(tmp_path) not in page
    assert re.findall(r'(?:src|href)="(?!data:)', page) == []
    assert page.count("<img ") == 3
    assert "nothing on this page was measured" in page


def test_pictures_say_what_binds_and_how_much_there_is() -> None:
    figures = draw(forecast(budget(), "plan.json"))
    shown = words(figures["timeline"])
    peak = budget().ledger.device_peak("cuda:0").num_bytes
    assert f"predicted peak {format_bytes(peak)}" in shown
    assert f"capacity {format_bytes(budget().binding_capacity)}" in shown
    longest = max(budget().timing.step.actions, key=lambda action: action.cost.seconds)
    assert f"{format_seconds(longest.cost.seconds)}, {longest.cost.bound_by}-bound" in words(figures["gantt"])
    assert "What limits a steady step" in words(figures["gantt"])


def test_the_legend_beside_a_picture_holds_every_kind_that_is_drawn() -> None:
    large = best_plan(gpu_job({"policy": "Qwen/Qwen2.5-7B", "hardware": "8xH100"}))
    held = {
        row.kind for row in large.ledger.rows if row.space == "device" and row.peak_bytes and row.run_phase == "steady"
    }
    peak = {kind for _, _, kind, size in large.ledger.device_peak("cuda:0").rows if size}
    assert held - peak, "the question is only put where the peak does not hold every kind"
    figures = draw(forecast(large, "plan.json"))
    for name in ("timeline", "actions"):
        shown = words(figures[name]).split(" | ")
        assert {style.name_of(str(kind)) for kind in held} <= set(shown), name


def test_every_phase_and_resource_of_a_gantt_chart_has_a_legend_entry() -> None:
    figure = draw(forecast(budget(), "plan.json"))["gantt"]
    shown = set(words(figure).split(" | "))
    drawn = {action.phase for action in budget().schedule.step}
    waits = {name for row in plan_page(budget()).phases for name, seconds in row.parts.items() if seconds}
    legends = {text.get_text() for text in figure.legends[0].get_texts()}
    assert legends == {str(phase) for phase in drawn}
    assert {style.name_of(name) for name in waits} <= shown


def test_a_step_of_several_groups_has_a_picture_of_each() -> None:
    shown = words(draw(forecast(budget("placement.placement=disaggregated"), "plan.json"))["timeline"])
    assert "The GPU, training" in shown
    assert "The GPU, generation" in shown


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


def test_a_jobs_page_has_bytes_of_every_process(tmp_path: Path) -> None:
    plan = read_run_folder(make_run(tmp_path / "run", RunShape())).plan
    page = plan_page(plan)
    assert {place.name for place in page.places} == {"The fullest host", *plan.ledger.processes}
    assert "in order, not in seconds" in words(draw(forecast(plan, "plan.json"))["gantt"])
    assert "Where the time went" not in render(page, draw(forecast(plan, "plan.json")), "plan.json")
