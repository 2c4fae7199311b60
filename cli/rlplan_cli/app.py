"""The `rlplan` command: one file a verb, one boundary for errors.

Results go to stdout, progress and messages to stderr. Exit codes stand in `rlplan.errors`.
"""

import importlib
import json
import keyword
import os
import re
import select
import sys
import traceback
from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Annotated, Any, NoReturn, TextIO, cast

import typer
from typer.core import TyperGroup

from rlplan.errors import (
    EXIT_BUG,
    EXIT_NO_READER,
    EXTRAS,
    HostError,
    MisspeltError,
    RlplanError,
    SpecError,
    missing_extra,
)
from rlplan.printable import PrintableStream
from rlplan.reading import path_refusal
from rlplan.version import __version__

COMMANDS: dict[str, dict[str, Any]] = json.loads(Path(__file__).with_name("commands.json").read_text("utf-8"))
"""Every command: its line in the help, the folder below commands/ that its module stands in, examples. Modules are
imported when their command is called: the help needs none.
"""


class _Modules(MutableMapping[str, Any]):
    """Commands by name, each made of its module when it is first looked up."""

    def __init__(self) -> None:
        self.made: dict[str, Any] = {}

    def __getitem__(self, name: str) -> Any:
        if name not in COMMANDS:
            raise KeyError(name)
        if name not in self.made:
            self.made[name] = _command_of(name)
        return self.made[name]

    def __iter__(self) -> Iterator[str]:
        return iter(COMMANDS)

    def __len__(self) -> int:
        return len(COMMANDS)

    def __setitem__(self, name: str, command: Any) -> None:
        self.made[name] = command

    def __delitem__(self, name: str) -> None:
        del self.made[name]


def _command_of(name: str) -> Any:
    place = [*filter(None, [COMMANDS[name].get("folder")]), name + "_" * keyword.iskeyword(name)]
    module = importlib.import_module(".".join(["rlplan_cli.commands", *place]))
    if hasattr(module, "app"):
        made: Any = typer.main.get_group(module.app)
        made.name = name
    else:
        alone = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
        alone.command(name=name)(module.command)
        made = typer.main.get_command(alone)
    made.epilog = "\b\nExamples:\n" + "\n".join(f"  {line}" for line in COMMANDS[name]["examples"])
    return made


class _PipeError(Exception):
    """A BrokenPipeError under a name that typer does not know: it would end with 1, which says that nothing fits."""


@contextmanager
def _pipes_that_break() -> Iterator[None]:
    try:
        yield
    except BrokenPipeError as error:
        raise _PipeError from error


class _Root(TyperGroup):
    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.commands = _Modules()

    def list_commands(self, ctx: Any) -> list[str]:
        return list(COMMANDS)

    def make_context(self, *arguments: Any, **settings: Any) -> Any:
        """Reads a command line, and prints the help."""
        with _pipes_that_break():
            return super().make_context(*arguments, **settings)

    def invoke(self, ctx: Any) -> Any:
        """Runs a command."""
        with _pipes_that_break():
            return super().invoke(ctx)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, about["help"]) for name, about in COMMANDS.items()])


app = typer.Typer(
    name="rlplan",
    cls=_Root,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _show_version(is_asked: bool) -> None:
    if is_asked:
        typer.echo(f"rlplan {__version__}")
        raise typer.Exit


@app.callback()
def rlplan(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Say which version this is.")
    ] = False,
    debug: Annotated[
        bool, typer.Option("--debug", help="Show the traceback of a failure; anywhere on the line.")
    ] = False,
) -> None:
    """Plan, estimate, simulate, run and report reinforcement learning of language models."""


def main() -> NoReturn:
    """Entry point: every expected failure is one message and its exit code, never a traceback."""
    debug = "--debug" in sys.argv
    if debug:
        sys.argv.remove("--debug")
    out, errors = (cast("TextIO", PrintableStream(stream)) for stream in (sys.stdout, sys.stderr))
    with redirect_stdout(out), redirect_stderr(errors):
        try:
            exit_code = _run(debug)
            out.flush()
        except BrokenPipeError:
            exit_code = EXIT_NO_READER
            # nothing may be flushed into the pipe any more, not even at exit
            for stream in filter(_has_no_reader, (out, errors)):
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
    sys.exit(exit_code)


def _has_no_reader(stream: TextIO) -> bool:
    """Whether the reader of a pipe has gone, as after `head`."""
    poll = select.poll()
    poll.register(stream.fileno(), 0)
    return any(event & (select.POLLERR | select.POLLHUP) for _, event in poll.poll(0))


def show_error(error: RlplanError) -> None:
    """An error on stderr."""
    from rlplan_cli.render.terminal import show_error as show  # a command that ends well may need no table

    show(error)


def _run(debug: bool) -> int:
    try:
        result = app(prog_name="rlplan", standalone_mode=False)
        return result if isinstance(result, int) else 0
    except RlplanError as error:
        if debug:
            traceback.print_exc()
        show_error(_in_our_words(error) if isinstance(error, MisspeltError) else error)
        return error.exit_code
    except typer.Exit as error:
        return error.exit_code
    except typer.TyperException as error:
        return _show_usage(error)
    except (KeyboardInterrupt, typer.Abort):
        print("interrupted", file=sys.stderr)
        return 130
    except Exception as error:
        if isinstance(error, _PipeError) and any(map(_has_no_reader, (sys.stdout, sys.stderr))):
            raise BrokenPipeError from error  # of our own output, not of a process that was lost
        if failure := _disk_error(error) or path_refusal(error):
            if debug:
                traceback.print_exc()
            show_error(failure)
            return failure.exit_code
        if debug:
            raise
        if isinstance(error, ModuleNotFoundError) and error.name in EXTRAS:
            show_error(missing_extra(error.name))
            return HostError.exit_code
        print(
            f"a bug in rlplan: {type(error).__name__}: {error}\n"
            "  way out: run again with --debug and report the traceback",
            file=sys.stderr,
        )
        return EXIT_BUG


def _in_our_words(error: MisspeltError) -> RlplanError:
    """A refused word of another stack with ours beside it. Its tables are read only then."""
    from rlplan.foreign.meant import in_our_words

    return in_our_words(error)


def _disk_error(error: Exception) -> RlplanError | None:
    """What a full disk did to a writer that has no boundary of its own, such as the standard output."""
    from rlplan.runtime.run_folder.disk_errors import disk_error  # imported where something went wrong

    failure = disk_error(error, None)
    if failure is not None and failure.where == "standard output":
        # Nothing may be written there any more, not even at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return failure


def _way_out_of_usage(message: str, path: str) -> str:
    """What to type instead, where it can be told."""
    if "No such option: --set" in message:
        return "overrides go without --set: seed=1"
    option = re.search(r"No such option: --([\w.-]+)", message)
    if option and "Did you mean" not in message:
        given = next((word for word in sys.argv if word.startswith(f"--{option[1]}")), "")
        if "=" in given or "." in option[1] or "_" in option[1]:
            value = given.partition("=")[2] or "VALUE"
            return f"keys of a job go without dashes: {option[1]}={value}"
    return f"correct the command line; `{path} --help` ends with examples"


def _show_usage(error: typer.TyperException) -> int:
    """A wrong command line; without any command or verb, the help."""
    message = error.format_message()
    if message.startswith("Usage:"):
        print(message, file=sys.stderr)
    else:
        context = getattr(error, "ctx", None)
        path = context.command_path if context else "rlplan"
        show_error(
            SpecError(
                message,
                where=f"command line of `{path}`",
                rule=f"`{path} --help` says what it takes",
                way_out=_way_out_of_usage(message, path),
            )
        )
    return SpecError.exit_code
