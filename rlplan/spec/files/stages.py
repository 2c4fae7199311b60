"""Stages: several jobs in one file, each of which may begin with the model that an earlier one leaves.

In: the data of a job file with `stages:`. Out: one stage's job as data, and what it takes from which earlier stage.
Beside `stages` stands what all have in common; a stage says what differs. `stage:NAME` in place of a model is what that
stage leaves: a run fills its folder in, a plan has the shape of the model that the stage began with.
Left out: running them one after the other (the command line).
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rlplan.errors import SpecError, did_you_mean
from rlplan.spec.algorithms import ALGORITHMS
from rlplan.spec.base import shorten

KEY, CHOICE, OUTPUT = "stages", "stage", "stage:"
"""The key of a file, the override that chooses one (stage=NAME), and what a model's path begins with."""
MAX_STAGES = 16
_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_-]{0,31}")


@dataclass(frozen=True)
class Stage:
    """One job of several."""

    name: str
    data: dict[str, Any]
    """Its job as data, with the models that earlier stages begin with in place of what they leave."""
    inputs: Mapping[str, str]
    """By dotted key of the job: the earlier stage whose model it takes."""
    base: Any
    """The path of the model that it begins with, through earlier stages."""
    trains_scalar: bool
    """Whether it leaves a reward model, and no policy."""


def stages_of(data: Any, where: str) -> tuple[Stage, ...]:
    """The stages of a file in their order; none of a file with one job. Raises: SpecError."""
    if not isinstance(data, dict) or KEY not in data:
        return ()
    common, listed = {key: value for key, value in data.items() if key != KEY}, data[KEY]
    if not isinstance(listed, list) or not 0 < len(listed) <= MAX_STAGES:
        raise _wrong(f"stages: {shorten(listed)}", where, f"a list of 1 to {MAX_STAGES} jobs")
    found: dict[str, Stage] = {}
    for number, own in enumerate(listed):
        name = own.get("name") if isinstance(own, dict) else None
        if isinstance(name, str) and name in found:
            raise _wrong(f"two stages are named {shorten(name, 40)}", where, "each stage has a name of its own")
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            rule = "a mapping with a `name` of its own: letters, digits, - and _, at most 32"
            raise _wrong(f"stages[{number}]: {shorten(own)}", where, rule)
        found[name] = _stage(
            name, _merged(common, own), str(common.get("name", "job")), found, f"{where}: stages.{name}"
        )
    return tuple(found.values())


def one_job(data: Any, overrides: Sequence[str], where: str) -> tuple[Any, list[str]]:
    """The data of one job, and the overrides that are about it: of several stages the one that `stage=NAME` chooses.

    Raises: SpecError where a file has several and none is chosen.
    """
    stages = {stage.name: stage for stage in stages_of(data, where)}
    if not stages:
        return data, list(overrides)
    name = chosen_stage(overrides)
    if name is None:
        raise SpecError(
            f"the file has {len(stages)} stages, and one job is asked for",
            where=where,
            rule=f"one of {', '.join(stages)}; estimate, plan and run alone take all of them",
            way_out=f"stage={next(iter(stages))}",
        )
    if name not in stages:
        raise _unknown(name, stages, "command line")
    return stages[name].data, _own(overrides, name, stages)


def chosen_stage(overrides: Sequence[str]) -> str | None:
    """The name of the stage that overrides choose; None where they choose none."""
    chosen = [override.partition("=")[2].strip() for override in overrides if _is_choice(override)]
    return chosen[-1] if chosen else None


def open_inputs(stage: Stage, overrides: Sequence[str], stages: Iterable[Stage]) -> dict[str, str]:
    """What a stage takes from earlier ones and no override gives: stage by key. `policy=X` gives policy.path too.

    Raises: SpecError for an override of a stage that is none.
    """
    own = _own(overrides, stage.name, {one.name: one for one in stages})
    given = {override.partition("=")[0].strip() for override in own}
    return {
        key: name
        for key, name in stage.inputs.items()
        if not any(key == word or key.startswith(f"{word}.") for word in given)
    }


def _is_choice(override: str) -> bool:
    return override.partition("=")[0].strip() == CHOICE


def _own(overrides: Sequence[str], chosen: str, stages: Mapping[str, Stage]) -> list[str]:
    """Overrides of every stage, and those of this one alone (stages.NAME.KEY=VALUE)."""
    found = []
    for override in overrides:
        if override.startswith(f"{KEY}."):
            name, _, rest = override.removeprefix(f"{KEY}.").partition(".")
            if name not in stages:
                raise _unknown(name, stages, f"override {shorten(override, 100)}")
            found += [rest] if name == chosen else []
        elif not _is_choice(override):
            found.append(override)
    return found


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
            part["path"] = _begins_with(source, key, before, f"{where}.{key}")
            part.pop("init", None)  # what a stage leaves has weights
    made = data | {"name": f"{job_name}-{name}", "policy": policy} | ({"roles": roles} if roles else {})
    return Stage(name, made, inputs, policy.get("path"), declared is not None and declared.trains_scalar)


def _begins_with(source: str, key: str, before: Mapping[str, Stage], where: str) -> Any:
    """The model that an earlier stage begins with. Raises: SpecError where there is none of the kind."""
    if source not in before:
        raise SpecError(
            f"no earlier stage is named {shorten(source, 40)}",
            where=where,
            rule=f"the stages before it: {', '.join(before) or 'none'}.{did_you_mean(source, before)}",
            way_out=f"write {OUTPUT}{[*before][-1]}, or a model" if before else "name a model: a hub id, or a folder",
        )
    wants_scalar = key == "roles.reward"
    if before[source].trains_scalar != wants_scalar and key != "roles.value":
        kinds = ("a policy", "a reward model")
        raise SpecError(
            f"stage {source} leaves {kinds[before[source].trains_scalar]}, {key} takes {kinds[wants_scalar]}",
            where=where,
            rule="roles.reward takes what reward modeling leaves, policy, reference and teacher what the others do",
            way_out="name another stage",
        )
    return before[source].base


def _merged(common: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """What a stage says over what all say, mapping by mapping.

    >>> _merged({"a": {"b": 1, "c": 2}, "d": [1]}, {"a": {"c": 3}, "d": [2]})
    {'a': {'b': 1, 'c': 3}, 'd': [2]}
    """
    found = dict(common)
    for key, value in own.items():
        below = found.get(key)
        found[key] = _merged(below, value) if isinstance(below, dict) and isinstance(value, dict) else value
    return found


def _unknown(name: str, known: Mapping[str, Stage], where: str) -> SpecError:
    return SpecError(
        f"there is no stage {shorten(name, 40)} here",
        where=where,
        rule=f"the file's stages are {', '.join(known)}.{did_you_mean(name, known)}",
        way_out=f"stage={next(iter(known))}",
    )


def _wrong(what: str, where: str, rule: str) -> SpecError:
    return SpecError(what, where=where, rule=rule, way_out="docs/job.md, Stages, shows a file of three")
