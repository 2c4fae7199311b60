"""Results of a plan as JSON: the step in seconds, phase by phase and action by action, and what else was rated.

In: a Budget. Out: dicts for plan files, `--json` and other tools. Left out: the ledger (budget.py).
"""

from dataclasses import asdict
from typing import Any

from pydantic import TypeAdapter

from rlplan.planner.budget import Alternative, Budget
from rlplan.planner.gpu.candidates import GpuCandidate
from rlplan.timing.cost import NOTHING, Cost
from rlplan.timing.step import StepTiming
from rlplan.vocabulary import Phase

CHOICES = ("step", "trainer", "engine")
WAYS = ("ulysses", "tp", "pp", "cp", "ep")
DEFAULTS = {f"training.{name}": "1" for name in WAYS} | {
    "workload.micro_batch_size_per_gpu": "auto",
    "workload.max_tokens_per_micro_batch": "null",
    "placement.generation_share": "auto",
    "placement.max_staleness": "0",
    "placement.parks": "false",
    "rollout.sleep_level": "0",
    "rollout.quantization": "null",
    "scoring_gpus": "0",
    "expert_parallel_engine": "false",
}
"""What a key says that a candidate's words leave out. The last two are no keys of a budget: the search alone sets them.
"""


def choice_as_json(candidate: GpuCandidate) -> dict[str, Any]:
    """What was chosen: everything that the ledger and the times follow from."""
    parts = {name: asdict(getattr(candidate, name)) for name in CHOICES} | {"transport": candidate.transport}
    return TypeAdapter(dict[str, Any]).dump_python(parts, mode="json")  # type: ignore[no-any-return]


def choice_words(candidate: GpuCandidate) -> dict[str, str]:
    """A candidate as overrides that would lead to it, by key; what DEFAULTS says too is left out."""
    step, trainer = candidate.step, candidate.trainer
    words: dict[str, Any] = {"placement.placement": step.placement} if step.has_rollouts else {}
    words |= {
        "training.zero_stage": trainer.zero_stage,
        "training.recompute": "full" if trainer.recomputes else "none",
        "training.offloads_optimizer": trainer.offloads_optimizer,
        "training.offloads_parameters": trainer.offloads_parameters,
    }
    if trainer.max_tokens:
        words["workload.max_tokens_per_micro_batch"] = trainer.max_tokens
    else:
        words["workload.micro_batch_size_per_gpu"] = trainer.micro_batch
    words |= {f"training.{name}": getattr(trainer, name) for name in WAYS}
    words |= {"placement.parks": step.parks, "scoring_gpus": step.num_scoring}
    if step.parks_frozen:
        words["placement.parks"] = "frozen"
    if step.has_rollouts:
        words |= _engine_words(candidate)
    typed = {key: str(value).lower() for key, value in words.items()}
    return {key: value for key, value in typed.items() if value != DEFAULTS.get(key)}


def _engine_words(candidate: GpuCandidate) -> dict[str, Any]:
    step, engine = candidate.step, candidate.engine
    share = step.num_generation / (step.num_training + step.num_generation + step.num_scoring)
    return {
        "placement.generation_share": "auto" if step.shares_devices else f"{share:.4g}",
        "placement.max_staleness": step.max_staleness,
        "placement.transport": candidate.transport or "auto",
        "rollout.tp": engine.tp,
        "rollout.sleep_level": engine.sleep_level,
        "rollout.quantization": engine.quantization or "null",
        "rollout.max_num_seqs": engine.max_num_seqs,
        "expert_parallel_engine": engine.has_expert_parallel,
    }


def differences(one: GpuCandidate, other: GpuCandidate) -> str:
    """What leads to `one` instead of `other`, as it is typed; a key that `one` lacks is said with its default."""
    mine, others = choice_words(one), choice_words(other)
    words = {key: mine.get(key, DEFAULTS.get(key, "none")) for key in (*mine, *others)}
    return " ".join(f"{key}={value}" for key, value in words.items() if value != others.get(key, DEFAULTS.get(key)))


def phase_costs(timing: StepTiming) -> dict[Phase, Cost]:
    """The cost of each phase that takes any time, in the order of the step."""
    costs: dict[Phase, Cost] = {}
    for action in timing.actions:
        costs[action.phase] = costs.get(action.phase, NOTHING) + action.cost
    return {phase: cost for phase, cost in costs.items() if cost.seconds > 0}


def timing_as_json(timing: StepTiming) -> dict[str, Any]:
    """A steady step. parts: seconds by resource."""
    return {
        "seconds": timing.seconds,
        "idle_s": timing.idle_s,
        "phases": {phase.value: _cost_as_json(cost) for phase, cost in phase_costs(timing).items()},
        "actions": [
            {"id": action.action_id, "phase": action.phase.value, "start_s": action.start_s}
            | _cost_as_json(action.cost)
            for action in timing.actions
        ],
    }


def _cost_as_json(cost: Cost) -> dict[str, Any]:
    parts = {resource.value: seconds for resource, seconds in cost.parts.items() if seconds}
    return {"seconds": cost.seconds, "bound_by": cost.bound_by.value, "parts": parts}


def alternative_as_json(one: Alternative) -> dict[str, Any]:
    """Another candidate, with what it would take."""
    return {
        "choice": choice_as_json(one.candidate),
        "seconds": one.timing.seconds,
        "kv_cache_memory_bytes": one.kv_cache,
        "peak_bytes": one.peak_bytes,
        "headroom_bytes": one.headroom_bytes,
        "verdict": one.verdict.value,
    }


def speed_as_json(budget: Budget) -> dict[str, Any]:
    """The step and what follows from it."""
    price = budget.spec.price_per_gpu_hour
    hours = budget.gpu_hours_per_million_tokens
    return {
        "step": timing_as_json(budget.timing),
        "tokens_per_s": budget.tokens_per_s,
        "gpu_hours_per_million_tokens": hours,
        "dollars_per_million_tokens": None if price is None else hours * price,
        "runners_up": list(map(alternative_as_json, budget.runners_up)),
        "pareto": list(map(alternative_as_json, budget.pareto)),
        "stats": asdict(budget.stats),
    }
