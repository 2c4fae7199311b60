"""Search on GPUs: the candidate with the least handicap whose every moment fits.

In: a BudgetSpec. Out: a Budget: what was chosen, its ledger, verdict and risks, or the nearest that does not fit.
Left out: time (gpu_candidates.py says what stands in for it).
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from rlplan.dataflow.schedule import Schedule
from rlplan.errors import NoFeasiblePlanError
from rlplan.memory.gpu.predict import DRIVER_HOST_BYTES, GpuProcess, predict_gpu_ledger
from rlplan.memory.host import rollout_buffer_bytes
from rlplan.memory.ledger import MemoryLedger
from rlplan.planner.budget import Budget, Considered, GpuSetting, KvReport, Verdict
from rlplan.planner.gpu_candidates import GpuCandidate, Impossible, list_gpu_candidates
from rlplan.planner.gpu_roles import GpuRoles
from rlplan.planner.gpu_tables import Fit, fit
from rlplan.spec.budget import BudgetSpec
from rlplan.units import format_bytes
from rlplan.vocabulary import Placement

KV_SHORTFALL = 8.0
"""Handicap where no rollout can run; none where all of a step run at once. In between they run in turns."""


@dataclass(frozen=True)
class Rated:
    """A candidate with what it needs. kv_cache: bytes a GPU. rank: 0 fits, 1 fits in expectation only, 2 does not.

    excess: the larger of what GPU and host need over what they have, as a ratio.
    """

    candidate: GpuCandidate
    need: Fit
    kv_cache: int
    rank: int
    total: float
    excess: float = 0.0

    @property
    def order(self) -> tuple[int, float]:
        """Better ones first: what fits, then what costs little; among what does not fit, what overflows least."""
        return self.rank, self.total if self.rank < 2 else self.excess


class GpuSearch:
    """One search of a budget."""

    def __init__(self, budget: BudgetSpec, setting: GpuSetting) -> None:
        self.budget, self.setting = budget, setting
        self.roles = GpuRoles(budget, setting)
        workload = budget.workload
        self.rollout_buffer = rollout_buffer_bytes(workload.num_rollouts_per_step, workload.max_seq_len)

    def run(self, *, with_others: bool = True) -> Budget:
        """The best candidate that fits, or the nearest one. with_others: and what the other placements would need.

        Raises: SpecError where sizes do not divide, NoFeasiblePlanError where no placement can be built.
        """
        candidates, impossible = list_gpu_candidates(
            self.budget, self.setting.num_gpus, self.setting.policy, self.setting.split
        )
        if not candidates:
            raise _nothing_possible(impossible)
        rated: list[Rated] = []
        limit = float("inf")
        for candidate in candidates:
            if candidate.handicap >= limit:
                break
            one = self.rate(candidate)
            rated.append(one)
            if one.rank == 0:
                limit = min(limit, one.total)
        considered = [Considered(item.placement, None, item.reason) for item in impossible]
        best = self._first_that_holds(sorted(rated, key=lambda one: one.order))
        if not with_others:
            return best
        others = map(self._considered, self._best_of_others(best.candidate.step.placement))
        return best.with_considered((*considered, *others))

    def rate(self, candidate: GpuCandidate) -> Rated:
        """What a candidate needs, how large its KV cache can be, and whether it fits."""
        _, pattern = self.roles.schedule(candidate.step)
        step = candidate.step
        need = fit(
            pattern,
            self.roles.tables(candidate),
            self.setting.capacity,
            self.roles.hosts(step),
            self.roles.lacking(step) if self.setting.has_pools else None,
        )
        capacity = self.setting.capacity
        if self.setting.gpu.shares_host_memory:
            taken = need.host + DRIVER_HOST_BYTES + self.rollout_buffer
            capacity -= taken
            need = replace(need, room_expected=need.room_expected - taken, room_high=need.room_high - taken)
        rank = 0 if need.high <= capacity else 1 if need.expected <= capacity else 2
        if self._host_is_full(need):
            rank = 2
        excess = max(need.expected / max(1, capacity), need.host / (self.setting.host_capacity or need.host or 1))
        if not candidate.step.has_rollouts:
            return Rated(candidate, need, 0, rank, candidate.handicap, excess)
        kv_cache, kv_rank, shortfall = self._kv_cache(candidate, need)
        return Rated(candidate, need, kv_cache, max(rank, kv_rank), candidate.handicap + shortfall, excess)

    def _kv_cache(self, candidate: GpuCandidate, need: Fit) -> tuple[int, int, float]:
        """(bytes of KV cache a GPU, the rank that they lead to, the handicap of rollouts in turns)."""
        demand, enough, least = self.roles.demand(candidate)
        wanted = self.budget.rollout.kv_cache_memory
        largest = max(enough, least) if wanted == "auto" else int(wanted)
        least = least if wanted == "auto" else largest
        rank = 0
        if largest < demand.least_bytes:
            rank = 2
        elif min(need.room_high, largest) < least:
            rank = 1 if need.room_expected >= least else 2
        room = need.room_high if need.room_high >= least else need.room_expected
        kv_cache = max(0, min(largest, room)) // demand.pool.bytes_per_block * demand.pool.bytes_per_block
        at_once = demand.num_seqs * self.roles.num_engines(candidate.step) * min(1.0, kv_cache / enough)
        return kv_cache, rank, KV_SHORTFALL * (1 - min(1.0, at_once / self.budget.workload.num_rollouts_per_step))

    def _host_is_full(self, need: Fit) -> bool:
        capacity = self.setting.host_capacity
        return capacity is not None and need.host + DRIVER_HOST_BYTES + self.rollout_buffer > capacity

    def _first_that_holds(self, rated: list[Rated]) -> Budget:
        """The first in order whose whole ledger holds: also while starting, and in the host's memory."""
        nearest: Budget | None = None
        for one in rated[:50]:
            budget = self.whole(one)
            if nearest is None or budget.verdict.rank < nearest.verdict.rank:
                nearest = budget
            if budget.verdict.rank == one.rank:
                break
        assert nearest is not None, "there is a candidate"
        return nearest

    def _best_of_others(self, chosen: Placement) -> Iterator[Rated]:
        """Of each other placement the first candidate that fits, else the one that needs least."""
        candidates, _ = list_gpu_candidates(self.budget, self.setting.num_gpus, self.setting.policy, self.setting.split)
        for placement in Placement:
            mine = [candidate for candidate in candidates if candidate.step.placement is placement]
            if placement is not chosen and mine:
                rated = (self.rate(candidate) for candidate in mine)
                yield next((one for one in rated if one.rank == 0), None) or min(
                    map(self.rate, mine), key=lambda one: one.order
                )

    def whole(self, one: Rated) -> Budget:
        """The budget of a rated candidate, with its whole ledger."""
        schedule, _ = self.roles.schedule(one.candidate.step)
        ledger = self._ledger(one, schedule)
        kv = None
        if one.candidate.step.has_rollouts:
            demand, _, _ = self.roles.demand(one.candidate)
            kv = KvReport.of(demand, one.kv_cache, one.candidate.engine.tp)
        verdict = Verdict.of(
            ledger, self.setting.host_capacity, at_least=one.rank, shares_memory=self.setting.gpu.shares_host_memory
        )
        return Budget(
            self.budget,
            self.setting,
            one.candidate,
            schedule,
            ledger,
            verdict,
            kv,
            0.0 if verdict is Verdict.FITS else self.roles.oom_risk(one.candidate, one.kv_cache),
        )

    def _ledger(self, one: Rated, schedule: Schedule) -> MemoryLedger:
        lengths = self.roles.lengths
        three = (lengths.mean, self.roles.usual_len, float(self.budget.workload.max_response_len))
        processes, hosts = [], self.roles.hosts(one.candidate.step)
        for name, device in schedule.processes:
            short, usual, longest = (self.roles.forecast(name, one.candidate, length, one.kv_cache) for length in three)
            role = next(layout.role for layout in schedule.layouts if (name, device) in layout.processes)
            host, alike = hosts[name]
            processes.append(GpuProcess(name, device, host, role, short, usual, longest, alike))
        capacity, host_capacity = self.setting.capacity, self.setting.host_capacity or 0
        other = self.roles.other_capacities(one.candidate.step)
        return predict_gpu_ledger(schedule, processes, capacity, host_capacity, self.rollout_buffer, other)

    def _considered(self, one: Rated) -> Considered:
        capacity = self.setting.capacity
        where = f"{format_bytes(one.need.expected)} without KV cache, {format_bytes(capacity)} available"
        if self._host_is_full(one.need):
            needed = format_bytes(one.need.host + DRIVER_HOST_BYTES + self.rollout_buffer)
            room = format_bytes(self.setting.host_capacity or 0)
            return Considered(one.candidate.step.placement, one, f"needs {needed} of a host's memory, {room} available")
        if one.rank == 2 and one.need.expected <= capacity:
            return Considered(one.candidate.step.placement, one, f"no room for a KV cache: {where}")
        if one.rank == 2:
            return Considered(one.candidate.step.placement, one, f"needs {where}")
        words = "would fit too, and is thought slower" if one.rank == 0 else "would fit in expectation only"
        return Considered(one.candidate.step.placement, one, f"{words} ({where})")


def _nothing_possible(impossible: list[Impossible]) -> NoFeasiblePlanError:
    reasons = "; ".join(f"{one.placement}: {one.reason}" for one in impossible)
    return NoFeasiblePlanError(
        "no layout can be built for this budget",
        where="placement, training, gpus",
        rule=reasons or "offloaded parameters need zero_stage 3, an offloaded optimizer zero_stage 1 or more",
        way_out="leave the choices on auto, or change the number of GPUs",
    )
