"""`rlplan profiles`: the hardware profiles that jobs can name."""

import json
from typing import Annotated

import typer

from rlplan.spec.hardware import get_profile, load_profiles
from rlplan.units import format_bytes
from rlplan_cli.options import AsJson
from rlplan_cli.render import new_table, stdout

app = typer.Typer(help="List and show hardware profiles.", no_args_is_help=True, rich_markup_mode=None)


@app.command("list")
def list_profiles(as_json: AsJson = False) -> None:
    """All profiles, a line each."""
    profiles = load_profiles()
    if as_json:
        rows = [{"name": p.name, "kind": p.kind, "memory_bytes": p.memory.value} for p in profiles.values()]
        print(json.dumps({"schema_version": 1, "profiles": rows}))
        return
    table = new_table("profile", "kind", "memory", "description", left=("description",))
    for profile in profiles.values():
        table.add_row(profile.name, profile.kind, format_bytes(profile.memory.value), profile.description)
    stdout.print(table)


@app.command("show")
def show_profile(
    name: Annotated[str, typer.Argument(help="A profile's name.", show_default=False)], as_json: AsJson = False
) -> None:
    """One profile with the source of every value."""
    profile = get_profile(name, where="command line")
    if as_json:
        print(profile.model_dump_json(indent=1))
        return
    title = f"{profile.name}: {profile.description}"
    table = new_table("value", "bytes", "provenance", "source", title=title, left=("source",))
    table.add_row("memory", format_bytes(profile.memory.value), profile.memory.provenance, profile.memory.source)
    for key, value in profile.process_overheads:
        table.add_row(f"process: {key}", format_bytes(value.value), value.provenance, value.source)
    for key, value in profile.process_slack:
        table.add_row(f"slack: {key}", format_bytes(value.value), value.provenance, value.source)
    for key, value in profile.weight_packing:
        if hasattr(value, "source"):
            table.add_row(f"packing: {key}", format_bytes(value.value), value.provenance, value.source)
    stdout.print(table)
