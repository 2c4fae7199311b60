"""`rlplan explain RUN|LOG` as a user types it: the answer first, the phases, the cause; what a log lacks is asked."""

import json
import re
import shlex
from pathlib import Path

import pytest

from rlplan.spec.files.job_file import load_job
from tests.cli.conftest import Call
from tests.factories import ROOT

JOB = "examples/grpo-7b-8xh100.yaml"
ROW = {
    "timing_s/gen": 60.0, "timing_s/ref": 20.0, "timing_s/update_actor": 120.0, "timing_s/step": 205.0,
    "response_length/mean": 1300.0, "response_length/clip_ratio": 0.55, "prompt_length/mean": 300.0, "timing_s/x": 1.0,
}  # fmt: skip


@pytest.fixture
def log(tmp_path: Path) -> Path:
    path = tmp_path / "metrics.jsonl"
    path.write_text(json.dumps(ROW | {"response_length/clip_ratio": 0.02}) + "\n")
    return path


@pytest.mark.parametrize("width", [80, 140])
def test_the_page_names_the_largest_gap_and_its_likely_cause(
    rlplan: Call, monkeypatch: pytest.MonkeyPatch, log: Path, width: int
) -> None:
    from rlplan_cli.render import terminal

    monkeypatch.setattr(terminal.stdout, "width", width)
    answer = rlplan("explain", log, JOB)
    assert (answer.exit_code, answer.err) == (0, "")
    assert answer.out.startswith("not normal  Qwen/Qwen2.5-7B, grpo, 8x h100-sxm: train takes 2 min 0 s")
    assert re.search(r"^ train +2 min 0 s .* largest gap", answer.out, re.MULTILINE)
    assert "packing off" in answer.out
    assert "Unknown fields, not read: timing_s/x" in answer.out
    tables = answer.out.partition("Step by phase")[2].partition("Each row is predicted")[0].splitlines()
    assert all(len(line) <= width for line in tables if not line.startswith("  workload"))


def test_what_is_printed_as_typed_parses(rlplan: Call, log: Path) -> None:
    result = json.loads(rlplan("explain", log, JOB, "--json").out)
    assert result["is_normal"] is False
    assert load_job(ROOT / JOB, result["overrides"]).workload.mean_prompt_len == 300
    for cause in result["causes"]:
        load_job(ROOT / JOB, shlex.split(cause["overrides"]))
    counted = next(line for line in rlplan("explain", log, JOB).out.splitlines() if line.startswith("Predicted with "))
    load_job(ROOT / JOB, shlex.split(counted.removeprefix("Predicted with ")))


def test_answers_at_the_cap_are_said(rlplan: Call, tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(json.dumps(ROW | {"response_length/mean": 5500.0}))
    assert "55% of responses end at the cap of 8,192 tokens" in rlplan("explain", path, JOB).out


def test_a_phase_that_the_job_lacks_points_to_another_job(rlplan: Call, tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"timing_s/gen": 3.0}')
    assert "the job has no rollout" in rlplan("explain", path, "examples/dpo-8b-8xa100.yaml").out


def test_a_run_folder_knows_its_job(rlplan: Call, tmp_path: Path) -> None:
    run = tmp_path / "run"
    assert rlplan("plan", "examples/quickstart.yaml", "-o", run / "plan.json").exit_code == 0
    step = json.loads((run / "plan.json").read_text())["results"]["step"]
    slow = {
        f"seconds/{entry['id']}": entry["seconds"] * (9 if entry["phase"] == "train" else 1)
        for entry in step["actions"]
    }
    rows = [{"step": number, "step_s": sum(slow.values()), **slow} for number in (1, 2, 3)]
    (run / "timings.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    answer = rlplan("explain", run)
    assert answer.exit_code == 0, answer.err
    assert answer.out.startswith("not normal  sorter, grpo, 2x cpu-host: train takes ")
    assert "9.0 times what the hardware needs" in answer.out
    assert "measured by rlplan, median of 3 steps" in answer.out
    gaps = {row["phase"]: row for row in json.loads(rlplan("explain", run, "--json").out)["gaps"]}
    assert gaps["rollout"]["ratio"] == pytest.approx(1.0)
    assert rlplan("explain", run, JOB).exit_code == 2


@pytest.mark.parametrize(
    ("text", "words", "message"),
    [
        ("", (JOB,), "neither rows nor an out-of-memory error"),
        ('{"gen_time": 3}', (JOB,), "--field rollout=gen_time:s"),
        ('{"gen_time": 3}', (JOB, "--field", "rollout=gen_time"), "has no known unit"),
        (json.dumps(ROW), (), "comes with 0 jobs"),
        (json.dumps(ROW), (JOB, "examples/quickstart.yaml"), "comes with 2 jobs"),
        (json.dumps(ROW), (JOB, "workload.max_response_len=1024"), "the job allows 1,024"),
        (json.dumps(ROW), ("missing.yaml",), "missing.yaml"),
    ],
)
def test_what_a_log_lacks_is_one_message_with_exit_code_2(
    rlplan: Call, tmp_path: Path, text: str, words: tuple[str, ...], message: str
) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(text)
    answer = rlplan("explain", path, *words)
    assert (answer.exit_code, answer.out) == (2, "")
    assert message in answer.err


def test_a_log_of_a_job_by_name_is_read_too(rlplan: Call, tmp_path: Path) -> None:
    path = tmp_path / "trainer_state.json"
    path.write_text(json.dumps({"log_history": [{"step": 1, "step_time": 900.0, "completions/mean_length": 400.0}]}))
    answer = rlplan("explain", path, "--model", "Qwen/Qwen2.5-0.5B", "--gpus", "1xH100")
    assert answer.exit_code == 0, answer.err
    assert "measured by TRL, median of one step, which includes warm-up" in answer.out


OUT_OF_MEMORY = (
    'File "/w/verl/workers/fsdp_workers.py", line 782, in compute_log_prob\n'
    'File "/w/verl/utils/torch_functional.py", line 148, in entropy_from_logits\n'
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 3.10 GiB. GPU 0 has a total capacity of 79.11 GiB "
    "of which 2.85 GiB is free.\n"
)


def test_an_out_of_memory_error_is_explained_alone_with_a_job_and_with_a_script(rlplan: Call, tmp_path: Path) -> None:
    log, script = tmp_path / "oom.txt", "tests/foreign/reports/rllm29.sh"
    log.write_text(OUT_OF_MEMORY)
    for words, expected in (
        ((), "With its job"),
        ((JOB,), "Predicted"),
        (("--with", script, "--gpus", "8xA100"), "tokens x vocabulary of 151,936 in fp32"),
    ):
        answer = rlplan("explain", log, *words)
        assert answer.exit_code == 0, answer.err
        assert expected in " ".join(answer.out.split())
    assert json.loads(rlplan("explain", log, "--json").out)["error"]["phase"] == "score"
    assert "no GPUs" in rlplan("explain", log, "--with", script).err
    log.write_text(OUT_OF_MEMORY.partition("torch.Out")[0])
    assert "neither rows nor an out-of-memory error" in rlplan("explain", log, JOB).err


def test_a_log_is_explained_with_the_script_that_wrote_it(rlplan: Call) -> None:
    reports = "tests/foreign/reports"
    answer = rlplan("explain", f"{reports}/rllm_norm.log", "--with", f"{reports}/rllm29.sh", "--gpus", "8xA100")
    assert answer.exit_code == 0, answer.err
    assert answer.out.startswith("normal")
