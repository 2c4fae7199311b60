"""Lengths measured in a run, as overrides of the next job's workload.

In: a run folder (`data.json` has the prompts' lengths, `lengths.json` the responses'). Out: dotted overrides. Left out:
whether the next run's data are similar, which the user asserts by naming the run.
"""

import json
import math
from itertools import pairwise
from pathlib import Path
from statistics import NormalDist
from typing import Any

from pydantic import Field

from rlplan.errors import SpecError
from rlplan.spec.base import Spec, read_json, validate
from rlplan.spec.parts.lengths import (
    MAX_LEN,
    ConstantLengths,
    HistogramLengths,
    Lengths,
    LengthSpec,
    LogNormalLengths,
)

BINS = 20
"""Bins of a stretched distribution."""


class PromptLengths(Spec):
    """Prompt lengths in data.json, in tokens."""

    mean: float = Field(gt=0)
    max: int = Field(ge=1)


class RunLengths(Spec):
    """Response lengths in lengths.json."""

    mean_response_len: int = Field(ge=1)
    response_lengths: HistogramLengths


def read_run_lengths(folder: Path) -> tuple[str, ...]:
    """Overrides with a run's lengths: their distribution on GPUs, otherwise their mean.

    Raises: SpecError when the folder holds none.
    """
    files = {"data.json": folder / "data.json", "lengths.json": folder / "lengths.json"}
    missing = [name for name, file in files.items() if not file.is_file()]
    if len(missing) == len(files):
        raise SpecError(
            f"{folder} holds no lengths",
            where="--lengths",
            rule="a run folder with data.json (lengths of prompts) or lengths.json (of responses)",
            way_out="name the folder of a finished run, which `rlplan run` prints",
        )
    workload: dict[str, Any] = {}
    if "data.json" not in missing:
        facts = read_json(files["data.json"], "the facts about the data")
        prompt_len = facts.get("prompt_len") if isinstance(facts, dict) else facts
        workload["mean_prompt_len"] = math.ceil(
            validate(PromptLengths, prompt_len, file=f"{files['data.json']}: prompt_len").mean
        )
    if "lengths.json" not in missing:
        responses = validate(
            RunLengths, read_json(files["lengths.json"], "the lengths"), file=str(files["lengths.json"])
        )
        workload["response_lengths"] = responses.response_lengths.model_dump(mode="json")
        workload["mean_response_len"] = responses.mean_response_len
    return tuple(f"workload.{key}={json.dumps(value)}" for key, value in workload.items())


def fit_lengths(
    mean: float,
    cap: int,
    *,
    cut_share: float | None,
    longest: float | None,
    num_rollouts: int,
    shape: LengthSpec | None = None,
) -> str:
    """An override with response lengths of a measured mean and tail, capped at `cap`.

    Without a measured tail, only the mean is fitted and the job's own distribution keeps its shape.

    Counts: the log-normal whose fraction `cut_share` reaches the cap, or whose longest of `num_rollouts` answers is
    `longest`, and whose mean, once capped, is the measured one. Bisection finds its deviation; if none gives that mean,
    the closest is taken.

    >>> fit_lengths(500.0, 1024, cut_share=None, longest=None, num_rollouts=8)
    'workload.response_lengths={kind: constant, value: 500}'
    """
    share, limit = cut_share or 0.0, float(cap)
    if not share and longest:
        share, limit = 1 / max(2, num_rollouts), longest
    if not share and shape is not None and not isinstance(shape, ConstantLengths) and mean < cap:
        return _fit_scale(shape, mean, cap)
    if not 0 < share < 1 or mean >= limit:
        return f"workload.response_lengths={{kind: constant, value: {max(1, round(min(mean, cap)))}}}"
    deviations = NormalDist().inv_cdf(1 - share)

    def lengths(sigma: float) -> LogNormalLengths:
        median = min(float(MAX_LEN), max(1.0, limit / math.exp(sigma * deviations)))
        return LogNormalLengths(kind="lognormal", median=median, sigma=sigma)

    low, high = 0.02, 4.0  # a wider distribution with the same tail has a smaller mean
    for _ in range(24):  # to a deviation within 4 / 2^24
        middle = (low + high) / 2
        low, high = (middle, high) if Lengths(lengths(middle), cap).mean > mean else (low, middle)
    return _as_override(lengths(high))


def _fit_scale(shape: LengthSpec, mean: float, cap: int) -> str:
    """The override of the distribution `shape`, stretched so that its mean, once capped at `cap`, is `mean`."""
    low, high = 1e-6, 1e6
    for _ in range(60):
        factor = math.sqrt(low * high)  # bisection of the logarithm: the range spans several orders of magnitude
        is_short = Lengths(_stretch(shape, factor), cap).mean < mean
        low, high = (factor, high) if is_short else (low, factor)
    return _as_override(_stretch(shape, high))


def _stretch(shape: LengthSpec, factor: float) -> LengthSpec:
    """The distribution of lengths that are all `factor` times as long; all but a log-normal one becomes a histogram."""
    if isinstance(shape, LogNormalLengths):
        return shape.model_copy(update={"median": min(float(MAX_LEN), shape.median * factor)})
    quantiles = [min(MAX_LEN, max(1, round(factor * shape.quantile(at / BINS)))) for at in range(BINS + 1)]
    edges = list(dict.fromkeys(quantiles))  # rounding may close a bin, whose share joins the next one
    counts = [quantiles.index(high) - quantiles.index(low) for low, high in pairwise(edges)]
    return (
        HistogramLengths(kind="histogram", edges=tuple(edges), counts=tuple(counts))
        if counts
        else ConstantLengths(value=edges[0])
    )


def _as_override(lengths: LengthSpec) -> str:
    if isinstance(lengths, LogNormalLengths):
        return (
            f"workload.response_lengths={{kind: lognormal, median: {lengths.median:.4g}, sigma: {lengths.sigma:.3g}}}"
        )
    return f"workload.response_lengths={json.dumps(lengths.model_dump(mode='json'))}"
