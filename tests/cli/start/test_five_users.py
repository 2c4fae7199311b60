"""Five kinds of new users: each has a useful answer after at most two commands, typed as README shows them."""

import re
import shlex
from pathlib import Path

import rlplan as library
from tests.cli.conftest import Call
from tests.factories import ROOT

SCRIPT = ROOT / "tests/foreign/reports/dapo795.sh"


def test_a_student_with_one_card_asks_in_words_and_the_first_command_printed_fits(rlplan: Call) -> None:
    asked = rlplan("qwen3 8b grpo on a 4090")
    assert asked.out.startswith("does not fit  Qwen/Qwen3-8B, grpo, 1x rtx-4090")
    assert len(asked.out.splitlines()) <= 14
    printed = re.search(r"^  (rlplan .*?)  \(fits", asked.out, re.MULTILINE)
    assert printed is not None
    again = rlplan(*shlex.split(printed[1])[1:])
    assert (again.exit_code, again.out.startswith("fits  Qwen/Qwen3-8B")) == (0, True)


def test_a_user_of_verl_gives_the_script_alone_and_the_gpus_by_either_name(rlplan: Call) -> None:
    answers = [rlplan(SCRIPT, option, "16xH100") for option in ("--gpus", "--hardware")]
    answers.append(rlplan("check", SCRIPT, "16xH100"))
    answers.append(rlplan("estimate", SCRIPT, "16xH100"))
    assert len({answer.out.partition("To try the first")[0] for answer in answers}) == 1
    assert "grpo, 16x h100-sxm: peak" in answers[0].out.splitlines()[0]
    printed = re.search(r"To try the first: rlplan (.*)", answers[-1].out)
    assert printed is not None
    assert rlplan(*shlex.split(printed[1])).out.startswith("fits")


def test_a_lead_compares_in_ranges_and_prints_a_page(rlplan: Call) -> None:
    table = rlplan("compare", "qwen3 8b grpo", "8xH100,8xA100").out
    assert "200 steps of 128 prompts x 8" in table
    assert re.search(r"\$\d+-\d+", table)
    assert "cannot be told apart" in table
    memo = rlplan("compare", "qwen3 8b grpo", "8xH100,8xA100", "--memo").out
    headings = ["## Answer", "## Alternatives", "## Assumptions", "## Measure first", "## Headroom against seconds"]
    assert [line for line in memo.splitlines() if line.startswith("## ")] == headings


def test_a_researcher_starts_a_job_for_this_machine_and_reads_its_verdict(rlplan: Call, tmp_path: Path) -> None:
    written = rlplan("init", tmp_path / "job.yaml", "--model", "smollm2 135m", "--gpus", "cpu")
    assert "on 1x cpu-host" in written.err or "on 2x cpu-host" in written.err
    assert rlplan("run", "examples/quickstart.yaml", "--dry-run").exit_code == 0


def test_a_notebook_asks_with_a_model_and_gpus() -> None:
    estimate = library.estimate("Qwen/Qwen3-8B", "8xH100")
    assert estimate.fits
    assert "<svg" in estimate._repr_html_()
