"""Plans for a framework can be exported to it: thirty jobs for each of six frameworks, and the import of each folder.

A job with a setting that a framework lacks is refused before the search; its way out is then planned.
"""

import re
from pathlib import Path
from typing import Any

import pytest

from rlplan.api import emit
from rlplan.emit.bundle import read_bundle
from rlplan.emit.execution import execution_spec
from rlplan.errors import RlplanError, SpecError
from rlplan.foreign.check import Asked, import_job
from rlplan.foreign.documents import flatten_keys
from rlplan.foreign.export.backwards import name_hardware
from rlplan.foreign.export.experiment import list_learning_keys
from rlplan.foreign.job_text import write_job_text
from rlplan.foreign.source import read_source
from rlplan.planner.plan import Plan, write_plan
from rlplan.planner.plan_parts import Verdict
from rlplan.planner.search import find_best_plan
from rlplan.spec.files.job_file import load_job, override_job
from rlplan.spec.job import JobSpec
from rlplan.spec.models.catalogue import format_model_name
from tests.foreign.export.plans import STARTED
from tests.foreign.export.spread import FRAMEWORKS, JOBS, make_job
from tests.repository.at_night import rotate_places

OVERRIDE = re.compile(r"(?<![\w.])[a-z_]+(?:\.[a-z_0-9]+)*=\S+")
NEVER_SHORTER = ("workload.max_", "workload.num_", "workload.mini_")
OF_VALUE = "roles.value.training."
NO_PART_OF_A_FILE = ("name", "framework", "data.", "rewards", "limits.", "rollout.engine")


@pytest.mark.parametrize(("framework", "name"), rotate_places(FRAMEWORKS, JOBS))
def test_what_is_planned_for_a_framework_emits(framework: str, name: str, tmp_path: Path) -> None:
    job = make_job(name, framework, tmp_path)
    try:
        plan = find_best_plan(job, with_others=False)
    except SpecError as error:
        check_way_out(job, error, tmp_path)
        return
    if plan.verdict is Verdict.FITS:
        check_folder(plan, tmp_path)
        return
    write_plan(plan, tmp_path / "plan.json")
    with pytest.raises(RlplanError) as caught:
        emit(tmp_path / "plan.json", tmp_path / "out")
    if plan.verdict is Verdict.REFUSED and framework != "rlplan":
        check_way_out(job, caught.value, tmp_path)


def check_way_out(job: JobSpec, error: RlplanError, folder: Path) -> None:
    """One alternative of a refusal, or more, can be planned and emitted, and no job becomes smaller."""
    alternatives = [OVERRIDE.findall(words) for words in error.way_out.split(" or ")]
    assert all(alternatives), error.way_out
    assert not any(override.startswith(NEVER_SHORTER) for overrides in alternatives for override in overrides)
    for at, overrides in enumerate(alternatives):
        plan = find_best_plan(override_job(job, overrides), with_others=False)
        assert plan.verdict is not Verdict.REFUSED
        if plan.verdict is Verdict.FITS:
            check_folder(plan, folder / str(at))


def check_folder(plan: Plan, folder: Path) -> None:
    """An export, read by `rlplan import`, is the plan's job with the plan's bytes; also as the written job file."""
    folder.mkdir(exist_ok=True)
    write_plan(plan, folder / "plan.json")
    emit(folder / "plan.json", folder / "out")
    if plan.job.is_for_rlplan:
        assert read_bundle(folder / "out").job == execution_spec(plan).job
        return
    started = folder / "out" / STARTED[plan.job.release.name]
    imported, job = import_job(read_source(started, None), Asked(name_hardware(plan)))
    (folder / "job.yaml").write_text(write_job_text(imported, job))
    there = find_best_plan(load_job(folder / "job.yaml"), with_others=False)
    assert there.job.release == plan.job.release
    assert there.refusals == ()
    assert differences(there, plan) == {}
    assert there.schedule == plan.schedule
    assert there.binding.num_bytes == pytest.approx(plan.binding.num_bytes, rel=0.001)


def differences(there: Plan, plan: Plan) -> dict[str, Any]:
    """Keys in which two resolved jobs differ, with both values; how data is read is no part of a stack's file."""
    back, wanted = map(_flat_job, (there, plan))
    keys = [key for key in {**back, **wanted} if not key.startswith(NO_PART_OF_A_FILE)]
    return {key: (back.get(key), wanted.get(key)) for key in keys if back.get(key) != wanted.get(key)}


def _flat_job(plan: Plan) -> dict[str, Any]:
    """The keys of a plan's job that have an effect, with what the value model takes over from the policy."""
    job = plan.job
    values = flatten_keys(job.model_dump(mode="json"))
    values["policy.path"] = format_model_name(values["policy.path"])
    if job.algorithm.declaration.has_value:
        values["algorithm.value_learning_rate"] = job.algorithm.value_learning_rate or job.algorithm.learning_rate
        values["roles.value.path"] = format_model_name(values.get("roles.value.path") or values["policy.path"])
        for key in (key for key in values if key.startswith(OF_VALUE) and values[key] == "auto"):
            name = key.removeprefix(OF_VALUE)
            values[key] = values.get(f"training.{name}", values.get(f"workload.{name}"))
    of_roles = tuple(f"scoring.{role}." for role in job.scored_roles)
    with_effect = ("algorithm.name", *list_learning_keys(job))
    return {
        key: value
        for key, value in values.items()
        if not key.startswith(("algorithm.", "scoring.")) or key in with_effect or key.startswith(of_roles)
    }
