"""`rlplan watch RUN`: shows the progress of a run from another terminal, until it ends."""

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rlplan_cli.options import AsJson

if TYPE_CHECKING:
    from rlplan.runtime.run_folder.following import Follower

NOT_YET = 1
"""Exit code while the run is still going on: a correct, negative answer."""
DAY_S = 86_400
PLAN_S = 30.0
"""Seconds that a run may take from the creation of its folder to its plan."""

Run = Annotated[
    str, typer.Argument(metavar="RUN", show_default=False, help="A run folder. Default: the newest in runs/.")
]
Every = Annotated[float, typer.Option(min=0.2, max=3600, help="Seconds between two updates.")]
Limit = Annotated[float, typer.Option(min=0, help="Stop watching after this many seconds; the run goes on.")]
Once = Annotated[bool, typer.Option("--once", help="Show the state once and exit; --json does so too.")]


def command(
    run: Run = "latest", every: Every = 1.0, limit: Limit = DAY_S, once: Once = False, as_json: AsJson = False
) -> None:
    """Show the progress of a run until it ends. Shows steps, rewards, tokens/s, and memory against the plan.

    Exits like the run: 0 if it finished, 1 if it is still going on (--once, --limit), 5 if its process is gone.
    """
    from rlplan.runtime.run_folder.following import check_success
    from rlplan_cli.render.running.watching import WatchDisplay
    from rlplan_cli.render.terminal import print_json

    follower = _follow(run)
    end = time.monotonic() + (0.0 if once or as_json else limit)
    with WatchDisplay(follower.plan, is_shown=not as_json) as display:
        standing = follower.read_new()
        display.show(standing)
        while standing.is_going_on and (left := end - time.monotonic()) > 0:
            time.sleep(min(every, left))
            standing = follower.read_new()
            display.show(standing)
    if as_json:
        print_json(standing.as_json())
    else:
        display.show_end(standing)
    if standing.is_going_on:
        raise typer.Exit(NOT_YET)
    check_success(standing, follower.folder)


def _follow(run: str) -> "Follower":
    """Open a run folder; wait for the plan of a run that has just started. Raises: SpecError."""
    from rlplan.runtime.run_folder.following import Follower, find_newest_run, is_running

    folder, end = find_newest_run(Path("runs")) if run == "latest" else Path(run), time.monotonic() + PLAN_S
    while not (folder / "plan.json").exists() and is_running(folder) and time.monotonic() < end:
        time.sleep(0.2)
    return Follower(folder)
