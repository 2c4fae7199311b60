"""The `rlplan` command: one file a verb, one boundary for errors.

Results go to stdout, progress and messages to stderr. Exit codes stand in `rlplan.errors`.
"""

import os
import sys
import traceback
from typing import NoReturn

import typer

from rlplan.errors import EXIT_BUG, HostError, RlplanError, SpecError
from rlplan_cli import accuracy, doctor, emit, estimate, plan, profiles, report, run
from rlplan_cli.render import show_error

app = typer.Typer(
    name="rlplan",
    help="Plan, estimate, run and report reinforcement learning of language models.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)

for module in (estimate, plan, emit, run, report, accuracy, doctor):
    app.command(name=module.NAME)(module.command)
app.add_typer(profiles.app, name="profiles")

EXTRAS = {"pandas": "report", "matplotlib": "report", "jinja2": "report"} | dict.fromkeys(
    ("ray", "torch", "vllm", "deepspeed", "transformers", "tokenizers", "safetensors", "psutil", "regex"), "cpu"
)
"""Packages that not every installation has, and the extra that brings them."""


def main() -> NoReturn:
    """Entry point: every expected failure is one message and its exit code, never a traceback."""
    debug = "--debug" in sys.argv
    if debug:
        sys.argv.remove("--debug")
    sys.exit(_run(debug))


def _run(debug: bool) -> int:
    try:
        result = app(prog_name="rlplan", standalone_mode=False)
        sys.stdout.flush()
        return result if isinstance(result, int) else 0
    except RlplanError as error:
        if debug:
            traceback.print_exc()
        show_error(error)
        return error.exit_code
    except typer.Exit as error:
        return error.exit_code
    except typer.TyperException as error:
        return _show_usage(error)
    except (KeyboardInterrupt, typer.Abort):
        print("interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # The reader has gone; nothing may be flushed into the pipe any more, not even at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except Exception as error:
        if debug:
            raise
        if isinstance(error, ModuleNotFoundError) and error.name in EXTRAS:
            show_error(_missing_extra(error.name))
            return HostError.exit_code
        print(
            f"a bug in rlplan: {type(error).__name__}: {error}\n"
            "  way out: run again with --debug and report the traceback",
            file=sys.stderr,
        )
        return EXIT_BUG


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
                way_out="correct the command line",
            )
        )
    return SpecError.exit_code


def _missing_extra(package: str) -> HostError:
    way_out = "run `make setup` in a checkout" if EXTRAS[package] == "cpu" else "pip install 'rlplan[report]'"
    return HostError(
        f"package '{package}' is missing",
        where="this Python environment",
        rule=f"this command needs the extra '{EXTRAS[package]}'",
        way_out=f"{way_out}; `rlplan doctor` says what else is missing",
    )
