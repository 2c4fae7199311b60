"""`rlplan calibrate RUN|LOG JOB|FILE ...`: fits a profile's free constants to your own measurements."""

from pathlib import Path
from typing import Annotated

import typer

from rlplan_cli.options import AsJson


def command(
    sources: Annotated[
        list[str],
        typer.Argument(
            metavar="RUN|LOG JOB|FILE ...",
            help="Run folders; logs, each followed by its job; files of measured points.",
        ),
    ],
    out: Annotated[
        Path, typer.Option("--out", help="Folder for the profile; set RLPLAN_PROFILES to it to use the profile.")
    ] = Path("calibrated-profiles"),
    as_json: AsJson = False,
) -> None:
    """Fit a profile to your own measured steps and peaks."""
    from rlplan.accuracy.calibrate import GROUPS, describe_value
    from rlplan.calibration import calibrate_profile, write_profile
    from rlplan_cli.render.terminal import note, print_json, show_table, stdout
    from rlplan_cli.render.waiting import waiting

    with waiting("fitting"):
        calibration = calibrate_profile(sources, out)
    path = write_profile(calibration.profile, out)
    if as_json:
        print_json(calibration.as_json() | {"path": str(path)})
        return
    title = f"Constants of {calibration.profile.name} (held-out errors before and after)"
    names = ("group", "samples", "models", "value", "before", "after", "used")
    rows = []
    for fit in calibration.fits:
        errors = (f"{fit.error_before:.1%}", f"{fit.error_after:.1%}")
        used = ", ".join(GROUPS[fit.group]) if fit.is_better else "no: not better"
        rows.append((fit.group, str(fit.num_samples), ", ".join(fit.models), describe_value(fit), *errors, used))
    show_table(names, rows, title, ("group", "models", "value", "used"))
    for reason, num in calibration.unused.items():
        note(f"{num} not used: {reason}")
    stdout.print(f"profile written to {path}; set RLPLAN_PROFILES={out} to plan with it", soft_wrap=True)
