"""Plan files of jobs on GPUs: what was asked and chosen, with its results for people and for other tools.

In: a GpuPlan, or a path. Out: JSON, or the GpuPlan again: it is worked out anew from what was asked and chosen, held
to the results that the file states, so that a plan cannot mean two things. Left out: the plans of jobs (plan.py).
"""

import hashlib
import json
import math
from dataclasses import fields
from pathlib import Path
from typing import Any, TypeVar, cast, get_args

from pydantic import TypeAdapter, ValidationError

from rlplan import __version__
from rlplan.dataflow.choice import Arrangement, Choice, EngineChoice, TrainerChoice, Way
from rlplan.errors import SpecError
from rlplan.planner.answers.plan_results import choice_as_json, speed_as_json
from rlplan.planner.gpu.remedies import search_of
from rlplan.planner.gpu.search import GpuSearch
from rlplan.planner.gpu_plan import Alternative, Considered, GpuPlan, Remedy, SearchStats, Verdict
from rlplan.spec.base import read_json, shorten, validate, writing
from rlplan.spec.job import JobSpec
from rlplan.vocabulary import Placement

GPU_PLAN_SCHEMA_VERSION = 2
GPU_PLAN_KIND = "gpu_plan"
MAX_BYTES = 1 << 26
AGAIN = "make the plan again with `rlplan plan`"
_NOT_STORED = ("schema_version", "job", "rows")
_STORED = ("asked", "choice", "totals", "results")

Part = TypeVar("Part", Arrangement, TrainerChoice, EngineChoice)


def write_gpu_plan(budget: GpuPlan, path: Path) -> None:
    """Write a budget's plan as JSON; paths of models become relative to the file's folder. Raises: SpecError."""
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(dump_gpu_plan(budget, path.parent) + "\n", encoding="utf-8")


def dump_gpu_plan(budget: GpuPlan, folder: Path) -> str:
    """JSON of a plan whose model paths are relative to `folder`."""
    stored = {
        "asked": budget.asked.relative_to(folder).model_dump(mode="json"),
        "choice": choice_as_json(budget.choice),
        "totals": totals(budget),
        "results": results_as_json(budget),
    }
    head = {"schema_version": GPU_PLAN_SCHEMA_VERSION, "kind": GPU_PLAN_KIND, "rlplan_version": __version__}
    return json.dumps({**head, "digest": _digest(stored), **stored}, indent=1)


def results_as_json(budget: GpuPlan) -> dict[str, Any]:
    """Everything that follows from what was asked and chosen, but for the rows of the ledger."""
    ledger = {key: value for key, value in budget.as_json().items() if key not in _NOT_STORED}
    return speed_as_json(budget) | ledger


def totals(budget: GpuPlan) -> dict[str, Any]:
    """What a plan is held to when it is read again."""
    return {
        "device_peak_bytes": budget.binding.num_bytes,
        "host_peak_bytes": budget.ledger.host_peak().num_bytes,
        "kv_cache_memory_bytes": budget.kv.kv_cache_memory_bytes if budget.kv else 0,
        "verdict": budget.verdict.value,
        "step_s": budget.seconds,
    }


def is_gpu_plan(path: Path) -> bool:
    """Whether a JSON file says that it is a plan for GPUs. Raises: SpecError where it cannot be read."""
    data = read_json(path, "the plan", limit=1 << 28)
    return isinstance(data, dict) and data.get("kind") == GPU_PLAN_KIND


def read_gpu_plan(path: Path) -> GpuPlan:
    """The budget of a plan file, worked out anew. Raises: SpecError where it is none, or its totals are others now."""
    data = read_json(path, "the plan", limit=MAX_BYTES)
    _check_head(data, path)
    if data["digest"] != _digest({key: data[key] for key in _STORED}):
        raise SpecError(
            "the plan was changed after it was made",
            where=f"{path}: {', '.join(_STORED)}",
            rule="a plan stands as the search made it; digest is the SHA-256 of these keys",
            way_out=f"change the job file, and {AGAIN}",
        )
    asked = validate(JobSpec, data["asked"], file=f"{path}: asked", way_out=AGAIN).resolved(path.parent)
    candidate = _read_choice(data["choice"], f"{path}: choice")
    search = search_of(asked).on(candidate.arrangement.num_devices)
    budget = search.whole(search.rate(candidate))
    _check_totals(budget, data, path)
    return _with_the_rest(budget, search, data["results"])


def _check_head(data: Any, path: Path) -> None:
    keys = ("schema_version", "kind", "rlplan_version", "digest", *_STORED)
    is_whole = isinstance(data, dict) and data.get("kind") == GPU_PLAN_KIND
    version = data.get("schema_version") if isinstance(data, dict) else None
    if is_whole and version != GPU_PLAN_SCHEMA_VERSION:
        raise SpecError(
            f"plan schema version is {shorten(version)}",
            where=f"{path}: schema_version",
            rule=f"this rlplan ({__version__}) reads version {GPU_PLAN_SCHEMA_VERSION}",
            way_out=AGAIN,
        )
    missing = [key for key in keys if key not in data] if is_whole else list(keys)
    if missing:
        raise SpecError(
            f"the file is no whole plan for GPUs: {', '.join(missing)} missing",
            where=str(path),
            rule=f"keys {', '.join(keys)}, with kind {GPU_PLAN_KIND}",
            way_out=AGAIN,
        )


def _digest(stored: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(stored, sort_keys=True).encode()).hexdigest()


def _read_choice(choice: dict[str, Any], where: str) -> Choice:
    def part(kind: type[Part], name: str) -> Part:
        return _read_part(kind, choice.get(name), f"{where}.{name}")

    way = choice.get("way")
    if way not in get_args(Way):
        known = ", ".join(get_args(Way)[1:])
        raise SpecError(f"way {shorten(way)}", where=f"{where}.way", rule=f"one of {known}", way_out=AGAIN)
    trainer, engine = part(TrainerChoice, "trainer"), part(EngineChoice, "engine")
    return Choice(part(Arrangement, "arrangement"), trainer, engine, cast(Way, way))


def _read_part(kind: type[Part], data: Any, where: str) -> Part:
    known = {field.name for field in fields(kind)}
    if not isinstance(data, dict) or set(data) != known:
        other = sorted(set(data) ^ known) if isinstance(data, dict) else [shorten(data)]
        raise SpecError(
            f"a choice of another version: {', '.join(other)}",
            where=where,
            rule=f"the keys {', '.join(sorted(known))}",
            way_out=AGAIN,
        )
    try:
        return TypeAdapter(kind).validate_json(json.dumps(data), strict=True)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(map(str, first["loc"]))
        raise SpecError(
            f"{key} is {shorten(first['input'])}", where=f"{where}.{key}", rule=first["msg"], way_out=AGAIN
        ) from None


def _check_totals(budget: GpuPlan, data: dict[str, Any], path: Path) -> None:
    """Raises: SpecError where a total that the file states is another now."""
    for key, value in totals(budget).items():
        stored = data["totals"][key]
        is_float = isinstance(value, float) and isinstance(stored, float)
        if not (math.isclose(stored, value, rel_tol=1e-9) if is_float else stored == value):
            raise SpecError(
                f"the plan says {key} = {shorten(stored)}, it is {shorten(value)} now",
                where=f"{path}: totals.{key}",
                rule=f"the plan is from rlplan {shorten(data['rlplan_version'])}, this is {__version__}: a formula, a "
                "profile or a model's shape is another now",
                way_out=AGAIN,
            )


def _with_the_rest(budget: GpuPlan, search: GpuSearch, results: dict[str, Any]) -> GpuPlan:
    """With what the search said about other candidates; only their times are worked out anew."""
    considered = [Considered(Placement(one["placement"]), None, one["reason"]) for one in results["considered"]]
    remedies = [Remedy(**{**one, "verdict": Verdict(one["verdict"])}) for one in results["remedies"]]
    runners_up, pareto = (
        tuple(_read_alternative(one, search) for one in results[key]) for key in ("runners_up", "pareto")
    )
    budget = budget.with_considered(tuple(considered)).with_remedies(tuple(remedies))
    return budget.with_alternatives(runners_up, pareto, SearchStats(**results["stats"]))


def _read_alternative(data: dict[str, Any], search: GpuSearch) -> Alternative:
    rated = search.rate(_read_choice(data["choice"], "results"))
    verdict = Verdict(data["verdict"])
    return Alternative(rated.choice, rated.timing, rated.kv_cache, data["peak_bytes"], data["headroom_bytes"], verdict)
