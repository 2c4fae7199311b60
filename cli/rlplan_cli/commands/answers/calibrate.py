"""`rlplan calibrate RUN|LOG JOB|FILE ...`: a profile's free constants fitted to measurements of one's own."""

from pathlib import Path
from typing import Annotated

import typer

from rlplan_cli.options import AsJson


def command(
    sources: Annotated[
        list[str],
        typer.Argument(
            metavar="RUN|LOG JOB|FILE ...",
            help="Run folders; logs, each with the job that wrote it behind it; files of measured points.",
            show_default=False,
        ),
    ],
    out: Annotated[
        Path, typer.Option("--out", help="Folder for the profile; it holds where RLPLAN_PROFILES names it.")
    ] = Path("calibrated-profiles"),
    as_json: AsJson = False,
) -> None:
    """Fit a profile to measured steps and peaks of your own."""
    from rlplan.accuracy.calibrate import GROUPS, value_words
    from rlplan.calibration import calibrated, write_profile
    from rlplan_cli.render.terminal import new_table, note, print_json, stdout
    from rlplan_cli.render.waiting import waiting

    with waiting("fitting"):
        found = calibrated(sources, out)
    path = write_profile(found.profile, out)
    if as_json:
        print_json(found.as_json() | {"path": str(path)})
        return
    names = ("group", "samples", "models", "says", "before", "held out", "used")
    table = new_table(*names, title=f"Constants of {found.profile.name}", left=("group", "models", "says", "used"))
    for fit in found.fits:
        errors = (f"{fit.error_before:.1%}", f"{fit.error_after:.1%}")
        used = ", ".join(GROUPS[fit.group]) if fit.is_better else "no: not better"
        table.add_row(fit.group, str(fit.num_samples), ", ".join(fit.models), value_words(fit), *errors, used)
    stdout.print(table)
    for why, num in found.unused.items():
        note(f"{num} not used: {why}")
    stdout.print(f"{path}: plans are as before; with RLPLAN_PROFILES={out} they take this profile", soft_wrap=True)
