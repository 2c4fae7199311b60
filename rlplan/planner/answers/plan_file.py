"""Plan files of GPU budgets: what was asked and chosen, with its results for people and for other tools.

In: a Budget, or a path. Out: JSON, or the Budget again: it is worked out anew from what was asked and chosen, and held
to the results that the file states, so that a plan cannot mean two things. Left out: the plans of jobs (plan.py).
"""

import hashlib
import json
import math
import os
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError

from rlplan import __version__
from rlplan.dataflow.gpu_step import GpuStep
from rlplan.errors import SpecError
from rlplan.memory.gpu.engine import EngineChoice
from rlplan.memory.gpu.states import TrainerChoice
from rlplan.planner.answers.plan_results import choice_as_json, speed_as_json
from rlplan.planner.budget import Alternative, Budget, Considered, Remedy, SearchStats, Verdict, read_setting
from rlplan.planner.budget_checks import check_budget
from rlplan.planner.gpu.candidates import GpuCandidate
from rlplan.planner.gpu.search import GpuSearch
from rlplan.spec.base import read_json, shorten, validate, writing
from rlplan.spec.budget import BudgetSpec
from rlplan.spec.models.catalogue import model_path
from rlplan.vocabulary import Placement

GPU_PLAN_SCHEMA_VERSION = 1
GPU_PLAN_KIND = "gpu_plan"
MAX_BYTES = 1 << 26
AGAIN = "make the plan again with `rlplan plan`"
_PLACES = ("model", "value_model", "reward_model", "folder")
_NOT_STORED = ("schema_version", "budget", "rows")
_STORED = ("spec", "choice", "totals", "results")

Choice = TypeVar("Choice", GpuStep, TrainerChoice, EngineChoice)


def write_gpu_plan(budget: Budget, path: Path) -> None:
    """Write a budget's plan as JSON; paths of models become relative to the file's folder. Raises: SpecError."""
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(dump_gpu_plan(budget, path.parent) + "\n", encoding="utf-8")


def dump_gpu_plan(budget: Budget, folder: Path) -> str:
    """JSON of a plan whose model paths are relative to `folder`."""
    stored = {
        "spec": _with_places(budget.spec, lambda name: _relative(name, folder)).model_dump(mode="json"),
        "choice": choice_as_json(budget.candidate),
        "totals": totals(budget),
        "results": results_as_json(budget),
    }
    head = {"schema_version": GPU_PLAN_SCHEMA_VERSION, "kind": GPU_PLAN_KIND, "rlplan_version": __version__}
    return json.dumps({**head, "digest": _digest(stored), **stored}, indent=1)


def results_as_json(budget: Budget) -> dict[str, Any]:
    """Everything that follows from what was asked and chosen, but for the rows of the ledger."""
    ledger = {key: value for key, value in budget.as_json().items() if key not in _NOT_STORED}
    return speed_as_json(budget) | ledger


def totals(budget: Budget) -> dict[str, Any]:
    """What a plan is held to when it is read again."""
    return {
        "device_peak_bytes": budget.binding.num_bytes,
        "host_peak_bytes": budget.ledger.host_peak().num_bytes,
        "kv_cache_memory_bytes": budget.kv.kv_cache_memory_bytes if budget.kv else 0,
        "verdict": budget.verdict.value,
        "step_s": budget.timing.seconds,
    }


def is_gpu_plan(path: Path) -> bool:
    """Whether a JSON file says that it is a plan for GPUs. Raises: SpecError where it cannot be read."""
    data = read_json(path, "the plan", limit=1 << 28)
    return isinstance(data, dict) and data.get("kind") == GPU_PLAN_KIND


def read_gpu_plan(path: Path) -> Budget:
    """The budget of a plan file, worked out anew. Raises: SpecError where it is none, or its totals are others now."""
    data = read_json(path, "the plan", limit=MAX_BYTES)
    _check_head(data, path)
    if data["digest"] != _digest({key: data[key] for key in _STORED}):
        raise SpecError(
            "the plan was changed after it was made",
            where=f"{path}: {', '.join(_STORED)}",
            rule="a plan stands as the search made it; digest is the SHA-256 of these keys",
            way_out=f"change the budget file, and {AGAIN}",
        )
    spec = validate(BudgetSpec, data["spec"], file=f"{path}: spec", way_out=AGAIN)
    spec = _with_places(spec, lambda name: _absolute(name, path.parent))
    setting = read_setting(spec)
    check_budget(spec, setting)
    candidate = _read_choice(data["choice"], f"{path}: choice")
    search = GpuSearch(spec, setting).on(candidate.num_gpus)
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


_PARTS: dict[str, Any] = {"step": GpuStep, "trainer": TrainerChoice, "engine": EngineChoice}


def _read_choice(choice: dict[str, Any], where: str) -> GpuCandidate:
    def part(kind: type[Choice], name: str) -> Choice:
        return _read_part(kind, choice.get(name), f"{where}.{name}")

    transport = _read_transport(choice.get("transport"), f"{where}.transport")
    step, trainer, engine = part(GpuStep, "step"), part(TrainerChoice, "trainer"), part(EngineChoice, "engine")
    return GpuCandidate(step, trainer, engine, transport)


def _read_transport(transport: Any, where: str) -> str:
    known = ("", "cuda_ipc", "nccl", "disk", "adapter", "delta")
    if transport not in known:
        raise SpecError(
            f"transport {shorten(transport)}", where=where, rule=f"one of {', '.join(known[1:])}", way_out=AGAIN
        )
    return str(transport)


def _read_part(kind: type[Choice], data: Any, where: str) -> Choice:
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


def _check_totals(budget: Budget, data: dict[str, Any], path: Path) -> None:
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


def _with_the_rest(budget: Budget, search: GpuSearch, results: dict[str, Any]) -> Budget:
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
    return Alternative(
        rated.candidate, rated.timing, rated.kv_cache, data["peak_bytes"], data["headroom_bytes"], verdict
    )


def _with_places(spec: BudgetSpec, changed: Callable[[str], str]) -> BudgetSpec:
    names = {key: name for key in _PLACES if (name := getattr(spec, key))}
    return spec.model_copy(update={key: changed(name) for key, name in names.items()})


def _relative(name: str, folder: Path) -> str:
    """A path from the folder, told from an id by its dots; an id as it is."""
    path = model_path(name)
    if path is None:
        return name
    relative = os.path.relpath(path, folder.resolve())
    return relative if relative.startswith("..") else f"./{relative}"


def _absolute(name: str, folder: Path) -> str:
    return os.path.normpath(folder.resolve() / name) if name.startswith(("./", "..")) else name
