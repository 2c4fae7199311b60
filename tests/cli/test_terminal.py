"""Tests in a terminal: tables fit into 80 columns, messages are indented, colors can be switched off."""

import fcntl
import os
import pty
import re
import struct
import subprocess
import termios
from functools import cache
from typing import Any

import pytest

from rlplan.runtime.processes.machine_speed import scale_seconds
from tests.cli.conftest import RLPLAN
from tests.factories import EXAMPLES, QUICKSTART, ROOT
from tests.repository.at_night import mark_nightly


@cache
def in_terminal(columns: int, *arguments: Any, **environment: str) -> str:
    """Output of `rlplan ARGUMENTS` in a terminal of this width, with escape codes; the same arguments are run once."""
    leader, follower = pty.openpty()
    fcntl.ioctl(follower, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
    process = subprocess.Popen(
        [RLPLAN, *map(str, arguments)],
        cwd=ROOT,
        env={"PATH": "/usr/bin:/bin", "TERM": "xterm", **environment},
        stdin=follower,
        stdout=follower,
        stderr=follower,
    )
    os.close(follower)
    written = b""
    while True:
        try:
            part = os.read(leader, 65536)
        except OSError:  # the last writer has gone
            break
        if not part:
            break
        written += part
    os.close(leader)
    process.wait(timeout=scale_seconds(60))
    return written.decode().replace("\r\n", "\n")


def plain(text: str) -> str:
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)


SHOWN = {
    "estimate": ["estimate", QUICKSTART],
    "plan": ["plan", QUICKSTART],
    "plan for GPUs": ["plan", EXAMPLES / "ppo-70b-64xh100.yaml"],
    "explain": ["explain", EXAMPLES / "grpo-lora-8b-1xrtx4090.yaml", "--more-gpus"],
    "simulate": ["simulate", EXAMPLES / "grpo-7b-8xh100.yaml", "--steps", "2"],
    "profiles list": ["profiles", "list"],
    "profiles show": ["profiles", "show", "cpu-host"],
    "doctor": ["doctor"],
}


BY_DAY = ("estimate-80", "explain-80", "profiles show-140")
"""The others at night."""
FITS = [
    pytest.param(columns, words, id=text, marks=() if text in BY_DAY else pytest.mark.nightly)
    for name, words in SHOWN.items()
    for columns in (80, 140)
    for text in (f"{name}-{columns}",)
]


@pytest.mark.parametrize(("columns", "arguments"), FITS)
def test_a_table_fits_and_loses_nothing(columns: int, arguments: list[Any]) -> None:
    text = plain(in_terminal(columns, *arguments))
    typed = re.compile(r"  [^ ].*: '?[a-z_]+\.[\w.]+=")  # stays on its line, whatever its length
    assert all(len(line) <= columns or typed.match(line) for line in text.splitlines())
    assert "…" not in text


@pytest.mark.parametrize("columns", mark_nightly([80, 100, 140], but=1))
def test_no_size_is_torn_from_its_unit(columns: int) -> None:
    text = plain(in_terminal(columns, "estimate", QUICKSTART))
    assert not re.search(r"\d(\.\d+)?\s*\n\s+[KMGT]iB", text)


@pytest.mark.parametrize("columns", mark_nightly([80, 140], but=1))
def test_every_process_stands_with_its_peak_on_one_line(columns: int) -> None:
    text = plain(in_terminal(columns, "estimate", QUICKSTART))
    for process in ("driver/0", "ray_system", "policy_trainer/0", "policy_trainer/1", "rollout_engine/0"):
        assert re.search(rf"^ {process} +\d+ MiB ", text, re.MULTILINE)


def test_a_narrow_terminal_leaves_columns_out_rather_than_breaking_them() -> None:
    narrow, wide = (plain(in_terminal(columns, "estimate", QUICKSTART)) for columns in (80, 140))
    assert "scorer/reference/0   484 MiB   score/reference" in wide
    assert "scorer/reference/0   484 MiB   process" in narrow
    assert re.search(r"active +idle +total", narrow)
    assert all(len(line) <= 80 for line in narrow.splitlines() if line.startswith(" "))


def test_an_error_is_wrapped_between_words_and_indented() -> None:
    lines = plain(in_terminal(80, "estimate", QUICKSTART, "workload.num_stepz=3")).splitlines()
    assert all(len(line) <= 80 for line in lines)
    assert lines[0] == "error: unknown key 'num_stepz'"
    assert [line.split(":")[0] for line in lines if re.match(r"  \w", line)] == ["  where", "  rule", "  way out"]
    assert any(line.startswith("    ") and "num_steps," in line for line in lines)


def test_what_is_to_be_typed_is_never_broken_into_lines() -> None:
    text = plain(in_terminal(80, "plan", "--model", "Qwen/Qwen2.5-7B", "--gpus", "1xRTX4090"))
    assert text.count("training.lora='{rank: 16, base_dtype: nf4}'") == 2  # in the list, and in the way out


def test_what_a_change_leads_to_is_folded_between_words_below_it() -> None:
    """A terminal that folds by itself would cut a word in two."""
    lines = plain(in_terminal(80, "plan", "--model", "Qwen/Qwen2.5-7B", "--gpus", "1xRTX4090")).splitlines()
    place = next(number for number, line in enumerate(lines) if line == "  training.lora='{rank: 16, base_dtype: nf4}'")
    assert lines[place + 1].startswith("      fits, ")
    assert all(len(line) <= 80 or "=" in line for line in lines)
    assert lines[-1].endswith("training.lora='{rank: 16, base_dtype: nf4}', or hardware.num_devices=2")


def test_in_a_narrow_terminal_an_explanation_numbers_its_rows_and_keeps_overrides_whole_below() -> None:
    text = plain(in_terminal(80, *SHOWN["explain"]))
    asked = text[text.index("Your changes") :]
    assert re.search(r"^ 1 +\S.* (fits|does not fit) *$", asked, re.MULTILINE)
    assert re.search(r"^  1: hardware\.num_devices=2$", asked, re.MULTILINE)
    assert re.search(r"^ 1 +\d.*(takes|faster|as good|does not|fits)", text[text.index("Next best") :], re.MULTILINE)


def test_colours_can_be_switched_off() -> None:
    assert "\x1b[" in in_terminal(80, "estimate", QUICKSTART)
    for arguments in (SHOWN["estimate"], ["estimate", "nowhere.yaml"], SHOWN["doctor"]):
        assert not re.search(r"\x1b\[[\d;]*m", in_terminal(80, *arguments, NO_COLOR="1"))  # a bar moves the cursor
