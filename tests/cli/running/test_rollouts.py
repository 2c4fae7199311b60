"""`rlplan rollouts` shows what a run has kept: in a terminal of any width, as JSON, and on a page that escapes it."""

import json
from pathlib import Path

import pytest
from rlplan_cli.render.running import rollouts

from rlplan.planner.plan import write_plan
from tests.cli.conftest import Call
from tests.factories import make_plan
from tests.runtime.run_folder.test_rollout_files import keep, make_rollout
from tests.runtime.run_folder.test_rollout_files import run as run

HOSTILE = "</pre><script>alert(1)</script>\x1b[31m{{ 7 * 7 }}"


def test_each_rollout_has_its_facts_its_prompt_and_its_response(rlplan: Call, run: Path) -> None:
    answer = rlplan("rollouts", run, "--best", 1)
    assert answer.exit_code == 0, answer.err
    assert answer.out.splitlines()[0] == (
        "step 2  prompt p2  reward 6 (right 4)  advantage +3.500  2 tokens  ended by stop  policy version 3"
    )
    for words in ("prompt:\n  1 + 1?\n", "truth:\n  2\n", "response:\n  ab\n", "1 rollout"):
        assert words in answer.out


@pytest.mark.parametrize("width", [80, 140])
def test_long_texts_are_folded_at_the_terminal_s_width(
    rlplan: Call, run: Path, width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    keep(run, 3, [make_rollout(0, "words and more of them " * 40)])
    monkeypatch.setattr(rollouts.stdout, "width", width)
    lines = rlplan("rollouts", run).out.splitlines()
    assert max(map(len, lines)) <= width
    assert len(lines) > 900 / width


def test_json_has_all_columns_with_tokens_and_log_probs(rlplan: Call, run: Path) -> None:
    value = json.loads(rlplan("rollouts", run, "--step", 1, "--limit", 2, "--json").out)
    assert (value["schema_version"], value["num_found"], len(value["rollouts"])) == (1, 5, 2)
    assert value["rollouts"][0]["tokens"] == [97, 98]
    assert value["rollouts"][0]["logprobs"] == [-0.5, -0.5]


def test_hostile_texts_stay_texts(rlplan: Call, run: Path) -> None:
    keep(run, 3, [make_rollout(0, HOSTILE, rewards={"<b>": 1.0})])
    assert "\x1b" not in rlplan("rollouts", run).out
    page = run / "pages" / "rollouts.html"
    assert rlplan("rollouts", run, "-o", page).out.strip() == str(page)
    text = page.read_text()
    assert "<script>alert" not in text
    assert "&lt;script&gt;alert(1)" in text
    assert "&lt;b&gt;" in text
    assert "{{ 7 * 7 }}" in text


def test_a_report_has_the_page_of_the_last_step(rlplan: Call, run: Path) -> None:
    assert rlplan("report", run).exit_code == 0
    assert "4 rollouts of step 2" in (run / "report" / "rollouts.html").read_text()


def test_a_stage_that_learns_from_given_answers_shows_its_loss(rlplan: Call, run: Path) -> None:
    sft = {
        "algorithm": {"name": "sft", "learning_rate": 1e-4},
        "workload.num_samples_per_prompt": 1,
        "workload.mini_batch_size": 4,
    }
    write_plan(make_plan(**sft), run / "plan.json")
    (run / "metrics.jsonl").write_text('{"step": 2, "policy/loss": 0.125}\n')
    out, page = rlplan("rollouts", run, "--limit", 1).out, run / "page.html"
    assert "loss of the step 0.125" in out
    assert "reward" not in out
    rlplan("rollouts", run, "-o", page)
    assert "0.125" in page.read_text()
    watched = rlplan("watch", run, "--once").out
    assert "loss" in watched
    assert "reward" not in watched


def test_two_ends_at_once_are_refused(rlplan: Call, run: Path) -> None:
    assert rlplan("rollouts", run, "--best", 1, "--worst", 1).exit_code == 2
