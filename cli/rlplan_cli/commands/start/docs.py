"""`rlplan docs WORD`: what the pages say about a word, offline."""

from typing import Annotated

import typer

from rlplan_cli.options import AsJson

ALSO = 5
"""Other sections that are named."""
MOST_KEYS = 12
"""Keys of a job that are named, where no more have all the words in them."""

Words = Annotated[list[str] | None, typer.Argument(metavar="[WORD]...", help="What to look up.", show_default=False)]


def command(words: Words = None, as_json: AsJson = False) -> None:
    """Look a word up in the pages, offline. Prints the section that says most about it, and names others."""
    from rlplan.spec.job_keys import job_keys
    from rlplan_cli.pages import folded, look_up, pages
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
        found = [{"place": one.place, "heading": one.heading, "text": one.body} for one in (best, *others[:ALSO])]
        print_json({"schema_version": 1, "sections": found})
        return
    stdout.print(f"{best.heading}  ({best.place})", style="bold")
    for block in best.told(folded(wanted)):
        stdout.print(f"\n{block}")
    named = [key for key in job_keys() if all(word in key for word in wanted.lower().replace(".", " ").split())]
    if 0 < len(named) <= MOST_KEYS:
        stdout.print("\nkeys of a job: " + ", ".join(named), style="dim")
    if others:
        stdout.print("\nalso: " + ", ".join(one.place.removeprefix("docs/") for one in others[:ALSO]), style="dim")
