"""A job on GPUs as the search over GPUs sees it: the same bytes and seconds, of the schedule that is executed.

In: a JobSpec whose profile is a GPU's. Out: the candidate that it names, its ledger and its seconds, on any schedule of
the job. Left out: which candidate is best (search.py). The first rank of each layout stands for all of its ranks.

Assumes: starting, evaluating and what the driver does take no time here.
"""

from dataclasses import replace
from functools import cached_property

from rlplan.dataflow.gpu_step import TRAINING, GpuStep
from rlplan.dataflow.layouts import RoleLayout
from rlplan.dataflow.schedule import Action, Part, Schedule
from rlplan.errors import SpecError
from rlplan.memory.checkpoints import saved_bytes
from rlplan.memory.gpu.checkpoints import StagedOnHost
from rlplan.memory.gpu.engine import EngineChoice
from rlplan.memory.gpu.predict import GpuForecast, GpuProcess, predict_gpu_ledger
from rlplan.memory.gpu.states import TrainerChoice
from rlplan.memory.ledger import MemoryLedger
from rlplan.memory.training import held_parameters, trained_rank
from rlplan.planner.gpu.candidates import GpuCandidate
from rlplan.planner.gpu.roles import GpuRoles
from rlplan.planner.gpu.times import GpuTimes
from rlplan.planner.setting import GpuPool, GpuSetting, usual_node
from rlplan.spec.base import validate
from rlplan.spec.budget import BudgetSpec
from rlplan.spec.hardware import NodeProfile
from rlplan.spec.job import JobSpec
from rlplan.spec.model import ModelSpec
from rlplan.spec.profiles import find_profile
from rlplan.timing.checkpoints import checkpoint_cost
from rlplan.timing.cost import NOTHING, Cost, Resource
from rlplan.timing.job import JobTiming, PartCosts, time_job
from rlplan.units import MIB, ceil_div, format_bytes
from rlplan.vocabulary import ActionKind, Placement, Role, SyncContent


class GpuJob:
    """One job. models: of the policy and of every role whose model is another one."""

    def __init__(self, job: JobSpec, models: dict[Role, ModelSpec]) -> None:
        self.job = job
        self.budget = budget_of(job)
        self.setting = GpuSetting((_pool(job),), models)
        self.roles = GpuRoles(self.budget, self.setting)
        self.times = GpuTimes(self.budget, self.setting, self.roles)

    def candidate(self, placement: Placement, zero_stage: int, num_training: int) -> GpuCandidate:
        """What the job has chosen, as a candidate. num_training: devices that train."""
        job, place = self.job, self.job.placement
        training, rollout = job.training, job.rollout
        step = GpuStep(
            placement=placement,
            num_training=num_training,
            num_generation=rollout.num_processes,
            trained_roles=job.trained_roles,
            frozen_roles=job.frozen_roles,
            num_mini_batches=min(2, job.workload.num_mini_batches),
            zero_stage=zero_stage,
            tp=rollout.tp,
            scores_base=any(job.holder_of(role) is Role.POLICY for role in job.scored_roles),
            sleeps=placement is Placement.COLOCATED,
            parks=place.parks != "none" and not place.parks_only_frozen,
            num_scoring=place.num_scoring_devices if placement is Placement.DISAGGREGATED else 0,
            max_staleness=place.max_staleness,
            parks_frozen=place.parks != "none" and place.parks_only_frozen,
        )
        trainer = TrainerChoice(
            zero_stage,
            training.gradient_checkpointing,
            training.offloads_optimizer,
            training.offloads_parameters,
            max(1, job.max_tokens_per_micro_batch // job.workload.max_seq_len),
            max_tokens=job.max_tokens_per_micro_batch,
            ulysses=training.ulysses,
            tp=training.tp,
        )
        engine = EngineChoice(
            rollout.tp,
            rollout.sleep_level if placement is Placement.COLOCATED else 0,
            rollout.max_num_seqs,
            None if rollout.quantization == "none" else rollout.quantization,
            rollout.has_expert_parallel,
        )
        return GpuCandidate(step, trainer, engine, self._transport)

    def ledger(self, schedule: Schedule, candidate: GpuCandidate) -> MemoryLedger:
        """What the first process of each layout holds, action by action, of the schedule that is executed."""
        lengths, kv_cache = self.roles.lengths, self.job.rollout.kv_cache_memory
        three = (lengths.mean, self.roles.usual_len, float(self.job.workload.max_response_len))
        hosts = self.roles.hosts(schedule)
        processes = []
        for layout in schedule.layouts:
            name, device = layout.processes[0]
            found = [self.roles.forecast(name, candidate, length, kv_cache) for length in three]
            short, usual, longest = (self._with_copy(forecast, schedule, layout) for forecast in found)
            host, alike = hosts[name]
            processes.append(GpuProcess(name, device, host, layout.role, short, usual, longest, alike))
        setting = self.setting
        others = self.roles.other_capacities(schedule)
        return predict_gpu_ledger(
            schedule, processes, setting.capacity, setting.host_capacity or 0, self.roles.rollout_buffer, others
        )

    def _with_copy(self, forecast: GpuForecast, schedule: Schedule, layout: RoleLayout) -> GpuForecast:
        """A trained role's rank with the copy that it makes for checkpoints, where the schedule has it copy."""
        copies = any(action.kind is ActionKind.SAVE_STATES and action.role is layout.role for action in schedule.step)
        if not copies or "trainer" not in layout.worker:
            return forecast
        return StagedOnHost(forecast, self._saved_bytes(layout))

    def _saved_bytes(self, layout: RoleLayout) -> int:
        model = self.setting.model_of(layout.role)
        parameters = held_parameters(model, layout.tp, self.job.trained_parameters(layout.role, model))
        rank = trained_rank(self.job.training, model, layout.zero_stage, layout.num_shards, 0, parameters)
        return saved_bytes(rank.states)

    def timing(self, schedule: Schedule, candidate: GpuCandidate) -> JobTiming:
        """Seconds of the actions that take any."""
        known = self.times.costs(candidate, self.job.rollout.kv_cache_memory)
        actions = {action.id: action for action in self.roles.parts(candidate.step).schedule.step}
        by_what = {_what(actions[name]): cost for name, cost in reversed(known.items())}  # of mini-batches the first
        parts: PartCosts = {
            (part, action.id): self._cost(part, action, by_what) + self._saving_cost(schedule, action)
            for part, actions in schedule.parts
            for action in actions
        }
        return time_job(schedule, parts)

    def _saving_cost(self, schedule: Schedule, action: Action) -> Cost:
        """Trained states copied to the host, or copied and written where the trainer waits."""
        if action.kind not in (ActionKind.SAVE_STATES, ActionKind.WRITE_STATES):
            return NOTHING
        layout = schedule.layout(f"{action.role}_trainer", action.role)
        whole = self.setting.cluster(TRAINING)
        cluster = replace(whole, num_gpus=layout.dp, gpus_per_host=min(layout.dp, whole.gpus_per_host))
        cost = checkpoint_cost(self._saved_bytes(layout) * len(layout.devices), cluster.num_hosts, cluster)
        waits = action.kind is ActionKind.WRITE_STATES
        return cost if waits else Cost({Resource.HOST_LINK: cost.parts[Resource.HOST_LINK]})

    @staticmethod
    def _cost(part: Part, action: Action, by_what: dict[tuple[ActionKind, Role], Cost]) -> Cost:
        if part != "step" or action.kind is ActionKind.EVALUATE:
            return NOTHING
        is_held = action.kind is ActionKind.SCORE and _what(action) not in by_what  # the base without its adapters
        return by_what.get((action.kind, Role.POLICY) if is_held else _what(action), NOTHING)

    def check_kv_cache(self, candidate: GpuCandidate) -> None:
        """Raises: SpecError where the KV cache does not hold one longest sequence."""
        least, given = self.roles.demand(candidate.step, candidate.engine)[0].least_bytes, self.job.rollout
        if given.kv_cache_memory < least:
            raise SpecError(
                f"rollout.kv_cache_memory = {format_bytes(given.kv_cache_memory)} a GPU, one sequence of "
                f"{self.job.workload.max_seq_len} tokens takes {format_bytes(least)}",
                where="rollout.kv_cache_memory",
                rule="the KV cache holds at least one longest sequence and one spare block",
                way_out=f"rollout.kv_cache_memory={ceil_div(least, MIB)}MiB or more",
            )

    @cached_property
    def _transport(self) -> str:
        content = self.job.placement.sync_content
        return self.job.sync_transport.value if content is SyncContent.FULL else content.value


def _what(action: Action) -> tuple[ActionKind, Role]:
    return action.kind, action.role


def _pool(job: JobSpec) -> GpuPool:
    hardware, gpu = job.hardware, job.load_gpu()
    named = find_profile(hardware.profile, where="hardware.profile")
    node = named if isinstance(named, NodeProfile) else usual_node(gpu)
    capacity = gpu.memory.value if hardware.memory is None else min(hardware.memory, gpu.memory.value)
    host_memory = hardware.host_memory or (node.host_memory.value if node else None)
    per_host = ceil_div(hardware.num_devices, hardware.num_hosts)
    return GpuPool(gpu, hardware.num_devices, capacity, per_host, host_memory, node)


def budget_of(job: JobSpec) -> BudgetSpec:
    """The question that the job answers, as far as bytes and seconds look at it."""
    work, training, rollout, place = job.workload, job.training, job.rollout, job.placement
    data = {
        "model": job.policy.path,
        "algorithm": job.algorithm.name,
        "algorithm_custom": job.algorithm.custom,
        "kl_coef": job.algorithm.kl_coef,
        "gpus": f"{job.hardware.num_devices}x{job.load_gpu().name}",
        "workload": {
            "num_prompts_per_step": work.num_prompts_per_step,
            "num_samples_per_prompt": work.num_samples_per_prompt,
            "mini_batch_size": work.mini_batch_size,
            "max_tokens_per_micro_batch": job.max_tokens_per_micro_batch,
            "max_prompt_len": work.max_prompt_len,
            "max_response_len": work.max_response_len,
            "mean_prompt_len": work.mean_prompt_len,
            "response_lengths": work.response_lengths.model_dump(mode="json"),
            "num_steps": work.num_steps,
        },
        "training": {
            "dtype": training.dtype.value,
            "optimizer": getattr(training, "optimizer", "adamw"),
            "reduce_bucket_size": training.reduce_bucket_size,
            "lora": _lora(job),
        },
        "rollout": {
            "dtype": rollout.dtype.value,
            "kv_dtype": rollout.kv_dtype,
            "kv_cache_memory": rollout.kv_cache_memory,
            "max_num_batched_tokens": rollout.max_num_batched_tokens,
            "block_size": rollout.block_size,
            "has_cuda_graphs": rollout.has_cuda_graphs,
        },
        "placement": {"sync_bucket": max(1 << 20, place.sync_bucket), "max_staleness": place.max_staleness},
    }
    return validate(BudgetSpec, data, file="the job as a budget")


def _lora(job: JobSpec) -> dict[str, object] | None:
    lora = job.training.lora
    if lora.rank is None:
        return None
    targets = lora.target_modules if isinstance(lora.target_modules, str) else list(lora.target_modules)
    base = "nf4" if job.training.quantization == "nf4" else "bfloat16"
    return {"rank": lora.rank, "targets": targets, "base": base}
