"""Regenerates reports/planner/time_against_gpus.{csv,png}: how long a plan takes, from 8 to 16,384 GPUs.

In: nothing. Out: the committed table and picture. Takes some minutes; `make planner` calls it.
"""

import csv
from pathlib import Path

import matplotlib.pyplot as plt
from bench_planner import Case, search_seconds, shell_seconds

FOLDER = Path(__file__).resolve().parents[1] / "reports" / "planner"
COUNTS = (8, 64, 1024, 16384)
MEGATRON = ("target=megatron", *(f"training.{axis}=auto" for axis in ("tp", "pp", "cp", "ep")))
MODELS: tuple[tuple[str, str, int, tuple[str, ...]], ...] = (
    ("Qwen/Qwen2.5-7B", "H100", 8, ()),
    ("meta-llama/Llama-3.1-70B", "H100", 64, ()),
    ("deepseek-ai/DeepSeek-V3", "H200", 256, ()),
    ("deepseek-ai/DeepSeek-V3", "H200", 256, MEGATRON),
)
"""Model, GPU, the fewest of it, further words of the command."""
COLUMNS = ("model", "target", "gpus", "shell_s", "search_s", "candidates", "rated")


def main() -> None:
    """The table, then the picture of it."""
    rows = [
        _measure(model, f"{count}x{gpu}", count, words)
        for model, gpu, least, words in MODELS
        for count in COUNTS
        if count >= least
    ]
    FOLDER.mkdir(parents=True, exist_ok=True)
    with (FOLDER / "time_against_gpus.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(COLUMNS)
        writer.writerows(rows)
    _draw(rows)


Row = tuple[str, str, int, float, float, int, int]


def _measure(model: str, gpus: str, count: int, words: tuple[str, ...]) -> Row:
    """One question: as many prompts as there are GPUs, at least 128, so that every GPU has work."""
    prompts = f"workload.num_prompts_per_step={max(128, count)}"
    case = Case(model, "grpo", gpus, 5.0, (prompts, *words))
    seconds, stats = search_seconds(case)
    target = "megatron" if words else "rlplan"
    shell = round(shell_seconds(case), 3)
    return model, target, count, shell, round(seconds, 3), stats.num_candidates, stats.num_scored


def _draw(rows: list[Row]) -> None:
    figure, axes = plt.subplots(figsize=(7.5, 4.2), layout="constrained")
    for model, target in dict.fromkeys(row[:2] for row in rows):
        mine = [row for row in rows if row[:2] == (model, target)]
        counts, seconds = [row[2] for row in mine], [row[4] for row in mine]
        label = model.split("/")[1] + ("" if target == "rlplan" else f", for {target}")
        (line,) = axes.plot(counts, [row[3] for row in mine], marker="o", label=label)
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
