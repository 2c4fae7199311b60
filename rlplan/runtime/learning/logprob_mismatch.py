"""Log-prob mismatch between engine and trainer (train-inference mismatch), compared with limits for their dtypes.

In: sums and counts over a step's tokens, from the trainer's ranks. Out: mean, 99th percentile and maximum of the
difference; an error, or a text for an alarm, where rounding does not explain the difference.
Left out: whether the weights are the same (weight_verification.py). This module does not import torch, because the
driver imports it.

The maximum has no limit: among 15,360 tokens of a correct bf16 model one differs by 0.54 (docs/lab-notes.md).
"""

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from rlplan.errors import RunError
from rlplan.spec.resolved import ResolvedJob
from rlplan.vocabulary import Dtype

DIFFERENCE = "logprob_difference"
"""Prefix of the numbers that a pass reports: `_sum`, `_count`, `_max` and `_bin:N`."""

BINS_PER_DOUBLING = 8
LOWEST_BIN, HIGHEST_BIN = -30 * BINS_PER_DOUBLING, 10 * BINS_PER_DOUBLING
"""Bin N counts differences up to 2^(N/8), so percentiles are accurate to 9 %."""

ENOUGH_TOKENS = 1000
"""Minimum number of tokens for checking the 99th percentile; with fewer it is close to the maximum."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of |trainer's log-prob - engine's log-prob| over a step's tokens."""

    mean: float
    p99: float
    source: str
    """The measurement that the limits come from."""


FOUR_BITS = "4 bits"
"""Name of the limits for engines with 4-bit weights, whatever the format."""

LIMITS: dict[str, Limits] = {
    name: Limits(**row)
    for name, row in json.loads(Path(__file__).with_name("logprob_limits.json").read_text("utf-8")).items()
}
"""Limits by the coarser format of engine and trainer, the coarsest format first."""


@dataclass(frozen=True, slots=True)
class Differences:
    """Absolute log-prob differences over all tokens of a mini-batch."""

    mean: float
    p99: float
    largest: float
    count: int
    """Number of tokens."""


def choose_limits(job: ResolvedJob) -> tuple[str, Limits]:
    """Return the coarser format of engine and trainer, and its limits."""
    rollout = job.rollout
    formats = {str(job.training.dtype), str(rollout.dtype), rollout.quantization, rollout.kv_dtype}
    if rollout.base_path is not None or rollout.quantization == "mxfp4":
        formats.add(FOUR_BITS)
    name = next(name for name in LIMITS if name in formats)
    return str(name), LIMITS[name]


def merge_differences(passes: Iterable[Mapping[str, float]]) -> Differences:
    """Merge the sums of ranks that had different tokens."""
    total, count, largest, bins = 0.0, 0.0, 0.0, dict[int, float]()
    for sums in passes:
        total, count = total + sums[f"{DIFFERENCE}_sum"], count + sums[f"{DIFFERENCE}_count"]
        rank_largest = sums[f"{DIFFERENCE}_max"]
        # max() would drop a NaN that comes second
        largest = rank_largest if math.isnan(rank_largest) else max(largest, rank_largest)
        for name, number in sums.items():
            if name.startswith(f"{DIFFERENCE}_bin:"):
                index = int(name.rpartition(":")[2])
                bins[index] = bins.get(index, 0.0) + number
    return Differences(total / count if count else 0.0, _percentile(bins, 0.99), largest, int(count))


def _percentile(bins: Mapping[int, float], share: float) -> float:
    """Upper edge of the bin below which the given share of all tokens lies.

    >>> _percentile({-8: 98.0, 0: 1.0, 8: 1.0}, 0.99)
    1.0
    """
    wanted, so_far = share * sum(bins.values()), 0.0
    for index in sorted(bins):
        so_far += bins[index]
        if so_far >= wanted:
            return 0.0 if index <= LOWEST_BIN else 2.0 ** (index / BINS_PER_DOUBLING)
    return 0.0


def check_logprob_mismatch(
    differences: Differences, job: ResolvedJob, step: int, *, is_accepted: bool = False
) -> str | None:
    """Return the text of an alarm if the difference exceeds the limits; None if it does not.

    is_accepted: the job explicitly asks for importance correction. The correction that is on by default in 16 bits only
    covers rounding, so larger differences still end the run.
    Raises: RunError where the difference exceeds the limits and is not accepted, or where a log-prob is NaN.
    """
    name, limits = choose_limits(job)
    has_close_p99 = differences.count < ENOUGH_TOKENS or differences.p99 <= limits.p99
    if differences.mean <= limits.mean and has_close_p99 and math.isfinite(differences.largest):
        return None
    weights = "the same weights in 4 bits" if name == FOUR_BITS else "the same weights"
    what = (
        f"log-probs of engine and trainer, with {weights}, differ by {differences.mean:.3g} on average, "
        f"{differences.p99:.3g} at the 99th percentile, {differences.largest:.3g} at most ({differences.count} tokens)"
    )
    rule = f"at most {limits.mean:g} on average and {limits.p99:g} at the 99th percentile in {name}"
    if is_accepted and job.algorithm.corrects_importance and math.isfinite(differences.mean):
        return f"{what}; {rule}; algorithm.importance={job.algorithm.importance} corrects for it"
    raise RunError(what, where=f"step {step}, train_forward_backward", rule=rule, way_out=_way_out(job, name))


def _way_out(job: ResolvedJob, name: str) -> str:
    remedies = []
    if job.algorithm.weighs_rollouts:
        remedies.append(
            "algorithm.importance=truncate in the job corrects for the difference and lets the run continue"
        )
    if name == FOUR_BITS:
        key = "rollout.quantization=none" if job.rollout.base_path is None else "rollout.base_path=null"
        return "; ".join([*remedies, f"{key} loads unquantized weights; check that the base has the policy's revision"])
    if name != Dtype.FLOAT32:
        remedies.append("training.dtype=float32 rollout.dtype=float32 removes rounding differences")
    return "; ".join([*remedies, "the weights have equal checksums: report it with the run folder"])
