"""Setting: everything that a simulation is given.

In: a schedule, the cost of each action, the rollouts of a step, how far generation may run ahead. Out: a checked value.
Left out: where costs and speeds come from (timing/), and what is drawn (lengths.py).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

from rlplan.dataflow.schedule import Action, Schedule
from rlplan.errors import SpecError
from rlplan.memory.ledger import MemoryLedger
from rlplan.simulate.engine import EngineLimits
from rlplan.simulate.speed import Speed
from rlplan.spec.parts.lengths import Lengths
from rlplan.timing.cost import NOTHING, Cost
from rlplan.units import ceil_div
from rlplan.vocabulary import ActionKind


@dataclass(frozen=True, slots=True)
class StepRollouts:
    """The rollouts of a step: groups of `num_samples` of one prompt, distributed over identical engines."""

    num_prompts: int
    num_samples: int
    prompt_len: int
    lengths: Lengths
    num_engines: int
    limits: EngineLimits


@dataclass(frozen=True, slots=True)
class Asynchrony:
    """How generation runs beside training: prompts are begun one by one and trained as they finish."""

    max_staleness: float = 1.0
    """Policy versions that generation may be ahead of training: at most (version + 1 + max_staleness) x num_prompts
    prompts have been begun at any time. 0 streams the rollouts of one version into training without ever using older
    ones."""
    interrupts: bool = False
    """The weight sync stops running rollouts, which continue under the new weights (partial rollouts, their KV cache
    recomputed); otherwise it waits until none is running."""
    num_takes: int = 1
    """Parts in which a step's prompts are taken and trained; weights are handed over after the last."""
    max_groups_at_once: int | None = None
    """Prompts that are worked on at the same time."""
    travel_s: float = 0.0
    """New weights are on their way for so long while both sides go on, one version at a time."""
    is_bound: bool = False
    """No group becomes older than `max_staleness`: the oldest are taken first, and a step waits for one that would be
    too old for the next. Otherwise groups are taken as they end, and only what is begun is bounded."""
    keeps_versions: bool = False
    """What runs at a weight sync ends under the version that it was begun with, with its KV cache."""


@dataclass(frozen=True)
class SimulationSetting:
    """What is simulated. With `rollouts` and a `speed` engines simulate GENERATE, which otherwise takes its cost."""

    schedule: Schedule
    costs: Mapping[str, Cost] = field(default_factory=dict)
    """By action id; an action without one takes no time."""
    rollouts: StepRollouts | None = None
    speed: Speed | None = None
    num_steps: int = 20
    asynchrony: Asynchrony | None = None
    """None for a synchronous step."""
    reward_latency_s: float = 0.0
    """From a rollout's last token to its reward."""
    ledger: MemoryLedger | None = None
    """Where memory over time is wanted."""
    num_traced_steps: int = 3
    """The first steps, which go into the trace."""

    def __post_init__(self) -> None:
        _check_rollouts(self.rollouts, self.speed)
        if self.num_steps < 1:
            raise _wrong(f"num_steps = {self.num_steps}", "a simulation has at least one step", "num_steps: 20")
        if self.asynchrony:
            self._check_asynchrony(self.asynchrony)

    @property
    def generates(self) -> Action | None:
        """The action that engines simulate."""
        kinds = {action.kind: action for action in self.schedule.step}
        return kinds.get(ActionKind.GENERATE) if self.rollouts else None

    @property
    def rest(self) -> tuple[Action, ...]:
        """What runs beside generation: all but it and the weight sync."""
        apart = (ActionKind.GENERATE, ActionKind.SYNC_WEIGHTS)
        return tuple(action for action in self.schedule.step if action.kind not in apart)

    @property
    def num_mini_batches(self) -> int:
        """Mini-batches of a step."""
        return 1 + max((action.mini_batch or 0 for action in self.schedule.step), default=0)

    def seconds(self, action: Action) -> float:
        """What an action takes."""
        return self.costs.get(action.id, NOTHING).seconds

    def groups_of(self, action: Action) -> tuple[str, ...]:
        """Device groups whose devices an action keeps busy, by name; none for the driver's own work."""
        if action.id not in self._groups:
            owners = self._owners
            found = {owners[process] for process in action.processes if process in owners}
            self._groups[action.id] = tuple(sorted(found))
        return self._groups[action.id]

    @cached_property
    def _owners(self) -> dict[str, str]:
        """The device group of each process."""
        return {process: layout.group for layout in self.schedule.layouts for process, _ in layout.processes}

    @cached_property
    def _groups(self) -> dict[str, tuple[str, ...]]:
        """By action id, for a schedule may have a hundred thousand processes and asks for each action of each step."""
        return {}

    def _check_asynchrony(self, asynchrony: Asynchrony) -> None:
        generate = self.generates
        if generate is None:
            raise _wrong("asynchrony without rollouts", "something must be generated beside training", "give rollouts")
        mine = set(self.groups_of(generate))
        shared = [action.id for action in self.rest if mine & set(self.groups_of(action))]
        if shared:
            raise _wrong(
                f"{generate.id} shares devices with {shared[0]}",
                "generation runs beside training only on devices of its own",
                "a disaggregated placement",
            )
        if self.num_mini_batches % asynchrony.num_takes:
            raise _wrong(
                f"num_takes = {asynchrony.num_takes} of {self.num_mini_batches} mini-batches",
                "each take trains as many mini-batches",
                "a divisor of the number of mini-batches",
            )
        assert self.rollouts is not None
        if self.rollouts.num_prompts % asynchrony.num_takes:
            raise _wrong(
                f"num_takes = {asynchrony.num_takes} of {self.rollouts.num_prompts} prompts",
                "each take has as many prompts",
                "a divisor of num_prompts",
            )


def num_engines(schedule: Schedule) -> int:
    """Rollout engines of a schedule: the data-parallel ranks of its engine's layout. Raises: KeyError without one."""
    return schedule.layout("rollout_engine").dp


def _check_rollouts(rollouts: StepRollouts | None, speed: Speed | None) -> None:
    if rollouts is None:
        return
    if speed is None:
        raise _wrong("rollouts without a speed", "engines need one", "timing.generation.EngineSpeed")
    if min(rollouts.num_prompts, rollouts.num_samples, rollouts.num_engines, rollouts.limits.max_num_seqs) < 1:
        raise _wrong(
            f"{rollouts.num_prompts} prompts, {rollouts.num_samples} samples, {rollouts.num_engines} engines of "
            f"{rollouts.limits.max_num_seqs} sequences",
            "at least one of each",
            "more of what is 0",
        )
    longest = rollouts.prompt_len + max(1, int(rollouts.lengths.quantile(1.0)))
    needed = ceil_div(longest, rollouts.limits.block_size)
    if needed > rollouts.limits.num_blocks:
        raise _wrong(
            f"the longest sequence has {longest} tokens and needs {needed} blocks, an engine's KV cache has "
            f"{rollouts.limits.num_blocks}",
            "one longest sequence fits, or the engine would never end it",
            "a larger KV cache, more ranks an engine, or a shorter max_response_len",
        )


def _wrong(what: str, rule: str, way_out: str) -> SpecError:
    return SpecError(what, where="simulation", rule=rule, way_out=way_out)
