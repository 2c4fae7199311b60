"""Regenerates reports/planner/time_against_gpus.{csv,png}, how long a plan takes, and rent.{csv,html},
which GPUs to rent for the 7B example, at the bundled prices.

In: nothing. Out: the committed tables and pictures. Takes some minutes; `make planner` calls it.
"""

import csv
from pathlib import Path

import matplotlib.pyplot as plt
from bench_planner import Case, search_seconds, shell_seconds

import rlplan
from rlplan.report.plans.comparison import side_of, write_comparison

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
RENTED = "2xRTX4090,8xRTX4090,8xA6000,8xL40S,16xL40S,8xA100,4xH100,8xH100,16xH100,4xH200,8xH200,4xB200,8xB200,8xB300"
RENT_COLUMNS = (
    "devices", "verdict", "step_s", "dollars_per_hour", "dollars_per_step", "run_s", "dollars_per_run", "kwh_per_run",
    "tokens_per_dollar", "is_on_front",
)  # fmt: skip
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
    rent()


def rent() -> None:
    """`rlplan compare` of the 7B example on what people rent."""
    compared = rlplan.compare(str(FOLDER.parents[1] / "examples" / "grpo-7b-8xh100.yaml"), hardware=RENTED)
    sides = [side_of(one.plan, row) for one, row in zip(compared.results, compared.rows(), strict=True)]
    write_comparison(sides, FOLDER / "rent.html")
    found = compared.rows()
    with (FOLDER / "rent.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow((*RENT_COLUMNS, "price_of_a_gpu_hour", "price_read_on"))
        for row in found:
            quotes = [(one["dollars"], one["date"]) for one in row["quotes"]]
            numbers = [f"{one:.4g}" if isinstance(one, float) else one for one in map(row.get, RENT_COLUMNS)]
            writer.writerow((*numbers, *(quotes[0] if quotes else ("", ""))))


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
