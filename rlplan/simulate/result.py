"""SimulationResult: what a simulated run says.

In: what the recorder and the engines counted. Out: one frozen, JSON-able value.
Left out: how it is drawn (report/).
"""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from rlplan.trace import MemorySample, Span, Trace
from rlplan.vocabulary import Phase

SIMULATION_SCHEMA_VERSION = 1


@dataclass(frozen=True, slots=True)
class GroupUse:
    """A device group."""

    name: str
    num_devices: int
    busy_s: float
    """Seconds that its devices worked, averaged over them; the rest are bubbles."""
    bubble_s: float

    @property
    def utilisation(self) -> float:
        """Share of the time in which the devices worked."""
        total = self.busy_s + self.bubble_s
        return self.busy_s / total if total else 0.0


@dataclass(frozen=True)
class SimulationResult:
    """A simulated run."""

    seed: int
    seconds: float
    step_s: tuple[float, ...]
    """From the end of a step (the weight sync of its weights) to the end of the next; the first from the start."""
    phase_s: Mapping[Phase, float]
    """Seconds of each phase in all steps; in an asynchronous run they overlap."""
    groups: tuple[GroupUse, ...]
    token_staleness: Mapping[int, int]
    """Staleness in policy versions -> number of trained tokens."""
    rollout_staleness: Mapping[int, int]
    """The same of trained rollouts: each is as stale as its oldest token."""
    num_tokens: int
    """Generated, those of unfinished rollouts too."""
    num_trained_tokens: int
    """Of rollouts that were trained."""
    num_prefill_tokens: int
    num_preemptions: int
    kv_use: float
    """Largest share of an engine's KV cache that held anything."""
    num_events: int
    """Changes of a batch, rewards and actions that ended."""
    trace: Trace
    simulated_share: float = 1.0
    """Of the engines and prompts, that was simulated and stands for all of them; counts are those of all, and
    num_events and the trace those of the part."""
    schema_version: int = SIMULATION_SCHEMA_VERSION

    @property
    def mean_step_s(self) -> float:
        """Mean over all steps."""
        return sum(self.step_s) / len(self.step_s)

    def step_quantile_s(self, share: float) -> float:
        """Seconds that a share of the steps does not exceed (nearest rank)."""
        ranked = sorted(self.step_s)
        return ranked[max(0, math.ceil(share * len(ranked)) - 1)]

    @property
    def num_gpus(self) -> int:
        """Devices of all groups."""
        return sum(group.num_devices for group in self.groups)

    @property
    def gpu_hours(self) -> float:
        """All devices, idle or not."""
        return self.seconds * self.num_gpus / 3600

    @property
    def mean_staleness(self) -> float:
        """Versions, averaged over trained tokens."""
        count = sum(self.token_staleness.values())
        return sum(age * tokens for age, tokens in self.token_staleness.items()) / count if count else 0.0

    def as_json(self) -> dict[str, Any]:
        """A value for json.dumps, with what is computed from the fields beside them."""
        return {
            **asdict(self),
            "mean_step_s": self.mean_step_s,
            "p50_step_s": self.step_quantile_s(0.5),
            "p95_step_s": self.step_quantile_s(0.95),
            "mean_staleness": self.mean_staleness,
            "gpu_hours": self.gpu_hours,
        }

    @staticmethod
    def parse(data: Mapping[str, Any]) -> "SimulationResult":
        """The value of `as_json`, read back. Raises: ValueError for another schema version, KeyError, TypeError."""
        if data["schema_version"] != SIMULATION_SCHEMA_VERSION:
            raise ValueError(f"schema version {data['schema_version']}, this is {SIMULATION_SCHEMA_VERSION}")
        trace = data["trace"]
        fields = {key: data[key] for key in SimulationResult.__dataclass_fields__ if key in data}
        return SimulationResult(
            **{
                **fields,
                "step_s": tuple(data["step_s"]),
                "phase_s": {Phase(phase): seconds for phase, seconds in data["phase_s"].items()},
                "groups": tuple(GroupUse(**group) for group in data["groups"]),
                "token_staleness": {int(age): count for age, count in data["token_staleness"].items()},
                "rollout_staleness": {int(age): count for age, count in data["rollout_staleness"].items()},
                "trace": Trace(
                    trace["origin"],
                    [Span(**span) for span in trace["spans"]],
                    [MemorySample(**sample) for sample in trace["samples"]],
                ),
            }
        )
