"""The `rlplan` command: one file per command, and a single place where errors become messages and exit codes.

Results go to stdout, progress and messages to stderr. The exit codes are defined in `rlplan.errors`.
"""

import importlib
import json
import keyword
import os
import re
import select
import shlex
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from functools import cache
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
    build_missing_extra,
    did_you_mean,
)
from rlplan.printable import PrintableStream
from rlplan.reading import describe_path_error
from rlplan.version import __version__

COMMANDS: dict[str, dict[str, Any]] = json.loads(Path(__file__).with_name("commands.json").read_text("utf-8"))
"""Every command with its line in the help, its module's folder below commands/, and examples. The help needs no module,
so a module is only imported when its command is called.
"""


@cache
def _load_command(name: str) -> Any:
    """A command, whose module is imported at its first use."""
    place = [*filter(None, [COMMANDS[name].get("folder")]), name + "_" * keyword.iskeyword(name)]
    module = importlib.import_module(".".join(["rlplan_cli.commands", *place]))
    if hasattr(module, "app"):
        command: Any = typer.main.get_group(module.app)
        command.name = name
    else:
        single = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
        single.command(name=name)(module.command)
        command = typer.main.get_command(single)
    # click reflows an epilog unless it begins with a backspace character
    command.epilog = "\b\nExamples:\n" + "\n".join(f"  {line}" for line in COMMANDS[name]["examples"])
    return command


OTHER_WORDS = {
    **dict.fromkeys(("gpus", "hardware", "list gpus", "list hardware", "list"), ("profiles", "list")),
    **dict.fromkeys(("models", "list models"), ("profiles", "models")),
    "profile": ("profiles",),
}
"""First words that people type, and the command that each means."""


_SCRIPTS, _PLANS = (".sh", ".py", ".yaml", ".yml", ".toml"), (".json", ".yaml")
FILES = {
    "check": (_SCRIPTS, ("--gpus", "8xH100")),
    "import": (_SCRIPTS, ("--gpus", "8xH100")),
    "emit": (_PLANS, ("-o", "bundle")),
    "report": (_PLANS, ()),
}
"""Endings of the file that a command asks for, and the words that follow its name."""
MOST_FILES = 50
"""Most files of the working folder that a way out considers."""


class _PipeError(Exception):
    """Replaces BrokenPipeError, for which typer would exit with 1; that code means that nothing fits."""


@contextmanager
def _pipes_that_break() -> Iterator[None]:
    try:
        yield
    except BrokenPipeError as error:
        raise _PipeError from error


class _Root(TyperGroup):
    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        names: dict[str, Any] = dict.fromkeys(COMMANDS)
        self.commands = names
        """Names alone, from which typer suggests one for a typo; `get_command` loads a command."""

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """The command of a name; None for an unknown one."""
        return _load_command(cmd_name) if cmd_name in COMMANDS else None

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Resolve `rlplan "qwen3 8b on a 4090"` and `rlplan run.sh` to the command that answers them."""
        if args == ["help"]:
            typer.echo(ctx.get_help())
            raise typer.Exit
        if (args[0] == "help" and args[1] in COMMANDS) or (args[0] in COMMANDS and args[1:] == ["help"]):
            args = [*(word for word in args[:2] if word != "help"), "--help"]
        if args == ["version"]:
            _show_version(is_asked=True)
        meant = OTHER_WORDS.get(" ".join(args[:2])) or OTHER_WORDS.get(args[0])
        args = [*meant, *args[1 + (" ".join(args[:2]) in OTHER_WORDS) :]] if meant else args
        name, command, rest = super().resolve_command(ctx, [*choose_command(args[0]), *args])
        if (
            isinstance(command, TyperGroup)
            and rest
            and rest[0][0] != "-"
            and not did_you_mean(rest[0], command.commands)
        ):
            rest = ["show", *rest]  # `rlplan profiles h100`
        return name, command, _read_options(command, rest)

    def make_context(self, *arguments: Any, **settings: Any) -> Any:
        """Read a command line, and print the help."""
        with _pipes_that_break():
            return super().make_context(*arguments, **settings)

    def invoke(self, ctx: Any) -> Any:
        """Run a command."""
        with _pipes_that_break():
            return super().invoke(ctx)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, about["help"]) for name, about in COMMANDS.items()])


def _read_options(command: Any, words: list[str]) -> list[str]:
    """Words behind a command with options that only name a key of a job, `--lora-r 16`, as overrides: `lora_r=16`."""
    if not any(parameter.name == "overrides" for parameter in command.params):
        return words
    known = {option for parameter in command.params for option in (*parameter.opts, *parameter.secondary_opts)}
    read, rest = list[str](), list(words)
    while rest:
        option, equals, value = rest.pop(0).partition("=")
        if not option.startswith("--") or option in known | {"--", "--help"}:
            read.append(option + equals + value)
        elif option == "--set" and rest:
            continue  # its value is an override
        else:
            from rlplan.spec.typed_words import is_key

            key = option[2:].replace("-", "_")
            key = key if is_key(key) else key.replace("_", ".", 1)  # --rollout-tp
            if not is_key(key) or key == "output":  # a file elsewhere, tokens in a question
                read.append(option + equals + value)
                continue
            read.append(f"{key}={value or (rest.pop(0) if rest and not rest[0].startswith('-') else 'true')}")
    return read


def choose_command(word: str) -> list[str]:
    """Choose the command for a first word that is none; empty for a typo.

    A script is checked, a run is explained, everything else is estimated.
    """
    if word in COMMANDS or word.startswith("-"):
        return []
    if Path(word).exists():
        from rlplan.planner.plan import is_run_folder
        from rlplan.sources import is_foreign

        return ["check" if is_foreign(Path(word)) else "explain" if is_run_folder(Path(word)) else "estimate"]
    from rlplan.spec.typed_words import load_words

    is_typo = word.isalpha() and word not in load_words()["settings"] and did_you_mean(word, COMMANDS)
    return [] if is_typo else ["estimate"]


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
        bool, typer.Option("--version", "-V", callback=_show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
    debug: Annotated[
        bool, typer.Option("--debug", help="Show the traceback of an error; may stand anywhere on the line.")
    ] = False,
) -> None:
    """Plan, estimate, simulate, run and report reinforcement learning of language models.

    Ask in words: rlplan "qwen3 8b grpo on a 4090", or give a file: rlplan run.sh --gpus 8xH100.
    """


def main() -> NoReturn:
    """Run the command line. Every expected failure prints one message and exits with its code, without a traceback."""
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
            # Python flushes stdout at exit, which would fail again
            for stream in filter(_has_no_reader, (out, errors)):
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
    sys.exit(exit_code)


def _has_no_reader(stream: TextIO) -> bool:
    """Whether the reader of a pipe has exited, as `head` does."""
    poll = select.poll()
    poll.register(stream.fileno(), 0)
    return any(event & (select.POLLERR | select.POLLHUP) for _, event in poll.poll(0))


def show_error(error: RlplanError) -> None:
    """Print an error on stderr."""
    from rlplan_cli.render.terminal import show_error as show  # rich takes 50 ms to import, and may not be needed

    show(error)


def _run(debug: bool) -> int:
    try:
        result = app(prog_name="rlplan", standalone_mode=False)
        return result if isinstance(result, int) else 0
    except RlplanError as error:
        if debug:
            traceback.print_exc()
        show_error(_translate(error) if isinstance(error, MisspeltError) else error)
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
            raise BrokenPipeError from error  # a pipe to a lost process raises the same error, but is a bug
        if failure := _disk_error(error) or describe_path_error(error):
            if debug:
                traceback.print_exc()
            show_error(failure)
            return failure.exit_code
        if debug:
            raise
        if isinstance(error, ModuleNotFoundError) and error.name in EXTRAS:
            show_error(build_missing_extra(error.name))
            return HostError.exit_code
        print(
            f"a bug in rlplan: {type(error).__name__}: {error}\n"
            "  way out: run again with --debug and report the traceback",
            file=sys.stderr,
        )
        return EXIT_BUG


def _translate(error: MisspeltError) -> RlplanError:
    """Add rlplan's word to a refused word of another framework. The tables of words are only loaded for it."""
    from rlplan.foreign.meant import add_hint

    return add_hint(error)


def _disk_error(error: Exception) -> RlplanError | None:
    """Translate an error of a full disk that no other code has caught, such as one of the standard output."""
    from rlplan.runtime.run_folder.disk_errors import disk_error

    failure = disk_error(error, None)
    if failure is not None and failure.where == "standard output":
        # Python flushes stdout at exit, which would fail again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return failure


def _suggest_usage(message: str, path: str) -> str:
    """Suggest a corrected command line."""
    option = re.search(r"No such option: ((?:--?)([\w.-]+))", message)
    if message.startswith("Missing option '--out'"):
        return shlex.join(["rlplan", *sys.argv[1:], "-o", "bundle" if path.endswith("emit") else "out"])
    if option and (possible := re.search(r"Possible options: (--\S*?)[,)]", message)):
        return shlex.join(["rlplan", *(possible[1] if word == option[1] else word for word in sys.argv[1:])])
    if option and path == "rlplan":
        words = [_correct_key(word) if word.startswith(option[1]) else word for word in sys.argv[1:]]
        return shlex.join(["rlplan", "estimate", *words])
    if option and "Did you mean" not in message:
        typed = next((word for word in sys.argv if word.startswith(option[1])), "")
        if "=" in typed or "." in option[2] or "_" in option[2]:
            key = _correct_key(f"{option[1]}={typed.partition('=')[2] or 'VALUE'}")
            return f"write keys of a job without dashes: {key.lstrip('-')}"
    if near := re.search(r"No such command '.*?'\. Did you mean '([^']+)'", message):
        return shlex.join([*path.split(), near[1], *sys.argv[1 + len(path.split()) :]])
    command = path.rpartition(" ")[2]
    examples = COMMANDS.get(command, {}).get("examples") or [f"{path} --help"]
    if present := _find_sources(command):
        return shlex.join(["rlplan", command, *present])
    return f"for example: {next(filter(_has_files, examples), examples[0])}"


def _correct_key(word: str) -> str:
    """An option of a job's key with the nearest key: `--rolout.tp=4` becomes `rollout.tp=4`; else unchanged."""
    from rlplan.spec.typed_words import list_keys

    key, equals, value = word.lstrip("-").partition("=")
    near = re.search(r"'(.+)'", did_you_mean(key, list_keys()))
    return f"{near[1]}{equals}{value}" if near else word


def _has_files(example: str) -> bool:
    """Whether every file that an example names exists."""
    return all(Path(word).exists() for word in shlex.split(example) if re.search(r"\.\w{2,5}$|/\d", word))


def _find_sources(command: str) -> list[str]:
    """Words for a command without its file, if the working folder has one."""
    from rlplan.sources import is_foreign

    endings, words = FILES.get(command, ((), ()))
    for path in sorted(Path().iterdir())[:MOST_FILES] if endings else ():
        if path.suffix in endings and is_foreign(path) == (endings is _SCRIPTS):
            return [path.name, *words]
    return []


def _show_usage(error: typer.TyperException) -> int:
    """Print the error of a wrong command line; if no command was given, the help."""
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
                rule=f"`{path} --help` lists its arguments and options",
                way_out=_suggest_usage(message, path),
            )
        )
    return SpecError.exit_code
