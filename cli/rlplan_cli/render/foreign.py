"""Configurations of other stacks in a terminal: the verdict, what makes it fit, and the account of their keys.

In: Imported, Checked. Out: the answer on stdout, the account on stderr.
"""

from itertools import groupby

from rlplan.foreign.check import Checked, typed_values
from rlplan.foreign.convert import Imported
from rlplan.units import format_bytes
from rlplan_cli.render.plan import fullness, range_of, show_errors, show_headline
from rlplan_cli.render.serving import show_served
from rlplan_cli.render.terminal import note, say, show_change

MANY = 6
"""Keys of one reason that are listed by name; --json has them all."""


def show_check(checked: Checked) -> None:
    """The verdict on a configuration as given."""
    plan = checked.plan
    if checked.served is not None:
        show_served(checked.served)
    if plan is not None:
        peak = plan.binding
        moment = f" at the peak, in {peak.action_id} on {peak.scope}{range_of(plan)}"
        limits = _limits_of_verdict(checked.imported) if plan.verdict.may_fit else ""
        show_headline(plan, fullness(plan), moment, but=limits)
        show_errors(plan)
    work = checked.imported.data.get("workload", {})
    if checked.shorter is not None:
        prompt, response = checked.shorter
        limits = f"{work.get('max_prompt_len', 0):,} + {work.get('max_response_len', 0):,}"
        say("Lengths", f"counted at the limits, {limits} tokens; at {prompt:,} + {response:,} it fits as given")
    if checked.changes:
        print("Each of these makes it fit, the mildest first:")
    for change in checked.changes:
        size = format_bytes(change.num_bytes)
        show_change(typed_values(change.values), f"{change.plan.verdict.value}, {size}")
    if checked.changes:
        first = checked.changes[0].values.items()
        say("To try the first", "the same command with " + " ".join(f"--set {key}={value}" for key, value in first))
    settings = checked.imported.settings
    if settings.file.endswith(".py"):
        changed = dict.fromkeys(key for change in checked.changes for key in change.values)
        for key in [key for key in changed if key in settings.table.in_python]:
            say("In the script", f"{key} is {settings.table.in_python[key]}")


def _limits_of_verdict(imported: Imported) -> str:
    """The settings that a verdict leaves out, counted for the first line; empty where none takes memory."""
    count = len(imported.not_counted)
    settings, are = ("setting", "is") if count == 1 else ("settings", "are")
    return f", but {count} {settings} that can take more memory {are} not counted" if count else ""


def show_account(imported: Imported) -> None:
    """How many keys were taken, what has no counterpart and why, and what was assumed."""
    table, given = imported.settings.table, [one for one in imported.taken if one.place and one.key]
    defaults = sum(1 for one in imported.taken if one.key and not one.place)
    share = imported.share is not None
    note(
        f"{table.title} {table.version}: {len(given) + share} keys as given, {defaults} as its defaults have them, "
        f"{len(imported.left)} without a counterpart"
    )
    by_reason = sorted(imported.left, key=lambda one: one.why)
    for why, keys in groupby(by_reason, key=lambda one: one.why):
        names = [one.key for one in keys]
        more = f" and {len(names) - MANY} more" if len(names) > MANY else ""
        note(f"  {why}: {', '.join(names[:MANY])}{more}")
    for text in imported.notes:
        note(f"  note: {text}")
