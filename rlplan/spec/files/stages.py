"""Stages: several jobs in one file, each of which may start from the model that an earlier one saves.

In: the data of a job file with `stages:`. Out: one stage's job as data, and its inputs from earlier stages. Left out:
running them one after the other (the command line).

Keys outside `stages` are common to all stages; a stage holds the keys that differ. `stage:NAME` in place of a model is
the model that this stage saves. A run fills in its folder; a plan uses the shape of the model that the stage starts
from.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rlplan.errors import SpecError, did_you_mean
from rlplan.frameworks.profile import merge_mappings
from rlplan.spec.algorithms import ALGORITHMS
from rlplan.spec.base import shorten_value

KEY, CHOICE, OUTPUT = "stages", "stage", "stage:"
"""The key of a file, the override that chooses a stage (stage=NAME), and the prefix of a model that a stage saves."""
MAX_STAGES = 16
_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_-]{0,31}")


@dataclass(frozen=True)
class Stage:
    """One of several jobs in a file."""

    name: str
    data: dict[str, Any]
    """Job as data, with each `stage:NAME` replaced by the model that that stage starts from."""
    inputs: Mapping[str, str]
    """Stage whose model is used, by dotted key of the job."""
    base: Any
    """Path of the model that the stage starts from, traced through earlier stages."""
    trains_scalar: bool
    """Whether the stage saves a reward model instead of a policy."""


def stages_of(data: Any, where: str) -> tuple[Stage, ...]:
    """The stages of a file in order; empty for a file with one job. Raises: SpecError."""
    if not isinstance(data, dict) or KEY not in data:
        return ()
    common, listed = {key: value for key, value in data.items() if key != KEY}, data[KEY]
    if not isinstance(listed, list) or not 0 < len(listed) <= MAX_STAGES:
        raise _wrong(f"stages: {shorten_value(listed)}", where, f"a list of 1 to {MAX_STAGES} jobs")
    stages: dict[str, Stage] = {}
    for number, own in enumerate(listed):
        name = own.get("name") if isinstance(own, dict) else None
        if isinstance(name, str) and name in stages:
            raise _wrong(f"two stages are named {shorten_value(name, 40)}", where, "stage names are unique")
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            rule = "a mapping with a unique `name`: letters, digits, - and _, at most 32"
            raise _wrong(f"stages[{number}]: {shorten_value(own)}", where, rule)
        stages[name] = _stage(
            name, merge_mappings(common, own), str(common.get("name", "job")), stages, f"{where}: stages.{name}"
        )
    return tuple(stages.values())


def select_job(data: Any, overrides: Sequence[str], where: str) -> tuple[Any, list[str]]:
    """The data of one job and the overrides that apply to it. With several stages, `stage=NAME` chooses one.

    Raises: SpecError where a file has several and none is chosen.
    """
    stages = {stage.name: stage for stage in stages_of(data, where)}
    if not stages:
        return data, list(overrides)
    name = find_chosen_stage(overrides)
    if name is None:
        raise SpecError(
            f"the file has {len(stages)} stages, but the command needs one job",
            where=where,
            rule=f"one of {', '.join(stages)}; only estimate, plan and run accept all stages at once",
            way_out=f"stage={next(iter(stages))}",
        )
    if name not in stages:
        raise _unknown_stage(name, stages, "command line")
    return stages[name].data, _select_overrides(overrides, name, stages)


def find_chosen_stage(overrides: Sequence[str]) -> str | None:
    """The name of the stage that overrides choose; None if they choose none."""
    chosen = [override.partition("=")[2].strip() for override in overrides if _is_choice(override)]
    return chosen[-1] if chosen else None


def list_open_inputs(stage: Stage, overrides: Sequence[str], stages: Iterable[Stage]) -> dict[str, str]:
    """Inputs of a stage that no override replaces: stage by key. An override `policy=X` replaces policy.path too.

    Raises: SpecError for an override of a stage that is none.
    """
    own = _select_overrides(overrides, stage.name, {other.name: other for other in stages})
    keys_set = {override.partition("=")[0].strip() for override in own}
    return {
        key: name
        for key, name in stage.inputs.items()
        if not any(key == word or key.startswith(f"{word}.") for word in keys_set)
    }


def _is_choice(override: str) -> bool:
    return override.partition("=")[0].strip() == CHOICE


def _select_overrides(overrides: Sequence[str], chosen: str, stages: Mapping[str, Stage]) -> list[str]:
    """Overrides of all stages, and those of the chosen one (stages.NAME.KEY=VALUE)."""
    selected = []
    for override in overrides:
        if override.startswith(f"{KEY}."):
            name, _, own = override.removeprefix(f"{KEY}.").partition(".")
            if name not in stages:
                raise _unknown_stage(name, stages, f"override {shorten_value(override, 100)}")
            selected += [own] if name == chosen else []
        elif not _is_choice(override):
            selected.append(override)
    return selected


def _stage(name: str, data: dict[str, Any], job_name: str, before: Mapping[str, Stage], where: str) -> Stage:
    algorithm = data.get("algorithm")
    named = algorithm.get("name") if isinstance(algorithm, dict) else algorithm
    declared = ALGORITHMS.get(named) if isinstance(named, str) else None
    policy, roles = data.get("policy"), data.get("roles")
    policy = dict(policy) if isinstance(policy, dict) else {"path": policy}
    if isinstance(roles, dict):
        roles = {key: dict(role) if isinstance(role, dict) else role for key, role in roles.items()}
    inputs: dict[str, str] = {}
    below = roles if isinstance(roles, dict) else {}
    parts = {"policy": policy} | {f"roles.{key}": role for key, role in below.items() if isinstance(role, dict)}
    for key, part in parts.items():
        path = part.get("path")
        if isinstance(path, str) and path.startswith(OUTPUT):
            inputs[f"{key}.path"] = source = path.removeprefix(OUTPUT)
            part["path"] = _find_base(source, key, before, f"{where}.{key}")
            part.pop("init", None)  # a saved model always has weights
    job = data | {"name": f"{job_name}-{name}", "policy": policy} | ({"roles": roles} if roles else {})
    return Stage(name, job, inputs, policy.get("path"), declared is not None and declared.trains_scalar)


def _find_base(source: str, key: str, before: Mapping[str, Stage], where: str) -> Any:
    """The model that an earlier stage starts from. Raises: SpecError where no earlier stage saves such a model."""
    if source not in before:
        raise SpecError(
            f"no earlier stage is named {shorten_value(source, 40)}",
            where=where,
            rule=f"the stages before it: {', '.join(before) or 'none'}.{did_you_mean(source, before)}",
            way_out=f"write {OUTPUT}{[*before][-1]}, or a model" if before else "name a model: a hub id, or a folder",
        )
    wants_scalar = key == "roles.reward"
    if before[source].trains_scalar != wants_scalar and key != "roles.value":
        kinds = ("a policy", "a reward model")
        raise SpecError(
            f"stage {source} saves {kinds[before[source].trains_scalar]}, {key} needs {kinds[wants_scalar]}",
            where=where,
            rule="roles.reward needs the model of a reward_modeling stage; other roles need a policy",
            way_out="name another stage",
        )
    return before[source].base


def _unknown_stage(name: str, known: Mapping[str, Stage], where: str) -> SpecError:
    return SpecError(
        f"unknown stage {shorten_value(name, 40)}",
        where=where,
        rule=f"the file's stages are {', '.join(known)}.{did_you_mean(name, known)}",
        way_out=f"stage={next(iter(known))}",
    )


def _wrong(what: str, where: str, rule: str) -> SpecError:
    return SpecError(what, where=where, rule=rule, way_out="docs/job.md, Stages, shows a file of three")
