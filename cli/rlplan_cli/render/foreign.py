"""Another framework's configuration in a terminal: the verdict, changes that make it fit, and how its keys were read.

In: Imported, Checked. Out: the answer on stdout, the account of keys on stderr.
"""

from itertools import groupby

from rlplan.foreign.check import Checked, format_assignments
from rlplan.foreign.convert import Imported
from rlplan.units import format_bytes
from rlplan_cli.render.plan import format_fullness, format_peak_range, show_errors, show_headline
from rlplan_cli.render.serving import show_served
from rlplan_cli.render.terminal import note, show_change, show_fact

MANY = 6
"""Number of keys that are listed for one reason; --json has all."""


def show_check(checked: Checked) -> None:
    """Show the verdict on a configuration, and changes that make it fit."""
    plan = checked.plan
    if checked.served is not None:
        show_served(checked.served)
    if plan is not None:
        peak = plan.binding
        moment = f" in {peak.action_id} on {peak.scope}{format_peak_range(plan)}"
        limits = _count_uncounted(checked.imported) if plan.verdict.may_fit else ""
        show_headline(plan, f"peak {format_fullness(plan)}", moment, but=limits)
        show_errors(plan)
    work = checked.imported.data.get("workload", {})
    if checked.shorter is not None:
        prompt, response = checked.shorter
        limits = f"{work.get('max_prompt_len', 0):,} + {work.get('max_response_len', 0):,}"
        show_fact(
            "Lengths", f"assumed at the limits, {limits} tokens; it fits without changes at {prompt:,} + {response:,}"
        )
    if checked.changes:
        print("Each of these changes alone makes it fit, the mildest first:")
    for change in checked.changes:
        size = format_bytes(change.num_bytes)
        show_change(format_assignments(change.values), f"{change.plan.verdict.value}, {size}")
    if checked.changes:
        first = checked.changes[0].values.items()
        show_fact("To try the first", "add " + " ".join(f"--set {key}={value}" for key, value in first))
    settings = checked.imported.settings
    if settings.file.endswith(".py"):
        changed = dict.fromkeys(key for change in checked.changes for key in change.values)
        for key in [key for key in changed if key in settings.table.in_python]:
            show_fact("In the script", f"{key} is {settings.table.in_python[key]}")


def _count_uncounted(imported: Imported) -> str:
    """Number of settings that the verdict ignores, for the headline; empty if none of them takes memory."""
    count = len(imported.not_counted)
    settings, are = ("setting", "is") if count == 1 else ("settings", "are")
    return f", but {count} {settings} that can take more memory {are} not counted" if count else ""


def show_account(imported: Imported) -> None:
    """Show how many keys were used, which have no counterpart and why, and notes on assumptions."""
    table = imported.settings.table
    num_set = sum(1 for entry in imported.taken if entry.place and entry.key) + (imported.share is not None)
    num_defaults = sum(1 for entry in imported.taken if entry.key and not entry.place)
    note(
        f"{table.title} {table.version}: {num_set} keys from the file, {num_defaults} defaults, "
        f"{len(imported.left)} without a counterpart"
    )
    by_reason = sorted(imported.left, key=lambda entry: entry.why)
    for why, entries in groupby(by_reason, key=lambda entry: entry.why):
        names = [entry.key for entry in entries]
        more = f" and {len(names) - MANY} more" if len(names) > MANY else ""
        note(f"  {why}: {', '.join(names[:MANY])}{more}")
    for text in imported.notes:
        note(f"  note: {text}")
