"""An out-of-memory error beside the job that had it: what the allocation was, who held the rest, what makes it fit.

In: OutOfMemory, and the answer of `check` for the job's script, or the plan of a job. Out: MemoryAnswer. Left out:
reading the text (read.py), remedies (check.py, planner/remedies.py), rendering.
"""

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from typing import Any

from rlplan.errors import RlplanError
from rlplan.foreign.check import MOST_REMEDIES, OTHERS, Asked, Change, check, format_assignments
from rlplan.foreign.settings import Settings
from rlplan.foreign.tracebacks.read import OutOfMemory
from rlplan.memory.ledger import Peak
from rlplan.planner.machine import open_search
from rlplan.planner.plan import Plan
from rlplan.spec.files.job_file import override_job
from rlplan.spec.job import JobSpec
from rlplan.units import GIB, MIB, ceil_div, format_bytes
from rlplan.vocabulary import MemoryKind, Role

SCHEMA_VERSION = 1
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
    """Bytes of the job's GPU or host; 0 without a job."""
    changes: tuple[tuple[str, int], ...] = ()
    """Changes that make the job fit, with the peak bytes that remain."""

    @property
    def missing_bytes(self) -> int:
        """Bytes that the run needed on the GPU beyond its prediction; 0 if unknown or fewer."""
        is_known = self.error.kind == "gpu" and self.predicted is not None
        return max(0, self.error.needed_bytes - self.predicted.num_bytes) if is_known and self.predicted else 0

    @property
    def way_out(self) -> str:
        """The answer where no change was found: the job is too large, or something else was on the GPU."""
        if self.changes or not self.capacity_bytes or self.error.get("held"):
            return ""
        if not self.missing_bytes:
            return f"no single change of the configuration makes it fit: {OTHERS}"
        return (
            f"no single change saves the {format_bytes(self.missing_bytes)} that the run held beyond its prediction: "
            "look for what else was on the GPU, such as an engine that was awake, another run, or a leak"
        )

    def as_json(self) -> dict[str, Any]:
        """The answer as `rlplan explain --json` prints it."""
        return {"schema_version": SCHEMA_VERSION, **asdict(self), "way_out": self.way_out}


def explain_alone(error: OutOfMemory) -> MemoryAnswer:
    """The answer from the text alone."""
    allocation = f"{_format_tried(error)}{error.allocation}" if error.allocation else ""
    if error.columns and error.get("tried"):
        allocation = _describe_logits(error, error.columns)
    return MemoryAnswer(error, _write_headline(error), allocation, tuple(_list_remarks(error)))


def explain_script(error: OutOfMemory, settings: Settings, asked: Asked) -> MemoryAnswer:
    """The answer for a script of another framework. Raises: SpecError for a wrong configuration."""
    if error.kind == "host" and error.get("total") and "hardware.host_memory=" not in " ".join(asked.overrides):
        host = f"hardware.host_memory={error.get('total') // MIB}MiB"
        asked = replace(asked, overrides=(*asked.overrides, host))
    checked, title, answer = check(settings, asked), settings.table.title, explain_alone(error)
    if error.stack and error.stack.lower() not in title.lower() and title != "vLLM":
        answer = _add_remarks(answer, f"the traceback is of {error.stack}, the file of {title}")
    if checked.served is not None:
        starts = "starts" if checked.served.fits else "does not start either"
        answer = _add_remarks(answer, f"by prediction the engine {starts}")
        answer = replace(answer, capacity_bytes=checked.served.capacity)
    elif checked.plan is None:
        answer = _add_remarks(answer, checked.refusal.what if checked.refusal is not None else "")
    else:
        answer = _compare(answer, checked.plan)
    if checked.fits and answer.missing_bytes:
        with suppress(RlplanError):
            checked = check(settings, replace(asked, overrides=(*asked.overrides, _reserve_missing(answer))))
    changes = ((format_assignments(change.values), _find_peak(change, error)) for change in checked.changes)
    return replace(answer, changes=tuple(changes))


def _find_peak(change: Change, error: OutOfMemory) -> int:
    """Peak bytes with a change: of a GPU, or of the host if that ran out."""
    is_host = error.kind == "host" and isinstance(change.plan, Plan)
    return change.plan.ledger.host_peak().num_bytes if is_host and isinstance(change.plan, Plan) else change.num_bytes


def explain_job(error: OutOfMemory, job: JobSpec) -> MemoryAnswer:
    """The answer for a job of rlplan. Raises: SpecError, NoFeasiblePlanError."""
    plan = open_search(job).run(with_others=False)
    answer = _compare(explain_alone(error), plan)
    if plan.fits and answer.missing_bytes:
        with suppress(RlplanError):
            plan = open_search(override_job(job, [_reserve_missing(answer)])).run()
    return replace(answer, changes=tuple((fix.change, fix.peak_bytes) for fix in plan.remedies[:MOST_REMEDIES]))


def _reserve_missing(answer: MemoryAnswer) -> str:
    """An override with as much less GPU memory as the run needed beyond its prediction."""
    return f"hardware.memory={(answer.capacity_bytes - answer.missing_bytes) // MIB}MiB"


def _add_remarks(answer: MemoryAnswer, *remarks: str) -> MemoryAnswer:
    return replace(answer, remarks=(*answer.remarks, *remarks))


def _compare(answer: MemoryAnswer, plan: Plan) -> MemoryAnswer:
    """The answer with the plan's prediction of the same phase."""
    error, ledger, remarks = answer.error, plan.ledger, list[str]()
    is_host = error.kind == "host" and ledger.host_capacity > 0
    action = "optimizer" if "optimizer" in error.words else f"/{error.role or Role.POLICY}"
    in_phase = ledger.phase_peak(error.phase, action) if error.phase else plan.binding
    predicted = ledger.host_peak() if is_host else in_phase
    capacity = ledger.host_capacity if is_host else plan.binding_capacity
    if predicted is None:
        remarks.append(f"the job has no {error.phase}: the traceback is of another job, or the job does more")
    elif not is_host and error.needed_bytes:
        range_words = f"{format_bytes(predicted.num_bytes)} are predicted in {error.phase or predicted.action_id}"
        remarks.append(f"the run needed {format_bytes(error.needed_bytes)} of the GPU; {range_words}")
    if error.kind == "engine" and predicted is not None:
        kv = format_bytes(sum(row[3] for row in predicted.rows if row[2] is MemoryKind.KV_CACHE))
        remarks.append(f"{kv} are predicted for it: with less, something else was on the GPU when the engine started")
    answer = _add_remarks(answer, *_list_contradictions(error, plan, capacity), *remarks)
    allocation = _describe_allocation(error, plan) or answer.allocation
    return replace(answer, allocation=allocation, predicted=predicted, capacity_bytes=capacity)


def _describe_allocation(error: OutOfMemory, plan: Plan) -> str:
    """The allocation as tokens times vocabulary, where it is that wide."""
    columns, tried = _count_columns(error, plan), error.get("tried")
    if error.width and tried:
        return _describe_logits(error, columns)
    model, most = plan.job.load_model(), _count_most_tokens(plan)
    widest = 2 * most * max(model.intermediate_size, model.hidden_size)  # activations of a layer in 16 bits
    if error.words != "backward pass" or not widest < tried <= 4 * MORE_TOKENS * most * columns:
        return ""
    # autograd runs without frames of its own, and nothing else of a micro-batch is that large
    return f"{_describe_logits(replace(error, width=4), columns)}, by its size"


def _count_columns(error: OutOfMemory, plan: Plan) -> int:
    """Entries of the vocabulary on a rank."""
    return error.columns or ceil_div(plan.job.load_model().vocab_size, plan.choice.trainer.tp)


def _count_most_tokens(plan: Plan) -> float:
    """Tokens of the largest micro-batch of any pass on a rank."""
    trainer, longest = plan.choice.trainer, plan.job.workload.max_seq_len
    sizes = [trainer.max_tokens, trainer.micro_batch * longest]
    for role in (Role.POLICY, Role.REFERENCE):
        sequences, tokens = plan.job.scoring.get_pass(role).sizes
        sizes += [times * size for times, size in ((longest, sequences), (1, tokens)) if isinstance(size, int)]
    return max(sizes) / trainer.num_token_shards


def _describe_logits(error: OutOfMemory, columns: int) -> str:
    """The allocation in rows of logits: its bytes over the vocabulary's entries times the bytes of an element."""
    tokens, precision = error.get("tried") / (columns * error.width), "fp32" if error.width == 4 else "16 bits"
    where = f" of the {error.words}" if error.words else ""
    return f"{_format_tried(error)}{tokens:,.0f} tokens x vocabulary of {columns:,} in {precision}: logits{where}"


def _format_tried(error: OutOfMemory) -> str:
    """The size as torch prints it, so that it can be found in the log."""
    unit, name = (GIB, "GiB") if error.get("tried") >= GIB else (MIB, "MiB")
    return f"{error.get('tried') / unit:.2f} {name} = " if error.get("tried") else ""


def _list_contradictions(error: OutOfMemory, plan: Plan, capacity: int) -> Iterator[str]:
    """Facts of the text that the job cannot have caused."""
    total, most = error.get("total"), _count_most_tokens(plan)
    if error.kind == "gpu" and total and abs(total / capacity - 1) > OTHER_GPU:
        yield f"the traceback is from a GPU of {format_bytes(total)}, the job's has {format_bytes(capacity)}"
    if error.role is not None and error.role not in {row.role for row in plan.ledger.rows}:
        yield f"the job has no {error.role} model, whose pass failed: the traceback is of another job"
    if error.width and error.get("tried") > MORE_TOKENS * most * error.width * _count_columns(error, plan):
        yield (
            f"a micro-batch of the job has at most {most:,.0f} tokens on a rank, fewer than the tensor: another job or "
            "model wrote the traceback"
        )


def _write_headline(error: OutOfMemory) -> str:
    where = f"in the {error.words}" if error.words else "in a phase that the text does not name"
    of_total = f" of {format_bytes(error.get('total'))}" if error.get("total") else ""
    if error.kind == "engine":
        return f"vLLM has no memory for its KV cache, {where}"
    if error.kind == "host":
        return f"the host{of_total} ran out of memory, {where}"
    free = f", {format_bytes(error.get('free'))} were free" if of_total else ""
    tried = f": {format_bytes(error.get('tried'))} more were asked for{free}" if error.get("tried") else ""
    return f"the GPU{of_total} ran out of memory {where}{tried}"


def _list_remarks(error: OutOfMemory) -> Iterator[str]:
    sizes = {name: format_bytes(size) for name, size in error.sizes.items() if size}
    if error.get("held"):
        most = error.get("held")
        longest = f"a sequence may have {error.get('asked'):,}"
        yield f"the KV cache holds {most:,} tokens, {longest}: it starts with max_model_len={most}"
    if error.kind == "engine" and "tried" in sizes:
        yield f"one sequence of full length needs {sizes['tried']} of KV cache, {sizes.get('free')} are left for it"
    if "other" in sizes:
        yield f"other processes hold {sizes['other']} of this GPU, such as an engine or another rank"
    if "allocated" in sizes:
        yield f"live tensors took {sizes['allocated']}"
    if error.get("unused") > MANY_UNUSED * (error.get("total") or error.get("unused") / MANY_UNUSED):
        # vLLM's allocator for sleep mode refuses expandable segments (vllm/device_allocator/cumem.py)
        setting = (
            "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True returns most of it, but not beside vLLM's sleep mode"
        )
        yield f"torch's allocator held {sizes['unused']} without a tensor in it: {setting}"
    if error.kind == "host" and "memory" not in error.message and "oom" not in error.message:
        yield "signal 9 is most often the kernel's OOM killer: `dmesg` names the process that it killed"
    if error.phase is None and not error.allocation:
        yield "the text has no known frame, so that phase and allocation cannot be told from it"
