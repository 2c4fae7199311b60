"""`rlplan check`: does a configuration of another stack fit, where does it break, and what makes it fit."""

from rlplan_cli.options import AsJson, ForeignFile, Hardware, Model, Outside, Overrides, SourceName

NAME = "check"


def command(
    file: ForeignFile,
    overrides: Overrides = None,
    hardware: Hardware = "",
    model: Model = None,
    source: SourceName = None,
    outside: Outside = None,
    as_json: AsJson = False,
) -> None:
    """Say whether a configuration of another stack fits. Changes to make it fit are in its own keys."""
    from rlplan.foreign.check import Asked, check, check_fits
    from rlplan.foreign.source import read_source
    from rlplan_cli.render.foreign import show_account, show_check
    from rlplan_cli.render.terminal import print_json
    from rlplan_cli.render.waiting import waiting
    from rlplan_cli.sources import fetched

    settings = read_source(file, source, outside or ())
    with waiting("checking"):
        checked = check(settings, Asked(hardware, model, tuple(overrides or ()), fetched))
    if as_json:
        print_json(checked.as_json())
    else:
        show_check(checked)
        show_account(checked.imported)
    check_fits(checked)
