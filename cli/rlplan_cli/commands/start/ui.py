"""`rlplan ui`: a page on this machine on which a job is changed, and budget, timeline, verdict and job file answer."""

import webbrowser
from contextlib import ExitStack
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Annotated

import typer

Port = Annotated[int, typer.Option(min=0, max=65535, help="Of 127.0.0.1; 0 takes a free one.")]
Open = Annotated[bool, typer.Option("--open", help="Open it in this machine's browser.")]


def command(port: Port = 8642, opens: Open = False) -> None:
    """Change a job in the browser and see at once whether it fits. Ctrl-C ends it."""
    from rlplan.report import html  # what is missing is said before anything is started
    from rlplan_cli.render.terminal import note
    from rlplan_cli.ui.server import Server

    html.environment()
    with Server(port) as server, ExitStack() as until_the_end:
        print(server.address, flush=True)
        note("only this machine can open it, and only with this token; Ctrl-C ends it")
        if opens:
            way_in = until_the_end.enter_context(NamedTemporaryFile("w", prefix="rlplan-ui-", suffix=".html"))
            way_in.write(f'<meta http-equiv="refresh" content="0;url={server.address}">')  # for our eyes alone: 0600
            way_in.flush()
            webbrowser.open_new_tab(Path(way_in.name).as_uri())  # a command line is seen by every user, the token not
        server.serve_forever()
