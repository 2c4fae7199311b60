"""SimulationResult: outcome of a simulated run.

In: counts of the recorder and the engines. Out: one frozen, JSON-able value. Left out: charts (report/).
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
    """Use of a device group."""

    name: str
    num_devices: int
    busy_s: float
    """Seconds that its devices worked, averaged over them; the other seconds are bubbles."""
    bubble_s: float
    capacity_bytes: int | None = None
    """Memory of each of its devices; None without a plan."""

    @property
    def utilisation(self) -> float:
        """Share of the time in which the devices worked."""
        total = self.busy_s + self.bubble_s
        return self.busy_s / total if total else 0.0


@dataclass(frozen=True)
class SimulationResult:
    """Outcome of a simulated run."""

    seed: int
    seconds: float
    step_s: tuple[float, ...]
    """Seconds from the end of one step (the weight sync after it) to the end of the next; the first from the start."""
    phase_s: Mapping[Phase, float]
    """Seconds of each phase over all steps; phases of an asynchronous run overlap."""
    groups: tuple[GroupUse, ...]
    token_staleness: Mapping[int, int]
    """Trained tokens by staleness in policy versions."""
    rollout_staleness: Mapping[int, int]
    """Trained rollouts by staleness of their oldest token."""
    num_tokens: int
    """Generated tokens, including those of unfinished rollouts."""
    num_trained_tokens: int
    """Tokens of trained rollouts."""
    num_prefill_tokens: int
    num_preemptions: int
    kv_use: float
    """Largest share of an engine's KV cache that was in use."""
    num_events: int
    """Batch changes, rewards and ended actions."""
    trace: Trace
    simulated_share: float = 1.0
    """Share of the engines and prompts that was simulated. Counts are scaled to all of them; num_events and the trace
    cover only the simulated part."""
    interval_s: tuple[float, float] | None = None
    """Range of the mean step's seconds that holds nine of ten measured steps; None without a plan."""
    schema_version: int = SIMULATION_SCHEMA_VERSION

    @property
    def mean_step_s(self) -> float:
        """Mean seconds over all steps."""
        return sum(self.step_s) / len(self.step_s)

    def step_quantile_s(self, share: float) -> float:
        """Quantile of the step seconds (nearest rank)."""
        ranked = sorted(self.step_s)
        return ranked[max(0, math.ceil(share * len(ranked)) - 1)]

    @property
    def num_gpus(self) -> int:
        """Devices of all groups."""
        return sum(group.num_devices for group in self.groups)

    @property
    def gpu_hours(self) -> float:
        """Hours of all devices, idle or not."""
        return self.seconds * self.num_gpus / 3600

    @property
    def mean_staleness(self) -> float:
        """Mean staleness in versions over trained tokens."""
        count = sum(self.token_staleness.values())
        return sum(age * tokens for age, tokens in self.token_staleness.items()) / count if count else 0.0

    def as_json(self) -> dict[str, Any]:
        """Convert to a value for json.dumps, with computed properties beside the fields."""
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
        """Read back a value of `as_json`. Raises: ValueError for another schema version, KeyError, TypeError."""
        if data["schema_version"] != SIMULATION_SCHEMA_VERSION:
            raise ValueError(f"schema version {data['schema_version']}, this is {SIMULATION_SCHEMA_VERSION}")
        trace = data["trace"]
        fields = {key: data[key] for key in SimulationResult.__dataclass_fields__ if key in data}
        return SimulationResult(
            **{
                **fields,
                "step_s": tuple(data["step_s"]),
                "interval_s": tuple(data["interval_s"]) if data.get("interval_s") else None,
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
