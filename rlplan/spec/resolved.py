"""How every `auto` of a job is resolved: first by the machine's rules, then by the planner's choices.

In: a JobSpec, and for a ResolvedJob the planner's values. Out: jobs whose types state what is no longer open. Left out:
which choice is best (planner/), whether it can run (planner/rules.py).

A job file stays sparse; a plan holds a ResolvedJob.

    JobSpec      the user's input
    SettledJob   machine and framework defaults are filled in; what the planner searches is still open
    ResolvedJob  nothing is open, except ZeRO stage, placement and transport on a CPU host until its plan is found
"""

from collections.abc import Sequence
from typing import Any, Literal, TypeVar

from rlplan.errors import SpecError
from rlplan.frameworks.profile import ScoredWords, suggest_trainer
from rlplan.frameworks.rules import RuleBook
from rlplan.spec.base import Spec, validate
from rlplan.spec.hardware.catalogue import count_gpus_per_host, find_profile, get_gpu, get_profile
from rlplan.spec.hardware.profile import GpuProfile, HardwareProfile
from rlplan.spec.job import JobSpec
from rlplan.spec.parts.algorithm import AlgorithmSpec
from rlplan.spec.parts.conduct import LimitsSpec
from rlplan.spec.parts.data import DataSpec
from rlplan.spec.parts.placement import HardwareSpec, PlacementSpec
from rlplan.spec.parts.rollout import RolloutSpec
from rlplan.spec.parts.training import LossName, TrainingSpec
from rlplan.spec.parts.workload import WorkloadSpec
from rlplan.units import GIB, MIB, ceil_div
from rlplan.vocabulary import Backend, Dtype, Loss, Role, SyncContent, Transport

Kind = Literal["cpu", "cuda"]
SpecKind = TypeVar("SpecKind", bound=Spec)

RULES: dict[str, dict[Kind, Any]] = {
    "training.dtype": {"cpu": Dtype.FLOAT32, "cuda": Dtype.BFLOAT16},
    "training.reduce_bucket_size": {"cpu": 25_000_000, "cuda": 50_000_000},
    "rollout.dtype": {"cpu": Dtype.FLOAT32, "cuda": Dtype.BFLOAT16},
    "rollout.has_cuda_graphs": {"cpu": False, "cuda": True},
    "rollout.max_num_batched_tokens": {"cpu": 2048, "cuda": 8192},
    "rollout.block_size": {"cpu": 32, "cuda": 16},
    "rollout.speculative_tokens": {"cpu": 0, "cuda": 0},
    "placement.spreads_scoring": {"cpu": False, "cuda": True},
    "placement.max_staleness": {"cpu": 0, "cuda": 0},
    "placement.sync_bucket": {"cpu": 64 * MIB, "cuda": 512 * MIB},
}
"""Defaults on a CPU host and on GPUs. On a CPU host, max_num_batched_tokens also holds one longest sequence."""

CPU_CHOICES: dict[str, Any] = {
    "training.gradient_checkpointing": False,
    "training.offloads_optimizer": False,
    "training.offloads_parameters": False,
    "training.ulysses": 1,
    "training.tp": 1,
    "training.pp": 1,
    "training.cp": 1,
    "training.ep": 1,
    "training.etp": 1,
    "rollout.num_engines": 1,
    "rollout.tp": 1,
    "rollout.attention_dp": 1,
    "rollout.has_expert_parallel": False,
    "rollout.sleep_level": 2,
    "rollout.kv_cache_memory": 64 * MIB,
    "rollout.max_num_seqs": 256,
    "placement.num_generation_devices": 1,
    "placement.num_scoring_devices": 0,
    "placement.offload": "none",
    "placement.offload_roles": "all",
    "placement.sync_senders": "one",
    "placement.sync_content": SyncContent.FULL,
}
"""Values on a CPU host where a job leaves the choice open; on GPUs the planner searches."""
LEAST_SECONDS: dict[str, float] = {"start_timeout_s": 300.0, "action_timeout_s": 600.0}
"""Minimum timeouts: fixed costs that no prediction counts (compilation, a cold disk) take minutes."""
CPU_MICRO_BATCH = 8
"""Limit on the default micro-batch size on a CPU host, in rollouts."""


class SettledAlgorithm(AlgorithmSpec):
    """Algorithm settings with the importance correction resolved."""

    importance: Literal["none", "truncate", "mask"] = "none"


class SettledTraining(TrainingSpec):
    """Trainer settings with the machine's defaults."""

    backend: Backend = "deepspeed"
    dtype: Dtype = RULES["training.dtype"]["cuda"]
    reduce_bucket_size: int = RULES["training.reduce_bucket_size"]["cuda"]
    logits: LossName = "by_rows"

    @property
    def loss(self) -> Loss:
        """How the loss is computed from hidden states."""
        return Loss(self.logits)

    @property
    def moment_bytes(self) -> int:
        """Bytes per parameter of each of the optimizer's moments."""
        return (self.master_dtype if self.moment_dtype == "auto" else self.moment_dtype).num_bytes

    def stored_dtype(self, backend: Backend) -> Dtype:
        """Data type of weights between passes. FSDP2 stores all of them, a frozen base too, in the master type."""
        return self.master_dtype if backend == "fsdp2" else self.dtype

    def shares_rows(self, backend: Backend) -> bool:
        """Whether tensor-parallel ranks split the operations between their matmuls by rows; DeepSpeed's AutoTP
        cannot.
        """
        return self.sequence_parallel and backend != "deepspeed"

    def sharding_ranks(self, num_ranks: int) -> int:
        """Ranks that share one copy of the states, out of `num_ranks` that hold the same layers."""
        return min(num_ranks, self.fsdp_size or num_ranks)


class SettledRollout(RolloutSpec):
    """Rollout settings with the machine's defaults."""

    dtype: Dtype = RULES["rollout.dtype"]["cuda"]
    has_cuda_graphs: bool = RULES["rollout.has_cuda_graphs"]["cuda"]
    max_num_batched_tokens: int = RULES["rollout.max_num_batched_tokens"]["cuda"]
    block_size: Literal[16, 32, 64, 128] = RULES["rollout.block_size"]["cuda"]
    speculative_tokens: int = 0


class SettledPlacement(PlacementSpec):
    """Placement settings with the machine's defaults."""

    spreads_scoring: bool = RULES["placement.spreads_scoring"]["cuda"]
    max_staleness: int = 0
    sync_bucket: int = RULES["placement.sync_bucket"]["cuda"]


class SettledHardware(HardwareSpec):
    """Hardware with the number of hosts."""

    num_hosts: int

    @property
    def devices_per_host(self) -> int:
        """Devices per host; the last host may have fewer."""
        return ceil_div(self.num_devices, self.num_hosts)

    def find_host(self, device: int) -> int:
        """The host of a device; devices fill hosts in order and as evenly as possible.

        >>> [SettledHardware(profile="cpu-host", num_devices=5, num_hosts=2).find_host(device) for device in range(5)]
        [0, 0, 0, 1, 1]
        """
        return device * self.num_hosts // self.num_devices


class SettledJob(JobSpec):
    """A job with its machine's and framework's defaults."""

    framework: str = "rlplan"
    hardware: SettledHardware
    algorithm: SettledAlgorithm = SettledAlgorithm.create_default()
    training: SettledTraining = SettledTraining.create_default()
    rollout: SettledRollout = SettledRollout.create_default()
    placement: SettledPlacement = SettledPlacement.create_default()

    def scored_words(self, role: Role) -> ScoredWords | None:
        """Vocabulary-sized tensors that a log-prob pass of a role holds; None: as many as the loss holds without
        gradient.

        A loss that never materializes all logits does not do so in this pass either.
        """
        if self.training.loss in (Loss.FUSED, Loss.BY_ROWS):
            return None
        logits = self.release.logits[self.backend]
        has_entropy = role is Role.POLICY and self.takes_entropies
        return (logits.score_with_entropy if has_entropy else None) or logits.score

    @property
    def takes_all_rows(self) -> bool:
        """Whether the head is applied to every token of a pass, including prompts, instead of only responses."""
        rows = self.release.head_rows
        return rows == "all" or (rows == "by_loss" and self.training.loss not in (Loss.BY_ROWS, Loss.FUSED))

    @property
    def host_waits(self) -> Literal["none", "layers", "tokens"]:
        """GPU work that the trainer's host waits for."""
        if self.training.kernels.host_waits != "auto":
            return self.training.kernels.host_waits
        waits = self.release.host_waits
        return "layers" if waits == "tokens" and not self.has_rollouts else waits

    @property
    def uncorrected_staleness(self) -> str:
        """The warning that stale rollouts are not corrected; empty if they are, or none are stale. The loss's ratio
        does not correct them: its denominator is the trainer's log-prob before the step, not that of the older weights.
        """
        staleness = self.placement.max_staleness
        if not staleness or not self.algorithm.weighs_rollouts or self.algorithm.corrects_importance:
            return ""
        return (
            f"algorithm.importance none with placement.max_staleness {staleness}: rollouts of older weights count like "
            f"the policy's own, which biases the gradient; algorithm.importance=truncate weighs each token"
        )

    def frozen_dtype(self, role: Role) -> Dtype:
        """Data type of a frozen role's weights."""
        if role is not Role.REFERENCE:
            return self.training.dtype
        if self.roles.reference.dtype != "auto":
            return self.roles.reference.dtype
        kept = self.release.reference_dtype.get(self.backend)
        return self.training.dtype if kept is None else Dtype(kept)

    def load_gpu(self, group: str = "training") -> GpuProfile:
        """The GPU that the job names, directly or by its node, for a group of its devices. Raises: SpecError."""
        second = self.hardware.generation if group == "generation" else None
        return get_gpu(second.profile if second else self.hardware.profile, where="hardware.profile")

    def load_profile(self) -> HardwareProfile:
        """The profile of the CPU host that the job names. Raises: SpecError."""
        profile = get_profile(self.hardware.profile, where="hardware.profile")
        if self.hardware.num_devices > profile.max_devices * self.hardware.num_hosts:
            raise SpecError(
                f"hardware.num_devices is {self.hardware.num_devices}, profile '{profile.name}' has at most "
                f"{profile.max_devices} on each of {self.hardware.num_hosts} host(s)",
                where="hardware.num_devices",
                rule="at most the profile's max_devices on each host",
                way_out="ask for fewer devices or name another profile",
            )
        return profile


class ResolvedWorkload(WorkloadSpec):
    """A workload with every batch size resolved."""

    mini_batch_size: int
    micro_batch_size_per_gpu: int


class ResolvedTraining(SettledTraining):
    """Trainer settings with every choice resolved."""

    max_tokens_per_micro_batch: int
    gradient_checkpointing: bool
    offloads_optimizer: bool
    offloads_parameters: bool = False
    ulysses: int
    tp: int
    pp: int = 1
    cp: int = 1
    ep: int = 1
    etp: int = 1

    @property
    def num_ranks_per_pass(self) -> int:
        """Ranks that compute one micro-batch together."""
        return self.ulysses * self.tp


class ResolvedRollout(SettledRollout):
    """Rollout settings with every choice resolved."""

    num_engines: int
    tp: int
    attention_dp: int = 1
    has_expert_parallel: bool
    sleep_level: Literal[0, 1, 2]
    kv_cache_memory: int
    max_num_seqs: int

    @property
    def num_processes(self) -> int:
        """Ranks of all engines: each is a process on a device of its own."""
        return self.num_engines * self.tp * self.attention_dp


class ResolvedPlacement(SettledPlacement):
    """Placement settings with every choice resolved. On a CPU host, the placement itself and the transport stay
    open.
    """

    num_generation_devices: int
    num_scoring_devices: int
    offload: Literal["none", "host", "disk"]
    offload_roles: Literal["all", "frozen"]
    sync_senders: Literal["one", "each"]
    sync_content: SyncContent


class ResolvedLimits(LimitsSpec):
    """Limits with every timeout resolved."""

    start_timeout_s: float
    action_timeout_s: float

    @property
    def rank_timeout_s(self) -> float:
        """Timeout of ranks that wait for each other, at their start as in every later action."""
        return max(self.start_timeout_s, self.action_timeout_s)


class ResolvedJob(SettledJob):
    """A job whose choices are made, as it is planned and run."""

    workload: ResolvedWorkload
    training: ResolvedTraining
    rollout: ResolvedRollout
    placement: ResolvedPlacement
    limits: ResolvedLimits

    @property
    def needed_data(self) -> DataSpec:
        """The training data of a job that runs; planner/executable.py has checked that it exists."""
        assert self.data is not None, "a job without data is not run"
        return self.data

    @property
    def max_tokens_per_micro_batch(self) -> int:
        """Limit on the tokens of one micro-batch of a trained or frozen model."""
        return self.training.max_tokens_per_micro_batch

    @property
    def sync_transport(self) -> Transport:
        """The transport of weights, chosen here if it is left open: shared memory on one host, since nothing is faster.

        With several hosts, the first host's trainer sends weights and engines run on the last, so that gloo connects
        them. On GPUs, CUDA IPC serves shared devices, and NCCL separate ones.
        """
        if self.placement.transport != "auto":
            return self.placement.transport
        if self.is_on_gpus:
            return Transport.NCCL if self.placement.placement == "disaggregated" else Transport.CUDA_IPC
        return Transport.SHARED_MEMORY if self.hardware.num_hosts == 1 else Transport.GLOO


def settle(job: JobSpec) -> SettledJob:
    """The job with its machine's and its framework's defaults.

    Raises: SpecError for an unknown profile, and for a trainer that the framework does not have.
    """
    if isinstance(job, SettledJob):
        return job
    release, kind = job.release, job.device_kind
    if "@" not in job.framework:  # a plan states the release that it was made for
        job = job.model_copy(update={"framework": release.label})
    values: dict[str, dict[str, Any]] = {"hardware": {"num_hosts": _num_hosts(job, kind)}}
    backend = _backend(job)
    job = _set_framework_values(_set_value(job, ("hardware", "num_hosts"), values["hardware"]["num_hosts"]))
    values["training"] = {"backend": backend}
    if job.training.logits == "auto":
        logits = release.logits[backend]
        values["training"]["logits"] = logits.train_given.get(job.algorithm.name, logits.train)
    for key, by_machine in RULES.items():
        part, _, name = key.partition(".")
        if getattr(getattr(job, part), name) == "auto":
            values.setdefault(part, {})[name] = by_machine[kind]
    if release.sync_bucket and job.placement.sync_bucket == "auto":
        values["placement"]["sync_bucket"] = release.sync_bucket
    if kind == "cpu" and job.rollout.max_num_batched_tokens == "auto":
        seqs = job.rollout.max_num_seqs
        least = max(job.workload.max_seq_len, 0 if seqs == "auto" else seqs)
        values["rollout"]["max_num_batched_tokens"] = max(least, RULES["rollout.max_num_batched_tokens"]["cpu"])
    settled = _narrow(job, SettledJob, values)
    settings = dict(settled.algorithm)
    if settings["importance"] == "auto":  # resolved last, since it depends on the settled data types
        settings["importance"] = _importance(settled)
    algorithm = SettledAlgorithm.model_construct(job.algorithm.model_fields_set, **settings)
    return settled.model_copy(update={"algorithm": algorithm})


def build_rule_book(job: JobSpec) -> RuleBook:
    """The rules of the job's framework, with the job's values."""
    rules = job.release.rules
    if not job.has_rollouts:
        rules = tuple(rule for rule in rules if not rule.key.startswith(("rollout.", "placement.placement")))
    return RuleBook(rules, lambda key: _read_value(job, key))


def build_search_rules(job: JobSpec) -> RuleBook:
    """The rules that a search obeys; those of rlplan's own runtime concern keys that no search chooses."""
    return RuleBook((), lambda key: _read_value(job, key)) if job.release.is_rlplan else build_rule_book(job)


def _read_value(job: JobSpec, key: str) -> Any:
    """The value of a dotted key, which may be a property; None below a part that the job lacks."""
    if key == "training.backend":
        return job.backend
    if key == "placement.placement" and job.hardware.generation is not None:
        return "disaggregated"  # two groups of GPUs share no devices
    if key == "hardware.has_large_gpus":
        generation = job.hardware.generation or job.hardware
        return job.is_on_gpus and _is_large_to_vllm(get_gpu(generation.profile, where="hardware.profile"))
    part: Any = job
    for name in key.split("."):
        part = getattr(part, name, None)
    return part


def _is_large_to_vllm(gpu: GpuProfile) -> bool:
    """Whether vLLM's server uses its larger default limits on a GPU. Source: vLLM 0.25 arg_utils.py."""
    return gpu.memory.value >= 70 * GIB and not gpu.name.startswith("a100")


def _set_framework_values(job: JobSpec) -> JobSpec:
    """The job with open keys set where its framework allows only one value."""
    for key, value in build_rule_book(job).settle().items():
        job = _set_value(job, key.split("."), value)
    return job


def _set_value(part: SpecKind, keys: Sequence[str], value: Any) -> SpecKind:
    """A part of a job with another value of a nested key."""
    key, *below = keys
    if below:
        value = _set_value(getattr(part, key), below, value)
    elif isinstance(value, str):  # may name an enumeration member
        value = getattr(validate(type(part), {key: value}, file=key), key)
    return part.model_copy(update={key: value})


def _backend(job: JobSpec) -> Backend:
    """The trainer that a job names, or its framework's default. Raises: SpecError where the framework lacks it."""
    release, asked = job.release, job.backend
    if asked not in release.backends:
        raise SpecError(
            f"training.backend is {asked}, framework {release.label} trains with {' or '.join(release.backends)}",
            where="training.backend",
            rule=f"the trainers of {release.title} (rlplan/frameworks/{release.name}.yaml)",
            way_out=f"training.backend={release.backends[0]}, or {suggest_trainer(asked)}",
        )
    return asked


def _importance(job: SettledJob) -> Literal["none", "truncate"]:
    """The value of `algorithm.importance: auto`: a correction wherever engine and trainer compute different log-probs.

    In fp32 they differ by 1e-6 (learning/logprob_mismatch.py). In 16 bits verl recomputes old log-probs and TRL
    corrects by default. Truncation at 2 is verl's recommendation (docs/algo/rollout_corr.md).
    """
    rollout = job.rollout
    formats = {job.training.dtype, rollout.dtype, rollout.quantization, rollout.kv_dtype}
    is_exact = formats <= {Dtype.FLOAT32, "none", "auto"} and rollout.base_path is None
    differs = not is_exact or job.placement.max_staleness > 0
    samples_elsewhere = job.algorithm.weighs_rollouts and not rollout.generates_in_trainer
    return "truncate" if differs and samples_elsewhere else "none"


def fill_choices(job: SettledJob, values: dict[str, dict[str, Any]]) -> ResolvedJob:
    """The job with `values`, by part and key, in place of open choices."""
    deadlines = {key: least for key, least in LEAST_SECONDS.items() if getattr(job.limits, key) == "auto"}
    return _narrow(job, ResolvedJob, {"limits": deadlines, **values})


def resolve_on_cpu(job: JobSpec) -> ResolvedJob:
    """The job of a CPU host with its open choices resolved, except those that its plan decides."""
    if isinstance(job, ResolvedJob):
        return job
    settled = settle(job)
    values: dict[str, dict[str, Any]] = {"workload": _passes(settled), "training": {}, "rollout": {}, "placement": {}}
    for key, value in CPU_CHOICES.items():
        part, _, name = key.partition(".")
        if getattr(getattr(settled, part), name) == "auto":
            values[part][name] = value
    tokens = settled.training.max_tokens_per_micro_batch
    if tokens == "auto":
        tokens = values["workload"]["micro_batch_size_per_gpu"] * settled.workload.max_seq_len
    values["training"]["max_tokens_per_micro_batch"] = tokens
    return fill_choices(settled, values)


def _passes(job: SettledJob) -> dict[str, Any]:
    """Batch sizes on a CPU host."""
    work, tokens = job.workload, job.training.max_tokens_per_micro_batch
    micro = work.micro_batch_size_per_gpu
    if micro == "auto":
        share = min(CPU_MICRO_BATCH, work.rollouts_per_mini_batch)
        micro = max(job.sequences_per_unit, share if tokens == "auto" else tokens // work.max_seq_len)
    return {"mini_batch_size": work.rollouts_per_mini_batch, "micro_batch_size_per_gpu": micro}


def _num_hosts(job: JobSpec, kind: Kind) -> int:
    num_hosts = job.hardware.num_hosts
    if num_hosts != "auto":
        return num_hosts
    if kind == "cpu":
        return 1
    per_host = count_gpus_per_host(find_profile(job.hardware.profile, where="hardware.profile"))
    return ceil_div(job.hardware.num_devices, per_host)


def _narrow(job: JobSpec, kind: type[SpecKind], values: dict[str, dict[str, Any]]) -> SpecKind:
    """The job as a narrower kind of job. It is not validated again, since values come from rules and the planner."""
    fields: dict[str, Any] = {name: getattr(job, name) for name in type(job).model_fields}
    for name, field in kind.model_fields.items():
        part, part_kind, changed = fields[name], field.annotation, values.get(name, {})
        if isinstance(part, Spec) and isinstance(part_kind, type) and (changed or type(part) is not part_kind):
            known = {key: getattr(part, key) for key in type(part).model_fields} | changed
            fields[name] = part_kind.model_construct(part.model_fields_set | set(changed), **known)
    return kind.model_construct(job.model_fields_set | set(values), **fields)
