"""Parts of a plan: its verdict, its KV cache, what else was looked at, and what would make it fit.

In: a ledger, demands of rollouts, candidates that were rated. Out: frozen, JSON-able values.
Left out: the plan itself (plan.py), and who finds these (cpu/search.py, gpu/search.py, remedies.py).
"""

import shlex
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import Enum
from typing import Literal

from rlplan.dataflow.choice import Choice
from rlplan.errors import NoFeasiblePlanError
from rlplan.memory.ledger import MemoryLedger, Peak
from rlplan.memory.serving.kv_demand import ENOUGH, KvDemand
from rlplan.spec.model import ModelSpec
from rlplan.spec.parts.environment import EnvironmentSpec
from rlplan.spec.resolved import SettledJob
from rlplan.timing.step import StepTiming
from rlplan.units import format_bytes
from rlplan.vocabulary import Placement


class Verdict(Enum):
    """Whether a plan fits: at the high end of every interval, as expected only, or not; or its framework refuses it.

    `Plan.fits` is the one predicate for what exits 0, is emitted and run.
    """

    FITS = "fits"
    IN_EXPECTATION = "fits in expectation only"
    DOES_NOT_FIT = "does not fit"
    REFUSED = "refused"

    @property
    def rank(self) -> int:
        """0 is best."""
        return list(Verdict).index(self)

    @property
    def may_fit(self) -> bool:
        """Whether the plan fits at least as expected, so that its seconds mean something."""
        return self in (Verdict.FITS, Verdict.IN_EXPECTATION)

    @staticmethod
    def judge(ledger: MemoryLedger, *, at_least: int = 0, takes_from_host: bool = False) -> "Verdict":
        """The verdict on the bytes of a ledger. at_least: the rank that the KV cache alone leads to.

        takes_from_host: a GPU's memory is the host's, so that both must fit into it together. A host of which nothing
        is known has a capacity of 0 and is not looked at.
        """
        taken = ledger.host_peak().num_bytes if takes_from_host else 0

        def fits(bound: Literal["expected", "high"]) -> bool:
            peaks = (ledger.device_peak(device, bound) for device in ledger.devices)
            return all(peak.num_bytes + taken <= ledger.capacity_of(peak.scope) for peak in peaks)

        rank = max(at_least, 0 if fits("high") else 1 if fits("expected") else 2)
        peaks = map(ledger.host_peak, ledger.hosts)
        if ledger.host_capacity and any(peak.num_bytes > ledger.host_capacity_of(peak.scope) for peak in peaks):
            rank = 2
        return list(Verdict)[rank]


@dataclass(frozen=True)
class Shortage:
    """What is too small."""

    of: str
    """In words: `a GPU`, `a host's memory`."""
    needed_bytes: int
    """That it would need."""
    available_bytes: int
    """That it has."""
    peak: Peak
    """The moment at which it is short."""
    is_of_host: bool = False
    """Whether a host's memory is short, also one that GPUs share."""

    @property
    def sizes(self) -> str:
        """Both sizes in words."""
        return f"{format_bytes(self.needed_bytes)} needed, {format_bytes(self.available_bytes)} available{self.excess}"

    @property
    def needs(self) -> str:
        """The same behind `the job needs`."""
        room = f"{format_bytes(self.available_bytes)} available{self.excess}"
        return f"{format_bytes(self.needed_bytes)} of {self.of}, {room}"

    @property
    def excess(self) -> str:
        """How much is missing, in words, where both sizes read the same; else empty."""
        needed, room = self.needed_bytes, self.available_bytes
        return f" ({format_bytes(needed - room)} too much)" if format_bytes(needed) == format_bytes(room) else ""


@dataclass(frozen=True)
class KvReport:
    """The KV cache of one engine of tp x attention_dp ranks. Bytes and blocks are of one rank; tokens and sequences of
    the engine."""

    kv_cache_memory_bytes: int
    """That it is given."""
    least_bytes: int
    """That one longest sequence takes."""
    num_blocks: int
    """Whole blocks in it."""
    num_tokens: int
    """That it holds."""
    max_num_seqs: int
    """That run at once."""
    expected_bytes: int
    """That the rollouts ask for at the median."""
    enough_bytes: int
    """That they ask for at the 99th percentile."""
    preemption_risk: float
    """Probability that they need more than there is."""
    tp: int
    """Ranks of the engine that share a layer."""
    attention_dp: int = 1
    """Groups of them, each with sequences and a cache of its own."""

    @staticmethod
    def build(demand: KvDemand, kv_cache: int, tp: int, attention_dp: int = 1) -> "KvReport":
        """The report on a cache of so many bytes."""
        blocks = demand.pool.num_blocks(kv_cache)
        longest = demand.max_prompt_len + demand.lengths.longest
        return KvReport(
            kv_cache_memory_bytes=kv_cache,
            least_bytes=demand.least_bytes,
            num_blocks=blocks,
            num_tokens=attention_dp * demand.pool.num_tokens(blocks, longest),
            max_num_seqs=attention_dp * demand.num_seqs,
            expected_bytes=demand.bytes_at(0.5),
            enough_bytes=demand.bytes_at(ENOUGH),
            preemption_risk=demand.preemption_risk(kv_cache),
            tp=tp,
            attention_dp=attention_dp,
        )


@dataclass(frozen=True)
class Considered:
    """A placement, or one ZeRO stage in it, that was not chosen, and why."""

    placement: Placement
    reason: str
    """For people."""
    zero_stage: int | None = None
    """None for the whole placement."""

    @property
    def name(self) -> str:
        """As it is named on a page."""
        return self.placement.value + ("" if self.zero_stage is None else f", ZeRO-{self.zero_stage}")


@dataclass(frozen=True)
class Alternative:
    """Another candidate that was scored."""

    choice: Choice
    timing: StepTiming | None
    """None where the machine has no rates."""
    kv_cache: int
    """Bytes of a rank."""
    peak_bytes: int
    """Of the fullest device, or of a host whose memory the devices share, at the high end."""
    headroom_bytes: int
    """That are left there; negative where it does not fit."""
    verdict: Verdict

    @property
    def seconds(self) -> float:
        """Of a usual step; 0 where they are not known."""
        return self.timing.seconds if self.timing else 0.0


@dataclass(frozen=True)
class SearchStats:
    """How much was looked at."""

    num_candidates: int = 0
    """That there are."""
    num_scored: int = 0
    """Whose bytes and seconds were computed."""


def list_uncounted(job: SettledJob, models: Iterable[ModelSpec]) -> tuple[str, ...]:
    """What of a job its bytes and seconds leave out, for people: a plan counts one turn of text."""
    words = ["images"] if any(model.vision for model in models) else []
    environment = job.rollout.environment
    if job.has_rollouts and environment.is_given:
        if environment.max_turns > 1:
            words.append(f"turns 2 to {environment.max_turns} of a rollout and the prompts that grow by each of them")
        answers = [name for name, is_there in _ANSWERS if is_there(environment)]
        words.append(f"waits for {' and '.join(answers)} (at most {environment.timeout_s:g} s for an answer)")
    return tuple(words)


_ANSWERS: tuple[tuple[str, Callable[[EnvironmentSpec], bool]], ...] = (
    ("tools", lambda environment: environment.has_tools),
    ("the environment", lambda environment: environment.has_environment),
)


LEARNS_LESS = {
    "adamw_8bit": "steps with moments of 8 bits",
    "lora": "trains adapters only",
    "base_dtype": "trains adapters only, on weights of 4 bits",
    "num_prompts_per_step": "learns from fewer prompts a step",
    "num_samples_per_prompt": "compares fewer rollouts of a prompt",
    "max_response_len": "cuts longer responses",
}
"""What a change costs in learning, by a word of it; the least first."""


@dataclass(frozen=True)
class Remedy:
    """A change that by itself makes the job fit (`Plan.fits`)."""

    change: str
    """As it is typed."""
    peak_bytes: int
    """Of the fullest device or host then."""
    verdict: Verdict
    """That it leads to."""
    seconds: float
    """Of a step then; 0 where they are not known."""
    num_devices: int
    """That it takes."""
    dollars: float | None = None
    """That a step costs then; None without a price."""

    @property
    def learns_less(self) -> str:
        """What it costs in learning; empty where it costs nothing."""
        return next((cost for word, cost in reversed(LEARNS_LESS.items()) if word in self.change), "")

    def order(self, devices: int) -> tuple[object, ...]:
        """What costs less in learning first, then what needs no more devices than these, then
        what changes fewer keys, then what costs fewer device-seconds. What resets several choices comes last.
        """
        cost = max((place for place, word in enumerate(LEARNS_LESS, 1) if word in self.change), default=0)
        needs_more, keys = self.num_devices > devices, len(shlex.split(self.change))
        resets = self.change.count("=auto") > 1
        return resets, cost, needs_more, keys, self.seconds * self.num_devices


def extract_keys(reason: str) -> str:
    """The keys with which a reason ends, as they are typed; empty where it names none.

    >>> extract_keys("rollout.tp 2 was not tried (rollout.tp=1)"), extract_keys("rollout.tp 2 (docs/job.md)")
    ('rollout.tp=1', '')
    """
    words = reason.rpartition(" (")[2].removesuffix(")")
    return words if "=" in words else ""


def explain_impossible(impossible: tuple[Considered, ...], of_the_job: Iterable[str] = ()) -> NoFeasiblePlanError:
    """The answer where no choice can be built. of_the_job: what refuses it whatever is chosen, which says more than the
    reason of a placement that begins with the same key.
    """
    reasons = "; ".join(f"{considered.placement}: {considered.reason}" for considered in impossible)
    reasons = next((reason for reason in of_the_job if reason.partition(":")[0] in reasons), reasons)
    return NoFeasiblePlanError(
        "no layout can be built for this job",
        where="placement.placement, training.zero_stage, hardware.num_devices",
        rule=reasons or "offloaded parameters need zero_stage 3, an offloaded optimizer zero_stage 1 or more",
        way_out=extract_keys(reasons)
        or "leave placement.placement and training.zero_stage on auto, or change hardware.num_devices",
    )
