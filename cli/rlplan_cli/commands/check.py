"""`rlplan check`: checks whether another framework's configuration fits, and suggests changes that make it fit."""

from rlplan_cli.options import AsJson, ForeignArguments, Verbose, flatten_options


@flatten_options
def command(asked: ForeignArguments, verbose: Verbose = False, as_json: AsJson = False) -> None:
    """Check whether another framework's configuration fits. Suggests changes in that framework's own keys."""
    check_file(asked, is_verbose=verbose, as_json=as_json)


def check_file(asked: ForeignArguments, *, is_verbose: bool, as_json: bool) -> None:
    """Check a file and print the answer. Raises: SpecError, HostError, NoFeasiblePlanError."""
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
        show_check(checked, is_verbose=is_verbose)
        show_account(checked.imported)
    check_fits(checked)
