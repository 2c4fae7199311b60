"""Setting: all inputs of a simulation.

In: a schedule, the cost of each action, the rollouts of a step, the allowed staleness. Out: a checked value.
Left out: computing costs and speeds (timing/), and sampling (engine_pool.py).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

from rlplan.dataflow.schedule import Action, Schedule
from rlplan.errors import SpecError
from rlplan.memory.ledger import MemoryLedger
from rlplan.simulate.engine import EngineLimits, Speed
from rlplan.spec.parts.lengths import Lengths
from rlplan.timing.cost import NOTHING, Cost
from rlplan.units import ceil_div
from rlplan.vocabulary import ActionKind


@dataclass(frozen=True, slots=True)
class StepRollouts:
    """The rollouts of a step: groups of `num_samples` per prompt, distributed over identical engines."""

    num_prompts: int
    num_samples: int
    prompt_len: int
    lengths: Lengths
    num_engines: int
    limits: EngineLimits
    splits_groups: bool = False
    """Whether the rollouts of a prompt may run on different engines."""


@dataclass(frozen=True, slots=True)
class Asynchrony:
    """Asynchronous generation: prompts start one by one and are trained as they finish."""

    max_staleness: float = 1.0
    """Policy versions that generation may be ahead of training. At most (version + 1 + max_staleness) x num_prompts
    prompts have been started at any time. 0 streams the rollouts of one version into training without using older
    ones."""
    interrupts: bool = False
    """The weight sync stops running rollouts, which continue under the new weights (partial rollouts, their KV cache
    recomputed). Otherwise it waits until none is running."""
    num_takes: int = 1
    """Parts in which a step's prompts are taken and trained; the weight sync follows the last."""
    max_groups_at_once: int | None = None
    """Most prompts in progress at the same time."""
    is_bound: bool = False
    """Enforces `max_staleness` for every group: the oldest are taken first, and a step waits for a group that would be
    too old for the next one. Otherwise groups are taken as they end, and only the start of prompts is bounded."""
    keeps_versions: bool = False
    """Rollouts that run at a weight sync finish under the version that they started with, with their KV cache."""


@dataclass(frozen=True)
class SimulationSetting:
    """Inputs of a simulation. With `rollouts` and a `speed`, engines simulate GENERATE instead of using its cost."""

    schedule: Schedule
    costs: Mapping[str, Cost] = field(default_factory=dict)
    """Costs by action id; an action without one takes no time."""
    rollouts: StepRollouts | None = None
    speed: Speed | None = None
    num_steps: int = 20
    asynchrony: Asynchrony | None = None
    """Asynchronous generation; None for a synchronous step."""
    reward_latency_s: float = 0.0
    """Seconds from a rollout's last token to its reward."""
    ledger: MemoryLedger | None = None
    """Memory ledger, for memory samples in the trace."""
    num_traced_steps: int = 3
    """Number of first steps that go into the trace."""

    def __post_init__(self) -> None:
        _check_rollouts(self.rollouts, self.speed)
        if self.num_steps < 1:
            raise _wrong(f"num_steps = {self.num_steps}", "a simulation has at least one step", "num_steps: 20")
        if self.asynchrony:
            self._check_asynchrony(self.asynchrony)

    @property
    def generates(self) -> Action | None:
        """The action that the engines simulate."""
        kinds = {action.kind: action for action in self.schedule.step}
        return kinds.get(ActionKind.GENERATE) if self.rollouts else None

    @property
    def rest(self) -> tuple[Action, ...]:
        """Actions that run beside generation: all but it and the weight sync."""
        apart = (ActionKind.GENERATE, ActionKind.SYNC_WEIGHTS)
        return tuple(action for action in self.schedule.step if action.kind not in apart)

    @property
    def num_mini_batches(self) -> int:
        """Mini-batches of a step."""
        return 1 + max((action.mini_batch or 0 for action in self.schedule.step), default=0)

    def seconds(self, action: Action) -> float:
        """Seconds of an action."""
        return self.costs.get(action.id, NOTHING).seconds

    def find_groups(self, action: Action) -> tuple[str, ...]:
        """Names of the device groups that an action keeps busy; none for the driver's own work."""
        if action.id not in self._groups:
            owners = self._owners
            groups = {owners[process] for process in action.processes if process in owners}
            self._groups[action.id] = tuple(sorted(groups))
        return self._groups[action.id]

    @cached_property
    def _owners(self) -> dict[str, str]:
        """The device group of each process."""
        return {process: layout.group for layout in self.schedule.layouts for process, _ in layout.processes}

    @cached_property
    def _groups(self) -> dict[str, tuple[str, ...]]:
        """Cache by action id: a schedule can have 100,000 processes, and each action of each step asks."""
        return {}

    def _check_asynchrony(self, asynchrony: Asynchrony) -> None:
        generate = self.generates
        if generate is None:
            raise _wrong("asynchrony without rollouts", "asynchronous jobs generate rollouts", "add rollouts")
        engine_groups = set(self.find_groups(generate))
        shared = [action.id for action in self.rest if engine_groups & set(self.find_groups(action))]
        if shared:
            raise _wrong(
                f"{generate.id} shares devices with {shared[0]}",
                "asynchronous generation needs devices of its own",
                "use a disaggregated placement",
            )
        if self.num_mini_batches % asynchrony.num_takes:
            raise _wrong(
                f"num_takes = {asynchrony.num_takes} does not divide {self.num_mini_batches} mini-batches",
                "each take trains the same number of mini-batches",
                "use a divisor of the number of mini-batches",
            )
        assert self.rollouts is not None
        if self.rollouts.num_prompts % asynchrony.num_takes:
            raise _wrong(
                f"num_takes = {asynchrony.num_takes} does not divide {self.rollouts.num_prompts} prompts",
                "each take has the same number of prompts",
                "use a divisor of num_prompts",
            )


def _check_rollouts(rollouts: StepRollouts | None, speed: Speed | None) -> None:
    if rollouts is None:
        return
    if speed is None:
        raise _wrong("rollouts without a speed", "engines need a speed", "pass timing.serving.generation.EngineSpeed")
    if min(rollouts.num_prompts, rollouts.num_samples, rollouts.num_engines, rollouts.limits.max_num_seqs) < 1:
        raise _wrong(
            f"{rollouts.num_prompts} prompts, {rollouts.num_samples} samples, {rollouts.num_engines} engines of "
            f"{rollouts.limits.max_num_seqs} sequences",
            "each of these is at least 1",
            "raise those that are 0",
        )
    longest = rollouts.prompt_len + max(1, int(rollouts.lengths.quantile(1.0)))
    needed = ceil_div(longest, rollouts.limits.block_size)
    if needed > rollouts.limits.num_blocks:
        raise _wrong(
            f"the longest sequence has {longest} tokens and needs {needed} blocks, an engine's KV cache has "
            f"{rollouts.limits.num_blocks}",
            "an engine must hold the longest sequence, or it would never finish",
            "use a larger KV cache, more ranks per engine, or a shorter max_response_len",
        )


def _wrong(what: str, rule: str, way_out: str) -> SpecError:
    return SpecError(what, where="simulation", rule=rule, way_out=way_out)
