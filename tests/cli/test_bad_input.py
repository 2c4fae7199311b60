"""Bad input: one message with what, where, rule and way out, its exit code, nothing on stdout and never a traceback."""

import json
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rlplan.emit.bundle import write_bundle
from rlplan.planner.plan import write_plan
from rlplan.runtime.processes.machine_speed import scale_seconds
from tests.cli.conftest import Answer, Call, start
from tests.factories import QUICKSTART, make_plan, write_config, write_job
from tests.repository.at_night import mark_nightly


def check(answer: Answer, code: int, *words: str) -> None:
    """The four parts, on stderr alone."""
    assert answer.exit_code == code, answer.err
    assert answer.out == ""
    assert "Traceback" not in answer.err
    assert "a bug in rlplan" not in answer.err
    lines = answer.err.splitlines()
    assert lines[0].startswith("error: ")
    assert len([line for line in lines if line.startswith("error: ")]) == 1
    labels = [line.split(":")[0] for line in lines[1:]]
    assert labels == ["  where", "  rule", "  way out"], answer.err
    assert all(line.partition(": ")[2].strip() for line in lines)
    for word in words:
        assert word in answer.err


NO_LAYOUT = "placement={max_staleness: 1, placement: colocated}"
OVERRIDES: list[tuple[str, int, tuple[str, ...]]] = [
    ("workload.num_stepz=3", 2, ("unknown key 'num_stepz'", "where: override 'workload.num_stepz=3'\n")),
    ("workload.num_stepz=3", 2, ("Did you mean 'num_steps'?", "way out: write workload.num_steps=3")),
    ("workload={num_stepz: 3}", 2, ("where: override 'workload={num_stepz: 3}': workload.num_stepz",)),
    ("stage=sft", 2, ("has no stages", "override 'stage=sft'", "leave stage=sft out")),
    ("num_prompts_per_step=3", 2, ("must be a multiple of mini_batch_size", "workload.mini_batch_size=8")),
    ("wrkload.num_steps=3", 2, ("unknown key 'wrkload'", "Did you mean 'workload'?")),
    ("workload.num_steps=many", 2, ("workload.num_steps is 'many'", "valid integer")),
    ("workload.num_steps=true", 2, ("workload.num_steps is True", "valid integer")),
    ("workload.num_steps=", 2, ("workload.num_steps is None",)),
    ("hardware.memory=80G", 2, ("hardware.memory is '80G'", "GiB", "64MiB")),
    ("hardware.memory=" + "9" * 400 + "GiB", 2, ("hardware.memory is", "8388608TiB")),
    ("algorithm.learning_rate=fast", 2, ("algorithm.learning_rate is 'fast'",)),
    ("algorithm.name=dpoo", 2, ("algorithm.name is 'dpoo'", "known algorithms", "'dpo'")),
    ("policy.path=models/sorter2", 2, ("models/sorter2' does not exist", "policy.path")),
    ("policy.path=" + "x" * 5000, 2, ("does not exist", "policy.path")),
    ("policy.path=data", 2, ("the model's config.json is missing", "examples/data/config.json")),
    ("data.prompts=data/nowhere.jsonl", 2, ("nowhere.jsonl' does not exist", "data.prompts")),
    ("hardware.num_devices=65", 2, ("hardware.num_devices is 65", "at most 64")),
    ("placement.placement=colocatd", 2, ("placement.placement is 'colocatd'", "Did you mean 'colocated'?")),
    ("rewards=[{kind: answer_matchr}]", 2, ("Did you mean 'answer_matcher'?",)),
    ("rewards=[{kind: format_checker, pattern: 'a{99999999999}'}]", 2, ("not a regular expression",)),
    ("workload.max_response_len=500", 2, ("may reach 508 tokens, the model's limit is 256",)),
    ("rollout.kv_cache_memory=1KiB", 2, ("holds 0 blocks of 32 tokens", "rollout.kv_cache_memory=1MiB")),
    ("workload.mini_batch_size=100", 2, ("= 256 must be a multiple of mini_batch_size = 100",)),
    (NO_LAYOUT, 1, ("no layout can be built", "for generation")),
    ("num_steps", 2, ("override 'num_steps' is not KEY=VALUE", "command line")),
    ("rewards.0.weight=2", 2, ("leads through", "command line")),
    ("seed=[1", 2, ("the override's value is not YAML", "command line: seed")),
]


@pytest.mark.parametrize(("override", "code", "words"), OVERRIDES, ids=lambda value: str(value)[:40])
def test_a_wrong_override_is_one_message(rlplan: Call, override: str, code: int, words: tuple[str, ...]) -> None:
    check(rlplan("estimate", QUICKSTART, override), code, *words)


def test_what_does_not_fit_is_a_page_and_then_one_message(rlplan: Call) -> None:
    answer = rlplan("estimate", QUICKSTART, "hardware.memory=1GiB")
    assert answer.out.startswith("does not fit  sorter, grpo, 2x cpu-host: ")
    assert "Each of these changes alone helps" in answer.out
    check(replace(answer, out=""), 1, "1.00 GiB available", "largest:", "hardware.memory=")


FILES: dict[str, tuple[bytes | None, tuple[str, ...]]] = {
    "absent": (None, ("the job file is missing",)),
    "empty": (b"", ("JobSpec is empty", "schema_version")),
    "words": (b"just words", ("JobSpec is str 'just words'",)),
    "binary": (bytes(range(256)), ("the job file is not UTF-8 text",)),
    "tab": (b"name: x\n\tseed: 1\n", ("not YAML", "line 2, column 1")),
    "duplicate": (b"seed: 1\nseed: 2\n", ("duplicate key", "line 2, column 1")),
    "tag": (b"name: !!python/object/apply:os.system ['touch hacked']\n", ("is a tag", "line 1, column 7")),
    "aliases": (b"a: &a [x]\nb: [*a, *a]\n", ("anchor or an alias",)),
    "deep": (b"[" * 5000, ("depth", "line 1")),
    "large": (b"#" * (1 << 21), ("has more than 1048576 bytes",)),
    "nothing": (b"{}", ("required key 'policy' is missing (and 1 more: ",)),
}


@pytest.mark.parametrize(("content", "words"), FILES.values(), ids=FILES)
def test_a_wrong_job_file_is_one_message(
    rlplan: Call, tmp_path: Path, content: bytes | None, words: tuple[str, ...]
) -> None:
    path = tmp_path / "job.yaml"
    if content is not None:
        path.write_bytes(content)
    check(rlplan("plan", path), 2, str(path), *words)


def test_a_folder_is_no_job_file(rlplan: Call, tmp_path: Path) -> None:
    check(rlplan("estimate", tmp_path), 2, "holds no bundle")


CONFIGS: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "unknown architecture": ({"architectures": ["GPT9LMHeadModel"]}, ("'GPT9LMHeadModel' is not known",)),
    "hostile": ({"architectures": ["Evil"], "auto_map": {"AutoConfig": "evil.Config"}}, ("'Evil' is not known",)),
    "missing key": ({"hidden_size": ...}, ("key 'hidden_size' is missing", "config.json: hidden_size")),
    "negative": ({"vocab_size": -1}, ("vocab_size is -1",)),
    "endless": ({"num_hidden_layers": 10**18}, ("num_hidden_layers is 1000000000000000000",)),
    "indivisible": ({"num_key_value_heads": 3}, ("num_attention_heads 4 does not divide by num_key_value_heads 3",)),
}


@pytest.mark.parametrize(("overrides", "words"), CONFIGS.values(), ids=CONFIGS)
def test_a_broken_model_config_is_one_message(
    rlplan: Call, tmp_path: Path, overrides: dict[str, Any], words: tuple[str, ...]
) -> None:
    write_config(tmp_path / "model", **overrides)
    job = write_job(tmp_path, **{"policy.path": "model"})
    check(rlplan("estimate", job), 2, *words)


@pytest.fixture
def plan_file(tmp_path: Path) -> Path:
    write_plan(make_plan(), tmp_path / "plan.json")
    return tmp_path / "plan.json"


@pytest.mark.parametrize("command", ["estimate", "plan", "run"])
def test_a_plan_of_another_version_is_one_message(rlplan: Call, plan_file: Path, command: str) -> None:
    plan_file.write_text(json.dumps(json.loads(plan_file.read_text()) | {"schema_version": 99}))
    check(rlplan(command, plan_file), 2, "plan schema version is 99", "reads version 3", "rlplan plan JOB")


@pytest.mark.parametrize("command", ["estimate", "plan", "run"])
def test_an_override_of_a_plan_is_one_message(rlplan: Call, plan_file: Path, command: str) -> None:
    check(rlplan(command, plan_file, "seed=1"), 2, "override 'seed=1' cannot change the plan")


def test_a_plan_is_not_written_where_nothing_can_be_written(rlplan: Call, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    for place in (tmp_path / "file" / "plan.json", tmp_path):
        check(rlplan("plan", QUICKSTART, "-o", place), 2, "cannot be written")


def test_a_bundle_is_not_written_over_something_else(rlplan: Call, tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("x")
    check(rlplan("emit", QUICKSTART, "-o", tmp_path), 3, "is not empty and holds no bundle")
    check(rlplan("emit", QUICKSTART, "-o", tmp_path / "thesis.tex"), 2, "cannot be written: Not a directory")


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    write_bundle(make_plan(), tmp_path / "bundle")
    return tmp_path / "bundle"


@pytest.mark.parametrize(
    ("file", "change", "words"),
    [
        (
            "deepspeed/policy.json",
            {"gradient_cliping": 1.0},
            ("gradient_cliping is 1.0, the plan gives no such key", "Did you mean 'gradient_clipping'?"),
        ),
        (
            "vllm/policy.json",
            {"max_num_seq": 8},
            ("max_num_seq is 8, the plan gives no such key", "Did you mean 'max_num_seqs'?"),
        ),
    ],
)
def test_a_bundle_with_an_unknown_engine_key_does_not_run(
    rlplan: Call, bundle: Path, tmp_path: Path, file: str, change: dict[str, Any], words: tuple[str, ...]
) -> None:
    path = bundle / file
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    check(rlplan("run", bundle), 2, file, *words)


def test_a_bundle_takes_no_override_and_a_folder_without_one_does_not_run(
    rlplan: Call, bundle: Path, tmp_path: Path
) -> None:
    check(rlplan("run", bundle, "workload.num_steps=1"), 2, "cannot change the bundle")
    shutil.rmtree(bundle / "vllm")
    check(rlplan("run", bundle), 2, "vllm/ is missing from the bundle")
    (tmp_path / "empty").mkdir()
    check(rlplan("run", tmp_path / "empty"), 2, "holds no bundle", "rlplan emit")


def test_a_run_does_not_overwrite_another_one(rlplan: Call, bundle: Path, tmp_path: Path) -> None:
    out = tmp_path / "runs" / "older"
    out.mkdir(parents=True)
    (out / "metrics.jsonl").write_text("{}")
    for what in (QUICKSTART, bundle):
        check(rlplan("run", what, "--out", out), 2, "is not empty", "--out")
    assert [path.name for path in out.iterdir()] == ["metrics.jsonl"]


def test_a_run_that_needs_more_memory_than_is_free_does_not_start(rlplan: Call, tmp_path: Path) -> None:
    too_much = ("hardware.memory=64TiB", "rollout.kv_cache_memory=32TiB")
    check(rlplan("run", QUICKSTART, *too_much, "--out", tmp_path / "run"), 4, "TiB of memory, ", "is free on this host")
    assert not (tmp_path / "run" / "trace.jsonl").exists()


def test_a_report_of_nothing_is_one_message(rlplan: Call, tmp_path: Path) -> None:
    check(rlplan("report", tmp_path / "nowhere"), 2, "nowhere")
    check(rlplan("report", tmp_path), 2, str(tmp_path))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["estimat", "x"], ("No such command 'estimat'. Did you mean 'estimate'", "rlplan --help")),
        (["estimate"], ("nothing to estimate", "rlplan estimate --model")),
        (["plan"], ("nothing to plan", "rlplan plan --model")),
        (["estimate", "--jsn", "x"], ("No such option: --jsn",)),
        (["estimate", "--model", "Qwen/Qwen2.5-7B", "--gpus", "8"], ("8 of which GPU?", "--gpus 8xH100")),
        (["emit", "x"], ("Missing option '--out' / '-o'",)),
        (["plan", "x", "--out"], ("'--out' requires an argument",)),
        (["profiles", "shw"], ("No such command 'shw'. Did you mean 'show'?",)),
        (["profiles", "show"], ("Missing argument 'name'",)),
        (["profiles", "show", "cpu-hots"], ("hardware profile 'cpu-hots' is unknown", "Did you mean 'cpu-host'?")),
        (["doctor", "who"], ("unexpected extra argument",)),
    ],
    ids=" ".join,
)
def test_a_wrong_command_line_is_one_message(rlplan: Call, arguments: list[str], words: tuple[str, ...]) -> None:
    check(rlplan(*arguments), 2, *words)


@pytest.mark.parametrize("arguments", [["estimate", "nowhere.yaml"], ["plan", QUICKSTART, NO_LAYOUT]])
def test_with_json_an_error_is_the_same_message_and_stdout_stays_empty(rlplan: Call, arguments: list[str]) -> None:
    plain = rlplan(*arguments)
    assert rlplan(*arguments, "--json") == plain
    check(plain, plain.exit_code)


def test_only_debug_shows_where_an_error_was_raised(rlplan: Call) -> None:
    answer = rlplan("estimate", "nowhere.yaml", "--debug")
    assert answer.exit_code == 2
    assert "Traceback (most recent call last)" in answer.err
    assert "error: the job file is missing" in answer.err


def test_a_real_process_ends_as_its_message_says() -> None:
    check(start("estimate", QUICKSTART, "workload.num_stepz=3"), 2, "Did you mean 'num_steps'?")
    check(start("plan", QUICKSTART, NO_LAYOUT), 1, "no layout can be built")


def test_a_name_that_is_no_text_is_still_a_message() -> None:
    check(start("estimate", "caf\udce9.yaml"), 2, "the job file is missing")


@pytest.mark.parametrize("package", mark_nightly(["pandas", "jinja2"], but=1))
def test_a_missing_extra_is_one_message_with_the_command_that_installs_it(tmp_path: Path, package: str) -> None:
    program = f"import sys; sys.modules[{package!r}] = None; from rlplan_cli.app import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", program, "report", tmp_path],
        capture_output=True,
        text=True,
        timeout=scale_seconds(60),
        check=False,
    )
    answer = Answer(done.returncode, done.stdout, done.stderr)
    check(answer, 4, f"package '{package}' is missing", "pip install jinja2 pandas")


def test_a_key_its_sign_and_its_value_may_stand_apart(rlplan: Call) -> None:
    asked = ("estimate", "--model", "Qwen/Qwen2.5-0.5B", "--gpus", "1xH100", "--json")
    assert json.loads(rlplan(*asked, "rollout.tp", "=", "1").out) == json.loads(rlplan(*asked, "rollout.tp=1").out)


def test_an_override_without_a_job_says_so(rlplan: Call) -> None:
    for words in (("rollout.tp", "=", "2"), ("rollout.tp = 2",), ("rollout.tp=2",)):
        check(rlplan("estimate", *words), 2, "on which GPUs?", "--model Qwen/Qwen2.5-7B --gpus 8xH100 rollout.tp=2")


def test_a_report_of_nothing_does_not_ask_for_packages_first(rlplan: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("pandas", "rlplan.report.write", "rlplan.report.plans.write"):
        monkeypatch.setitem(sys.modules, name, None)
    check(rlplan("report", "nowhere"), 2, "nowhere does not exist")


def test_the_help_names_what_shows_a_traceback(rlplan: Call) -> None:
    assert "--debug" in rlplan("--help").out
