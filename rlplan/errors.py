"""The exception tree. Every message has four parts: what (with both numbers), where, the rule, the way out.

    RlplanError
      SpecError            the job, profile or data is wrong        exit 2
      NoFeasiblePlanError  a correct, negative answer               exit 1
      EmitError            the framework refuses the job or plan    exit 3
      HostError            missing extra, device, memory, process   exit 4
      RunError             a launched process or a disk failed      exit 5
      InterruptedRunError  stopped by Ctrl-C, SIGTERM or SIGHUP     exit 130, 143 or 129, 75 if resumable
    a bug of ours (anything else)                                   exit 70

An interrupted run exits with 75 where it left a checkpoint to resume from, with 130, 143 or 129 where it did not.
"""

import difflib
from collections.abc import Iterable

EXIT_BUG = 70
EXIT_RESUMABLE = 75
EXIT_NO_READER = 141
"""Exit code when the reader of the output has gone: the code that shells report for SIGPIPE."""


class RlplanError(Exception):
    """A failure with an explanation. `str()` gives the four parts on one to four lines.

    what: the problem, with the value at fault. where: file and key path, or the process and action. rule: the condition
    that must hold, with the allowed values. way_out: the next step for the user.
    """

    exit_code = EXIT_BUG

    def __init__(self, what: str, *, where: str = "", rule: str = "", way_out: str = "") -> None:
        self.what, self.where, self.rule, self.way_out = what, where, rule, way_out
        labelled = (("where", where), ("rule", rule), ("way out", way_out))
        super().__init__("\n".join([what] + [f"  {label}: {text}" for label, text in labelled if text]))

    def __reduce__(self) -> tuple[object, ...]:
        """Keep the four parts when the error crosses a process boundary."""
        return _create_error, (type(self), self.what, self.where, self.rule, self.way_out)


def _create_error(kind: type[RlplanError], what: str, where: str, rule: str, way_out: str) -> RlplanError:
    return kind(what, where=where, rule=rule, way_out=way_out)


class SpecError(RlplanError):
    """The job, a profile, a plan or a data file is wrong."""

    exit_code = 2


class MisspeltError(SpecError):
    """An unknown key of a job, or a word that is not a value of its key.

    key: its dotted path, down to the first value below an unknown key. word: the wrong word; None for a key.
    value_text: `=VALUE` of an unknown key, if the value is one word or number.
    """

    key = ""
    word: str | None = None
    value_text = ""


class NoFeasiblePlanError(RlplanError):
    """No allowed layout fits: an answer, not a failure."""

    exit_code = 1


class EmitError(RlplanError):
    """The framework cannot run the job, or cannot express the plan."""

    exit_code = 3


class HostError(RlplanError):
    """This machine lacks an extra, a version, a device, a port, memory or a free process."""

    exit_code = 4


class RunError(RlplanError):
    """A launched process failed, timed out or returned an impossible result; or a disk is full."""

    exit_code = 5


class InterruptedRunError(RlplanError):
    """A person or a scheduler stopped the run; `exit_code` follows the signal (128 + its number)."""

    exit_code = 130


EXTRAS = {"pandas": "report", "jinja2": "report"} | dict.fromkeys(
    (
        *("ray", "torch", "vllm", "deepspeed", "transformers", "tokenizers", "safetensors"),
        *("psutil", "regex", "filelock", "huggingface_hub"),
    ),
    "cpu",
)
"""Packages that are not in every installation, and the extra that installs each."""


def build_missing_extra(package: str) -> HostError:
    """The error for a package of EXTRAS that is not installed."""
    way_out = "run `make setup` in a checkout" if EXTRAS[package] == "cpu" else "pip install jinja2 pandas"
    return HostError(
        f"package '{package}' is missing",
        where="this Python environment",
        rule=f"this command needs the extra '{EXTRAS[package]}'",
        way_out=f"{way_out}; `rlplan doctor` lists everything that is missing",
    )


FAR = 0.7
"""Minimum similarity of words that begin with different letters."""


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """` Did you mean 'x'?` if a known word is similar, else "".

    Case is ignored. Among equally similar words, an anagram of the word comes first.

    >>> did_you_mean("plicy", ["policy", "reward"]), did_you_mean("GPRO", ["gspo", "grpo"])
    (" Did you mean 'policy'?", " Did you mean 'grpo'?")
    >>> did_you_mean("top_p", ["stop", "tp"])
    ''
    """
    lower, names = word.lower(), {name.lower(): name for name in known}
    near = difflib.get_close_matches(lower, list(names), n=3, cutoff=0.6)
    near = [
        name
        for name in near
        if name[:1] == lower[:1]
        or name in lower
        or lower in name
        or difflib.SequenceMatcher(None, name, lower).ratio() > FAR
    ]
    near.sort(key=lambda name: sorted(name) != sorted(lower))  # transposed letters first
    return f" Did you mean '{names[near[0]]}'?" if near else ""
