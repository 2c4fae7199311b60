"""`rlplan ui`: serves a local page to edit a job, which shows verdict, memory, timeline and job file at once."""

import webbrowser
from contextlib import ExitStack
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Annotated

import typer

Port = Annotated[int, typer.Option(min=0, max=65535, help="Port on 127.0.0.1; 0 takes a free one.")]
Open = Annotated[bool, typer.Option("--open", help="Open the page in this machine's browser.")]


def command(port: Port = 8642, opens: Open = False) -> None:
    """Edit a job in the browser and see at once whether it fits. Ctrl-C stops the server."""
    from rlplan.report import html
    from rlplan_cli.render.terminal import note
    from rlplan_cli.ui.server import Server

    html.make_environment()  # a missing package must fail before the server starts
    with Server(port) as server, ExitStack() as open_files:
        print(server.address, flush=True)
        note("only this machine can open it, and only with this token; Ctrl-C stops the server")
        if opens:
            # Every user can see a browser's command line, so the token goes into a file with mode 0600 instead.
            redirect = open_files.enter_context(NamedTemporaryFile("w", prefix="rlplan-ui-", suffix=".html"))
            redirect.write(f'<meta http-equiv="refresh" content="0;url={server.address}">')
            redirect.flush()
            webbrowser.open_new_tab(Path(redirect.name).as_uri())
        server.serve_forever()
