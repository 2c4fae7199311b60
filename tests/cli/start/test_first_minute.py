"""The first minute: a job to begin with, its schema, the pages offline, examples in the help, completion."""

import json
import os
import shlex
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import typer
from rlplan_cli import completion
from rlplan_cli.app import COMMANDS, app
from rlplan_cli.pages import look_up, sections

from rlplan.spec.algorithms import ALGORITHMS
from rlplan.spec.files import job_schema as schemas
from rlplan.spec.files.job_file import load_job
from rlplan.spec.files.job_schema import HEADER, NAME
from tests.cli.conftest import Answer, Call, start
from tests.factories import EXAMPLES, ROOT
from tests.repository.at_night import mark_nightly, rotate_places

SCHEMA = EXAMPLES / NAME
JOBS = [path for path in sorted(EXAMPLES.rglob("*.yaml")) if "models" not in path.parts]

job_schema = cache(schemas.job_schema)

# -------------------------------------------------------------------------------------------------------------- init


@pytest.mark.parametrize(
    ("gpus", "reward"), rotate_places(("cpu-host", "H100:8", "1xrtx-4090"), ("answer", "math", "code", "function"))
)
def test_a_job_to_begin_with_is_read_and_says_what_it_can(rlplan: Call, tmp_path: Path, gpus: str, reward: str) -> None:
    job = tmp_path / "new" / "first.yaml"
    answer = rlplan("init", job, "--gpus", gpus, "--reward", reward)
    assert answer.exit_code == 0, answer.err
    assert set(answer.out.split()) == {str(path) for path in job.parent.iterdir()}
    assert f"rlplan plan {job}" in answer.err
    text = job.read_text()
    assert text.startswith(HEADER.format(NAME) + "\n")
    assert json.loads((job.parent / NAME).read_text()) == job_schema()
    read = load_job(job)
    assert (read.name, read.is_on_gpus) == ("first", gpus != "cpu-host")
    assert read.rewards[0].kind == {"answer": "answer_matcher", "math": "answer_matcher", "code": "code_executor"}.get(
        reward, "function"
    )


@pytest.mark.parametrize(
    "words",
    [
        ("--gpus", "8xH100"),
        pytest.param(
            ("--gpus", "1xrtx-4090", "--model", "Qwen/Qwen2.5-0.5B", "--algorithm", "ppo"), marks=pytest.mark.nightly
        ),
        ("--gpus", "cpu-host", "--reward", "function"),
    ],
)
def test_plan_takes_what_init_has_written(rlplan: Call, tmp_path: Path, words: tuple[str, ...]) -> None:
    assert rlplan("init", tmp_path / "job.yaml", *words).exit_code == 0
    answer = rlplan("plan", tmp_path / "job.yaml", "-o", tmp_path / "plan.json")
    assert answer.exit_code == 0, answer.err
    assert answer.out.startswith("fits")


@pytest.mark.parametrize("algorithm", mark_nightly(ALGORITHMS, but=[*ALGORITHMS][::4]))
def test_there_is_a_job_to_begin_with_for_every_algorithm(rlplan: Call, tmp_path: Path, algorithm: str) -> None:
    job = tmp_path / "job.yaml"
    assert rlplan("init", job, "--algorithm", algorithm, "--gpus", "8xH100").exit_code == 0
    read = load_job(job)
    assert read.algorithm.name == algorithm
    assert read.data is not None
    declared = ALGORITHMS[algorithm]
    is_needed = declared.given in ("pair", "unpaired") and not declared.trains_scalar  # else a part is held back
    assert (read.data.heldout is not None) == is_needed


def test_own_data_keep_their_place_and_their_columns(rlplan: Call, tmp_path: Path) -> None:
    data = tmp_path / "rows.csv"
    data.write_text("question,answer\n1 + 1?,2\n")
    job = tmp_path / "jobs" / "mine.yaml"
    assert rlplan("init", job, "--data", data, "--heldout", data, "--gpus", "8xH100").exit_code == 0
    assert "  prompts: ../rows.csv\n  heldout: ../rows.csv\n  prompt_column: question\n" in job.read_text()
    assert {path.name for path in job.parent.iterdir()} == {"mine.yaml", NAME}
    assert load_job(job).data is not None


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--gpus", "8xh1000"), "'8xh1000' names no GPUs"),
        (("--algorithm", "grppo"), "Did you mean 'grpo'?"),
        (("--reward", "guess"), "unknown reward 'guess'"),
        (("--data", "nowhere.jsonl"), "nowhere.jsonl does not exist"),
    ],
)
def test_an_answer_that_names_nothing_writes_nothing(
    rlplan: Call, tmp_path: Path, words: tuple[str, ...], message: str
) -> None:
    answer = rlplan("init", tmp_path / "new" / "job.yaml", *words)
    assert (answer.exit_code, answer.out) == (2, "")
    assert message in answer.err
    assert not (tmp_path / "new").exists()


def test_nothing_of_the_users_is_written_over_unless_asked(rlplan: Call, tmp_path: Path) -> None:
    job = tmp_path / "job.yaml"
    job.write_text("mine")
    answer = rlplan("init", job, "--gpus", "8xH100")
    assert answer.exit_code == 2
    assert "already exists" in answer.err
    assert job.read_text() == "mine"
    assert rlplan("init", job, "--gpus", "8xH100", "--force").exit_code == 0


def test_force_leaves_rows_and_rewards_as_they_are(rlplan: Call, tmp_path: Path) -> None:
    job, own = tmp_path / "job.yaml", {"train.jsonl": '{"sum": "1 + 1?", "answer": "2"}\n', "reward.py": "mine"}
    for name, text in own.items():
        (tmp_path / name).write_text(text)
    refused = rlplan("init", job, "--gpus", "8xH100")
    assert (refused.exit_code, job.exists()) == (2, False)
    assert f"--data {tmp_path / 'train.jsonl'} uses the existing file" in refused.err
    assert "--force" not in refused.err
    answer = rlplan("init", job, "--gpus", "8xH100", "--reward", "function", "--force")
    assert answer.out.splitlines() == [str(job), str(tmp_path / NAME)]
    assert {name: (tmp_path / name).read_text() for name in own} == own
    assert "prompt_column: sum" in job.read_text()


def test_at_a_terminal_it_asks_and_asks_again(rlplan: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    message = iter(["8xh1000", "2xH100", "Qwen/Qwen2.5-0.5B", "", "math"])
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True)
    monkeypatch.setattr(typer, "prompt", lambda *_, default, **__: next(message) or default)
    answer = rlplan("init", tmp_path / "job.yaml")
    assert answer.exit_code == 0, answer.err
    assert "'8xh1000' names no GPUs" in answer.err
    job = load_job(tmp_path / "job.yaml")
    assert (job.hardware.num_devices, job.hardware.profile) == (2, "h100-sxm")
    assert job.policy.path.endswith("Qwen/Qwen2.5-0.5B")


# ------------------------------------------------------------------------------------------------------------ schema


def test_the_schema_beside_the_examples_is_that_of_the_jobs() -> None:
    assert json.loads(SCHEMA.read_text()) == job_schema(), f"rlplan schema -o {SCHEMA.relative_to(ROOT)} writes it anew"


@pytest.mark.parametrize("job", JOBS, ids=lambda path: str(path.relative_to(EXAMPLES)))
def test_every_example_names_its_schema_and_keeps_to_it(job: Path) -> None:
    header = job.read_text().splitlines()[0]
    assert header == HEADER.format(os.path.relpath(SCHEMA, job.parent))
    assert faults(job) == []


def faults(job: Path) -> list[str]:
    """Keys that an editor would underline."""
    import jsonschema

    from rlplan.spec.files.yaml import read_yaml

    result = jsonschema.Draft202012Validator(job_schema()).iter_errors(read_yaml(job, "the job"))
    return [".".join(map(str, fault.path)) for fault in result]


@pytest.mark.parametrize(
    ("line", "key"),
    [
        ("workload: {num_steps: 0}", "workload.num_steps"),
        ("workload: {num_stepz: 5}", "workload"),
        ("training: {zero_stage: 4}", "training.zero_stage"),
        ("rewards: [{kind: answers}]", "rewards.0"),
        ("seed: '1'", "seed"),
        ("algorithm: {learning_rate: fast}", "algorithm"),
    ],
)
def test_an_editor_underlines_what_a_plan_would_refuse(tmp_path: Path, line: str, key: str) -> None:
    job = tmp_path / "job.yaml"
    job.write_text(f"policy: Qwen/Qwen2.5-7B\nhardware: {{profile: h100, num_devices: 8, memory: 60GiB}}\n{line}\n")
    assert faults(job) == [key]


def test_the_schema_says_what_a_key_means() -> None:
    parts = job_schema()["$defs"]
    assert parts["DataSpec"]["properties"]["prompts"]["description"].startswith("File or folder of rows to train on")
    undescribed = {
        f"{part}.{name}"
        for part in ("WorkloadSpec", "TrainingSpec", "RolloutSpec", "PlacementSpec", "HardwareSpec", "DataSpec")
        for name, field in parts[part]["properties"].items()
        if "description" not in field
    }
    assert undescribed <= {"WorkloadSpec.max_prompt_len"}, undescribed


# -------------------------------------------------------------------------------------------------------------- docs


@pytest.mark.parametrize(
    ("words", "place", "message"),
    [
        ("training.zero_stage", "docs/job.md#training", "DeepSpeed's ZeRO stage"),
        ("zero_stage", "docs/job.md#training", "`training.zero_stage`"),
        ("exit codes", "docs/runtime.md#exit-codes", "`SpecError`"),
        ("KV-cache", "docs/glossary.md#memory-kinds", "the engine's keys and values"),
        ("staleness", "docs/simulate.md#staleness", "number of versions between its"),
    ],
)
def test_a_word_is_looked_up_offline(rlplan: Call, words: str, place: str, message: str) -> None:
    answer = rlplan("docs", *words.split())
    assert answer.exit_code == 0, answer.err
    assert place in answer.out.splitlines()[0]
    assert message in answer.out
    assert len(answer.out.splitlines()) < 120


def test_a_word_that_no_page_says_gets_those_that_are_near(rlplan: Call) -> None:
    answer = rlplan("docs", "zerostage")
    assert (answer.exit_code, answer.out) == (2, "")
    assert "Did you mean 'zero_stage'" in answer.err
    result = json.loads(rlplan("docs", "heldout", "--json").out)
    assert result["sections"][0]["place"].startswith("docs/")
    pages = json.loads(rlplan("docs", "--json").out)["pages"]
    folder = ROOT / "docs"
    assert sorted(pages) == sorted(str(path.relative_to(folder).with_suffix("")) for path in folder.rglob("*.md"))
    assert all(name in rlplan("docs").out for name in pages)


def test_every_key_of_a_job_is_found_where_it_is_explained() -> None:
    missed = []
    for part, spec in (("workload", "WorkloadSpec"), ("rollout", "RolloutSpec"), ("placement", "PlacementSpec")):
        for name in job_schema()["$defs"][spec]["properties"]:
            best = look_up(f"{part}.{name}")[0]
            missed += [f"{part}.{name}: {best.place}"] * (best.page != "job")
    assert missed in ([], ["rollout.environment: docs/runtime.md#environments"])
    assert len(sections()) > 100


# --------------------------------------------------------------------------------------------------------------- help


def commands() -> list[tuple[str, Any]]:
    created: Any = typer.main.get_command(app)
    return [(name, created.get_command(None, name)) for name in COMMANDS]


@pytest.mark.parametrize(("name", "command"), commands(), ids=lambda value: value if isinstance(value, str) else "")
def test_the_help_of_every_verb_ends_with_examples_that_parse(name: str, command: Any) -> None:
    lines = command.epilog.splitlines()[2:]
    assert lines
    for line in lines:
        words = shlex.split(line.split("   ")[0] if line.strip().count("   ") else line)
        assert words[:2] == ["rlplan", name]
        command.make_context(name, words[2:])  # which refuses what it does not take


# --------------------------------------------------------------------------------------------------------- completion


def completed(line: str) -> list[str]:
    answer: Answer = start(_RLPLAN_COMPLETE="complete_bash", COMP_WORDS=line, COMP_CWORD=str(line.count(" ")))
    assert answer.exit_code == 0, answer.err
    return answer.out.split()


@pytest.mark.parametrize(
    ("line", "some"),
    [
        ("rlplan sc", {"schema"}),
        ("rlplan estimate --gpus 8xh100", {"8xh100-sxm", "8xh100-pcie"}),
        ("rlplan plan job.yaml training.zero", {"training.zero_stage="}),
    ],
)
def test_a_shell_completes_verbs_gpus_and_keys(line: str, some: set[str]) -> None:
    assert some <= set(completed(line))


def test_models_algorithms_and_values_of_keys_are_completed_too() -> None:
    assert {"Qwen/Qwen2.5-7B", "Qwen/Qwen2.5-7B-Instruct"} <= set(completion.models("Qwen/Qwen2.5-7"))
    assert completion.algorithms("g") == ["grpo", "gspo"]
    assert completion.gpus("") == [*completion.COUNTS, "cpu-host"]
    assert completion.overrides("placement.placement=co") == ["placement.placement=colocated"]
    assert completion.overrides("workload.ignores_eos=") == [f"workload.ignores_eos={x}" for x in ("true", "false")]
    assert completion.overrides("no.such=") == []


def test_a_word_of_a_few_keys_names_them(rlplan: Call) -> None:
    assert "keys of a job: rollout.kv_cache_memory" in rlplan("docs", "kv", "cache").out
    assert "keys of a job" not in rlplan("docs", "exit", "codes").out
