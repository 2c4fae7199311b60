"""GRPO side by side with TRL: the same model, prompts and lengths of rollouts, on the same cores, in one run.

In: nothing. Out: reports/runtime/trl.md, trl.json and trl.png. `python -m benchmarks.trl.comparison [--settings all]
[--jobs long-tail even] [--steps 11] [--report]`: about twenty minutes on two cores, which must be quiet.
TRL 1.16 gets an environment of its own (requirements/trl.txt) beside this one, whose other packages it shares.

A job is measured on both sides for --steps steps. The first counts for nothing: both make things in it that stay.
TRL is measured with the setting that was its fastest (element type, rollouts a forward pass); `--settings all` first
tries all of them for one step each, and says which is. --report measures nothing.
"""

import argparse
import json
import os
import subprocess
import sys
import venv
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.trl.model import write_model, write_prompts
from benchmarks.trl.report import REPORT, WORK, rate, read_results, write_report
from rlplan.runtime.data.prompt_sets import load_prompts
from rlplan.runtime.rollout.requests import RequestMaker
from rlplan.spec.files.job_file import load_job
from rlplan.spec.resolved import ResolvedJob, resolve_on_cpu

ROOT = Path(__file__).resolve().parents[2]
JOB = ROOT / "benchmarks" / "trl" / "job.yaml"
STEPS = 11
SIDES = ("rlplan", "trl")
DEADLINE_S = 1800


@dataclass(frozen=True)
class Setting:
    """One of TRL's: element type, rollouts a forward pass. Generation always has all rollouts of a step at once."""

    dtype: str
    batch_size: int


SETTINGS = (Setting("bfloat16", 16), Setting("bfloat16", 8))
"""Slower by far, in a comparison before: all 64 rollouts a pass, in either type."""
JOBS: dict[str, tuple[str, ...]] = {
    "long-tail": (),
    "even": (
        *("workload.num_samples_per_prompt=4", "workload.mini_batch_size=32", "workload.max_prompt_len=128"),
        *(
            "workload.max_response_len=64",
            "workload.mean_response_len=64",
            "workload.response_lengths={kind: constant}",
        ),
    ),
}
"""Changes of each job to job.yaml: none; longer prompts, and short responses that are all of one length."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure both sides and write the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, default=ROOT / "runs" / "trl-comparison")
    parser.add_argument("--trl-python", type=Path, help="an interpreter that has TRL; else one is made")
    parser.add_argument("--steps", type=int, default=STEPS, help="of each side; the first counts for nothing")
    parser.add_argument("--jobs", nargs="+", choices=JOBS, default=list(JOBS))
    parser.add_argument("--settings", choices=("fastest", "all"), default="fastest", help="of TRL")
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=SIDES)
    parser.add_argument("--report", action="store_true", help="write the report from trl.json")
    options = parser.parse_args(arguments)
    if not options.report:
        measure(options)
    write_report(read_results())
    return 0


def measure(options: argparse.Namespace) -> None:
    """Both sides of the jobs that are asked for; each is kept as soon as it is there."""
    work: Path = options.work.resolve()
    work.mkdir(parents=True, exist_ok=True)
    write_model(work / "model")
    python = options.trl_python or make_environment(work / "trl-venv")
    if options.settings == "all":
        tried = prepare(work, "long-tail", 1)
        for setting in SETTINGS:
            keep(
                {
                    "tried": {
                        format_setting(setting): asdict(setting)
                        | run_trl(python, tried, work / "long-tail.jsonl", setting)
                    }
                }
            )
    fastest = fastest_setting()
    for name in options.jobs:
        job = prepare(work, name, options.steps)
        if "rlplan" in options.sides:
            keep({"jobs": {name: {"rlplan": run_ours(job, name, work)}}})
        if "trl" in options.sides:
            keep({"jobs": {name: {"trl": asdict(fastest) | run_trl(python, job, work / f"{name}.jsonl", fastest)}}})


def prepare(work: Path, name: str, num_steps: int) -> ResolvedJob:
    """A job with its prompts; its file is copied beside the model."""
    (work / "job.yaml").write_bytes(JOB.read_bytes())
    overrides = [*JOBS[name], f"workload.num_steps={num_steps}", f"data.prompts={name}.jsonl"]
    for file in (f"{name}.jsonl", "heldout.jsonl"):
        (work / file).touch()
    load = resolve_on_cpu(load_job(work / "job.yaml", overrides)).workload
    write_prompts(work / f"{name}.jsonl", load.num_prompts_per_step * num_steps, load.max_prompt_len)
    write_prompts(work / "heldout.jsonl", 1, load.max_prompt_len, seed=1)
    return resolve_on_cpu(load_job(work / "job.yaml", overrides))


def format_setting(setting: Setting) -> str:
    """The setting's name in the report's rows."""
    return f"{setting.dtype}, {setting.batch_size} rollouts a pass"


def fastest_setting() -> Setting:
    """The tried setting with the most tokens per second; the first of all if none was tried."""
    tried = read_results().get("tried", {}).values()
    best = max(tried, key=rate, default=asdict(SETTINGS[0]))
    return Setting(best["dtype"], best["batch_size"])


def keep(results: dict[str, Any]) -> None:
    """Results into trl.json, beside or instead of what it holds."""
    REPORT.mkdir(parents=True, exist_ok=True)
    merged = merge(read_results(), results)
    (REPORT / "trl.json").write_text(json.dumps(merged, indent=1) + "\n", encoding="utf-8")


def merge(old: dict[str, Any], new: dict[str, Any]) -> dict[str, Any]:
    """The new values instead of the old ones, dictionary by dictionary."""
    both = {key: merge(old[key], new[key]) for key in new if isinstance(new[key], dict) and key in old}
    return old | new | both


def make_environment(folder: Path) -> Path:
    """An interpreter with TRL that sees the packages of this one."""
    python = folder / "bin" / "python"
    if not python.exists():
        venv.create(folder, with_pip=True)
        site = next((folder / "lib").glob("python*/site-packages"))
        (site / "base.pth").write_text("\n".join(path for path in sys.path if path.endswith("site-packages")) + "\n")
        requirements = ROOT / "requirements" / "trl.txt"
        subprocess.run([python, "-m", "pip", "install", "-q", "--no-deps", "-r", requirements], check=True)
    return python


def run_ours(job: ResolvedJob, name: str, work: Path) -> dict[str, Any]:
    """Seconds of our steps, by phase, from the run's own trace."""
    out = next(folder for number in range(1, 1000) if not (folder := work / f"{name}-{number}").exists())
    overrides = [*JOBS[name], f"workload.num_steps={job.workload.num_steps}", f"data.prompts={name}.jsonl"]
    command = [sys.executable, "-m", "rlplan_cli", "run", work / "job.yaml", *overrides]
    subprocess.run([*map(str, command), "--out", str(out)], check=True, timeout=DEADLINE_S)
    timings = [json.loads(line) for line in (out / "timings.jsonl").read_text().splitlines()]
    records = [json.loads(line) for line in (out / "trace.jsonl").read_text().splitlines()]
    steps = []
    for row in timings:
        if row["step"] < 1:
            continue
        spans = [record for record in records if record["type"] == "span" and record["step"] == row["step"]]
        seconds = row["step_s"] - row.get("seconds/evaluate", 0.0)
        steps.append({"step_s": seconds, "num_tokens": count_tokens(job, row["step"]), **phases(spans)})
    return {"steps": steps, "threads": os.cpu_count()}


def phases(spans: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Seconds in which a process was at work, by phase, and in which any of them was."""
    names = {"generate": "rollout", "sync_weights": "sync", "score": "score", "verify": "score"}
    names |= {"train_forward_backward": "train", "optimizer_step": "train"}
    parts: dict[str, list[tuple[float, float]]] = {phase: [] for phase in WORK}
    for span in spans:
        phase = names.get(span["action_id"].split("/")[0].split("#")[0])
        if phase:
            parts[phase].append((span["start_s"], span["end_s"]))
    seconds = {f"{phase}_s": measure_union(intervals) for phase, intervals in parts.items()}
    return seconds | {"work_s": measure_union([interval for intervals in parts.values() for interval in intervals])}


def measure_union(intervals: Sequence[tuple[float, float]]) -> float:
    """Length of the union of intervals."""
    total, reached = 0.0, float("-inf")
    for start, end in sorted(intervals):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total


def count_tokens(job: ResolvedJob, step: int) -> int:
    """Tokens that are generated in a step."""
    return sum(draw_lengths(job, step))


def draw_lengths(job: ResolvedJob, step: int) -> list[int]:
    """Tokens of each rollout of a step, as our run draws them."""
    requests, count = RequestMaker(job, load_prompts(job)), job.workload.num_prompts_per_step
    return [
        length
        for number in range((step - 1) * count, step * count)
        for length in requests.rollout_request(number).lengths
    ]


def run_trl(python: Path, job: ResolvedJob, prompts: Path, setting: Setting) -> dict[str, Any]:
    """Seconds of TRL's steps with one setting. Its rollouts have the very lengths of ours."""
    load = job.workload
    lengths = [length for step in range(1, load.num_steps + 1) for length in draw_lengths(job, step)]
    settings = {
        "model": job.policy.path,
        "prompts": str(prompts),
        "out": str(prompts.parent / "trl-out"),
        "num_threads": os.cpu_count(),
        "autocast": False,
        "num_rollouts": load.num_rollouts_per_step,
        "num_samples": load.num_samples_per_prompt,
        "num_steps": load.num_steps,
        "max_response_len": load.max_response_len,
        "lengths": lengths,
    }
    file = prompts.with_suffix(".trl.json")
    file.write_text(json.dumps(settings | asdict(setting)))
    script = ROOT / "benchmarks" / "trl" / "trl_side.py"
    print(f"--- TRL, {format_setting(setting)}", flush=True)
    done = subprocess.run([python, script, file], check=True, timeout=DEADLINE_S, stdout=subprocess.PIPE, text=True)
    result = json.loads(done.stdout.splitlines()[-1])
    per_step = zip(result["step_s"], result["generate_s"], result["num_tokens"], strict=True)
    return {
        "steps": [
            {"step_s": step, "rollout_s": rollout_s, "num_tokens": tokens} for step, rollout_s, tokens in per_step
        ]
    }


if __name__ == "__main__":
    sys.exit(main())
