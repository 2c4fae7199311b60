"""Log-prob mismatch between engine and trainer (train-inference mismatch): whether it is as small as their types allow.

In: sums and counts over a step's tokens, from the trainer's ranks. Out: mean, 99th percentile and maximum of the
difference; an error, or a text for an alarm, where they are further apart than the types explain.
Left out: whether the weights are the same (weight_verification.py). The driver reads this module: no torch.

A maximum says little: among 15,360 tokens of one honest model in bf16 one differs by 0.54 (docs/decisions.md).
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
"""What the names of the numbers begin with that a pass gives: `_sum`, `_count`, `_max` and `_bin:N`."""

BINS_PER_DOUBLING = 8
LOWEST_BIN, HIGHEST_BIN = -30 * BINS_PER_DOUBLING, 10 * BINS_PER_DOUBLING
"""Bin N counts differences up to 2^(N/8): a percentile is known to 9 %."""

ENOUGH_TOKENS = 1000
"""Of fewer the 99th percentile is the maximum, or nearly."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Of |log-prob of the trainer - of the engine|, over a step's tokens. source: where the numbers come from."""

    mean: float
    p99: float
    source: str


FOUR_BITS = "4 bits"
"""The row of limits for engines whose weights are in 4 bits, whatever the format."""

LIMITS: dict[str, Limits] = {
    name: Limits(**row)
    for name, row in json.loads(Path(__file__).with_name("logprob_limits.json").read_text("utf-8")).items()
}
"""By the coarser format of the two sides, the coarsest first."""


@dataclass(frozen=True, slots=True)
class Differences:
    """Over all tokens of a mini-batch, whose number is count."""

    mean: float
    p99: float
    largest: float
    count: int


def choose_limits(job: ResolvedJob) -> tuple[str, Limits]:
    """(the coarser format of engine and trainer, its limits)."""
    rollout = job.rollout
    formats = {str(job.training.dtype), str(rollout.dtype), rollout.quantization, rollout.kv_dtype}
    if rollout.base_path is not None or rollout.quantization == "mxfp4":
        formats.add(FOUR_BITS)
    name = next(name for name in LIMITS if name in formats)
    return str(name), LIMITS[name]


def differences_of(passes: Iterable[Mapping[str, float]]) -> Differences:
    """What ranks that each had their own tokens say together."""
    total, count, largest, bins = 0.0, 0.0, 0.0, dict[int, float]()
    for sums in passes:
        total, count = total + sums[f"{DIFFERENCE}_sum"], count + sums[f"{DIFFERENCE}_count"]
        found = sums[f"{DIFFERENCE}_max"]
        largest = found if math.isnan(found) else max(largest, found)
        for name, number in sums.items():
            if name.startswith(f"{DIFFERENCE}_bin:"):
                index = int(name.rpartition(":")[2])
                bins[index] = bins.get(index, 0.0) + number
    return Differences(total / count if count else 0.0, _percentile(bins, 0.99), largest, int(count))


def _percentile(bins: Mapping[int, float], share: float) -> float:
    """The upper edge of the bin up to which such a share of all tokens lies.

    >>> _percentile({-8: 98.0, 0: 1.0, 8: 1.0}, 0.99)
    1.0
    """
    wanted, so_far = share * sum(bins.values()), 0.0
    for index in sorted(bins):
        so_far += bins[index]
        if so_far >= wanted:
            return 0.0 if index <= LOWEST_BIN else 2.0 ** (index / BINS_PER_DOUBLING)
    return 0.0


def check_logprob_mismatch(found: Differences, job: ResolvedJob, step: int, *, is_accepted: bool = False) -> str | None:
    """The text of an alarm where the difference is beyond the limits; None where it is within them.

    is_accepted: the job itself asks for a correction. The one that is on by default in 16 bits is for rounding: what
    rounding does not explain still ends the run.
    Raises: RunError where it is beyond them and not accepted, or where a log-prob is no number.
    """
    name, limits = choose_limits(job)
    is_close = found.mean <= limits.mean and (found.count < ENOUGH_TOKENS or found.p99 <= limits.p99)
    if is_close and math.isfinite(found.largest):
        return None
    weights = "the same weights in 4 bits" if name == FOUR_BITS else "the same weights"
    what = (
        f"engine and trainer, of {weights}, differ by {found.mean:.3g} on average in the log-prob of a sampled "
        f"token, by {found.p99:.3g} at the 99th percentile, by {found.largest:.3g} at most ({found.count} tokens)"
    )
    rule = f"at most {limits.mean:g} on average and {limits.p99:g} at the 99th percentile in {name}"
    if is_accepted and job.algorithm.corrects_importance and math.isfinite(found.mean):
        return f"{what}; {rule}; algorithm.importance={job.algorithm.importance} corrects for it"
    raise RunError(what, where=f"step {step}, train_forward_backward", rule=rule, way_out=_way_out(job, name))


def _way_out(job: ResolvedJob, name: str) -> str:
    remedies = []
    if job.algorithm.weighs_rollouts:
        remedies.append("algorithm.importance=truncate, said in the job, accepts and corrects it and goes on")
    if name == FOUR_BITS:
        key = "rollout.quantization=none" if job.rollout.base_path is None else "rollout.base_path=null"
        return "; ".join([*remedies, f"{key} loads whole weights; a base of another revision differs as much"])
    if name != Dtype.FLOAT32:
        remedies.append("training.dtype=float32 rollout.dtype=float32 computes alike")
    return "; ".join([*remedies, "the weights themselves agree, by their checksums: report it with the run folder"])
