"""Memory of one job on its GPUs: process placement, capacities, and the fit of a candidate.

In: a SettledJob and its setting. Out: schedules, moments, capacities, Fit of a candidate. Left out: bytes per role
(roles.py) and which candidate is best (search.py).
"""

from dataclasses import replace

from rlplan.dataflow.choice import NO_ENGINE, NO_TRAINER, Arrangement, Choice, EngineChoice, TrainerChoice
from rlplan.dataflow.placements import count_group_devices
from rlplan.dataflow.schedule import HOST_DEVICE, Schedule
from rlplan.memory.machine.host import DRIVER_HOST_BYTES
from rlplan.memory.predict import Forecast
from rlplan.memory.roles.engine import EngineOnGpu, choose_engine_class
from rlplan.memory.serving.kv import KvDemand
from rlplan.planner.gpu.engine_costs import EngineCosts
from rlplan.planner.gpu.roles import Ahead, RoleBytes, reduce_to_shape
from rlplan.planner.gpu.tables import (
    DEPENDS_ON_TOKENS,
    ENGINE,
    ArrangementParts,
    BytesByMoment,
    Fit,
    ProcessPlace,
    RoleTable,
    fit,
    list_capacities,
    sum_process_bytes,
)
from rlplan.planner.memo import Memo, memoize
from rlplan.planner.setting import GpuSetting
from rlplan.spec.resolved import SettledJob

UNKNOWN = 1 << 60
"""Capacity used for a host of unknown size, so that it never is the bottleneck."""


class Places:
    """Placement of a job's processes on GPUs and hosts, with capacities."""

    def __init__(self, job: SettledJob, setting: GpuSetting, roles: RoleBytes) -> None:
        self.job, self.setting, self.roles = job, setting, roles
        self.known = roles.memo.create_table()

    def ahead(self, arrangement: Arrangement) -> Ahead:
        """Async settings that a schedule depends on in addition to its arrangement."""
        place = self.job.placement
        return (place.max_staleness, place.partial_rollouts) if arrangement.is_async else (0, False)

    @memoize
    def parts(self, arrangement: Arrangement) -> ArrangementParts:
        """Parts shared by all choices in an arrangement."""
        roles, shape, ahead = self.roles, reduce_to_shape(arrangement), self.ahead(arrangement)
        schedule = roles.build_schedule_view(shape, ahead)
        hosts = self.assign_hosts(schedule, arrangement)
        moments = roles.list_moments(shape, ahead, tuple((name, host) for name, (host, _) in hosts.items()))
        host = UNKNOWN if self.setting.host_capacity is None else self.setting.host_capacity
        driver, others = DRIVER_HOST_BYTES + roles.rollout_buffer, self.list_other_capacities(schedule)
        places = [ProcessPlace(name, alike, roles.copies_states(schedule, name)) for name, (_, alike) in hosts.items()]
        trainers = tuple(place for place in places if not place.name.startswith(ENGINE))
        engines = tuple(place for place in places if place.name.startswith(ENGINE))
        generates_with = choose_engine_class(self.job, arrangement.num_training)
        return ArrangementParts(
            moments,
            schedule,
            list_capacities(moments, self.setting.capacity, host, driver, others),
            roles.build_side(replace(arrangement, num_generation=0), moments, trainers, EngineOnGpu),
            roles.build_side(replace(shape, num_scoring=0), moments, engines, generates_with),
        )

    def assign_hosts(self, schedule: Schedule, arrangement: Arrangement) -> dict[str, tuple[str, int]]:
        """Assign each process (host, number of equal processes on that host); one process stands for all equal ones.

        With more than one host, groups with their own devices have their own hosts.
        """
        hosts = {}
        for index, group in enumerate(schedule.groups):
            per_host = self.setting.get_pool(group.name).gpus_per_host
            host = f"host:{index}" if self.setting.num_gpus > per_host else HOST_DEVICE
            members = set(group.devices)
            for name, device in schedule.processes:
                if device in members:
                    hosts[name] = host, min(count_group_devices(arrangement, group.name), per_host)
        return hosts

    def list_other_capacities(self, schedule: Schedule) -> dict[str, int]:
        """List capacities of devices and hosts outside the training pool."""
        capacities: dict[str, int] = {}
        for index, group in enumerate(schedule.groups if self.setting.has_pools else ()):
            pool = self.setting.get_pool(group.name)
            capacities |= dict.fromkeys(group.devices[:1], pool.capacity)
            if pool.host_capacity is not None:
                capacities[f"host:{index}"] = pool.host_capacity
        return capacities


class GpuRoles(RoleBytes):
    """Bytes of every role of a job on its GPUs."""

    def __init__(self, job: SettledJob, setting: GpuSetting, memo: Memo) -> None:
        super().__init__(job, setting, memo)
        self.setting, self.places = setting, Places(job, setting, self)
        self.engines = EngineCosts(job, setting.policy, memo)

    def build_kind_key(self, arrangement: Arrangement) -> tuple[Arrangement, Ahead]:
        """Key shared by arrangements that differ only in group sizes."""
        return reduce_to_shape(arrangement), self.places.ahead(arrangement)

    def parts(self, arrangement: Arrangement) -> ArrangementParts:
        """Parts shared by all choices in an arrangement."""
        return self.places.parts(arrangement)

    def predict_fit(self, candidate: Choice) -> Fit:
        """Predict a candidate's peaks and the room for its KV cache."""
        where, keeps = candidate.arrangement, candidate.sends_changes
        trainers = self.sum_trainer_bytes(where, candidate.trainer, keeps_sent=keeps)
        other = self.sum_engine_bytes(where, candidate.engine, keeps_sent=keeps)
        return self.subtract_host_memory(fit(trainers, other, self.parts(where).capacities))

    def subtract_host_memory(self, need: Fit) -> Fit:
        """Subtract host bytes from the room of a GPU that shares the host's memory."""
        if not self.setting.gpu.shares_host_memory:
            return need
        names = ("slack_expected", "slack_high", "room_expected", "room_high")
        return replace(need, **{name: getattr(need, name) - need.host for name in names})

    def sum_trainer_bytes(
        self, where: Arrangement, choice: TrainerChoice, *, keeps_sent: bool = False
    ) -> BytesByMoment:
        """Sum the bytes of trainers and scorers. keeps_sent: include the copies that delta sync keeps."""
        return self.sum_bytes(self.parts(where).others, choice, NO_ENGINE, keeps_sent)

    def sum_state_bytes(self, where: Arrangement, choice: TrainerChoice, *, keeps_sent: bool = False) -> BytesByMoment:
        """Sum the bytes of states without activations: a lower bound for all micro-batch sizes.

        Counts: passes as what remains after them. At no moment does it exceed any choice with the same states.
        """
        return self.sum_bytes(self.parts(where).others, choice.without_passes, NO_ENGINE, keeps_sent, DEPENDS_ON_TOKENS)

    def sum_engine_bytes(self, where: Arrangement, choice: EngineChoice, *, keeps_sent: bool = False) -> BytesByMoment:
        """Sum the bytes of the engine without its KV cache. keeps_sent: as above."""
        return self.sum_bytes(self.parts(where).engines, NO_TRAINER, choice, keeps_sent)

    def nothing(self, arrangement: Arrangement) -> BytesByMoment:
        """Zero bytes at every moment."""
        return self.parts(arrangement).moments.nothing

    def predict_demand(self, arrangement: Arrangement, choice: EngineChoice) -> tuple[KvDemand, int, int]:
        """Predict (demand of one engine's rollouts, bytes that are enough, bytes required to start)."""
        return self.engines.predict_demand(
            arrangement.num_generation, self.count_versions_ahead(arrangement) or 1, choice
        )

    def count_versions_ahead(self, arrangement: Arrangement) -> int:
        """Steps of rollouts in flight beside training if new weights interrupt them; 0 for synchronous batches."""
        staleness, interrupts = self.places.ahead(arrangement)
        return staleness if interrupts else 0

    def forecast_process(self, process: str, candidate: Choice, response_len: float, kv_cache: int = 0) -> Forecast:
        """Forecast a process whose micro-batch has a longest response of `response_len` tokens."""
        where = candidate.arrangement
        return self.forecast_role(
            process,
            candidate,
            response_len,
            kv_cache,
            copies=self.copies_states(self.parts(where).schedule, process),
            generates_with=choose_engine_class(self.places.job, where.num_training),
        )

    def estimate_oom_risk(self, candidate: Choice, kv_cache: int) -> float:
        """Probability that any micro-batch of a step is too long to fit.

        Counts: 1 - F(l)^n, l the longest response with which every moment still fits as expected, n rollouts a step.
        """
        workload = self.job.workload
        low, high = 1.0, float(workload.max_response_len)
        if not self._check_response_len(candidate, kv_cache, low):
            return 1.0
        if self._check_response_len(candidate, kv_cache, high):
            return 0.0
        for _ in range(12):
            middle = (low + high) / 2
            low, high = (middle, high) if self._check_response_len(candidate, kv_cache, middle) else (low, middle)
        return 1.0 - self.lengths.compute_probability(low) ** workload.num_rollouts_per_step

    def _check_response_len(self, candidate: Choice, kv_cache: int, response_len: float) -> bool:
        """Whether every moment fits in expectation with a longest response of `response_len` tokens."""
        parts = self.parts(candidate.arrangement)
        total = nothing = parts.moments.nothing
        for name, _ in parts.schedule.processes:
            forecast = self.forecast_process(name, candidate, response_len, kv_cache)
            total += sum_process_bytes(parts.moments.locate_process(name), 1, RoleTable(forecast))
        return self.subtract_host_memory(fit(total, nothing, parts.capacities)).slack_expected >= 0
