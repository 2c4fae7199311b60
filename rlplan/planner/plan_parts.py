"""Parts of a plan: its verdict, its KV cache, the alternatives that were scored, and remedies where it does not fit.

In: a memory ledger, the KV demand of rollouts, scored candidates. Out: frozen values that serialize to JSON. Left out:
the plan itself (plan.py) and the searches that fill these values (cpu/search.py, gpu/search.py, remedies.py).
"""

import shlex
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import Enum
from functools import cache
from pathlib import Path
from typing import Any, Literal

from rlplan.dataflow.choice import Choice
from rlplan.errors import NoFeasiblePlanError
from rlplan.memory.ledger import MemoryLedger, Peak
from rlplan.memory.serving.kv import ENOUGH, KvDemand
from rlplan.planner.combinations import Effect
from rlplan.spec.files.yaml import read_yaml
from rlplan.spec.model import ModelSpec
from rlplan.spec.parts.environment import EnvironmentSpec
from rlplan.spec.resolved import SettledJob
from rlplan.timing.step import StepTiming
from rlplan.units import format_bytes
from rlplan.vocabulary import Placement


class Verdict(Enum):
    """Whether a plan fits: in the worst case, in expectation only, or not at all. `REFUSED` means that its framework
    cannot run it.

    `Plan.fits` is the one predicate that decides exit code 0, emitting and running.
    """

    FITS = "fits"
    IN_EXPECTATION = "fits in expectation only"
    DOES_NOT_FIT = "does not fit"
    REFUSED = "refused"

    @property
    def rank(self) -> int:
        """Position in the order from best (0) to worst."""
        return list(Verdict).index(self)

    @property
    def may_fit(self) -> bool:
        """Whether the plan fits at least in expectation, so that its predicted seconds are meaningful."""
        return self in (Verdict.FITS, Verdict.IN_EXPECTATION)

    @staticmethod
    def judge(ledger: MemoryLedger, *, at_least: int = 0, takes_from_host: bool = False) -> "Verdict":
        """Compare the peaks of a ledger with the capacities of devices and hosts.

        at_least: the rank that the KV cache alone leads to. takes_from_host: GPU and host share one memory, so their
        sum must fit. A host of unknown size has capacity 0 and is skipped.
        """
        # such a GPU draws from the same memory as the processes of its host
        taken = ledger.host_peak().num_bytes if takes_from_host else 0

        def fits(bound: Literal["expected", "high"]) -> bool:
            peaks = (ledger.device_peak(device, bound) for device in ledger.devices)
            return all(peak.num_bytes + taken <= ledger.get_device_capacity(peak.scope) for peak in peaks)

        rank = max(at_least, 0 if fits("high") else 1 if fits("expected") else 2)
        peaks = map(ledger.host_peak, ledger.hosts)
        if ledger.host_capacity and any(peak.num_bytes > ledger.get_host_capacity(peak.scope) for peak in peaks):
            rank = 2
        return list(Verdict)[rank]


@dataclass(frozen=True)
class Shortage:
    """A device, host or KV cache that is too small for the job."""

    of: str
    """Name for messages: `a GPU`, `a host's memory`."""
    needed_bytes: int
    """Bytes the job needs there."""
    available_bytes: int
    """Bytes that exist there."""
    peak: Peak
    """The peak that exceeds the capacity."""
    is_of_host: bool = False
    """Whether a host's memory is short, including memory that GPUs share with it."""

    @property
    def sizes(self) -> str:
        """Needed and available bytes, for a message."""
        return f"{format_bytes(self.needed_bytes)} needed, {format_bytes(self.available_bytes)} available{self.excess}"

    @property
    def needs(self) -> str:
        """Needed and available bytes with the name of the place, to follow "the job needs"."""
        room = f"{format_bytes(self.available_bytes)} available{self.excess}"
        return f"{format_bytes(self.needed_bytes)} of {self.of}, {room}"

    @property
    def excess(self) -> str:
        """The missing bytes in parentheses if both sizes print the same; else an empty string."""
        needed, room = self.needed_bytes, self.available_bytes
        return f" ({format_bytes(needed - room)} too much)" if format_bytes(needed) == format_bytes(room) else ""


@dataclass(frozen=True)
class KvReport:
    """The KV cache of one engine with tp x attention_dp ranks.

    Bytes and blocks are per rank; tokens and sequences are per engine.
    """

    kv_cache_memory_bytes: int
    """Bytes allocated to the cache."""
    least_bytes: int
    """Bytes that one sequence of maximum length needs."""
    num_blocks: int
    """Complete blocks in the cache."""
    num_tokens: int
    """Tokens that the cache holds."""
    max_num_seqs: int
    """Maximum number of concurrent sequences."""
    expected_bytes: int
    """Bytes that the rollouts need at the median."""
    enough_bytes: int
    """Bytes that the rollouts need at the 99th percentile."""
    preemption_risk: float
    """Probability that the rollouts need more than the cache holds, so that vLLM preempts sequences."""
    tp: int
    """Tensor-parallel size of the engine."""
    attention_dp: int = 1
    """Data-parallel attention groups, each with its own sequences and cache."""

    @staticmethod
    def build(demand: KvDemand, kv_cache: int, tp: int, attention_dp: int = 1) -> "KvReport":
        """Report on a cache of `kv_cache` bytes per rank."""
        blocks = demand.pool.num_blocks(kv_cache)
        longest = demand.max_prompt_len + demand.lengths.longest
        return KvReport(
            kv_cache_memory_bytes=kv_cache,
            least_bytes=demand.least_bytes,
            num_blocks=blocks,
            num_tokens=attention_dp * demand.pool.num_tokens(blocks, longest),
            max_num_seqs=attention_dp * demand.num_seqs,
            expected_bytes=demand.predict_bytes(0.5),
            enough_bytes=demand.predict_bytes(ENOUGH),
            preemption_risk=demand.preemption_risk(kv_cache),
            tp=tp,
            attention_dp=attention_dp,
        )


@dataclass(frozen=True)
class Considered:
    """A placement, or one ZeRO stage within it, that was not chosen, with the reason."""

    placement: Placement
    reason: str
    """Why it was not chosen, in one sentence."""
    zero_stage: int | None = None
    """ZeRO stage; None if the reason holds for the whole placement."""

    @property
    def name(self) -> str:
        """Name for messages and pages: `hybrid, ZeRO-2`."""
        return self.placement.value + ("" if self.zero_stage is None else f", ZeRO-{self.zero_stage}")


@dataclass(frozen=True)
class Alternative:
    """A scored candidate that was not chosen."""

    choice: Choice
    timing: StepTiming | None
    """Predicted step; None if the hardware profile has no rates."""
    kv_cache: int
    """KV cache bytes per rank."""
    peak_bytes: int
    """Worst-case bytes of the fullest device, or of the host whose memory the devices share."""
    headroom_bytes: int
    """Bytes left on that device in the worst case; negative if it does not fit."""
    verdict: Verdict

    @property
    def seconds(self) -> float:
        """Predicted seconds of a steady step; 0 if unknown."""
        return self.timing.seconds if self.timing else 0.0


@dataclass(frozen=True)
class SearchStats:
    """Size of the search."""

    num_candidates: int = 0
    """Candidates in the search space."""
    num_scored: int = 0
    """Candidates whose bytes and seconds were computed."""


def list_uncounted(job: SettledJob, models: Iterable[ModelSpec]) -> tuple[str, ...]:
    """List the parts of a job that the prediction ignores: a plan covers one turn of text."""
    words = ["images"] if any(model.vision for model in models) else []
    environment = job.rollout.environment
    if job.has_rollouts and environment.is_given:
        if environment.max_turns > 1:
            words.append(f"turns 2 to {environment.max_turns} of a rollout and the prompts that grow with each turn")
        words += ["the memory of agents"] * (environment.agent is not None)
        answers = [name for name, is_there in _ANSWERS if is_there(environment)]
        words.append(f"waiting for {' and '.join(answers)} (at most {environment.timeout_s:g} s per answer)")
    return tuple(words)


_ANSWERS: tuple[tuple[str, Callable[[EnvironmentSpec], bool]], ...] = (
    ("tools", lambda environment: environment.has_tools),
    ("the environment", lambda environment: environment.has_environment and environment.agent is None),
    ("the agent", lambda environment: environment.agent is not None),
)


@cache
def load_remedies() -> dict[str, Any]:
    """Load remedies.yaml: the changes that are tried, and their effects. Only a job that does not fit needs it."""
    return dict(read_yaml(Path(__file__).with_name("remedies.yaml"), "the remedies"))


def list_effects(change: str) -> list[tuple[Effect, str]]:
    """Effects on training of a change as typed, each with its description; the mildest first."""
    table = load_remedies()["effects"]
    return [(Effect[entry["effect"].upper()], entry["words"]) for entry in table if entry["part"] in change]


@dataclass(frozen=True)
class Remedy:
    """One change that makes the job fit (`Plan.fits`)."""

    change: str
    """Overrides as typed on the command line."""
    peak_bytes: int
    """Peak bytes of the fullest device or host after the change."""
    verdict: Verdict
    """Verdict after the change."""
    seconds: float
    """Seconds of a step after the change; 0 if unknown."""
    num_devices: int
    """Devices used after the change."""
    dollars: float | None = None
    """Dollars per step after the change; None without a price."""

    @property
    def learns_less(self) -> str:
        """Effects on learning; empty if there are none."""
        return ", ".join(words for _, words in list_effects(self.change) if words)

    @property
    def effect(self) -> Effect:
        """The strongest effect on the experiment."""
        return max((effect for effect, _ in list_effects(self.change)), default=Effect.NONE)

    def order(self, devices: int) -> tuple[object, ...]:
        """Sort key: the verdict, small effect on learning first, then no more than `devices` devices, then seconds."""
        needs_more, keys = self.num_devices > devices, len(shlex.split(self.change))
        return self.verdict.rank, self.effect, needs_more, self.seconds, keys


def extract_keys(reason: str) -> str:
    """Extract the overrides in parentheses at the end of a reason; empty if there are none.

    >>> extract_keys("rollout.tp 2 was not tried (rollout.tp=1)"), extract_keys("rollout.tp 2 (docs/job.md)")
    ('rollout.tp=1', '')
    """
    # a parenthesis without "=" is a reference to a page, not an override
    words = reason.rpartition(" (")[2].removesuffix(")")
    return words if "=" in words else ""


def explain_impossible(impossible: tuple[Considered, ...], of_the_job: Iterable[str] = ()) -> NoFeasiblePlanError:
    """Build the error for a job without any possible layout.

    job_reasons: refusals that hold for every choice. One of them replaces the placement's reason if both begin with the
    same key.
    """
    reasons = "; ".join(f"{considered.placement}: {considered.reason}" for considered in impossible)
    # a job-wide refusal explains more than a placement's reason about the same key
    reasons = next((reason for reason in of_the_job if reason.partition(":")[0] in reasons), reasons)
    return NoFeasiblePlanError(
        "no layout can be built for this job",
        where="placement.placement, training.zero_stage, hardware.num_devices",
        rule=reasons or "offloaded parameters need zero_stage 3, an offloaded optimizer zero_stage 1 or more",
        way_out=extract_keys(reasons)
        or "set placement.placement and training.zero_stage to auto, or change hardware.num_devices",
    )
