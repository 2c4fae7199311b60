"""The workload: which prompts, and how many rollouts of what length.

In: the `workload:` part of a job, and rows of a JSONL file. Out: frozen values.
Units: lengths in tokens; counts are of prompts or rollouts as their names say.
"""

import json
from pathlib import Path
from typing import TypeVar

from pydantic import Field, ValidationError, ValidationInfo, field_validator, model_validator

from rlplan.errors import SpecError
from rlplan.spec.base import Spec
from rlplan.spec.lengths import ConstantLengths, LengthSpec

MAX_DATA_BYTES = 1 << 30
MAX_COUNT = 1 << 30
"""Above any real batch: a count beyond it is a slip of the keyboard."""
MAX_MINI_BATCHES = 256
"""Optimizer steps in one RL step; each is an action of the schedule."""


class WorkloadSpec(Spec):
    """The `workload:` part of a job: the batch ladder and the lengths.

    evaluate_every: greedy evaluation on the held-out prompts after every so many steps; also before the first and
    after the last. mini_batch_size: rollouts per optimizer step. micro_batch_size_per_gpu: rollouts per forward.
    mean_prompt_len, mean_response_len: of usual rollouts, for predictions alone; the longest where not given.
    response_lengths: how lengths are distributed, for simulated runs, and for real ones where controls force them.
    """

    prompts: str
    heldout_prompts: str
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


class PromptRow(Spec):
    """One row of a prompt file: an id, the text that the policy sees, and the right answer."""

    id: str = Field(min_length=1)
    prompt: str = Field(min_length=1)
    answer: str


class PairRow(Spec):
    """One row of a file of preferences: an id, the text that the policy sees, the better and the worse answer."""

    id: str = Field(min_length=1)
    prompt: str = Field(min_length=1)
    chosen: str
    rejected: str


Row = TypeVar("Row", PromptRow, PairRow)


def read_prompts(path: Path) -> tuple[PromptRow, ...]:
    """The rows of a JSONL file of prompts. Raises: SpecError naming file, line and rule for the first bad row."""
    return _read_rows(path, PromptRow)


def read_pairs(path: Path) -> tuple[PairRow, ...]:
    """The same of preferences. Both answers alike are a bad row, too: they teach nothing."""
    rows = _read_rows(path, PairRow)
    for number, row in enumerate(rows, 1):
        if row.chosen == row.rejected:
            raise _row_error(path, number, f"{row.id!r}: chosen and rejected are the same", "two different answers")
    return rows


def _read_rows(path: Path, kind: type[Row]) -> tuple[Row, ...]:
    try:
        if path.stat().st_size > MAX_DATA_BYTES:
            raise _row_error(path, 0, f"the file has more than {MAX_DATA_BYTES} bytes", "a smaller file")
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise SpecError(
            f"the prompt file cannot be read: {error.strerror}",
            where=str(path),
            rule="a readable JSONL file",
            way_out="check the path; paths in a job are relative to the job file",
        ) from None
    rows = {number: _read_row(path, number, line, kind) for number, line in enumerate(lines, 1) if line.strip()}
    if not rows:
        raise SpecError(
            "the prompt file is empty",
            where=str(path),
            rule="at least one row",
            way_out="add rows, or name another file",
        )
    first_line: dict[str, int] = {}
    for number, row in rows.items():
        if row.id in first_line:
            raise _row_error(path, number, f"id {row.id!r} stands in line {first_line[row.id]} too", "ids are unique")
        first_line[row.id] = number
    return tuple(rows.values())


def _read_row(path: Path, number: int, line: bytes, kind: type[Row]) -> Row:
    try:
        return kind.model_validate(json.loads(line.decode("utf-8")))
    except UnicodeDecodeError:
        raise _row_error(path, number, "the line is not UTF-8", "UTF-8 text") from None
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(str(part) for part in first["loc"]) or "row"
        raise _row_error(
            path, number, f"{key}: {first['msg']}", f"an object with the strings {', '.join(kind.model_fields)}"
        ) from None
    except (ValueError, RecursionError) as error:
        raise _row_error(path, number, f"the line is not JSON ({error})", "one JSON object a line") from None


def _row_error(path: Path, number: int, what: str, rule: str) -> SpecError:
    where = f"{path}, line {number}" if number else str(path)
    return SpecError(what, where=where, rule=rule, way_out="mend or remove that line")
