"""Goldens of the example budgets: what is chosen, its bytes and its seconds, as they are today.

A change of a formula, a profile or an example shows here as a diff. When the diff is what you wanted, write the files
anew with `REGENERATE_GOLDENS=1 pytest tests/planner/answers/test_golden_plans.py` and commit them with the change.
Numbers have five digits, so that they are the same on every machine.
"""

from pathlib import Path
from typing import Any

import pytest

from rlplan.planner.answers.plan_results import diff_choices, list_overrides, results_as_json
from rlplan.planner.plan import Plan, read_plan, write_plan
from rlplan.planner.search import find_best_plan
from rlplan.spec.files.job_file import load_job
from tests.emit.test_goldens import GOLDENS, compare, one_line_an_item
from tests.factories import EXAMPLES

NAMES = ("grpo-7b-8xh100", "ppo-70b-64xh100", "grpo-671b-1024xh200", "grpo-lora-8b-1xrtx4090", "dpo-8b-8xa100")
STATED = ("verdict", "peak_bytes", "binding", "kv_cache", "checkpoint_bytes", "tokens_per_s", "considered", "remedies")


@pytest.fixture(params=NAMES, scope="module")
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def plan(name: str) -> Plan:
    return find_best_plan(load_job(EXAMPLES / f"{name}.yaml"))


def round_numbers(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.5g}")
    if isinstance(value, dict):
        return {key: round_numbers(item) for key, item in value.items()}
    return [round_numbers(item) for item in value] if isinstance(value, list) else value


def read_golden(plan: Plan) -> dict[str, Any]:
    results = results_as_json(plan)
    rivals = [
        {
            "seconds": runner_up.timing.seconds,
            "headroom_bytes": runner_up.headroom_bytes,
            "verdict": runner_up.verdict.value,
        }
        | {"differs": diff_choices(runner_up.choice, plan.choice, plan.job, plan.asked)}
        for runner_up in plan.runners_up
    ]
    stated = {key: results[key] for key in STATED}
    return {
        "chosen": list_overrides(plan.choice, plan.job, plan.asked),
        "host_peak_bytes": plan.ledger.host_peak().num_bytes,
        "step_s": plan.seconds,
        "phases": results["step"]["phases"],
    } | {
        "actions": results["step"]["actions"],
        "runners_up": rivals,
        **stated,
    }


def test_the_plan_is_the_golden_one(name: str, plan: Plan) -> None:
    compare(GOLDENS / "plans" / f"{name}.json", one_line_an_item(round_numbers(read_golden(plan))))


def test_the_plan_of_an_example_fits_and_is_read_as_it_was_written(plan: Plan, tmp_path: Path) -> None:
    assert plan.verdict.value == "fits"
    write_plan(plan, tmp_path / "plan.json")
    assert read_golden(read_plan(tmp_path / "plan.json")) == read_golden(plan)
