"""The workload: how many prompts, and how many rollouts of which length.

In: the `workload:` part of a job. Out: frozen values. Units: lengths are in tokens, counts in prompts or rollouts as
their names say.
"""

from math import gcd
from typing import Annotated

from pydantic import BeforeValidator, Field, ValidationInfo, field_validator, model_validator
from pydantic_core import PydanticCustomError

from rlplan.spec.base import Auto, Spec
from rlplan.spec.parts.lengths import ConstantLengths, Lengths, LengthSpec, cut_lengths
from rlplan.units import parse_tokens

MAX_COUNT = 1 << 30
"""Limit of counts, far above any real batch: a larger number is a typo."""
Count = Annotated[int, Field(ge=1, le=MAX_COUNT)]
Tokens = Annotated[int, BeforeValidator(parse_tokens, json_schema_input_type=int | str), Field(ge=1, le=MAX_COUNT)]
"""A length in tokens; `16k` is 16,384."""
MAX_MINI_BATCHES = 256
"""Limit of optimizer steps in one RL step: each is an action of the schedule, so that planning time grows with them."""


class WorkloadSpec(Spec):
    """The `workload:` part of a job: the batch ladder and the lengths."""

    num_steps: int = Field(default=200, ge=1, le=10_000_000)
    """Number of RL steps."""
    num_prompts_per_step: Count = 128
    """Prompts per RL step."""
    num_generated_prompts_per_step: Count | None = None
    """Prompts that a step generates rollouts for, if it trains only on some of the groups (dynamic sampling,
    over-sampling in other frameworks). None: num_prompts_per_step."""
    num_samples_per_prompt: Count = 8
    """Rollouts per prompt; 1 or 2 for algorithms that learn from answers in the data."""
    mini_batch_size: Count | None = None
    """Rollouts per optimizer step; None: all rollouts of the RL step."""
    num_epochs_per_step: int = Field(default=1, ge=1, le=MAX_MINI_BATCHES)
    """Training epochs over a step's rollouts; each shuffles them into new mini-batches."""
    micro_batch_size_per_gpu: Count | Auto = "auto"
    """Rollouts per micro-batch on each rank, counted at maximum length. training.max_tokens_per_micro_batch is the same
    limit in tokens."""
    max_prompt_len: Tokens = 1024
    """Maximum prompt length in tokens."""
    max_response_len: Tokens = 3072
    """Maximum response length in tokens."""
    mean_prompt_len: Tokens | None = None
    """Mean prompt length in tokens, for predictions only; None: max_prompt_len."""
    mean_response_len: Tokens | None = None
    """Mean response length in tokens, for predictions only; None: max_response_len. On GPUs a given `response_lengths`
    takes precedence."""
    response_lengths: LengthSpec = ConstantLengths.create_default()
    """Distribution of response lengths, for predictions on GPUs, simulations, and runs with controls.forces_lengths."""
    num_concurrent_requests: Count | None = None
    """Requests that clients keep in flight at a standalone engine (`framework: vllm`), for `rlplan simulate`. Each has
    the mean prompt and response length; an answered request is replaced at once."""
    reward_latency_s: float = Field(default=0.0, ge=0, le=3600)
    """Seconds that the rule-based reward of one rollout takes, for predictions on GPUs."""
    temperature: float = Field(default=1.0, ge=0.01, le=2)
    """Sampling temperature."""
    ignores_eos: bool = False
    """Whether generation continues past the end-of-sequence token."""
    evaluate_every: int = Field(default=10, ge=1)
    """Interval of evaluation on held-out prompts, in steps; evaluation also runs before the first step and after the
    last."""
    num_heldout_prompts: int = Field(default=256, ge=1)
    """Limit on held-out prompts per evaluation, for each data set."""
    num_evaluation_samples: int = Field(default=1, ge=1, le=1024)
    """Responses per held-out prompt."""
    evaluation_temperature: float = Field(default=0.0, ge=0, le=2)
    """Sampling temperature of evaluation; 0 is greedy."""

    @property
    def num_rollouts_per_step(self) -> int:
        """Rollouts generated in one step."""
        return self.num_prompts_per_step * self.num_samples_per_prompt

    @property
    def rollouts_per_mini_batch(self) -> int:
        """Rollouts per optimizer step."""
        return self.num_rollouts_per_step if self.mini_batch_size is None else self.mini_batch_size

    @property
    def mini_batches_per_epoch(self) -> int:
        """Optimizer steps in which each rollout of an RL step is trained on once."""
        return self.num_rollouts_per_step // self.rollouts_per_mini_batch

    @property
    def num_mini_batches(self) -> int:
        """Optimizer steps in one RL step, over all its epochs."""
        return self.mini_batches_per_epoch * self.num_epochs_per_step

    @property
    def max_seq_len(self) -> int:
        """Longest prompt plus longest response, in tokens."""
        return self.max_prompt_len + self.max_response_len

    @property
    def usual_response_len(self) -> int:
        """Response length used for predicted times: the mean if the job has one, else the maximum as an upper bound."""
        return self.max_response_len if self.mean_response_len is None else self.mean_response_len

    @property
    def usual_prompt_len(self) -> int:
        """Prompt length used for predictions: the mean if the job has one, else the maximum as an upper bound."""
        return self.max_prompt_len if self.mean_prompt_len is None else self.mean_prompt_len

    @property
    def lengths(self) -> Lengths:
        """Response lengths, cut at max_response_len; without a distribution every response has the usual length."""
        spec = self.response_lengths
        if spec == ConstantLengths() and self.mean_response_len is not None:
            spec = ConstantLengths(value=self.mean_response_len)
        return cut_lengths(spec, self.max_response_len)

    @property
    def tokens_in_words(self) -> str:
        """Prompt and response lengths in words, for pages and answers."""
        longest, mean = self.max_response_len, round(self.lengths.mean)
        beside = f", {mean:,} on average" if mean < longest else ""
        most = "up to " if beside else ""
        return f"{self.max_prompt_len:,} + {most}{longest:,} tokens ({self.response_lengths.kind} lengths{beside})"

    @field_validator("mean_prompt_len", "mean_response_len")
    @classmethod
    def _mean_is_no_longer(cls, mean: int | None, info: ValidationInfo) -> int | None:
        longest = str(info.field_name).replace("mean", "max")
        if mean is not None and mean > info.data.get(longest, mean):
            raise ValueError(f"{info.field_name} is at most {longest}")
        return mean

    @model_validator(mode="after")
    def _samples_differ(self) -> "WorkloadSpec":
        if self.num_evaluation_samples > 1 and not self.evaluation_temperature:
            raise ValueError(
                f"num_evaluation_samples = {self.num_evaluation_samples} at evaluation_temperature = 0 would all be "
                f"the same greedy response: give workload.evaluation_temperature, such as 1.0"
            )
        return self

    @model_validator(mode="after")
    def _ladder_divides(self) -> "WorkloadSpec":
        if self.num_rollouts_per_step % self.rollouts_per_mini_batch:
            size = gcd(self.num_rollouts_per_step, self.rollouts_per_mini_batch)
            raise PydanticCustomError(
                "value_error",
                f"num_prompts_per_step x num_samples_per_prompt = {self.num_rollouts_per_step} must be a multiple of "
                f"mini_batch_size = {self.mini_batch_size}",
                {"way_out": f"workload.mini_batch_size={size}"},
            )
        if self.num_mini_batches > MAX_MINI_BATCHES:
            raise ValueError(
                f"num_prompts_per_step x num_samples_per_prompt / mini_batch_size x num_epochs_per_step = "
                f"{self.num_mini_batches} optimizer steps in one RL step; at most {MAX_MINI_BATCHES}"
            )
        return self
