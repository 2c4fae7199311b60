"""A plan's results as overrides, sentences and JSON.

In: a Plan. Out: dicts for plan files, `--json` and other tools. Left out: reading them back: a plan file stores the
values themselves next to these results (plan.py).
"""

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from pydantic import TypeAdapter

from rlplan.dataflow.choice import Choice
from rlplan.memory.ledger import LedgerRow, Peak
from rlplan.planner.margins import find_assumed_host, get_reserve
from rlplan.planner.measured_errors import MeasuredError, find_peak_error, find_phase_error, find_step_error
from rlplan.planner.plan_parts import Alternative, Verdict
from rlplan.spec.job import JobSpec
from rlplan.timing.cost import NOTHING, Cost
from rlplan.timing.step import StepTiming
from rlplan.units import format_bytes, format_seconds
from rlplan.vocabulary import Phase

if TYPE_CHECKING:
    from rlplan.planner.plan import Plan

ESTIMATE_SCHEMA_VERSION = 4
CHOICES = ("arrangement", "trainer", "engine")
PARALLEL_AXES = ("ulysses", "tp", "pp", "cp", "ep")
DEFAULTS = {f"training.{name}": "1" for name in PARALLEL_AXES} | {
    "workload.micro_batch_size_per_gpu": "auto",
    "training.max_tokens_per_micro_batch": "auto",
    "placement.num_generation_devices": "auto",
    "placement.num_scoring_devices": "0",
    "placement.max_staleness": "0",
    "placement.offload": "none",
    "placement.offload_roles": "auto",
    "placement.transport": "auto",
    "placement.sync_content": "full",
    "rollout.sleep_level": "0",
    "rollout.quantization": "none",
    "rollout.has_expert_parallel": "false",
    "rollout.attention_dp": "1",
}
"""Default of each override; overrides equal to it are omitted."""


def choice_as_json(choice: Choice) -> dict[str, Any]:
    """JSON of a choice: all inputs of the ledger and the timing."""
    parts = {name: asdict(getattr(choice, name)) for name in CHOICES} | {"sync_mode": choice.sync_mode}
    return TypeAdapter(dict[str, Any]).dump_python(parts, mode="json")  # type: ignore[no-any-return]


def list_overrides(choice: Choice, job: JobSpec, asked: JobSpec | None = None) -> dict[str, str]:
    """List the overrides that lead to a choice, by key, without those equal to DEFAULTS.

    job: the resolved job. asked: the job that the overrides are typed onto; `job` if omitted.
    """
    asked = asked or job
    arrangement, trainer = choice.arrangement, choice.trainer
    words: dict[str, Any] = {"placement.placement": arrangement.placement} if choice.sync_mode else {}
    words |= {
        "training.zero_stage": trainer.zero_stage,
        "training.gradient_checkpointing": trainer.gradient_checkpointing,
        "training.offloads_optimizer": trainer.offloads_optimizer,
        "training.offloads_parameters": trainer.offloads_parameters,
    }
    if trainer.max_tokens:
        words["training.max_tokens_per_micro_batch"] = trainer.max_tokens
    else:
        words["workload.micro_batch_size_per_gpu"] = trainer.micro_batch
    words |= {f"training.{name}": getattr(trainer, name) for name in PARALLEL_AXES}
    words["placement.num_scoring_devices"] = arrangement.num_scoring
    if arrangement.offloaded != "none":
        where = job.placement.offload if job.placement.offload in ("host", "disk") else "host"
        words |= {"placement.offload": where, "placement.offload_roles": arrangement.offloaded}
    if choice.sync_mode:
        words |= _list_engine_overrides(choice, asked)
    typed = {key: str(value).lower() for key, value in words.items()}
    kept_keys = {"placement.max_staleness"} if asked.placement.max_staleness else set()
    return {key: value for key, value in typed.items() if key in kept_keys or value != DEFAULTS.get(key)}


def _list_engine_overrides(choice: Choice, asked: JobSpec) -> dict[str, Any]:
    arrangement, engine = choice.arrangement, choice.engine
    is_part = choice.sync_mode in ("adapter", "delta")
    return {
        "placement.num_generation_devices": "auto" if arrangement.shares_devices else arrangement.num_generation,
        "placement.max_staleness": asked.placement.max_staleness if arrangement.is_async else 0,
        "placement.transport": "auto" if is_part else choice.sync_mode,
        "placement.sync_content": choice.sync_mode if is_part else "full",
        "rollout.tp": engine.tp,
        "rollout.attention_dp": engine.attention_dp,
        "rollout.sleep_level": engine.sleep_level,
        "rollout.quantization": engine.quantization or "none",
        "rollout.max_num_seqs": engine.max_num_seqs,
        "rollout.has_expert_parallel": engine.has_expert_parallel,
    }


def diff_choices(choice: Choice, other: Choice, job: JobSpec, asked: JobSpec | None = None) -> str:
    """Format the overrides that turn `other` into `choice`. A key that `choice` lacks gets its default."""
    own, others = list_overrides(choice, job, asked), list_overrides(other, job, asked)
    words = {key: own.get(key, DEFAULTS.get(key, "none")) for key in (*own, *others)}
    return " ".join(f"{key}={value}" for key, value in words.items() if value != others.get(key, DEFAULTS.get(key)))


def sum_phase_costs(timing: StepTiming) -> dict[Phase, Cost]:
    """Sum the costs of each phase that takes time, in the order of the step."""
    costs: dict[Phase, Cost] = {}
    for action in timing.actions:
        costs[action.phase] = costs.get(action.phase, NOTHING) + action.cost
    return {phase: cost for phase, cost in costs.items() if cost.seconds > 0}


def timing_as_json(timing: StepTiming) -> dict[str, Any]:
    """JSON of a steady step. parts: seconds by resource."""
    return {
        "seconds": timing.seconds,
        "idle_s": timing.idle_s,
        "phases": {phase.value: _cost_as_json(cost) for phase, cost in sum_phase_costs(timing).items()},
        "actions": [
            {"id": action.action_id, "phase": action.phase.value, "start_s": action.start_s}
            | _cost_as_json(action.cost)
            for action in timing.actions
        ],
    }


def _cost_as_json(cost: Cost) -> dict[str, Any]:
    parts = {resource.value: seconds for resource, seconds in cost.parts.items() if seconds}
    return {"seconds": cost.seconds, "bound_by": cost.bound_by.value, "parts": parts}


def alternative_as_json(alternative: Alternative) -> dict[str, Any]:
    """JSON of an alternative."""
    return {
        "choice": choice_as_json(alternative.choice),
        "seconds": alternative.seconds,
        "kv_cache_memory_bytes": alternative.kv_cache,
        "peak_bytes": alternative.peak_bytes,
        "headroom_bytes": alternative.headroom_bytes,
        "verdict": alternative.verdict.value,
    }


def results_as_json(plan: "Plan") -> dict[str, Any]:
    """JSON of the main results: the step and its derived values, memory, and the alternatives."""
    hours, step = plan.gpu_hours_per_million_tokens, plan.timing.step if plan.timing else None
    return {
        "step": None if step is None else timing_as_json(step),
        "step_error": None if step is None else _seconds_as_json(find_step_error(plan), plan.seconds),
        "phase_errors": _phase_errors(plan),
        "tokens_per_s": plan.tokens_per_s,
        "gpu_hours_per_million_tokens": hours,
        "dollars_per_million_tokens": plan.dollars_per_million_tokens,
        "runners_up": list(map(alternative_as_json, plan.runners_up)),
        "pareto": list(map(alternative_as_json, plan.pareto)),
        "stats": asdict(plan.stats),
        **_bytes_as_json(plan),
    }


def _phase_errors(plan: "Plan") -> dict[str, Any] | None:
    """Range of each phase's seconds."""
    if plan.timing is None:
        return None
    costs = sum_phase_costs(plan.timing.step)
    return {phase.value: _seconds_as_json(find_phase_error(plan, phase), cost.seconds) for phase, cost in costs.items()}


def _seconds_as_json(error: MeasuredError, seconds: float) -> dict[str, Any]:
    low_s, high_s = error.interval(seconds)
    return {"low_s": low_s, "high_s": high_s, **error.as_json()}


def describe_step_error(plan: "Plan") -> str:
    """Describe the range of the step and its source; empty without seconds."""
    if plan.timing is None:
        return ""
    error = find_step_error(plan)
    low, high = map(format_seconds, error.interval(plan.seconds))
    return f"{low} to {high} a step: {error.words}"


def describe_peak_error(plan: "Plan") -> str:
    """Describe the range of the peak, its source, and whether it exceeds the GPU; empty on a CPU host."""
    if plan.is_on_host:
        return ""
    (low, high), capacity = plan.interval(), plan.binding_capacity
    words = f"{format_bytes(low)} to {format_bytes(high)} at the peak: {find_peak_error(plan).words}"
    if plan.fit is Verdict.FITS and high > capacity:
        words += f"; its high end exceeds {format_bytes(capacity)}, but the verdict follows the computed worst case"
    return words


def describe_needed_memory(plan: "Plan") -> str:
    """Describe the memory a GPU really needs, without optional KV cache; empty on a CPU host."""
    if plan.is_on_host:
        return ""
    size, reserve = plan.needed_bytes, format_bytes(get_reserve(plan.job.load_gpu()))
    words = f"worst case {format_bytes(size)} ({100 * size / plan.binding_capacity:.0f} %), which decides the verdict"
    if size < plan.row_interval()[1]:
        words += "; the rest is filled with optional KV cache"
    return f"{words}; {reserve} per GPU reserved"


def estimate_as_json(plan: "Plan") -> dict[str, Any]:
    """JSON of the ledger: all rows, and the peaks of host, devices and processes."""
    return {
        "schema_version": ESTIMATE_SCHEMA_VERSION,
        **_bytes_as_json(plan),
        "job": plan.asked.model_dump(mode="json"),
        "rows": TypeAdapter(tuple[LedgerRow, ...]).dump_python(plan.ledger.rows, mode="json"),
    }


def _bytes_as_json(plan: "Plan") -> dict[str, Any]:
    """JSON of needed and available bytes, and of what was chosen and rejected."""
    (low, high), ledger = plan.interval(), plan.ledger
    shortages = [
        {"of": short.of, "needed_bytes": short.needed_bytes, "available_bytes": short.available_bytes}
        for short in plan.shortages
    ]
    peaks = [ledger.host_peak(), *map(ledger.device_peak, ledger.devices)]
    peaks += map(ledger.process_peak, ledger.processes)
    return {
        "verdict": plan.verdict.value,
        "fits": plan.fits,
        "refusals": list(plan.refusals),
        "notes": list(plan.notes),
        "not_counted": list(plan.not_counted),
        "shortages": shortages,
        "peak_bytes": {"low": low, "expected": plan.binding.num_bytes, "high": high},
        "peak_error": None if plan.is_on_host else find_peak_error(plan).as_json(),
        "worst_case_bytes": plan.row_interval()[1],
        "binding": {
            "device": plan.binding.scope,
            "run_phase": plan.binding.run_phase,
            "action_id": plan.binding.action_id,
        },
        "needed_bytes": plan.needed_bytes,
        "capacity_bytes": plan.binding_capacity,
        "reserve_bytes": 0 if plan.is_on_host else get_reserve(plan.job.load_gpu()),
        "host_memory_is_assumed": find_assumed_host(plan.job) is not None,
        "host_capacity_bytes": plan.host_capacity,
        **(
            {}
            if plan.is_on_host
            else {"host_peak_bytes": dict(zip(("expected", "high"), plan.host_interval, strict=True))}
        ),
        "oom_risk_per_step": plan.oom_risk,
        "oom_risk_of_run": plan.oom_risk_of_run,
        "devices": plan.devices,
        "num_devices": plan.num_devices,
        "chosen": list_overrides(plan.choice, plan.job, plan.asked),
        "kv_cache": None if plan.kv is None else asdict(plan.kv),
        "checkpoint_bytes": plan.checkpoint_bytes,
        "swap_bytes_per_host": plan.swap_bytes,
        "considered": [{"placement": considered.name, "reason": considered.reason} for considered in plan.considered],
        "remedies": [{**asdict(remedy), "verdict": remedy.verdict.value} for remedy in plan.remedies],
        "peaks": TypeAdapter(list[Peak]).dump_python(peaks, mode="json"),
    }
