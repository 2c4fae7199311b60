"""Regenerates reports/pages: pages of a plan and a comparison, and pictures of them.

In: the bundled profiles; nothing is run. Out: HTML, and PNG files as Chromium draws them, wide and light, on a phone
and dark. `python -m benchmarks.pages.evidence`, a minute.
"""

from pathlib import Path

import rlplan
from benchmarks.pages.chromium import Chromium
from rlplan.report.plans.comparison import side_of, write_comparison
from rlplan.report.plans.write import write_report_of

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "reports" / "pages"
JOB = str(ROOT / "examples" / "grpo-7b-8xh100.yaml")
ASYNCHRONOUS = ["placement.placement=disaggregated", "placement.max_staleness=2"]


def main() -> None:
    """Pages, then their pictures."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    plan, split = rlplan.plan(JOB), rlplan.plan(JOB, ASYNCHRONOUS)
    pages = {"plan": write_report_of(plan.plan, "plan.json", FOLDER).page.rename(FOLDER / "plan.html")}
    pages["comparison"] = FOLDER / "comparison.html"
    sides = [side_of(one.plan, one.compared() | {"name": name}) for name, one in (("shared", plan), ("apart", split))]
    write_comparison(sides, pages["comparison"])
    for name in ("report.json", "trace.pftrace"):
        (FOLDER / name).unlink()
    with Chromium() as browser:
        for name, page in pages.items():
            photograph(browser, page, name)


def photograph(browser: Chromium, page: Path, name: str) -> None:
    """What is seen first of it: wide and light, and on a phone and dark."""
    for size, dark in (("wide", False), ("phone", True)):
        browser.open(page, size, dark=dark)
        browser.wait("document.querySelector('canvas') !== null", 60)
        browser.says("new Promise((done) => setTimeout(done, 300))")
        browser.picture(FOLDER / f"{name}-{size}-{'dark' if dark else 'light'}.png", whole=size == "wide")


if __name__ == "__main__":
    main()
