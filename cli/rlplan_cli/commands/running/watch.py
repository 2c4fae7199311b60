"""`rlplan watch RUN`: how a run stands, from another terminal, until it ends."""

import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rlplan_cli.options import AsJson

if TYPE_CHECKING:
    from rlplan.runtime.run_folder.following import Follower

NAME = "watch"
EXAMPLES = ("rlplan watch", "rlplan watch runs/quickstart/20261120-120000 --page", "rlplan watch --once --json")
NOT_YET = 1
"""Exit code where the run still goes on: a correct, negative answer."""
DAY_S = 86_400
PLAN_S = 30.0
"""How long a run may take from its folder to its plan."""

Run = Annotated[
    str, typer.Argument(metavar="[RUN]", help="A run folder; by default the newest below runs/.", show_default=False)
]
Every = Annotated[float, typer.Option(min=0.2, max=3600, help="Seconds between two looks.")]
Limit = Annotated[float, typer.Option(min=0, help="Seconds after which watching ends, not the run.")]
Once = Annotated[bool, typer.Option("--once", help="One look; --json does so too.")]
Page = Annotated[bool, typer.Option("--page", help="Keep the run's page new: RUN/report/index.html, which reloads.")]


def command(
    run: Run = "latest",
    every: Every = 1.0,
    limit: Limit = DAY_S,
    once: Once = False,
    page: Page = False,
    as_json: AsJson = False,
) -> None:
    """Show how a run stands, until it ends. Steps, rewards, memory against plan, tokens/s.

    Exits as the run did: 0 where it finished, 1 where it still goes on (--once, --limit), 5 where its process is gone.
    """
    from rlplan.runtime.run_folder.following import check_ended_well
    from rlplan_cli.render.running.watching import WatchDisplay
    from rlplan_cli.render.terminal import print_json

    follower = _follow(run)
    end = time.monotonic() + (0.0 if once or as_json else limit)
    pages = _Pages(follower.folder) if page else None
    with WatchDisplay(follower.plan, is_shown=not as_json) as display:
        standing = follower.look()
        display.show(standing)
        while standing.is_going_on and (left := end - time.monotonic()) > 0:
            if pages is not None:
                pages.make()
            time.sleep(min(every, left))
            standing = follower.look()
            display.show(standing)
    if pages is not None:
        pages.make_last()
    if as_json:
        print_json(standing.as_json())
    else:
        display.show_end(standing)
    if standing.is_going_on:
        raise typer.Exit(NOT_YET)
    check_ended_well(standing, follower.folder)


def _follow(run: str) -> "Follower":
    """The run that is meant; one that has only begun is waited for. Raises: SpecError."""
    from rlplan.runtime.run_folder.following import Follower, is_going_on, newest_run

    folder, end = newest_run(Path("runs")) if run == "latest" else Path(run), time.monotonic() + PLAN_S
    while not (folder / "plan.json").exists() and is_going_on(folder) and time.monotonic() < end:
        time.sleep(0.2)
    return Follower(folder)


class _Pages:
    """The report of a run that goes on, made again and again by a process of its own that gives way to the run."""

    SHARE = 0.1
    """Of the time that may go into pages."""

    def __init__(self, folder: Path) -> None:
        self.command = ["nice", "-n", "19", sys.executable, "-m", "rlplan_cli", "report", str(folder)]
        self.made: subprocess.Popen[bytes] | None = None
        self.began, self.next = 0.0, 0.0

    def make(self) -> None:
        """Begin a new page, where the last one is done and old enough."""
        now = time.monotonic()
        if self.made is not None and self.made.poll() is not None:
            self.next, self.made = now + (now - self.began) / self.SHARE, None
        if self.made is None and now >= self.next:
            self.began = now
            self.made = subprocess.Popen(self.command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    def make_last(self) -> None:
        """The page of the run as it stands at the end."""
        if self.made is not None:
            self.made.wait()
        subprocess.run(self.command, stdout=sys.stderr, check=False)
