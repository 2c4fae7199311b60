"""An out-of-memory error beside the job that had it: what the allocation was, who held the rest, what makes it fit.

In: OutOfMemory, and the answer of `check` for the job's script, or the plan of a job. Out: MemoryAnswer. Left out:
reading the text (read.py), remedies (check.py, planner/remedies.py), rendering.
"""

import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from itertools import islice
from typing import Any

from rlplan.errors import RlplanError
from rlplan.foreign.check import MOST_REMEDIES, OTHERS, Asked, Checked, check, format_assignments
from rlplan.foreign.settings import Settings
from rlplan.foreign.tracebacks.read import OutOfMemory
from rlplan.memory.ledger import Peak
from rlplan.planner.machine import open_search
from rlplan.planner.plan import Plan
from rlplan.spec.files.job_file import override_job
from rlplan.spec.job import JobSpec
from rlplan.units import GIB, MIB, ceil_div, format_bytes
from rlplan.vocabulary import Role

SCHEMA_VERSION = 1
FULL_PRECISION, HALF_PRECISION = 4, 2
"""Bytes of an element in fp32 and in 16 bits."""
OTHER_GPU = 0.05
"""Share by which the memory of a GPU may differ from the job's: drivers and MIG reserve some."""
MANY_UNUSED = 0.05
"""Share of the GPU above which the allocator's unused memory is named."""
MORE_TOKENS = 1.05
"""Ratio of tokens to the longest micro-batch of the job above which the job cannot have made the tensor."""


@dataclass(frozen=True)
class MemoryAnswer:
    """The answer to an out-of-memory error."""

    error: OutOfMemory
    headline: str
    """Phase and bytes in one sentence."""
    allocation: str
    """The failed allocation in one sentence; empty if nothing tells."""
    remarks: tuple[str, ...]
    """Further facts of the text, and contradictions between text and job."""
    predicted: Peak | None = None
    """The predicted peak of that phase."""
    capacity_bytes: int = 0
    """Bytes of the job's GPU or host."""
    changes: tuple[tuple[str, int], ...] = ()
    """Changes that make the job fit, with the peak bytes that remain."""

    @property
    def way_out(self) -> str:
        """The answer where no change was found: the job is too large, or something else was on the GPU."""
        if self.changes or not self.capacity_bytes:
            return ""
        if lack := find_missing_bytes(self):
            return (
                f"no single change saves the {format_bytes(lack)} that the run held beyond its prediction: look for"
                " what else was on the GPU, such as an engine that was awake, another run, or a leak"
            )
        return f"no single change of the configuration makes it fit: {OTHERS}"

    def as_json(self) -> dict[str, Any]:
        """The answer as `rlplan explain --json` prints it."""
        rows = [] if self.predicted is None else self.predicted.rows
        return {
            "schema_version": SCHEMA_VERSION,
            "error": asdict(self.error),
            "headline": self.headline,
            "allocation": self.allocation,
            "remarks": list(self.remarks),
            "predicted_bytes": None if self.predicted is None else self.predicted.num_bytes,
            "predicted_rows": [
                {"process": row[0], "role": row[1].value, "kind": row[2].value, "bytes": row[3]} for row in rows
            ],
            "capacity_bytes": self.capacity_bytes,
            "changes": [{"set": words, "peak_bytes": peak} for words, peak in self.changes],
        }


def explain_alone(error: OutOfMemory) -> MemoryAnswer:
    """The answer from the text alone."""
    columns = f" of {error.columns:,} columns" if error.columns else ""
    allocation = f"{_format_tried(error)}{error.allocation}{columns}" if error.allocation else ""
    if error.columns and error.tried_bytes:
        allocation = _describe_logits(error, error.columns, error.width)
    return MemoryAnswer(error, _write_headline(error), allocation, tuple(_list_remarks(error)))


def explain_script(error: OutOfMemory, settings: Settings, asked: Asked) -> MemoryAnswer:
    """The answer for a script of another framework. Raises: SpecError for a wrong configuration."""
    asked = _state_host_memory(error, asked)
    checked = check(settings, asked)
    title = settings.table.title
    mismatch = [f"the traceback is of {error.stack}, the file of {title}"] * _is_other_stack(error, title)
    if checked.plan is None:
        reason = checked.refusal.what if checked.refusal is not None else "the file configures only an engine"
        return _add_changes(_add_remarks(explain_alone(error), *mismatch, reason), checked)
    answer = _compare(error, checked.plan, mismatch)
    less = _reserve_missing(answer) if checked.fits else ""
    if less:
        with suppress(RlplanError):
            checked = check(settings, replace(asked, overrides=(*asked.overrides, less)))
    return _add_changes(answer, checked)


def explain_job(error: OutOfMemory, job: JobSpec) -> MemoryAnswer:
    """The answer for a job of rlplan. Raises: SpecError, NoFeasiblePlanError."""
    plan = open_search(job).run(with_others=False)
    answer = _compare(error, plan, [])
    less = _reserve_missing(answer) if plan.fits else ""
    if less:
        with suppress(RlplanError):
            plan = open_search(override_job(job, [less])).run()
    changes = ((remedy.change, remedy.peak_bytes) for remedy in plan.remedies)
    return replace(answer, changes=tuple(islice(changes, MOST_REMEDIES)))


def find_missing_bytes(answer: MemoryAnswer) -> int:
    """Bytes that the run needed on the GPU beyond its prediction; 0 if unknown or fewer."""
    if answer.error.kind != "gpu" or answer.predicted is None:
        return 0
    return max(0, answer.error.needed_bytes - answer.predicted.num_bytes)


def _reserve_missing(answer: MemoryAnswer) -> str:
    """An override with as much less GPU memory as the run needed beyond its prediction; empty for no more."""
    lack = find_missing_bytes(answer)
    return f"hardware.memory={(answer.capacity_bytes - lack) // MIB}MiB" if lack else ""


def _state_host_memory(error: OutOfMemory, asked: Asked) -> Asked:
    """The host's memory as Ray states it, unless the user did."""
    is_stated = any(word.startswith("hardware.host_memory=") for word in asked.overrides)
    if error.kind != "host" or not error.total_bytes or is_stated:
        return asked
    return replace(asked, overrides=(*asked.overrides, f"hardware.host_memory={error.total_bytes // MIB}MiB"))


def _is_other_stack(error: OutOfMemory, title: str) -> bool:
    return bool(error.stack) and error.stack.lower() not in title.lower() and title != "vLLM"


def _add_remarks(answer: MemoryAnswer, *remarks: str) -> MemoryAnswer:
    return replace(answer, remarks=(*answer.remarks, *remarks))


def _add_changes(answer: MemoryAnswer, checked: Checked) -> MemoryAnswer:
    changes = ((format_assignments(change.values), change.num_bytes) for change in checked.changes)
    return replace(answer, changes=tuple(changes))


def _compare(error: OutOfMemory, plan: Plan, remarks: list[str]) -> MemoryAnswer:
    """The answer with the plan's prediction of the same phase."""
    answer, ledger = explain_alone(error), plan.ledger
    is_host = error.kind == "host"
    if is_host and ledger.host_capacity:
        predicted: Peak | None = ledger.host_peak()
    else:
        action = "optimizer" if "optimizer" in error.words else f"/{error.role or Role.POLICY}"
        predicted = ledger.phase_peak(error.phase, action) if error.phase else plan.binding
    capacity = ledger.host_capacity if is_host else plan.binding_capacity
    remarks += list(_list_contradictions(error, plan, capacity))
    if predicted is None:
        remarks.append(f"the job has no {error.phase}: the traceback is of another job, or the job does more")
    elif not is_host and error.needed_bytes:
        range_words = f"{format_bytes(predicted.num_bytes)} are predicted in {error.phase or predicted.action_id}"
        remarks.append(f"the run needed {format_bytes(error.needed_bytes)} of the GPU; {range_words}")
    allocation = _describe_allocation(error, plan) or answer.allocation
    answer = replace(answer, allocation=allocation, predicted=predicted, capacity_bytes=capacity)
    return _add_remarks(answer, *remarks)


def _describe_allocation(error: OutOfMemory, plan: Plan) -> str:
    """The allocation as tokens times vocabulary, where it is that wide."""
    columns = _count_columns(error, plan)
    if error.width and error.tried_bytes:
        return _describe_logits(error, columns, error.width)
    model, most = plan.job.load_model(), _count_most_tokens(plan)
    widest = HALF_PRECISION * most * max(model.intermediate_size, model.hidden_size)
    if (
        error.words != "backward pass"
        or not widest < error.tried_bytes <= MORE_TOKENS * most * columns * FULL_PRECISION
    ):
        return ""
    # autograd runs without frames of its own, and nothing else of a micro-batch is that large
    return f"{_describe_logits(error, columns, FULL_PRECISION)}, by its size"


def _count_columns(error: OutOfMemory, plan: Plan) -> int:
    """Entries of the vocabulary on a rank."""
    return error.columns or ceil_div(plan.job.load_model().vocab_size, plan.choice.trainer.tp)


def _count_most_tokens(plan: Plan) -> float:
    """Tokens of the largest micro-batch of any pass on a rank."""
    trainer = plan.choice.trainer
    own = max(trainer.max_tokens, trainer.micro_batch * plan.job.workload.max_seq_len)
    return max(own, *_list_score_tokens(plan)) / trainer.num_token_shards


def _describe_logits(error: OutOfMemory, columns: int, width: int) -> str:
    """The allocation in rows of logits.

    Counts: tried bytes over the vocabulary's entries on the rank times the bytes of an element.
    """
    tokens = error.tried_bytes / (columns * width)
    precision = "fp32" if width == FULL_PRECISION else "16 bits"
    where = f" of the {error.words}" if error.words else ""
    return f"{_format_tried(error)}{tokens:,.0f} tokens x vocabulary of {columns:,} in {precision}: logits{where}"


def _format_tried(error: OutOfMemory) -> str:
    """The size as torch prints it, so that it can be found in the log."""
    unit, name = (GIB, "GiB") if error.tried_bytes >= GIB else (MIB, "MiB")
    return f"{error.tried_bytes / unit:.2f} {name} = " if error.tried_bytes else ""


def _list_contradictions(error: OutOfMemory, plan: Plan, capacity: int) -> Iterator[str]:
    """Facts of the text that the job cannot have caused."""
    if error.kind == "gpu" and error.total_bytes and abs(error.total_bytes / capacity - 1) > OTHER_GPU:
        yield (
            f"the traceback is from a GPU of {format_bytes(error.total_bytes)}, the job's has {format_bytes(capacity)}:"
            " another job, or hardware.memory is missing"
        )
    roles = {row.role for row in plan.ledger.rows}
    if error.role is not None and error.role not in roles:
        yield f"the job has no {error.role} model, whose pass failed: the traceback is of another job"
    most = _count_most_tokens(plan)
    if error.width and error.tried_bytes > MORE_TOKENS * most * error.width * _count_columns(error, plan):
        yield (
            f"a micro-batch of the job has at most {most:,.0f} tokens on a rank, fewer than the tensor: another job"
            " or model wrote the traceback"
        )


def _list_score_tokens(plan: Plan) -> Iterator[int]:
    """Tokens of the log-prob passes, where the job sizes them."""
    for role in (Role.POLICY, Role.REFERENCE):
        sequences, tokens = plan.job.scoring.get_pass(role).sizes
        yield tokens if isinstance(tokens, int) else 0
        yield sequences * plan.job.workload.max_seq_len if isinstance(sequences, int) else 0


def _write_headline(error: OutOfMemory) -> str:
    where = f"in the {error.words}" if error.words else "in a phase that the text does not name"
    if error.kind == "host":
        total = f" of {format_bytes(error.total_bytes)}" if error.total_bytes else ""
        return f"the host{total} ran out of memory, {where}"
    if error.kind == "engine":
        return f"vLLM has no memory for its KV cache, {where}"
    free = f", {format_bytes(error.free_bytes)} were free" if error.total_bytes else ""
    tried = f": {format_bytes(error.tried_bytes)} more were asked for{free}" if error.tried_bytes else ""
    gpu = f" of {format_bytes(error.total_bytes)}" if error.total_bytes else ""
    return f"the GPU{gpu} ran out of memory {where}{tried}"


def _list_remarks(error: OutOfMemory) -> Iterator[str]:
    if error.tokens:
        yield f"the KV cache holds {error.tokens[1]:,} tokens, and one sequence may have {error.tokens[0]:,}"
    if error.kind == "engine" and error.tried_bytes:
        left = format_bytes(error.free_bytes)
        yield f"one sequence of full length needs {format_bytes(error.tried_bytes)} of KV cache, {left} are left for it"
    if error.other_bytes:
        yield f"other processes hold {format_bytes(error.other_bytes)} of this GPU, such as an engine or another rank"
    if error.allocated_bytes:
        yield f"live tensors took {format_bytes(error.allocated_bytes)}"
    if error.total_bytes and error.unused_bytes > MANY_UNUSED * error.total_bytes:
        unused = f"torch's allocator held {format_bytes(error.unused_bytes)} without a tensor in it"
        # vLLM's allocator for sleep mode refuses expandable segments (vllm/device_allocator/cumem.py)
        setting = "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"
        yield f"{unused}: {setting} returns most of it, but not in a process with vLLM's sleep mode"
    if error.kind == "host" and not re.search(r"memory|oom", error.message, re.IGNORECASE):
        yield "signal 9 is most often the kernel's OOM killer: `dmesg` names the process that it killed"
    if not error.num_frames and error.phase is None and not error.allocation:
        yield "the text has no traceback above the message, so that phase and allocation cannot be told from it"
