"""`rlplan rollouts RUN`: shows the rollouts that a run has kept, in the terminal, as JSON or on a page."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from rlplan.errors import SpecError
from rlplan_cli.options import AsJson

NUM_SHOWN, MAX_ON_PAGE = 8, 2000
"""Rollouts shown in the terminal without a number, and on a page at most: it holds all texts."""

Run = Annotated[
    str, typer.Argument(metavar="RUN", help="A run folder. Default: the newest in runs/.", show_default=False)
]
Steps = Annotated[
    list[int] | None, typer.Option("--step", help="A step, repeatable. Default: the last one.", show_default=False)
]
Best = Annotated[int | None, typer.Option(min=1, help="Show this many with the highest reward.", show_default=False)]
Worst = Annotated[int | None, typer.Option(min=1, help="Show this many with the lowest reward.", show_default=False)]
Truncated = Annotated[bool, typer.Option("--truncated", help="Show only those that the length limit cut.")]
Reward = Annotated[
    str | None, typer.Option(help="Rank by this reward; leaves out rollouts without it.", show_default=False)
]
Limit = Annotated[int | None, typer.Option(min=1, help="Show at most this many. Default: 8.", show_default=False)]
Out = Annotated[Path | None, typer.Option("--out", "-o", help="Write a page with them (.html).", show_default=False)]


def command(
    run: Run = "latest",
    steps: Steps = None,
    best: Best = None,
    worst: Worst = None,
    truncated: Truncated = False,
    reward: Reward = None,
    limit: Limit = None,
    out: Out = None,
    as_json: AsJson = False,
) -> None:
    """Show the rollouts that a run has kept.

    Each has its prompt, response, rewards and advantage, and why it stopped. --json also prints the tokens and their
    log-probs.
    """
    from rlplan.runtime.run_folder.following import find_newest_run
    from rlplan.runtime.run_folder.reading_rollouts import choose_rollouts

    if best is not None and worst is not None:
        raise SpecError(
            f"--best {best} together with --worst {worst}",
            where="command line",
            rule="rollouts are ranked from one end",
            way_out="call the command twice",
        )
    folder, count = find_newest_run(Path("runs")) if run == "latest" else Path(run), best or worst
    rows = choose_rollouts(
        folder, steps or (), reward=reward, count=count, is_best=worst is None, truncated_only=truncated,
        with_tokens=as_json and out is None,
    )  # fmt: skip
    limit = limit or count
    if out is not None:
        _write_page(folder, rows[: limit or MAX_ON_PAGE], out)
        print(json.dumps({"schema_version": 1, "page": str(out)}) if as_json else out)
    elif as_json:
        print(json.dumps({"schema_version": 1, "num_found": len(rows), "rollouts": rows[:limit]}))
    else:
        from rlplan_cli.render.running.rollouts import show_rollouts

        show_rollouts(rows, limit or NUM_SHOWN)


def write_report_page(run_folder: Path, report: Path) -> None:
    """Write the page of the last step's rollouts into a report's folder, if the run has kept any."""
    from rlplan.runtime.run_folder.reading_rollouts import choose_rollouts
    from rlplan.runtime.run_folder.rollout_files import list_step_files

    if list_step_files(run_folder):
        _write_page(run_folder, choose_rollouts(run_folder)[:MAX_ON_PAGE], report / "rollouts.html")


def _write_page(folder: Path, rows: list[dict[str, Any]], page: Path) -> None:
    from rlplan.report.html import render_rollouts
    from rlplan.spec.base import explain_write_errors

    with explain_write_errors(page):
        page.parent.mkdir(parents=True, exist_ok=True)
        page.write_text(render_rollouts(folder.resolve().name, rows), encoding="utf-8")
