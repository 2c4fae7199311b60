"""What is planned for a framework emits: thirty jobs for each of six frameworks, and the folder's own import.

A job that states what a framework lacks is refused before the search; what the way out says is then planned.
"""

import re
from pathlib import Path
from typing import Any

import pytest

from rlplan.api import emit
from rlplan.emit.bundle import read_bundle
from rlplan.emit.execution import execution_spec
from rlplan.errors import RlplanError, SpecError
from rlplan.foreign.check import Asked, plan_as_given
from rlplan.foreign.documents import flat
from rlplan.foreign.export.counted import name_hardware
from rlplan.foreign.export.experiment import list_learning_keys
from rlplan.foreign.source import read_source
from rlplan.frameworks.profile import find_release
from rlplan.planner.plan import Plan, write_plan
from rlplan.planner.plan_parts import Verdict
from rlplan.planner.search import best_plan
from rlplan.spec.files.job_file import changed
from rlplan.spec.job import JobSpec
from rlplan.spec.models.catalogue import named_model
from tests.foreign.export.plans import STARTED
from tests.foreign.export.spread import FRAMEWORKS, JOBS, job_of
from tests.repository.at_night import in_turn

OVERRIDE = re.compile(r"(?<![\w.])[a-z_]+(?:\.[a-z_0-9]+)*=\S+")
NEVER_SHORTER = ("workload.max_", "workload.num_", "workload.mini_")
OF_VALUE = "roles.value.training."
NO_PART_OF_A_FILE = ("name", "framework", "data.", "rewards", "limits.", "rollout.engine")


@pytest.mark.parametrize(("framework", "name"), in_turn(FRAMEWORKS, JOBS))
def test_what_is_planned_for_a_framework_emits(framework: str, name: str, tmp_path: Path) -> None:
    job = job_of(name, framework, tmp_path)
    try:
        plan = best_plan(job, with_others=False)
    except SpecError as error:
        check_way_out(job, error)
        return
    write_plan(plan, tmp_path / "plan.json")
    if plan.verdict is not Verdict.FITS:
        with pytest.raises(RlplanError) as caught:
            emit(tmp_path / "plan.json", tmp_path / "out")
        if plan.verdict is Verdict.REFUSED and framework != "rlplan":
            check_way_out(job, caught.value)
        return
    written = emit(tmp_path / "plan.json", tmp_path / "out")
    assert written.notes == ()
    if framework == "rlplan":
        assert read_bundle(tmp_path / "out").job.training == execution_spec(plan).job.training
    else:
        check_import(plan, framework, tmp_path / "out")


def check_way_out(job: JobSpec, error: RlplanError) -> None:
    """What a refusal asks for is planned, one alternative at least, and no job becomes smaller."""
    alternatives = [OVERRIDE.findall(words) for words in error.way_out.split(" or ")]
    assert all(alternatives), error.way_out
    assert not any(override.startswith(NEVER_SHORTER) for overrides in alternatives for override in overrides)
    for overrides in alternatives:
        assert best_plan(changed(job, overrides), with_others=False).verdict is not Verdict.REFUSED


def check_import(plan: Plan, framework: str, folder: Path) -> None:
    """The folder, read by `rlplan import`, is the plan's job with the plan's bytes."""
    settings = read_source(folder / STARTED[framework], None)
    assert find_release(settings.table.framework).name == plan.job.release.name
    there = plan_as_given(settings, Asked(name_hardware(plan), overrides=[f"framework={plan.job.framework}"]))
    assert differences(there, plan) == {}
    assert there.schedule == plan.schedule
    assert there.binding.num_bytes == pytest.approx(plan.binding.num_bytes, rel=0.001)


def differences(there: Plan, plan: Plan) -> dict[str, Any]:
    """Keys in which two resolved jobs differ, with both values; how data is read is no part of a stack's file."""
    found, wanted = map(_flat_job, (there, plan))
    keys = [key for key in {**found, **wanted} if not key.startswith(NO_PART_OF_A_FILE)]
    return {key: (found.get(key), wanted.get(key)) for key in keys if found.get(key) != wanted.get(key)}


def _flat_job(plan: Plan) -> dict[str, Any]:
    """The keys of a plan's job that have an effect, with what the value model takes over from the policy."""
    job = plan.job
    found = flat(job.model_dump(mode="json"))
    if job.algorithm.declaration.has_value:
        found["algorithm.value_learning_rate"] = job.algorithm.value_learning_rate or job.algorithm.learning_rate
        found["roles.value.path"] = named_model(found.get("roles.value.path") or found["policy.path"])
        for key in (key for key in found if key.startswith(OF_VALUE) and found[key] == "auto"):
            name = key.removeprefix(OF_VALUE)
            found[key] = found.get(f"training.{name}", found.get(f"workload.{name}"))
    of_roles = tuple(f"scoring.{role}." for role in job.scored_roles)
    with_effect = ("algorithm.name", *list_learning_keys(job))
    return {
        key: value
        for key, value in found.items()
        if not key.startswith(("algorithm.", "scoring.")) or key in with_effect or key.startswith(of_roles)
    }
