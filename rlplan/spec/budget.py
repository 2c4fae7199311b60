"""BudgetSpec: what memory is asked for on GPUs: models, algorithm, hardware, batch, and what may be chosen.

In: a YAML file, or `--model`, `--algorithm` and `--gpus`, with dotted overrides. Out: a frozen BudgetSpec whose open
choices are `auto`. Left out: data, rewards and deadlines, which memory does not depend on (they are a job's, job.py).
"""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationInfo, field_validator, model_validator

from rlplan.errors import did_you_mean
from rlplan.spec.algorithms import ALGORITHMS, DEFAULT
from rlplan.spec.base import ByteCount, Spec, validate
from rlplan.spec.declaration import Algorithm
from rlplan.spec.lengths import ConstantLengths, Lengths, LengthSpec, cut_lengths
from rlplan.spec.workload import MAX_COUNT, MAX_MINI_BATCHES
from rlplan.spec.yaml import apply_overrides, read_yaml
from rlplan.units import MIB
from rlplan.vocabulary import Dtype

Choice = Literal["auto"] | bool
Ways = Annotated[int, Field(ge=1, le=1024)] | Literal["auto"]
Target = Literal["rlplan", "fsdp2", "megatron"]
Objective = Literal["step_time", "tokens_per_s", "cost", "gpus"]


def fixed_ways(ways: int | str) -> int:
    """A number of ranks as given; 1 where it is left open."""
    return 1 if ways == "auto" else int(ways)


class BudgetWorkload(Spec):
    """The batch ladder and the lengths. Counts are of prompts or rollouts, lengths in tokens.

    mini_batch_size: rollouts per optimizer step; None for all of a step. response_lengths: how long responses are;
    none is longer than max_response_len. micro_batch_size_per_gpu: rollouts per pass, padded to the longest of them;
    max_tokens_per_micro_batch: tokens per pass instead, packed without padding.
    """

    num_prompts_per_step: int = Field(default=128, ge=1, le=MAX_COUNT)
    num_samples_per_prompt: int = Field(default=8, ge=1, le=MAX_COUNT)
    mini_batch_size: int | None = Field(default=None, ge=1, le=MAX_COUNT)
    micro_batch_size_per_gpu: int | Literal["auto"] = "auto"
    max_tokens_per_micro_batch: int | None = Field(default=None, ge=1, le=MAX_COUNT)
    max_prompt_len: int = Field(default=1024, ge=1, le=MAX_COUNT)
    max_response_len: int = Field(default=3072, ge=1, le=MAX_COUNT)
    mean_prompt_len: int | None = Field(default=None, ge=1, le=MAX_COUNT)
    response_lengths: LengthSpec = ConstantLengths()
    num_steps: int = Field(default=200, ge=1, le=10_000_000)

    @field_validator("micro_batch_size_per_gpu")
    @classmethod
    def _positive(cls, value: int | str) -> int | str:
        if isinstance(value, int) and not 1 <= value <= MAX_COUNT:
            raise ValueError(f"micro_batch_size_per_gpu = {value} must be `auto` or from 1 to {MAX_COUNT}")
        return value

    @model_validator(mode="after")
    def _ladder_divides(self) -> "BudgetWorkload":
        if self.num_rollouts_per_step % self.rollouts_per_mini_batch:
            raise ValueError(
                f"num_prompts_per_step x num_samples_per_prompt = {self.num_rollouts_per_step} must be a multiple of "
                f"mini_batch_size = {self.mini_batch_size}"
            )
        if self.num_mini_batches > MAX_MINI_BATCHES:
            raise ValueError(f"{self.num_mini_batches} optimizer steps in one RL step; at most {MAX_MINI_BATCHES}")
        if self.max_tokens_per_micro_batch is not None:
            if self.micro_batch_size_per_gpu != "auto":
                raise ValueError("give micro_batch_size_per_gpu or max_tokens_per_micro_batch, not both")
            if self.max_tokens_per_micro_batch < self.max_seq_len:
                raise ValueError(
                    f"max_tokens_per_micro_batch = {self.max_tokens_per_micro_batch} must hold one longest sequence, "
                    f"max_prompt_len + max_response_len = {self.max_seq_len}"
                )
        if (self.mean_prompt_len or 0) > self.max_prompt_len:
            raise ValueError(
                f"mean_prompt_len = {self.mean_prompt_len} is more than max_prompt_len = {self.max_prompt_len}"
            )
        return self

    @property
    def num_rollouts_per_step(self) -> int:
        """Rollouts generated in one step."""
        return self.num_prompts_per_step * self.num_samples_per_prompt

    @property
    def rollouts_per_mini_batch(self) -> int:
        """Rollouts per optimizer step."""
        return self.num_rollouts_per_step if self.mini_batch_size is None else self.mini_batch_size

    @property
    def num_mini_batches(self) -> int:
        """Optimizer steps in one RL step."""
        return self.num_rollouts_per_step // self.rollouts_per_mini_batch

    @property
    def max_seq_len(self) -> int:
        """Longest prompt plus longest response."""
        return self.max_prompt_len + self.max_response_len

    @property
    def prompt_len(self) -> int:
        """Tokens of a usual prompt: as given, else the longest."""
        return self.mean_prompt_len or self.max_prompt_len

    @property
    def lengths(self) -> Lengths:
        """Response lengths, cut at max_response_len."""
        return cut_lengths(self.response_lengths, self.max_response_len)


class LoraSpec(Spec):
    """Adapters that train beside a frozen policy. targets: names such as `q_proj`, or `all-linear`.

    base: what the frozen weights are kept in; `nf4` is QLoRA.
    """

    rank: int = Field(ge=1, le=65536)
    targets: str | tuple[str, ...] = "all-linear"
    base: Literal["bfloat16", "nf4"] = "bfloat16"


class BudgetTraining(Spec):
    """How trained roles are held under DeepSpeed; `auto` leaves the choice to the search.

    dtype: of weights in the passes; master weights and moments are fp32 beside 16-bit weights. logits: how the loss is
    taken (memory/logits.py); `auto` as the target does. offloads_optimizer, offloads_parameters: for good, to
    offload_device (ZeRO-Offload and ZeRO-Infinity). master_dtype: of master weights and moments beside 16-bit weights.
    ulysses: ranks that share one sequence. tp, pp, cp, ep: tensor, pipeline, context and expert parallel ranks;
    DeepSpeed has tp (AutoTP) alone.
    """

    dtype: Literal[Dtype.FLOAT32, Dtype.BFLOAT16, Dtype.FLOAT16] = Dtype.BFLOAT16
    zero_stage: Literal["auto", 0, 1, 2, 3] = "auto"
    recompute: Literal["auto", "none", "full"] = "auto"
    logits: Literal["auto", "plain", "chunked", "fused", "in_place", "by_rows"] = "auto"
    optimizer: Literal["adamw", "adamw_8bit", "muon"] = "adamw"
    offloads_optimizer: Choice = "auto"
    offloads_parameters: Choice = False
    offload_device: Literal["cpu", "nvme"] = "cpu"
    offloads_activations: bool = False
    master_dtype: Literal[Dtype.FLOAT32, Dtype.BFLOAT16] = Dtype.FLOAT32
    ulysses: Ways = "auto"
    tp: Ways = "auto"
    pp: Ways = "auto"
    cp: Ways = "auto"
    ep: Ways = "auto"
    reduce_bucket_size: int = Field(default=50_000_000, ge=1_000, le=MAX_COUNT)
    lora: LoraSpec | None = None


class BudgetRollout(Spec):
    """How the rollout engine is held. kv_cache_memory: bytes a GPU; `auto` takes what is free, up to what is needed.

    tp: ranks that share one engine. sleep_level: 0 stays, 1 keeps weights on the host, 2 drops them. quantization: of
    its weights, by a format's name; `auto` may take fp8 where the GPU computes it. has_expert_parallel: whole experts
    lie on an engine's ranks instead of a slice of each.
    """

    dtype: Literal[Dtype.FLOAT32, Dtype.BFLOAT16, Dtype.FLOAT16] = Dtype.BFLOAT16
    quantization: str | None = Field(default=None, max_length=40)
    kv_dtype: Literal["auto", "fp8"] = "auto"
    tp: int | Literal["auto"] = "auto"
    kv_cache_memory: ByteCount | Literal["auto"] = "auto"
    max_num_seqs: Annotated[int, Field(ge=1, le=MAX_COUNT)] | Literal["auto"] = "auto"
    max_num_batched_tokens: int = Field(default=8192, ge=1, le=MAX_COUNT)
    block_size: Literal[16, 32, 64, 128] = 16
    sleep_level: Literal["auto", 0, 1, 2] = "auto"
    has_cuda_graphs: bool = True
    has_expert_parallel: Choice = "auto"

    @field_validator("tp")
    @classmethod
    def _positive(cls, value: int | str) -> int | str:
        if isinstance(value, int) and not 1 <= value <= 1024:
            raise ValueError(f"tp = {value} must be `auto` or from 1 to 1024")
        return value


class BudgetPlacement(Spec):
    """Who shares devices with whom. generation_share: of the GPUs, where generation has its own.

    parks: whether roles that wait move to the host meanwhile, or `frozen` ones alone. sync_bucket: bytes of weights
    handed over at a time.
    max_staleness: policy versions that a rollout may be behind; from 1 on, generation may run beside training.
    transport: how weights reach the engine. reward_latency_s: that a rule-based reward of one rollout takes.
    """

    placement: Literal["auto", "colocated", "hybrid", "disaggregated"] = "auto"
    parks: Choice | Literal["frozen"] = "auto"
    sync_bucket: ByteCount = Field(default=512 * MIB, ge=1 << 20)
    generation_share: Annotated[float, Field(gt=0, lt=1)] | Literal["auto"] = "auto"
    max_staleness: int = Field(default=0, ge=0, le=1024)
    transport: Literal["auto", "cuda_ipc", "nccl", "disk", "adapter", "delta"] = "auto"
    reward_latency_s: float = Field(default=0.0, ge=0, le=3600)


class BudgetSpec(Spec):
    """What memory is asked for. Nested parts are documented on their own classes and in docs/budgets.md.

    model: an id of the catalogue, or a path to a Hugging Face folder or `config.json`. value_model, reward_model: the
    same; the value model is the policy's shape with one output unless given, and there is no reward model unless given.
    gpus: as `8xH100`; profile names and short names; `8xH100 + 8xL40S` are two groups that do not share devices.
    algorithm_custom: the declaration of an algorithm of a job's own. kl_coef: 0 does without a reference, None is as
    usual.
    target: who trains: rlplan's own runtime (DeepSpeed), or what a plan is exported to. objective: what is made small,
    or large (tokens per second). price_per_gpu_hour: in dollars, of each group of GPUs alike.
    job: the parts of a job file (docs/job.md) that a run needs beside: what is trained on, how it is rewarded.
    folder: what its paths are relative to, the file's own unless given.
    memory: bytes of one GPU that may be used, None for all that the driver reports. host_memory, gpus_per_host: of one
    host, None as in the node that is named, or the first bundled one with this GPU.
    """

    schema_version: Literal[1] = 1
    model: str = Field(min_length=1, max_length=4096)
    value_model: str | None = None
    reward_model: str | None = None
    algorithm_custom: dict[str, Any] | None = None
    algorithm: str = DEFAULT
    kl_coef: float | None = Field(default=None, ge=0)
    gpus: str = Field(min_length=1, max_length=200)
    memory: ByteCount | None = Field(default=None, ge=1 << 30)
    host_memory: ByteCount | None = Field(default=None, ge=1 << 30)
    gpus_per_host: int | None = Field(default=None, ge=1, le=1024)
    target: Target = "rlplan"
    objective: Objective = "step_time"
    price_per_gpu_hour: float | None = Field(default=None, gt=0, le=1e6)
    workload: BudgetWorkload = BudgetWorkload()
    training: BudgetTraining = BudgetTraining()
    rollout: BudgetRollout = BudgetRollout()
    placement: BudgetPlacement = BudgetPlacement()
    job: dict[str, Any] | None = None
    folder: str | None = None

    @field_validator("algorithm")
    @classmethod
    def _known_name(cls, name: str, info: ValidationInfo) -> str:
        if name not in ALGORITHMS and info.data.get("algorithm_custom") is None:
            raise ValueError(f"known algorithms: {', '.join(ALGORITHMS)}." + did_you_mean(name, ALGORITHMS))
        return name

    @model_validator(mode="after")
    def _group_is_large_enough(self) -> "BudgetSpec":
        least = self.declaration.min_samples_per_prompt
        if self.workload.num_samples_per_prompt < least:
            raise ValueError(
                f"{self.algorithm} compares rollouts of one prompt: workload.num_samples_per_prompt = "
                f"{self.workload.num_samples_per_prompt} must be at least {least}"
            )
        return self

    @property
    def declaration(self) -> Algorithm:
        """The algorithm's declaration."""
        custom = self.algorithm_custom
        return ALGORITHMS[self.algorithm] if custom is None else Algorithm.model_validate(custom)

    @property
    def num_generated_per_step(self) -> int:
        """Rollouts that engines make in a step, the baselines that nobody trains on among them."""
        baselines = self.workload.num_prompts_per_step * self.declaration.num_baseline_samples
        return self.workload.num_rollouts_per_step + baselines

    @property
    def has_reference(self) -> bool:
        """Whether a frozen copy of the policy is held as KL anchor. With adapters the frozen base is the anchor."""
        wanted = self.declaration.has_reference if self.kl_coef is None else self.kl_coef > 0
        return wanted and self.training.lora is None


def load_budget(path: Path, overrides: Sequence[str] = ()) -> BudgetSpec:
    """The budget in a YAML file, with dotted overrides laid over it; a model's path is relative to the file.

    Raises: SpecError.
    """
    data = apply_overrides(read_yaml(path, "the budget file"), overrides)
    budget = validate(BudgetSpec, data, file=str(path), way_out=WAY_OUT)
    changed = {
        key: str(path.parent / name)
        for key in ("model", "value_model", "reward_model")
        if (name := getattr(budget, key)) and (path.parent / name).exists()
    }
    if budget.job is not None:
        changed["folder"] = os.path.normpath(path.parent.resolve() / (budget.folder or "."))
    return budget.model_copy(update=changed)


def make_budget(answers: dict[str, Any], overrides: Sequence[str] = ()) -> BudgetSpec:
    """The budget of a command line. answers: top-level keys. Raises: SpecError."""
    given = {key: value for key, value in answers.items() if value is not None}
    return validate(BudgetSpec, apply_overrides(given, overrides), file="command line", way_out=WAY_OUT)


WAY_OUT = "docs/budgets.md shows every key and a whole budget"
