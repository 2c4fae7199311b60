"""Regenerates reports/pages: pages of a plan, a simulation and a comparison, and pictures of them and of `rlplan ui`.

In: the bundled profiles; nothing is run. Out: HTML, and PNG files as Chromium draws them, wide and light, on a phone
and dark. How long `rlplan ui` takes to answer is printed. `python -m benchmarks.pages.evidence`, a minute.
"""

import json
import statistics
import threading
import time
from pathlib import Path

from rlplan_cli.ui.answer import answer
from rlplan_cli.ui.server import Server

import rlplan
from benchmarks.pages.chromium import Chromium
from rlplan.report.plans.comparison import make_side, write_comparison
from rlplan.report.plans.simulated import read_simulated_plan
from rlplan.report.plans.write import write_plan_report, write_simulation_report

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "reports" / "pages"
JOB = str(ROOT / "examples" / "grpo-7b-8xh100.yaml")
ASYNCHRONOUS = ["placement.placement=disaggregated", "placement.max_staleness=2"]
MOVED = [{"max_response_len": str(length)} for length in (1000, 2000, 3000, 5000, 6000, 7000, 8000)]


def main() -> None:
    """Pages, then their pictures."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    plan, split = rlplan.plan(JOB), rlplan.plan(JOB, ASYNCHRONOUS)
    result = FOLDER / "simulation.json"
    result.write_text(json.dumps(rlplan.simulate(split, steps=6).as_json()))
    pages = {"plan": write_plan_report(plan.plan, "plan.json", FOLDER).page.rename(FOLDER / "plan.html")}
    if simulation := write_simulation_report(result, FOLDER):
        pages["simulation"] = simulation.page.rename(FOLDER / "simulation.html")
    pages["comparison"] = FOLDER / "comparison.html"
    simulated = read_simulated_plan(json.loads(result.read_text()), result)
    sides = [
        make_side(result.plan, result.build_comparison_row() | {"name": name})
        for name, result in (("shared", plan), ("apart", split))
    ]
    write_comparison([*sides, make_side(simulated, {"name": "apart"})], pages["comparison"])
    for name in ("simulation.json", "report.json", "trace.json"):
        (FOLDER / name).unlink()
    with Chromium() as browser, Server(0) as server:
        for name, page in pages.items():
            photograph(browser, page, name)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        photograph(browser, server.address, "ui")
        server.shutdown()
    first = {"model": "Qwen/Qwen2.5-7B", "algorithm": "grpo", "gpus": "8xh100-sxm"}
    usual = statistics.median(seconds(first | moved) for moved in MOVED)
    print(f"an answer of rlplan ui, 7B on 8 GPUs: {1000 * usual:.0f} ms of one core")


def seconds(fields: dict[str, str]) -> float:
    """CPU seconds of one answer: wall time would count other work on the machine."""
    begin = time.process_time()
    answer(fields)
    return time.process_time() - begin


def photograph(browser: Chromium, page: Path | str, name: str) -> None:
    """Save the top of the page: wide and light, and on a phone and dark."""
    for size, dark in (("wide", False), ("phone", True)):
        browser.open(page, size, dark=dark)
        browser.wait("document.querySelector('canvas') !== null", 60)
        browser.says("new Promise((done) => setTimeout(done, 300))")
        browser.picture(
            FOLDER / f"{name}-{size}-{'dark' if dark else 'light'}.png", whole=size == "wide" and name != "ui"
        )


if __name__ == "__main__":
    main()
