"""`rlplan ui`: a page on this machine on which a job is moved, and budget, timeline, verdict and job file answer."""

import webbrowser
from typing import Annotated

import typer

NAME = "ui"
EXAMPLES = ("rlplan ui", "rlplan ui --port 0 --open")

Port = Annotated[int, typer.Option(min=0, max=65535, help="Of 127.0.0.1; 0 takes a free one.")]
Open = Annotated[bool, typer.Option("--open", help="Open it in this machine's browser.")]


def command(port: Port = 8642, opens: Open = False) -> None:
    """Move a job on a local page. Answers with budget, timeline, verdict and job file; Ctrl-C ends it."""
    from rlplan.report import html  # what is missing is said before anything is started
    from rlplan_cli.render.terminal import note
    from rlplan_cli.ui.server import Server

    html.environment()
    with Server(port) as server:
        print(server.address, flush=True)
        note("only this machine can open it, and only with this token; Ctrl-C ends it")
        if opens:
            webbrowser.open_new_tab(server.address)
        server.serve_forever()
