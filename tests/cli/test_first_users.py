"""Five kinds of new users: each has a useful answer after at most two commands, which README shows literally."""

import re
import shlex
from pathlib import Path

import pytest

import rlplan as library
from tests.cli.conftest import Answer, Call
from tests.factories import ROOT

README = (ROOT / "README.md").read_text("utf-8")
SCRIPT = ROOT / "tests/foreign/reports/dapo795.sh"


def call_as_in_readme(rlplan: Call, line: str) -> Answer:
    """Call a command that stands at the beginning of a line of README, which may go on with a remark."""
    assert re.search(rf"^{re.escape(line)}(?:\s+#|$)", README, re.MULTILINE), f"README lacks: {line}"
    return rlplan(*shlex.split(line)[1:])


def test_a_student_with_one_card_asks_in_words_and_the_first_command_printed_fits(rlplan: Call) -> None:
    asked = call_as_in_readme(rlplan, 'rlplan "qwen3 8b grpo on a 4090"')
    assert asked.out.startswith("does not fit  Qwen/Qwen3-8B, grpo, 1x rtx-4090")
    assert len(asked.out.splitlines()) <= 14
    printed = re.search(r"^  (rlplan .*?)  \(fits", asked.out, re.MULTILINE)
    assert printed is not None
    again = rlplan(*shlex.split(printed[1])[1:])
    assert (again.exit_code, again.out.startswith("fits  Qwen/Qwen3-8B")) == (0, True)


def test_a_user_of_verl_gives_the_script_alone_as_readme_does(
    rlplan: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "run.sh").write_bytes(SCRIPT.read_bytes())
    monkeypatch.chdir(tmp_path)
    answer = call_as_in_readme(rlplan, "rlplan run.sh --gpus 8xH100")
    assert "grpo, 8x h100-sxm: peak" in answer.out.splitlines()[0], answer.err


def test_gpus_have_either_name_and_a_script_any_verb(rlplan: Call) -> None:
    answers = [rlplan(SCRIPT, option, "16xH100") for option in ("--gpus", "--hardware")]
    answers.append(rlplan("check", SCRIPT, "16xH100"))
    answers.append(rlplan("estimate", SCRIPT, "16xH100"))
    assert len({answer.out.partition("To try the first")[0] for answer in answers}) == 1
    printed = re.search(r"To try the first: rlplan (.*)", answers[-1].out)
    assert printed is not None
    assert rlplan(*shlex.split(printed[1])).out.startswith("fits")


def test_a_lead_compares_in_ranges_and_prints_a_page(rlplan: Call) -> None:
    line = "rlplan compare examples/grpo-7b-8xh100.yaml --hardware 8xH100,16xL40S"
    table = call_as_in_readme(rlplan, line).out
    assert "200 steps of 128 prompts x 8" in table
    assert re.search(r"\$[\d.]+-[\d.]+", table)
    assert "cannot be told apart" in table
    memo = call_as_in_readme(rlplan, f"{line} --memo").out
    headings = ["## Answer", "## Alternatives", "## Assumptions", "## Measure first", "## Headroom against seconds"]
    assert [line for line in memo.splitlines() if line.startswith("## ")] == headings


def test_a_researcher_checks_a_run_without_starting_it(rlplan: Call) -> None:
    answer = call_as_in_readme(rlplan, "rlplan run examples/quickstart.yaml --dry-run")
    assert (answer.exit_code, answer.out.startswith("fits  ")) == (0, True), answer.err
    assert "nothing was started" in answer.out


def test_a_researcher_starts_a_job_for_this_machine(rlplan: Call, tmp_path: Path) -> None:
    written = rlplan("init", tmp_path / "job.yaml", "--model", "smollm2 135m", "--gpus", "cpu")
    assert "on 1x cpu-host" in written.err or "on 2x cpu-host" in written.err


def test_a_dry_run_shows_its_plan_before_the_packages_that_are_missing(
    rlplan: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rlplan.runtime.driver.preflight.missing_packages", lambda *_, **__: ["torch"])
    answer = call_as_in_readme(rlplan, "rlplan run examples/quickstart.yaml --dry-run")
    assert (answer.exit_code, answer.out.startswith("fits  ")) == (4, True)
    assert "packages are missing: torch" in answer.err


def test_a_notebook_asks_with_a_model_and_gpus() -> None:
    line = 'rlplan.estimate("Qwen/Qwen3-8B", "8xH100")'
    assert f"`{line}`" in README
    estimate = eval(line, {"rlplan": library})
    assert estimate.fits
    assert "<svg" in estimate._repr_html_()
