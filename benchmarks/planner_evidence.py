"""Regenerates reports/planner/time_against_gpus.{csv,png}, how long a plan takes, and rent.{csv,html},
which GPUs to rent for the 7B example, at the bundled prices.

In: nothing. Out: the committed tables and pictures. Takes some minutes; `make planner` calls it. `--draw` alone draws
the committed table once more.
"""

import csv
import sys
from pathlib import Path

import matplotlib as mpl
from bench_planner import Case, search_seconds, shell_seconds
from figures import RC, new_figure, save_png

import rlplan
from rlplan.report.plans.comparison import make_side, write_comparison

FOLDER = Path(__file__).resolve().parents[1] / "reports" / "planner"
COUNTS = (8, 64, 1024, 16384)
MEGATRON = ("training.backend=megatron", *(f"training.{axis}=auto" for axis in ("tp", "pp", "cp", "ep")))
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
LINES = ("#1c2630", "#33508f", "#c8702a", "#b3261e")
COLUMNS = ("model", "trainer", "gpus", "shell_s", "search_s", "candidates", "rated")


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
    draw()
    compare_rents()


def compare_rents() -> None:
    """`rlplan compare` of the 7B example on what people rent."""
    compared = rlplan.compare(str(FOLDER.parents[1] / "examples" / "grpo-7b-8xh100.yaml"), hardware=RENTED)
    sides = [make_side(result.plan, row) for result, row in zip(compared.results, compared.rows(), strict=True)]
    write_comparison(sides, FOLDER / "rent.html")
    compared_rows = compared.rows()
    with (FOLDER / "rent.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow((*RENT_COLUMNS, "price_of_a_gpu_hour", "price_read_on"))
        for row in compared_rows:
            quotes = [(quote["dollars"], quote["date"]) for quote in row["quotes"]]
            numbers = [f"{cell:.4g}" if isinstance(cell, float) else cell for cell in map(row.get, RENT_COLUMNS)]
            writer.writerow((*numbers, *(quotes[0] if quotes else ("", ""))))


Row = tuple[str, str, int, float, float, int, int]


def _measure(model: str, gpus: str, count: int, words: tuple[str, ...]) -> Row:
    """One question: as many prompts as there are GPUs, at least 128, so that every GPU has work."""
    prompts = f"workload.num_prompts_per_step={max(128, count)}"
    case = Case(model, "grpo", gpus, 5.0, (prompts, *words))
    seconds, stats = search_seconds(case)
    trainer = "megatron" if words else "deepspeed"
    shell = round(shell_seconds(case), 3)
    return model, trainer, count, shell, round(seconds, 3), stats.num_candidates, stats.num_scored


def draw() -> None:
    """time_against_gpus.png, from the table beside it."""
    with (FOLDER / "time_against_gpus.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    with mpl.rc_context(RC):
        figure = new_figure(7.2, 3.6)
        figure.set_layout_engine("constrained")
        axes, lowest = figure.add_subplot(), -1.0
        for (model, trainer), color in zip(
            dict.fromkeys((row["model"], row["trainer"]) for row in rows), LINES, strict=True
        ):
            own_rows = [row for row in rows if (row["model"], row["trainer"]) == (model, trainer)]
            seconds = [float(row["shell_s"]) for row in own_rows]
            axes.plot(
                [int(row["gpus"]) for row in own_rows], seconds, color=color, linewidth=1.8, marker="o", markersize=4
            )
            label = model.split("/")[1] + (" on Megatron" if trainer == "megatron" else "")
            lowest = max(seconds[-1], lowest + 0.28)
            axes.annotate(label, (int(own_rows[-1]["gpus"]), lowest), (8, 0), textcoords="offset points",
                          color=color, va="center")  # fmt: skip
        axes.set_xscale("log", base=2)
        axes.set_xlim(6, COUNTS[-1] * 12)
        axes.set_xticks(COUNTS, [f"{count:,}" for count in COUNTS])
        axes.set_ylim(bottom=0)
        axes.set_xlabel("GPUs")
        axes.set_title("Seconds of `rlplan plan`, from the shell, nothing cached")
        axes.grid(axis="y")
        save_png(figure, FOLDER / "time_against_gpus.png")


if __name__ == "__main__":
    draw() if sys.argv[1:] == ["--draw"] else main()
