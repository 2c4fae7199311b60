"""The workload: which prompts, and how many rollouts of what length.

In: the `workload:` part of a job. Out: frozen values. Left out: rows of data sets (runtime/data).
Units: lengths in tokens; counts are of prompts or rollouts as their names say.
"""

from pydantic import Field, ValidationInfo, field_validator, model_validator

from rlplan.spec.base import Spec
from rlplan.spec.lengths import ConstantLengths, LengthSpec

MAX_COUNT = 1 << 30
"""Above any real batch: a count beyond it is a slip of the keyboard."""
MAX_MINI_BATCHES = 256
"""Optimizer steps in one RL step; each is an action of the schedule."""


class WorkloadSpec(Spec):
    """The `workload:` part of a job: the batch ladder and the lengths.

    prompt_column, answer_column: of a data set whose layout is none of those that are known.
    evaluate_every: greedy evaluation on the held-out prompts after every so many steps; also before the first and
    after the last. mini_batch_size: rollouts per optimizer step. micro_batch_size_per_gpu: rollouts per forward.
    mean_prompt_len, mean_response_len: of usual rollouts, for predictions alone; the longest where not given.
    response_lengths: how lengths are distributed, for simulated runs, and for real ones where controls force them.
    """

    prompts: str
    heldout_prompts: str
    prompt_column: str | None = None
    answer_column: str | None = None
    num_steps: int = Field(ge=1, le=10_000_000)
    num_prompts_per_step: int = Field(ge=1, le=MAX_COUNT)
    num_samples_per_prompt: int = Field(ge=1, le=MAX_COUNT)
    mini_batch_size: int = Field(ge=1, le=MAX_COUNT)
    micro_batch_size_per_gpu: int = Field(ge=1, le=MAX_COUNT)
    max_prompt_len: int = Field(ge=1, le=MAX_COUNT)
    max_response_len: int = Field(ge=1, le=MAX_COUNT)
    mean_prompt_len: int | None = Field(default=None, ge=1, le=MAX_COUNT)
    mean_response_len: int | None = Field(default=None, ge=1, le=MAX_COUNT)
    response_lengths: LengthSpec = ConstantLengths()
    temperature: float = Field(default=1.0, ge=0.01, le=2)
    ignores_eos: bool = False
    evaluate_every: int = Field(default=10, ge=1)
    num_heldout_prompts: int = Field(default=256, ge=1)

    @property
    def num_rollouts_per_step(self) -> int:
        """Rollouts generated in one step."""
        return self.num_prompts_per_step * self.num_samples_per_prompt

    @property
    def num_mini_batches(self) -> int:
        """Optimizer steps in one RL step."""
        return self.num_rollouts_per_step // self.mini_batch_size

    @property
    def max_seq_len(self) -> int:
        """Longest prompt plus longest response."""
        return self.max_prompt_len + self.max_response_len

    @property
    def usual_response_len(self) -> int:
        """Tokens of a response in predicted seconds: the longest, an upper bound, unless the job says."""
        return self.max_response_len if self.mean_response_len is None else self.mean_response_len

    @property
    def usual_prompt_len(self) -> int:
        """Tokens of a prompt in predictions: the longest, an upper bound, unless the job says."""
        return self.max_prompt_len if self.mean_prompt_len is None else self.mean_prompt_len

    @field_validator("mean_prompt_len", "mean_response_len")
    @classmethod
    def _mean_is_no_longer(cls, mean: int | None, info: ValidationInfo) -> int | None:
        longest = str(info.field_name).replace("mean", "max")
        if mean is not None and mean > info.data.get(longest, mean):
            raise ValueError(f"{info.field_name} is at most {longest}")
        return mean

    @model_validator(mode="after")
    def _ladder_divides(self) -> "WorkloadSpec":
        if self.num_rollouts_per_step % self.mini_batch_size:
            raise ValueError(
                f"num_prompts_per_step x num_samples_per_prompt = {self.num_rollouts_per_step} must be a multiple of "
                f"mini_batch_size = {self.mini_batch_size}"
            )
        if self.num_mini_batches > MAX_MINI_BATCHES:
            raise ValueError(
                f"num_prompts_per_step x num_samples_per_prompt / mini_batch_size = {self.num_mini_batches} optimizer "
                f"steps in one RL step; at most {MAX_MINI_BATCHES}"
            )
        return self
