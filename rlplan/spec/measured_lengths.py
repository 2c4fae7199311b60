"""Lengths that a run has measured, as overrides of the next job's workload.

In: a run folder (`data.json` has the prompts' lengths, `lengths.json` the responses'). Out: dotted overrides.
Left out: whether the next run's data are alike: naming the run says so.
"""

import json
import math
from pathlib import Path
from statistics import NormalDist
from typing import Any

from pydantic import Field

from rlplan.errors import SpecError
from rlplan.spec.base import Spec, read_json, validate
from rlplan.spec.parts.lengths import MAX_LEN, HistogramLengths, Lengths, LengthSpec, LogNormalLengths


class PromptLengths(Spec):
    """What data.json says of the prompts, in tokens."""

    mean: float = Field(gt=0)
    max: int = Field(ge=1)


class RunLengths(Spec):
    """What lengths.json says of the responses."""

    mean_response_len: int = Field(ge=1)
    response_lengths: HistogramLengths


def lengths_of_run(folder: Path) -> tuple[str, ...]:
    """Overrides that make a plan count with a run's lengths: on GPUs with their distribution, else with their mean.

    Raises: SpecError when the folder holds none.
    """
    files = {"data.json": folder / "data.json", "lengths.json": folder / "lengths.json"}
    missing = [name for name, file in files.items() if not file.is_file()]
    if len(missing) == len(files):
        raise SpecError(
            f"{folder} holds no lengths",
            where="--lengths",
            rule="a run folder with data.json (lengths of prompts) or lengths.json (of responses)",
            way_out="name the folder of a run that has ended; `rlplan run` says where it is",
        )
    said: dict[str, Any] = {}
    if "data.json" not in missing:
        found = _part(files["data.json"], "prompt_len")
        said["mean_prompt_len"] = math.ceil(
            validate(PromptLengths, found, file=f"{files['data.json']}: prompt_len").mean
        )
    if "lengths.json" not in missing:
        responses = validate(
            RunLengths, read_json(files["lengths.json"], "the lengths"), file=str(files["lengths.json"])
        )
        said["response_lengths"] = responses.response_lengths.model_dump(mode="json")
        said["mean_response_len"] = responses.mean_response_len
    return tuple(f"workload.{key}={json.dumps(value)}" for key, value in said.items())


def fitted_lengths(
    mean: float,
    cap: int,
    *,
    cut_share: float | None,
    longest: float | None,
    num_rollouts: int,
    shape: LengthSpec | None = None,
) -> str:
    """An override: lengths with a measured mean and a measured tail, cut at `cap`; without a tail the mean alone, of
    the shape that the job has.

    Counts: the log-normal of which a share `cut_share` reaches the cap, or 1 in `num_rollouts` the longest answer, and
    whose mean, once cut, is the measured one. Its deviation is found by halving; what no deviation gives is met as near
    as it can be.

    >>> fitted_lengths(500.0, 1024, cut_share=None, longest=None, num_rollouts=8)
    'workload.response_lengths={kind: constant, value: 500}'
    """
    share, at = cut_share or 0.0, float(cap)
    if not share and longest:
        share, at = 1 / max(2, num_rollouts), longest
    if not share and isinstance(shape, LogNormalLengths) and mean < cap:
        return _with_mean(mean, cap, shape.sigma)
    if not 0 < share < 1 or mean >= at:
        return f"workload.response_lengths={{kind: constant, value: {max(1, round(min(mean, cap)))}}}"
    deviations = NormalDist().inv_cdf(1 - share)

    def lengths(sigma: float) -> LogNormalLengths:
        median = min(float(MAX_LEN), max(1.0, at / math.exp(sigma * deviations)))
        return LogNormalLengths(kind="lognormal", median=median, sigma=sigma)

    low, high = 0.02, 4.0  # a wider distribution with the same tail has a smaller mean
    for _ in range(24):
        middle = (low + high) / 2
        low, high = (middle, high) if Lengths(lengths(middle), cap).mean > mean else (low, middle)
    return _as_override(lengths(high))


def _with_mean(mean: float, cap: int, sigma: float) -> str:
    """The override of log-normal lengths of that deviation whose mean, once cut at `cap`, is the given one."""
    low, high = 1.0, 1e3 * cap
    for _ in range(60):
        median = math.sqrt(low * high)
        is_short = Lengths(LogNormalLengths(kind="lognormal", median=median, sigma=sigma), cap).mean < mean
        low, high = (median, high) if is_short else (low, median)
    return _as_override(LogNormalLengths(kind="lognormal", median=min(float(MAX_LEN), high), sigma=sigma))


def _as_override(lengths: LogNormalLengths) -> str:
    return f"workload.response_lengths={{kind: lognormal, median: {lengths.median:.4g}, sigma: {lengths.sigma:.3g}}}"


def _part(file: Path, key: str) -> Any:
    data = read_json(file, "the facts about the data")
    return data.get(key) if isinstance(data, dict) else data
