"""GRPO side by side with TRL: the same model, prompts and lengths of rollouts, on the same cores, in one run.

In: nothing. Out: reports/runtime/trl.md, trl.json and trl.png. Takes about ten minutes on two cores.
TRL 1.16 gets an environment of its own (requirements/trl.txt) beside this one, whose other packages it shares.

TRL's settings are tried one after the other (element type, batch), each for a few steps; the fastest is what ours is
compared with. The first step of each side counts for nothing: both make things in it that stay.
"""

import argparse
import json
import os
import subprocess
import sys
import venv
from collections.abc import Sequence
from pathlib import Path
from statistics import mean
from typing import Any

from benchmarks.figures import ACCENT, MUTED
from benchmarks.trl.model import write_model, write_prompts
from rlplan.runtime.data.prompt_sets import load_prompts
from rlplan.runtime.rollout.requests import RequestMaker
from rlplan.spec.files.job_file import load_job
from rlplan.spec.resolved import ResolvedJob, on_a_cpu_host

ROOT = Path(__file__).resolve().parents[2]
REPORT = ROOT / "reports" / "runtime"
JOB = ROOT / "benchmarks" / "trl" / "job.yaml"
STEPS = 3
DEADLINE_S = 900
VARIANTS = (("bfloat16", 64), ("float32", 64), ("bfloat16", 16))
"""TRL's settings: element type, rollouts a forward pass. Generation always has all 64 at once."""
WORK = ("rollout", "score", "train", "sync")


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure both sides and write the report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", type=Path, default=ROOT / "runs" / "trl-comparison")
    parser.add_argument("--trl-python", type=Path, help="an interpreter that has TRL; else one is made")
    parser.add_argument("--steps", type=int, default=STEPS, help="of each side; the first counts for nothing")
    options = parser.parse_args(arguments)
    work: Path = options.work.resolve()
    work.mkdir(parents=True, exist_ok=True)
    write_model(work / "model")
    write_prompts(work / "prompts.jsonl", 8 * options.steps)
    write_prompts(work / "heldout.jsonl", 1, seed=1)
    (work / "job.yaml").write_bytes(JOB.read_bytes())
    job = on_a_cpu_host(load_job(work / "job.yaml", [f"workload.num_steps={options.steps}"]))
    python = options.trl_python or make_environment(work / "trl-venv")
    ours = run_ours(job, work)
    theirs: list[dict[str, Any]] = []
    for variant in VARIANTS:
        theirs.append(run_trl(python, job, work, *variant))
        write_report({"rlplan": ours, "trl": theirs})  # each time: the next one may take a quarter of an hour
    return 0


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


def run_ours(job: ResolvedJob, work: Path) -> dict[str, Any]:
    """Seconds of our steps, by phase, from the run's own trace."""
    out = next(folder for number in range(1, 1000) if not (folder := work / f"run-{number}").exists())
    steps = f"workload.num_steps={job.workload.num_steps}"
    command = [sys.executable, "-m", "rlplan_cli", "run", work / "job.yaml", steps]
    subprocess.run([*map(str, command), "--out", str(out)], check=True, timeout=DEADLINE_S)
    timings = [json.loads(line) for line in (out / "timings.jsonl").read_text().splitlines()]
    records = [json.loads(line) for line in (out / "trace.jsonl").read_text().splitlines()]
    steps = []
    for row in timings:
        if row["step"] < 1:
            continue
        spans = [record for record in records if record["type"] == "span" and record["step"] == row["step"]]
        steps.append({"step_s": row["step_s"], "num_tokens": tokens_of(job, row["step"]), **phases(spans)})
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
    seconds = {f"{phase}_s": covered(intervals) for phase, intervals in parts.items()}
    return seconds | {"work_s": covered([interval for intervals in parts.values() for interval in intervals])}


def covered(intervals: Sequence[tuple[float, float]]) -> float:
    """Length of the union of intervals."""
    total, reached = 0.0, float("-inf")
    for start, end in sorted(intervals):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total


def tokens_of(job: ResolvedJob, step: int) -> int:
    """Tokens that are generated in a step."""
    return sum(lengths_of(job, step))


def lengths_of(job: ResolvedJob, step: int) -> list[int]:
    """Tokens of each rollout of a step, as our run draws them."""
    requests, count = RequestMaker(job, load_prompts(job)), job.workload.num_prompts_per_step
    return [
        length for number in range((step - 1) * count, step * count) for length in requests.rollouts(number).lengths
    ]


def run_trl(python: Path, job: ResolvedJob, work: Path, dtype: str, batch_size: int) -> dict[str, Any]:
    """Seconds of TRL's steps with one setting. Its rollouts have the very lengths of ours."""
    load = job.workload
    lengths = [length for step in range(1, load.num_steps + 1) for length in lengths_of(job, step)]
    settings = {
        "policy": job.policy.path,
        "prompts": load.prompts,
        "out": str(work / "trl-out"),
        "num_threads": os.cpu_count(),
        "dtype": dtype,
        "autocast": False,
        "batch_size": batch_size,
        "num_rollouts": load.num_rollouts_per_step,
        "num_samples": load.num_samples_per_prompt,
        "num_steps": load.num_steps,
        "max_response_len": load.max_response_len,
        "lengths": lengths,
    }
    file = work / f"trl-{dtype}-{batch_size}.json"
    file.write_text(json.dumps(settings))
    script = ROOT / "benchmarks" / "trl" / "trl_side.py"
    done = subprocess.run([python, script, file], check=True, timeout=DEADLINE_S, stdout=subprocess.PIPE, text=True)
    result = json.loads(done.stdout.splitlines()[-1])
    per_step = zip(result["step_s"], result["generate_s"], result["num_tokens"], strict=True)
    steps = [{"step_s": step, "rollout_s": made, "num_tokens": tokens} for step, made, tokens in per_step]
    return {"dtype": dtype, "batch_size": batch_size, "steps": steps}


def steady(side: dict[str, Any], key: str) -> float:
    """Mean over the steps after the first."""
    return mean(step[key] for step in side["steps"][1:])


def rate(side: dict[str, Any]) -> float:
    """Generated tokens by seconds of the whole step."""
    return steady(side, "num_tokens") / steady(side, "step_s")


def write_report(results: dict[str, Any]) -> None:
    """The table, the numbers behind it, and a chart."""
    ours, theirs = results["rlplan"], results["trl"]
    best = max(theirs, key=rate)
    outside = 1 - steady(ours, "work_s") / steady(ours, "step_s")
    rows = [("rlplan, bfloat16", ours), *((f"TRL, {s['dtype']}, {s['batch_size']} rollouts a pass", s) for s in theirs)]
    table = [
        f"| {name} | {steady(side, 'step_s'):.2f} | {steady(side, 'rollout_s'):.2f} | {rate(side):.0f} | "
        f"{rate(ours) / rate(side):.2f} |"
        for name, side in rows
    ]
    parts = ", ".join(f"{phase} {steady(ours, phase + '_s'):.2f} s" for phase in WORK)
    text = (ROOT / "benchmarks" / "trl" / "report.md").read_text(encoding="utf-8")
    text = text.replace("<table>", "\n".join(table)).replace("<parts>", parts)
    text = text.replace("<outside>", f"{outside:.1%}").replace("<times>", f"{rate(ours) / rate(best):.1f}")
    text = text.replace("<threads>", str(ours["threads"])).replace("<steps>", str(len(ours["steps"]) - 1))
    REPORT.mkdir(parents=True, exist_ok=True)
    (REPORT / "trl.md").write_text(text, encoding="utf-8")
    (REPORT / "trl.json").write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    draw(rows, REPORT / "trl.png")


def draw(rows: Sequence[tuple[str, dict[str, Any]]], path: Path) -> None:
    """Seconds of a step, generation apart, a bar a side."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 0.5 * len(rows) + 0.9), layout="constrained")
    names = [name for name, _ in rows][::-1]
    made = [steady(side, "rollout_s") for _, side in rows][::-1]
    rest = [steady(side, "step_s") - steady(side, "rollout_s") for _, side in rows][::-1]
    axes.barh(names, made, color=ACCENT, label="generation")
    axes.barh(names, rest, left=made, color=MUTED, label="everything else")
    axes.set_xlabel("seconds of a step of 64 rollouts")
    axes.legend(frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=120)
    plt.close(figure)


if __name__ == "__main__":
    sys.exit(main())
