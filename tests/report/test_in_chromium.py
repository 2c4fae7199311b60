"""Pages in a real browser: no error, light and dark, wide and on a phone, used by mouse and by keys."""

import json
from collections.abc import Iterator
from itertools import product
from pathlib import Path

import pytest

import rlplan
from benchmarks.pages.chromium import WIDTHS, Chromium
from rlplan.report.html import render_rollouts
from rlplan.report.plans.comparison import make_side, write_comparison
from rlplan.report.plans.simulated import read_simulated_plan
from rlplan.report.plans.write import write_plan_report, write_simulation_report
from rlplan.report.write import write_report
from tests.report.factory import RunShape, make_empty_run, make_run
from tests.repository.at_night import mark_nightly

PAGES = ("plan", "simulation", "run", "empty run", "comparison")
DARK_BY_DAY = (("phone", True, "run"), ("phone", True, "plan"))
"""Combinations that run in addition to every page in light and wide; all others run at night."""
LIMIT_BYTES = 1_500_000
LIMIT_PIXELS = 12_000
"""Height of a page on a phone."""


@pytest.fixture(name="browser", scope="module")
def _browser() -> Iterator[Chromium]:
    with Chromium() as browser:
        yield browser


@pytest.fixture(name="pages", scope="module")
def _pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("pages")
    plan = rlplan.plan(model="Qwen/Qwen2.5-7B", algorithm="grpo", gpus="8xH100")
    (folder / "result.json").write_text(json.dumps(rlplan.simulate(plan, steps=4).as_json()))
    runs = [make_run(folder / str(lr), RunShape(num_steps=8, learning_rate=lr)) for lr in (3e-4, 0)]
    simulation = write_simulation_report(folder / "result.json", folder / "simulation")
    assert simulation
    sides = [
        make_side(plan.plan, plan.build_comparison_row()),
        make_side(read_simulated_plan(json.loads((folder / "result.json").read_text()), folder / "result.json"), {}),
        *(make_side(result.run, result.build_comparison_row()) for result in map(rlplan.load_run, runs)),
    ]
    write_comparison(sides, folder / "comparison.html")
    return {
        "comparison": folder / "comparison.html",
        "plan": write_plan_report(plan.plan, "plan.json", folder / "plan").page,
        "simulation": simulation.page,
        "run": write_report(runs[0], folder / "run", runs[1:]).page,
        "empty run": write_report(make_empty_run(folder / "empty"), folder / "empty-report").page,
    }


@pytest.mark.parametrize(
    ("size", "dark", "name"),
    mark_nightly(product(WIDTHS, (False, True), PAGES), but=[("wide", False, name) for name in PAGES] + [*DARK_BY_DAY]),
)
def test_a_page_is_drawn_without_an_error_and_fits_its_width(
    browser: Chromium, pages: dict[str, Path], tmp_path: Path, name: str, size: str, dark: bool
) -> None:
    assert pages[name].stat().st_size < LIMIT_BYTES
    browser.open(pages[name], size, dark=dark)
    assert browser.said == []
    assert browser.says("document.documentElement.scrollWidth") <= WIDTHS[size][0]
    if size == "phone":
        assert browser.says("document.documentElement.scrollHeight") <= LIMIT_PIXELS
    assert bool(browser.says("document.querySelector('canvas') !== null")) == (name != "empty run")
    browser.picture(tmp_path / "page.png", whole=False)
    assert (tmp_path / "page.png").stat().st_size > 10_000
    paper = browser.says("getComputedStyle(document.body).backgroundColor")
    assert (paper == "rgb(255, 255, 255)") != dark


def test_a_long_table_is_cut_on_a_phone_and_a_button_shows_the_rest(browser: Chromium, tmp_path: Path) -> None:
    row = {
        "step": 40, "prompt_id": "train-1", "text": "4", "prompt": "2+2", "truth": "4", "turns": [], "failure": "",
        "rewards": {"answer_matcher": 1.0}, "loss": None, "reward": 1.0, "advantage": 0.5, "num_tokens": 8,
        "is_truncated": False, "stop_reason": "stop", "version": 40,
    }  # fmt: skip
    (tmp_path / "page.html").write_text(render_rollouts("quickstart", [row] * 256))
    count = "[...document.querySelectorAll('tbody tr')].filter((row) => row.offsetParent).length"
    for size, shown in (("wide", 256), ("phone", 60)):
        browser.open(tmp_path / "page.html", size)
        assert browser.says(count) == shown
    assert browser.says("document.documentElement.scrollHeight") <= LIMIT_PIXELS
    browser.says("document.querySelector('table + button').click()")
    assert browser.says(count) == 256


SCENE = "[...document.querySelectorAll('.row .plot .u-over')].filter((one) => one.offsetParent)[1]"
TIP = "document.querySelector('.tip')"


def test_the_mouse_over_a_chart_says_exact_bytes_seconds_and_source(browser: Chromium, pages: dict[str, Path]) -> None:
    browser.open(pages["plan"])
    browser.point(SCENE, 0.9, 0.5)
    browser.wait(f"!{TIP}.hidden")
    tip = browser.says(f"{TIP}.innerText")
    plan = rlplan.plan(model="Qwen/Qwen2.5-7B", algorithm="grpo", gpus="8xH100").plan
    training = plan.ledger.device_totals("cuda:0")[("steady", "train_forward_backward")]
    assert f"({training:,} B)" in tip
    assert "at 1 min" in tip
    assert "derived" in tip
    assert "train forward backward" in tip
    browser.point("document.querySelector('h1')")
    browser.wait(f"{TIP}.hidden")


VIEW = "charts.figures.find((one) => one.box.isConnected && one.plots.length > 1).view"


def test_a_timeline_is_zoomed_and_panned_by_buttons_keys_and_the_mouse(
    browser: Chromium, pages: dict[str, Path]
) -> None:
    browser.open(pages["plan"])
    browser.wait(f"{VIEW}[0] === 0")
    whole = browser.says(VIEW)
    browser.click("document.querySelector('button[title=\"zoom in\"]')")
    near = browser.says(VIEW)
    assert near[1] - near[0] < whole[1] - whole[0]
    browser.click("document.querySelector('button[title=\"pan right\"]')")
    assert browser.says(VIEW)[0] > near[0]
    browser.says(f"({SCENE}).closest('.uplot').focus()")
    browser.press("-")
    assert browser.says(f"{VIEW}[1] - {VIEW}[0]") > near[1] - near[0]
    browser.press("ArrowRight")
    browser.wait(f"!{TIP}.hidden")
    browser.point(SCENE, 0.2, 0.5)
    browser.ask("Input.dispatchMouseEvent", type="mousePressed", button="left", clickCount=1, **browser.at)
    there = browser.at | {"x": browser.at["x"] + 120}
    browser.ask("Input.dispatchMouseEvent", type="mouseMoved", button="left", **there)
    browser.ask("Input.dispatchMouseEvent", type="mouseReleased", button="left", clickCount=1, **there)
    before = browser.says(f"{VIEW}[1] - {VIEW}[0]")
    assert before < whole[1] - whole[0]
    shown = browser.says(f"{VIEW}[1] - {VIEW}[0]")
    assert all(abs(high - low - shown) < 1e-6 for low, high in browser.says(
        "charts.figures[0].plots.map((one) => [one.scales.x.min, one.scales.x.max])"
    ))  # fmt: skip


def test_kinds_and_predicted_or_measured_are_switched_off_and_on(browser: Chromium, pages: dict[str, Path]) -> None:
    browser.open(pages["run"])
    series = "charts.figures.find((one) => one.plots.some((plot) => plot.scene)).plots.find((one) => one.scene)"
    top = browser.says(f"Math.max(...({series}).data[1])")
    browser.click("document.querySelector('input[data-key=process]')")
    assert browser.says(f"Math.max(...({series}).data[1])") < top / 2
    assert browser.says("document.querySelectorAll('input[data-key=process]:checked').length") == 0
    browser.click("document.querySelector('input[data-key=measured]')")
    assert browser.says(f"({series}).series.at(-1).show") is False
    browser.click("document.querySelector('input[data-key=measured]')")
    assert browser.says(f"({series}).series.at(-1).show") is True


def test_tables_are_sorted_by_value_and_rows_stay_below_their_heading(
    browser: Chromium, pages: dict[str, Path]
) -> None:
    browser.open(pages["plan"])
    table = "[...document.querySelectorAll('table')].find((one) => one.tHead.innerText.includes('Fullest GPU'))"
    column = "[...({table}).tBodies[0].rows].map((row) => Number(row.cells[5].dataset.v))".replace("{table}", table)
    for ascending in (True, False):
        browser.click(f"({table}).tHead.rows[0].cells[5].querySelector('button')")
        assert browser.says(column) == sorted(browser.says(column), reverse=not ascending)
    kinds = "[...document.querySelectorAll('table')].find((one) => one.tHead.innerText.startsWith('Kind'))"
    heads = f"[...({kinds}).tBodies[0].rows].map((row) => row.className)"
    before = browser.says(heads)
    browser.click(f"({kinds}).tHead.rows[0].cells[1].querySelector('button')")
    assert browser.says(heads) == before


def test_a_page_is_printed_light_with_its_charts(browser: Chromium, pages: dict[str, Path]) -> None:
    browser.open(pages["run"], dark=True)
    assert browser.pdf().startswith(b"%PDF")
    assert browser.said == []
    browser.wait("!('print' in document.documentElement.dataset)")
