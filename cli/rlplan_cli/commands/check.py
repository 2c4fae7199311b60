"""`rlplan check`: checks whether another framework's configuration fits, and suggests changes that make it fit."""

from rlplan_cli.options import AsJson, ForeignArguments, flatten_options


@flatten_options
def command(asked: ForeignArguments, as_json: AsJson = False) -> None:
    """Check whether another framework's configuration fits. Suggests changes in that framework's own keys."""
    from rlplan.foreign.check import check, check_fits
    from rlplan_cli.render.foreign import show_account, show_check
    from rlplan_cli.render.terminal import print_json
    from rlplan_cli.render.waiting import waiting
    from rlplan_cli.sources import read_foreign

    settings, question = read_foreign(asked)
    with waiting("checking"):
        checked = check(settings, question)
    if as_json:
        print_json(checked.as_json())
    else:
        show_check(checked)
        show_account(checked.imported)
    check_fits(checked)
