"""Fits the `serving:` constants of Hopper and Blackwell to published times per token, leaving out a pair at a time.

In: the bundled points. Out: reports/accuracy/serving.json: the constants, the error of each pair with the profiles as
they are, and its error with constants fitted without it. Pure Python, about two minutes; `accuracy_evidence.py` shows
the result. The constants of the modules (serving/step.py, serving/counts.py) stay as they are; they were chosen with
all pairs at hand. The profiles' experts' constants lie between the two generations' fits (reports/runtime/seconds.md).

A pair is a model, a GPU and a format. Where the pair left out is the only mixture of experts of its generation, the
experts' constants are the other generation's.
"""

import json
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean

from rlplan.accuracy.files.reading import bundled_points
from rlplan.accuracy.points import MeasuredPoint
from rlplan.accuracy.predict import validate_job
from rlplan.accuracy.serving_points import latency_job
from rlplan.memory.serving.versions import VllmVersion
from rlplan.planner.serving import ServingJob
from rlplan.spec.hardware.profile import ServingRates, SourcedSeconds, SourcedShare
from rlplan.timing.network.cluster import Cluster
from rlplan.timing.serving.counts import EngineCounts, engine_counts
from rlplan.timing.serving.load import ClosedLoop, closed_loop_latency
from rlplan.timing.serving.step import EngineRates
from rlplan.vocabulary import Provenance

FILE = Path(__file__).resolve().parents[2] / "reports" / "accuracy" / "serving.json"
NAMES = ("memory", "matmul", "layer", "collective", "expert_layer")
SHARES = ("memory", "matmul")
START = (0.8, 0.6, 40e-6, 10e-6, 20e-6)
MOST = 0.95
"""A share that nothing reaches: beyond it a fit is punished."""
ITERATIONS = 200
Pair = tuple[str, str, str]


@dataclass(frozen=True)
class Row:
    """One setting, measured once or more. token_s: the mean."""

    pair: Pair
    counts: EngineCounts
    cluster: Cluster
    loop: ClosedLoop
    kv_element_bytes: int
    version: VllmVersion
    token_s: float

    def error(self, constants: Sequence[float] | None) -> float:
        """Relative error with these constants, or with the profile's own."""
        cluster = self.cluster if constants is None else replace_constants(self.cluster, constants)
        rates = EngineRates(self.counts, cluster, kv_element_bytes=self.kv_element_bytes, version=self.version)
        return closed_loop_latency(rates, self.loop).token_s / self.token_s - 1


def replace_constants(cluster: Cluster, constants: Sequence[float]) -> Cluster:
    """The same cluster with other serving constants."""
    provenance = {"provenance": Provenance.ASSUMED, "source": "a fit"}
    values = {
        name: SourcedShare(value=min(1.0, value), **provenance)
        if name in SHARES
        else SourcedSeconds(value=value, **provenance)
        for name, value in zip(NAMES, constants, strict=True)
    }
    return replace(cluster, gpu=cluster.gpu.model_copy(update={"serving": ServingRates.model_construct(**values)}))


def read_rows() -> list[Row]:
    """Every bundled time per token, repeated settings as their mean."""
    measured: dict[tuple[Pair, object], list[tuple[MeasuredPoint, ServingJob]]] = {}
    for point in bundled_points():
        if point.kind in ("serving_tpot", "throughput_infer"):
            server = ServingJob(validate_job(latency_job(point)))
            form = server.quantization.form.name if server.quantization else "bf16"
            pair = ((point.model or "").rpartition("/")[2], server.pool.gpu.name, form)
            setting = (server.cut, server.version, server.loop)
            measured.setdefault((pair, setting), []).append((point, server))
    rows = []
    for (pair, _), measurements in measured.items():
        server = measurements[0][1]
        token_s = fmean(bounds[0] for point, _ in measurements if (bounds := point.measured.bounds)) / 1e3
        counts, kv_bytes = engine_counts(server.model, server.cut), server.kv_element_bytes
        rows.append(Row(pair, counts, server.pool.cluster, server.loop, kv_bytes, server.version, token_s))
    return rows


def fit(rows: list[Row]) -> list[float]:
    """Constants that make the mean squared logarithm of the error small; a pair counts with the root of its rows."""

    def loss(logs: Sequence[float]) -> float:
        constants = [math.exp(value) for value in logs]
        squares: dict[Pair, list[float]] = {}
        for row in rows:
            squares.setdefault(row.pair, []).append(math.log1p(row.error(constants)) ** 2)
        weights = {pair: math.sqrt(len(errors)) for pair, errors in squares.items()}
        mean = sum(weights[pair] * fmean(errors) for pair, errors in squares.items()) / sum(weights.values())
        shares = [value for name, value in zip(NAMES, constants, strict=True) if name in SHARES]
        return mean + 10 * sum(max(0.0, share - MOST) for share in shares)

    return [math.exp(value) for value in minimize(loss, [math.log(value) for value in START])]


def minimize(loss: Callable[[Sequence[float]], float], start: list[float]) -> list[float]:
    """Nelder and Mead's simplex. Source: Computer Journal 7 (1965) 308."""
    corners = [start] + [[x + 0.3 * (i == j) for i, x in enumerate(start)] for j in range(len(start))]
    known = sorted((loss(corner), corner) for corner in corners)
    for _ in range(ITERATIONS):
        *rest, (worst_loss, worst) = known
        middle = [fmean(values) for values in zip(*(corner for _, corner in rest), strict=True)]

        def along(step: float, middle: list[float] = middle, worst: list[float] = worst) -> tuple[float, list[float]]:
            corner = [m + step * (m - w) for m, w in zip(middle, worst, strict=True)]
            return loss(corner), corner

        tried = along(1.0)
        if tried[0] < known[0][0]:
            tried = min(tried, along(2.0))
        elif tried[0] >= rest[-1][0]:
            tried = min(tried, along(-0.5))
        if tried[0] < worst_loss:
            known = sorted([*rest, tried])
            continue
        best = known[0][1]
        shrunk = [[(a + b) / 2 for a, b in zip(best, corner, strict=True)] for _, corner in known[1:]]
        known = sorted([known[0], *((loss(corner), corner) for corner in shrunk)])
    return known[0][1]


def generation(row: Row) -> str:
    """The generation of a row's GPU, by its compute capability."""
    return {"9": "Hopper", "10": "Blackwell"}[row.cluster.gpu.architecture.partition(".")[0]]


def main() -> int:
    """Fit, leave out, write."""
    rows = read_rows()
    by_generation = {name: [row for row in rows if generation(row) == name] for name in ("Hopper", "Blackwell")}
    full = {name: fit(chosen_rows) for name, chosen_rows in by_generation.items()}
    report = []
    for pair in dict.fromkeys(row.pair for row in rows):
        pair_rows = [row for row in rows if row.pair == pair]
        name = generation(pair_rows[0])
        others = [row for row in by_generation[name] if row.pair != pair]
        constants = fit(others)
        if pair_rows[0].counts.experts and not any(row.counts.experts for row in others):
            constants[4:] = full["Blackwell" if name == "Hopper" else "Hopper"][4:]
        inside, outside = ([row.error(used) for row in pair_rows] for used in (None, constants))
        line = {
            "model": pair[0],
            "gpu": pair[1],
            "format": pair[2],
            "has_experts": pair_rows[0].counts.experts is not None,
            "settings": len(pair_rows),
            "mean_error": fmean(map(abs, inside)),
            "bias": fmean(inside),
            "largest_error": max(map(abs, inside)),
            "mean_error_left_out": fmean(map(abs, outside)),
            "bias_left_out": fmean(outside),
            "constants_left_out": dict(zip(NAMES, constants, strict=True)),
        }
        report.append(line)
        print(pair, *(f"{key} {line[key]:.3f}" for key in ("mean_error", "mean_error_left_out", "bias_left_out")))
    fitted = {name: dict(zip(NAMES, constants, strict=True)) for name, constants in full.items()}
    FILE.write_text(json.dumps({"fitted": _round(fitted), "pairs": _round(report)}, indent=1) + "\n")
    print(json.dumps(_round(fitted), indent=1))
    return 0


def _round(value: object) -> object:
    if isinstance(value, dict):
        return {key: _round(part) for key, part in value.items()}
    if isinstance(value, list):
        return [_round(part) for part in value]
    return float(f"{value:.4g}") if isinstance(value, float) else value


if __name__ == "__main__":
    sys.exit(main())
