"""How long `rlplan plan` takes, from the shell and cold, against the number of GPUs: reports/planner/time_against_gpus.

Each point is the shortest of REPEATS whole commands, start of Python included; the empty command is timed in the same
run. Writes time_against_gpus.csv and .png. Run by `make planner`.
"""

import csv
import subprocess
import sys
import time
from pathlib import Path

import matplotlib as mpl

mpl.use("Agg")
import matplotlib.pyplot as plt

FOLDER = Path(__file__).resolve().parents[1] / "reports" / "planner"
REPEATS = 3
TIMEOUT_S = 120
OPEN = tuple(f"training.{axis}=auto" for axis in ("tp", "pp", "cp", "ep"))
JOBS: dict[str, tuple[tuple[str, ...], tuple[int, ...]]] = {
    "7B, GRPO": (("--model", "Qwen/Qwen2.5-7B", "--algorithm", "grpo"), (1, 8, 64, 512)),
    "70B, PPO": (("--model", "meta-llama/Llama-3.1-70B", "--algorithm", "ppo"), (64, 256, 1024)),
    "671B, GRPO, exported to Megatron": (
        ("--model", "deepseek-ai/DeepSeek-V3", "--algorithm", "grpo", "target=megatron", *OPEN),
        (256, 1024, 4096, 16384),
    ),
}
"""Words of a command, and how many H200 it is asked for."""
BOUNDS = {
    ("7B, GRPO", 8): 0.6,
    ("70B, PPO", 64): 1.0,
    (next(reversed(JOBS)), 1024): 2.0,
    (next(reversed(JOBS)), 16384): 5.0,
}
"""Seconds that a plan may take."""


def main() -> None:
    """Measure, write, draw."""
    empty = _shortest("--version")
    rows = [{"job": "(no command)", "gpus": 0, "seconds": f"{empty:.3f}", "bound_s": ""}]
    for job, (words, sizes) in JOBS.items():
        for size in sizes:
            prompts = max(128, size // 4)
            batch = f"workload.num_prompts_per_step={prompts}"
            seconds = _shortest("plan", *words[:4], "--gpus", f"{size}xH200", *words[4:], batch)
            bound = BOUNDS.get((job, size), "")
            rows.append({"job": job, "gpus": size, "seconds": f"{seconds:.3f}", "bound_s": bound})
            print(rows[-1])
    FOLDER.mkdir(parents=True, exist_ok=True)
    with (FOLDER / "time_against_gpus.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    _draw(rows)


def _shortest(*words: str) -> float:
    """Seconds of the fastest of some runs of a command; 1 (does not fit) is an answer too."""
    best = float("inf")
    for _ in range(REPEATS):
        start = time.perf_counter()
        done = subprocess.run(
            [sys.executable, "-m", "rlplan_cli.app", *words], capture_output=True, timeout=TIMEOUT_S, check=False
        )
        best = min(best, time.perf_counter() - start)
        if done.returncode not in (0, 1):
            raise SystemExit(f"{' '.join(words)}: exit {done.returncode}\n{done.stderr.decode()}")
    return best


def _draw(rows: list[dict[str, object]]) -> None:
    figure, axes = plt.subplots(figsize=(8, 4.5), layout="constrained")
    for job, color in zip(JOBS, ("#2563eb", "#d97706", "#059669"), strict=True):
        mine = [(float(str(row["gpus"])), float(str(row["seconds"]))) for row in rows if row["job"] == job]
        axes.plot(*zip(*mine, strict=True), marker="o", color=color, label=job)
    bounds = [(float(str(row["gpus"])), float(str(row["bound_s"]))) for row in rows if row["bound_s"]]
    axes.scatter(*zip(*bounds, strict=True), marker="_", s=300, color="#334155", label="at most")
    axes.set(xscale="log", xlabel="GPUs", ylabel="seconds of `rlplan plan`, from the shell", ylim=(0, None))
    axes.set_xticks([1, 8, 64, 256, 1024, 4096, 16384], ["1", "8", "64", "256", "1,024", "4,096", "16,384"])
    axes.minorticks_off()
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    figure.savefig(FOLDER / "time_against_gpus.png", dpi=130)


if __name__ == "__main__":
    main()
