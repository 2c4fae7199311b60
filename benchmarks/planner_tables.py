"""Regenerates reports/planner/README.md with published.csv and scan.{csv,png}: published RL steps beside ours, and step
times over numbers of GPUs.

In: the bundled points, the 7B example. Out: the tables and the picture. `make planner` calls it; some minutes. `--draw`
alone makes README.md and the picture from the committed tables.
"""

import csv
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from statistics import median
from typing import Any

import matplotlib as mpl
from rlplan_cli.render.plan import choice_line

from benchmarks.figures import RC, new_figure, save_png
from benchmarks.texts import format_table, read_texts
from rlplan.accuracy.compare import compare
from rlplan.accuracy.files.reading import bundled_points, read_points
from rlplan.accuracy.points import MeasuredPoint
from rlplan.accuracy.predictions import CannotPredict
from rlplan.accuracy.rl_steps.job import rl_job
from rlplan.accuracy.settings import find_gpu
from rlplan.accuracy.training.settings import RunSettings, num_ranks
from rlplan.errors import RlplanError
from rlplan.planner.search import find_best_plan
from rlplan.spec.files.job_file import job_from, load_job

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "reports" / "planner"
SEVEN_B = ROOT / "examples" / "grpo-7b-8xh100.yaml"
COUNTS = range(1, 65)
LENGTHS = (0.5, 0.75, 1.0, 1.5, 2.0)
COLORS = ("#8fa6cf", "#5f7fb5", "#1c2630", "#c8702a", "#b3261e")
STEPS, RECIPES = "rl_step_time", "rl_fits"
RECIPES_FILE = ROOT / "tests" / "accuracy" / "rl_steps" / "recipes.json"
COLUMNS = ("point", "model", "gpus", "published", "unit", "published_layout", "error", "own_step_s", "own_layout")
SCAN_COLUMNS = ("gpus", *(f"step_s_at_{length:g}" for length in LENGTHS))

TEXTS = read_texts(__file__)


def main() -> None:
    """The tables, then the page."""
    write(FOLDER / "published.csv", COLUMNS, published_rows())
    write(FOLDER / "scan.csv", SCAN_COLUMNS, scan_rows())
    draw()


def write(path: Path, columns: tuple[str, ...], rows: Iterable[tuple[Any, ...]]) -> None:
    """A table with its head."""
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(columns)
        writer.writerows(rows)


def points() -> tuple[MeasuredPoint, ...]:
    """The bundled RL steps, and published recipes that run."""
    return (*(point for point in bundled_points() if point.kind == STEPS), *read_points(RECIPES_FILE))


def published_rows() -> Iterator[tuple[Any, ...]]:
    """Each RL step and recipe."""
    for point, compared in zip(points(), compare(points()).points, strict=True):
        is_step = point.kind == STEPS
        predicted = f"{compared.predicted:.4g}" if isinstance(compared.predicted, float) else compared.predicted
        error = f"{compared.relative_error:.4f}" if is_step and compared.relative_error is not None else ""
        published = (
            (f"{compared.measured:.4g}", compared.unit) if isinstance(compared.measured, float) else ("runs", "")
        )
        gpu = find_gpu(point)
        gpus = f"{num_ranks(RunSettings(point))} {gpu.name if gpu else point.gpu}"
        yield point.id, point.model, gpus, *published, predicted, error, *own_choice(point)


def own_choice(point: MeasuredPoint) -> tuple[str, str]:
    """(seconds of a step, layout) of the same job with nothing forced; where it cannot be said, why."""
    try:
        job = rl_job(point)
    except CannotPredict as error:
        return "", f"not asked: {error}"
    backend, staleness = job["training"]["backend"], job["placement"].get("max_staleness", 0)
    job |= {"training": {"backend": backend}, "rollout": {}, "placement": {"max_staleness": staleness}}
    try:
        plan = find_best_plan(job_from(job))
    except RlplanError as error:
        return "", str(error).splitlines()[0]
    return f"{plan.seconds:.4g}", f"{plan.verdict.value}, {choice_line(plan)}"


def scan_rows() -> Iterator[tuple[Any, ...]]:
    """Seconds of a step for each number of GPUs, by length of responses."""
    for count in COUNTS:
        yield count, *(f"{_step_s(count, length):.6g}" for length in LENGTHS)


def _step_s(num_gpus: int, length: float) -> float:
    lengths = f"workload.max_response_len={int(8192 * length)}", f"workload.response_lengths.median={int(900 * length)}"
    gpus = "hardware.profile=h100-sxm", f"hardware.num_devices={num_gpus}"
    return find_best_plan(load_job(SEVEN_B, (*gpus, *lengths))).seconds


def read(name: str) -> list[dict[str, str]]:
    """A committed table."""
    with (FOLDER / name).open(newline="") as file:
        return list(csv.DictReader(file))


def draw() -> None:
    """README.md and scan.png, from the tables beside them."""
    published, scan = read("published.csv"), read("scan.csv")
    steps = [row for row in published if row["unit"]]
    errors = sorted(abs(float(row["error"])) for row in steps if row["error"])
    slower = sum(
        float(row[column]) > min(float(earlier[column]) for earlier in scan[: place + 1]) * (1 + 1e-5)
        for column in SCAN_COLUMNS[1:]
        for place, row in enumerate(scan)
    )
    page = TEXTS["head"] + TEXTS["steps"].format(num=len(errors), median=median(errors), largest=errors[-1])
    page += format_table(("step", "model", "GPUs", "published", "forced", "error", "own choice, s", "own layout"), [
        (row["point"], row["model"], row["gpus"], f"{row['published']} {row['unit']}", row["published_layout"],
         f"{float(row['error']):+.1%}" if row["error"] else "", row["own_step_s"], row["own_layout"])
        for row in steps
    ])  # fmt: skip
    page += "\n\n" + TEXTS["recipes"]
    page += format_table(("recipe", "model", "GPUs", "forced", "own choice, s", "own layout"), [
        (row["point"], row["model"], row["gpus"], row["published_layout"], row["own_step_s"], row["own_layout"])
        for row in published if not row["unit"]
    ])  # fmt: skip
    page += "\n\n" + TEXTS["scan"].format(slower=slower, num=len(scan) * len(LENGTHS))
    (FOLDER / "README.md").write_text(page, encoding="utf-8")
    draw_scan(scan)


def draw_scan(scan: list[dict[str, str]]) -> None:
    """Seconds of a step against GPUs, a line a length."""
    with mpl.rc_context(RC):
        figure = new_figure(7.2, 3.6)
        figure.set_layout_engine("constrained")
        axes = figure.add_subplot()
        counts = [int(row["gpus"]) for row in scan]
        for column, length, color in zip(SCAN_COLUMNS[1:], LENGTHS, COLORS, strict=True):
            seconds = [float(row[column]) for row in scan]
            axes.plot(counts, seconds, color=color, linewidth=1.6, drawstyle="steps-post", label=f"{length:g} times")
        axes.set_xscale("log", base=2)
        axes.set_yscale("log", base=2)
        axes.set_xticks((1, 2, 4, 8, 16, 32, 64), ["1", "2", "4", "8", "16", "32", "64"])
        ticks = (16, 32, 64, 128, 256, 512, 1024)
        axes.set_yticks(ticks, [str(tick) for tick in ticks])
        axes.set_xlabel("H100")
        axes.set_title("Seconds of a step of the 7B example, by length of responses")
        axes.legend()
        axes.grid(axis="y")
        save_png(figure, FOLDER / "scan.png")


if __name__ == "__main__":
    draw() if sys.argv[1:] == ["--draw"] else main()
