"""Regenerates reports/planner/time_against_gpus.{csv,png}: how long a plan takes, from 8 to 16,384 GPUs.

In: nothing. Out: the committed table and picture. Takes about two minutes; `make evidence` calls it.
"""

import csv
from pathlib import Path

import matplotlib.pyplot as plt
from bench_planner import Case, search_seconds, shell_seconds

FOLDER = Path(__file__).resolve().parents[1] / "reports" / "planner"
COUNTS = tuple(2**power for power in range(3, 15))
MODELS = (
    ("Qwen/Qwen2.5-7B", "H100", 8),
    ("meta-llama/Llama-3.1-70B", "H100", 64),
    ("deepseek-ai/DeepSeek-V3", "H200", 256),
)
COLUMNS = ("model", "gpus", "shell_s", "search_s", "candidates", "rated")


def main() -> None:
    """The table, then the picture of it."""
    rows = [_measure(model, gpu, count) for model, gpu, least in MODELS for count in COUNTS if count >= least]
    FOLDER.mkdir(parents=True, exist_ok=True)
    with (FOLDER / "time_against_gpus.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(COLUMNS)
        writer.writerows(rows)
    _draw(rows)


def _measure(model: str, gpu: str, count: int) -> tuple[str, int, float, float, int, int]:
    """One question: as many prompts as there are GPUs, at least 128, so that every GPU has work."""
    prompts = f"workload.num_prompts_per_step={max(128, count)}"
    case = Case(model, "grpo", f"{count}x{gpu}", 5.0, (prompts,))
    seconds, stats = search_seconds(case)
    return model, count, round(shell_seconds(case), 3), round(seconds, 3), stats.num_candidates, stats.num_rated


def _draw(rows: list[tuple[str, int, float, float, int, int]]) -> None:
    figure, axes = plt.subplots(figsize=(7.5, 4.2), layout="constrained")
    for model, _, _ in MODELS:
        mine = [row for row in rows if row[0] == model]
        (line,) = axes.plot([row[1] for row in mine], [row[2] for row in mine], marker="o", label=model.split("/")[1])
        counts, seconds = [row[1] for row in mine], [row[3] for row in mine]
        axes.plot(counts, seconds, marker=".", linestyle=":", color=line.get_color())
    axes.set_xscale("log", base=2)
    axes.set_xticks(COUNTS, [f"{count:,}" for count in COUNTS], rotation=45)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("GPUs")
    axes.set_ylabel("seconds")
    axes.set_title(
        "`rlplan plan`: from the shell, cold (solid), and the search alone (dotted)", loc="left", fontsize=10
    )
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    figure.savefig(FOLDER / "time_against_gpus.png", dpi=150)


if __name__ == "__main__":
    main()
