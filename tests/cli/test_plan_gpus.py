"""`rlplan plan`, `explain` and `simulate` for GPUs: from a command line, a file and a plan, as text and as JSON."""

import json
from pathlib import Path
from typing import Any

import pytest

from rlplan.planner.answers.plan_results import results_as_json
from rlplan.planner.plan import read_plan
from rlplan.planner.search import find_best_plan
from rlplan.spec.files.job_file import load_job
from tests.cli.conftest import Answer, Call, start
from tests.factories import EXAMPLES

SHORT = ("workload.num_prompts_per_step=16", "workload.max_response_len=512", "workload.max_prompt_len=256")
ASKED = ("--model", "Qwen/Qwen2.5-0.5B", "--gpus", "2xH100", *SHORT)
TOO_SMALL = ("--model", "Qwen/Qwen2.5-7B", "--gpus", "1xRTX4090", *SHORT)
EXAMPLE = EXAMPLES / "grpo-7b-8xh100.yaml"


def data_of(answer: Answer) -> Any:
    assert answer.exit_code == 0, answer.err
    assert answer.err == ""
    return json.loads(answer.out)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("planned")


@pytest.fixture
def plan(rlplan: Call, folder: Path) -> Path:
    """Made once."""
    path = folder / "new" / "plan.json"
    if not path.exists():
        assert rlplan("plan", *ASKED, "-o", path).exit_code == 0
    return path


def test_a_plan_is_a_page_that_says_what_a_step_takes_and_what_binds(rlplan: Call) -> None:
    answer = rlplan("plan", *ASKED, "-v")
    assert (answer.exit_code, answer.err) == (0, "")
    for words in ("fits  Qwen/Qwen2.5-0.5B, grpo, 2x h100-sxm: ", " per step", "bound by", "Next best", "Memory: "):
        assert words in answer.out


def test_json_is_the_plan_file(rlplan: Call, plan: Path) -> None:
    printed = data_of(rlplan("plan", *ASKED, "--json"))
    written = json.loads(plan.read_text())
    paths = {"asked": 0, "job": 0, "digest": 0}  # but for the paths' folder
    assert {**printed, **paths} == {**written, **paths}


def test_a_written_plan_says_what_can_be_done_with_it(rlplan: Call, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    answer = rlplan("plan", *ASKED, "-o", path)
    assert answer.err == (
        f"plan written to {path}; `rlplan explain {path}` explains it, `rlplan simulate {path}` simulates it, "
        f"`rlplan run {path}` runs it\n"
    )


def test_a_file_asks_the_same_as_the_library(rlplan: Call) -> None:
    results = data_of(rlplan("plan", EXAMPLE, "--json"))["results"]
    assert results == json.loads(json.dumps(results_as_json(find_best_plan(load_job(EXAMPLE)))))


def test_a_plan_is_shown_and_estimated_as_the_budget_it_was_made_of(rlplan: Call, plan: Path) -> None:
    assert rlplan("plan", plan).out == rlplan("plan", *ASKED).out.partition("Assumed: ")[0]
    assert rlplan("estimate", plan).out == rlplan("estimate", *ASKED).out.partition("Assumed: ")[0]


def test_tables_show_the_next_best(rlplan: Call) -> None:
    assert "Next best" not in rlplan("plan", *ASKED).out
    assert "Next best" in rlplan("plan", *ASKED, "-v").out


@pytest.mark.parametrize("objective", ["step_time", "tokens_per_s", "cost", "gpus"])
def test_an_objective_is_a_key_of_the_budget(rlplan: Call, objective: str) -> None:
    assert data_of(rlplan("plan", *ASKED, "--objective", objective, "--json"))["asked"]["objective"] == objective


def test_what_does_not_fit_ends_with_1_writes_nothing_and_says_what_would(rlplan: Call, tmp_path: Path) -> None:
    answer = rlplan("plan", *TOO_SMALL, "-o", tmp_path / "plan.json")
    assert answer.exit_code == 1
    assert not (tmp_path / "plan.json").exists()
    assert "does not fit" in answer.out
    assert "Each of these changes alone helps" in answer.out
    assert answer.err.startswith("error: Qwen/Qwen2.5-7B needs ")
    assert len(answer.err.splitlines()) == 4


@pytest.mark.parametrize("verb", ["plan", "explain", "simulate"])
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((), "nothing to "),
        (("--model", "Qwen/Qwen2.5-7B", "--gpus", "0xH100"), "from 1"),
        (("--model", "Qwen/Qwen2.5-7B", "--gpus", "-8xH100"), "names no GPUs"),
        (("--model", "Qwen/Qwen2.5-7B", "--gpus", "8xH1000"), "h100"),
        (("--model", "Qwen/Qwen2.5-7B", "--gpus", "8xH100", "rollout.tp=3"), "3"),
        (("--model", "Qwen/Qwen2.5-7B", "--gpus", "1xH100", "placement.placement=disaggregated"), "at least 2 GPUs"),
        (("examples/no-such-file.yaml",), "is missing"),
        (("no-such-plan.json",), "is missing"),
        (("examples/quickstart.yaml", "--model", "x"), "model 'x' is not known"),
    ],
)
def test_a_wrong_question_is_one_message(rlplan: Call, verb: str, arguments: tuple[str, ...], words: str) -> None:
    answer = rlplan(verb, *arguments)
    assert answer.exit_code in (1, 2)
    assert answer.out == ""
    assert answer.err.startswith("error: ")
    assert words in answer.err
    assert len(answer.err.splitlines()) == 4


@pytest.mark.parametrize("verb", ["plan", "explain", "simulate", "estimate"])
def test_a_plan_takes_no_changes(rlplan: Call, plan: Path, verb: str) -> None:
    answer = rlplan(verb, plan, "hardware.num_devices=4")
    assert (answer.exit_code, answer.out) == (2, "")
    assert "cannot change the plan" in answer.err


# ---------------------------------------------------------------------------------------------------------- explain


def test_an_explanation_is_a_page(rlplan: Call, plan: Path) -> None:
    answer = rlplan("explain", plan)
    assert (answer.exit_code, answer.err) == (0, "")
    for words in (
        "Bottleneck of each phase",
        "Memory: ",
        "Next best",
        "Rejected choices",
        "What if",
        "one more GPU" if "one more GPU" in answer.out else "one more host",
    ):
        assert words in answer.out


def test_what_ifs_are_asked_by_themselves_and_together(rlplan: Call, plan: Path) -> None:
    sets = ("--set", "training.zero_stage=3", "--set", "training.lora={rank: 8}")
    asked = data_of(rlplan("explain", plan, *sets, "--json"))["asked"]
    assert [entry["change"] for entry in asked] == [
        "training.zero_stage=3",
        "'training.lora={rank: 8}'",
        "training.zero_stage=3 'training.lora={rank: 8}'",
    ]
    assert all(entry["seconds"] > 0 for entry in asked)


def test_more_gpus_are_asked_for(rlplan: Call, plan: Path) -> None:
    asked = data_of(rlplan("explain", plan, "--more-gpus", "--json"))["asked"]
    assert [entry["num_devices"] for entry in asked] == [4, 8, 16, 32]


@pytest.mark.parametrize("change", ["zero_stage=3", "training.zero_stage=9", "x", "workload.num_steps=200"])
def test_a_wrong_what_if_is_one_message(rlplan: Call, plan: Path, change: str) -> None:
    answer = rlplan("explain", plan, "--set", change)
    assert (answer.exit_code, answer.out) == (2, "")
    assert answer.err.startswith("error: ")


def test_what_does_not_fit_is_explained_too(rlplan: Call) -> None:
    answer = rlplan("explain", *TOO_SMALL)
    assert answer.exit_code == 0
    assert "Does not fit because: " in answer.out


# --------------------------------------------------------------------------------------------------------- simulate


def test_a_simulation_says_how_steps_vary(rlplan: Call, plan: Path, tmp_path: Path) -> None:
    out = tmp_path / "deep" / "result.json"
    answer = rlplan("simulate", plan, "--steps", 3, "-o", out)
    assert (answer.exit_code, answer.err) == (0, f"result written to {out}\n")
    for words in ("on average over 3 simulated steps (seed 0)", "simulated", "formula", "Utilization", "Rollouts: "):
        assert words in answer.out
    result = json.loads(out.read_text())
    assert result["schema_version"] == 1
    assert len(result["step_s"]) == 3
    assert result["trace"]["origin"] == "predicted"


def test_the_same_seed_draws_the_same(rlplan: Call, plan: Path) -> None:
    lengths = ("workload.response_lengths={kind: lognormal, median: 100, sigma: 0.5}",)
    asked = ("simulate", *ASKED, *lengths, "--steps", 2, "--json")
    entry, again, other = data_of(rlplan(*asked)), data_of(rlplan(*asked)), data_of(rlplan(*asked, "--seed", 1))
    assert entry == again
    assert entry["num_tokens"] != other["num_tokens"]


def test_what_takes_no_drawing_takes_what_the_formula_says(rlplan: Call) -> None:
    asked = ("--model", "Qwen/Qwen2.5-0.5B", "--gpus", "2xH100", "--algorithm", "dpo", *SHORT, "framework=trl")
    simulated = data_of(rlplan("simulate", *asked, "--steps", 2, "--json"))
    seconds = data_of(rlplan("plan", *asked, "--json"))["results"]["step"]["seconds"]
    assert simulated["mean_step_s"] == pytest.approx(seconds)


def test_what_does_not_fit_is_not_simulated(rlplan: Call) -> None:
    answer = rlplan("simulate", *TOO_SMALL)
    assert (answer.exit_code, answer.out) == (1, "")


REFUSED = ("--model", "Qwen/Qwen2.5-0.5B", "--gpus", "2xH100", "training.optimizer=muon")


@pytest.mark.parametrize("verb", ["estimate", "plan"])
def test_what_the_target_refuses_is_shown_with_the_reason_and_ends_with_3(rlplan: Call, verb: str) -> None:
    answer = rlplan(verb, *REFUSED)
    assert answer.exit_code == 3
    assert answer.out.startswith("refused  Qwen/Qwen2.5-0.5B")
    assert "training.optimizer muon: the runtime has AdamW" in answer.out
    assert answer.err.startswith("error: refused: training.optimizer muon")
    assert len(answer.err.splitlines()) == 4
    data = json.loads(rlplan(verb, *REFUSED, "--json").out)
    assert (data if verb == "estimate" else data["results"])["verdict"] == "refused"


def test_what_the_target_refuses_is_neither_written_nor_simulated(rlplan: Call, tmp_path: Path) -> None:
    assert rlplan("plan", *REFUSED, "-o", tmp_path / "plan.json").exit_code == 3
    assert not (tmp_path / "plan.json").exists()
    answer = rlplan("simulate", *REFUSED)
    assert (answer.exit_code, answer.out) == (3, "")
    assert "refused: training.optimizer muon" in answer.err


@pytest.mark.parametrize("count", [0, 20_000, "many"])
def test_a_number_of_steps_that_makes_no_sense_is_refused(rlplan: Call, plan: Path, count: object) -> None:
    assert rlplan("simulate", plan, "--steps", count).exit_code == 2


# ------------------------------------------------------------------------------------------------------------ start


@pytest.mark.parametrize(
    "arguments",
    [
        (),
        ("plan",),
        *(pytest.param((verb,), marks=pytest.mark.nightly) for verb in ("explain", "simulate", "estimate")),
    ],
)
def test_the_help_loads_no_library(arguments: tuple[str, ...]) -> None:
    answer = start(*arguments, "--help", PYTHONPROFILEIMPORTTIME="1")
    assert answer.exit_code == 0
    loaded = {line.rpartition("|")[2].strip() for line in answer.err.splitlines()}
    assert "typer" in loaded
    assert not loaded & {"rich", "rlplan.planner", "rlplan.spec.job", "simpy", "ruamel.yaml"}


def test_the_trades_of_time_against_memory_are_shown_and_kept(rlplan: Call, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    answer = rlplan("plan", *ASKED, "--pareto", "-o", path)
    assert "step time against headroom" in answer.out
    front = json.loads(path.read_text())["results"]["pareto"]
    rooms = [point["headroom_bytes"] for point in front]
    assert rooms == sorted(rooms)
    assert [point.timing.seconds for point in read_plan(path).pareto] == [point["seconds"] for point in front]


def test_a_job_with_everything_chosen_is_planned_as_it_was_chosen(rlplan: Call, plan: Path, tmp_path: Path) -> None:
    job = read_plan(plan).job.model_dump(mode="json", exclude_defaults=True)
    path = tmp_path / "job.yaml"
    path.write_text(json.dumps(job))  # JSON is YAML
    assert rlplan("plan", path).out.splitlines()[0] == rlplan("plan", plan).out.splitlines()[0]
    answer = rlplan("plan", path, "hardware.memory=2GiB")
    assert answer.exit_code == 1
    assert answer.err.startswith("error: ")
    assert "2.00 GiB available" in answer.err


TURNS = (
    f"rollout.environment.path={EXAMPLES / 'environments' / 'guess_digit.py'}:play",
    "rollout.environment.max_turns=50",
)
TOOLS = (f"rollout.environment.tools=[{EXAMPLES / 'environments' / 'look_up.py'}:look_up]",)


@pytest.mark.parametrize("verb", ["plan", "estimate", "explain", "simulate"])
def test_a_job_with_turns_and_tools_says_that_they_are_not_counted(rlplan: Call, verb: str) -> None:
    answer = rlplan(verb, *ASKED, *TURNS, *TOOLS)
    assert answer.exit_code == 0, answer.err
    words = " ".join(answer.out.split())
    assert "not counted: turns 2 to 50 of a rollout and the prompts that grow with each turn; " in words
    assert "waiting for tools and the environment (at most 10 s per answer)" in words


@pytest.mark.parametrize("verb", ["plan", "estimate", "explain"])
def test_json_lists_what_is_not_counted_and_nothing_for_rollouts_of_one_turn(rlplan: Call, verb: str) -> None:
    of_turns = data_of(rlplan(verb, *ASKED, *TURNS, "--json"))["not_counted"]
    assert [words.partition(" ")[0] for words in of_turns] == ["turns", "waiting"]
    assert data_of(rlplan(verb, *ASKED, "--json"))["not_counted"] == []
