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
    """Show the rollouts that a run has kept: prompt, response, rewards, advantage and why it stopped.

    --json also prints the tokens and their log-probs.
    """
    from rlplan.runtime.run_folder.following import find_newest_run
    from rlplan.runtime.run_folder.reading_rollouts import Wanted, choose_rollouts, read_losses

    if best is not None and worst is not None:
        raise SpecError(
            f"--best {best} together with --worst {worst}",
            where="command line",
            rule="rollouts are ranked from one end",
            way_out="call the command twice",
        )
    folder = find_newest_run(Path("runs")) if run == "latest" else Path(run)
    wanted = Wanted(tuple(steps or ()), reward, best, worst, truncated)
    rows = choose_rollouts(folder, wanted, with_tokens=as_json and out is None)
    count = limit or best or worst
    if out is not None:
        _write_page(folder, rows[: count or MAX_ON_PAGE], out)
        print(json.dumps({"schema_version": 1, "page": str(out)}) if as_json else out)
    elif as_json:
        print(json.dumps({"schema_version": 1, "num_found": len(rows), "rollouts": rows[:count]}))
    else:
        from rlplan_cli.render.running.rollouts import show_rollouts

        show_rollouts(rows, count or NUM_SHOWN, read_losses(folder), learns_from_rewards=_has_rewards(folder))


def write_report_page(run_folder: Path, report: Path) -> Path | None:
    """Write the page of the last step's rollouts into a report's folder; None for a run that has kept none."""
    from rlplan.runtime.run_folder.reading_rollouts import Wanted, choose_rollouts
    from rlplan.runtime.run_folder.rollout_files import list_step_files

    if not list_step_files(run_folder):
        return None
    page = report / "rollouts.html"
    _write_page(run_folder, choose_rollouts(run_folder, Wanted())[:MAX_ON_PAGE], page)
    return page


def _write_page(folder: Path, rows: list[dict[str, Any]], page: Path) -> None:
    from rlplan.report.rollouts_page import render_rollouts
    from rlplan.runtime.run_folder.reading_rollouts import list_rewards, read_losses
    from rlplan.spec.base import explain_write_errors

    losses = read_losses(folder) if not _has_rewards(folder) else {}
    rows = [row | {"rewards": list_rewards(row), "loss": losses.get(row["step"])} for row in rows]
    with explain_write_errors(page):
        page.parent.mkdir(parents=True, exist_ok=True)
        page.write_text(render_rollouts(folder.resolve().name, rows), encoding="utf-8")


def _has_rewards(folder: Path) -> bool:
    from rlplan.planner.plan import read_run_plan

    return read_run_plan(folder).job.algorithm.declaration.has_rollouts
