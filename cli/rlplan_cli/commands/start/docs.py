"""`rlplan docs WORD`: searches the documentation offline."""

from typing import Annotated

import typer

from rlplan_cli.options import AsJson

MAX_OTHERS = 5
"""Number of other sections that are listed."""
MAX_KEYS = 12
"""Matching keys of a job are listed if they are at most this many."""

Words = Annotated[list[str] | None, typer.Argument(metavar="WORD", help="Words to search for.")]


def command(words: Words = None, as_json: AsJson = False) -> None:
    """Search the documentation offline. Prints the best section, and lists others."""
    from rlplan.spec.files.job_schema import job_keys
    from rlplan_cli.pages import look_up, normalize, pages
    from rlplan_cli.render.terminal import print_json, stdout

    if not words:
        if as_json:
            print_json({"schema_version": 1, "pages": pages()})
        else:
            stdout.print("\n".join(f"{name:<28}{title}" for name, title in pages().items()))
        return
    wanted = " ".join(words)
    best, *others = look_up(wanted)
    if as_json:
        shown = (best, *others[:MAX_OTHERS])
        sections = [{"place": section.place, "heading": section.heading, "text": section.body} for section in shown]
        print_json({"schema_version": 1, "sections": sections})
        return
    stdout.print(f"{best.heading}  ({best.place})", style="bold")
    for block in best.select_blocks(normalize(wanted)):
        stdout.print(f"\n{block}")
    named = [key for key in job_keys() if all(word in key for word in wanted.lower().replace(".", " ").split())]
    if 0 < len(named) <= MAX_KEYS:
        stdout.print("\nkeys of a job: " + ", ".join(named), style="dim")
    if others:
        places = ", ".join(section.place.removeprefix("docs/") for section in others[:MAX_OTHERS])
        stdout.print("\nalso: " + places, style="dim")
