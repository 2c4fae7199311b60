"""A job that fits becomes a bundle that the specs accept and that holds as many bytes, whatever the search chose."""

from itertools import product
from pathlib import Path

import pytest

from rlplan.emit.bundle import read_bundle, write_bundle
from rlplan.emit.execution import execution_spec
from rlplan.planner.executable import require_executable
from rlplan.planner.plan import read_plan
from rlplan.planner.plan_parts import Verdict
from rlplan.planner.search import find_best_plan
from rlplan.spec.files.job_file import job_from
from tests.factories import EXAMPLES
from tests.repository.at_night import mark_nightly

MODELS = (
    "Qwen/Qwen2.5-0.5B",
    "Qwen/Qwen2.5-1.5B",
    "Qwen/Qwen2.5-7B",
    "Qwen/Qwen2.5-32B",
    "Qwen/Qwen3-0.6B",
    "Qwen/Qwen3-8B",
    "Qwen/Qwen3-14B",
    "meta-llama/Llama-3.2-1B",
    "meta-llama/Llama-3.1-8B",
)
GPUS = ("1xRTX4090", "1xH100", "2xA100", "2xH100", "4xH100", "8xL40S", "8xH100", "16xH100", "64xH100")
ALL = tuple(product(MODELS, ("grpo", "ppo"), GPUS))
SOME = ALL[::14]
"""README's first estimate is among them, and Qwen2.5-32B on 2xA100, whose roles are offloaded side by side while
starting."""
DATA = {key: str(EXAMPLES / "data" / "sort_digits" / f"{key}.jsonl") for key in ("train", "heldout")}


@pytest.mark.parametrize(("model", "algorithm", "gpus"), mark_nightly(SOME, but=SOME[::3] + SOME[4:5]))
def test_what_fits_is_accepted_as_a_bundle(model: str, algorithm: str, gpus: str, tmp_path: Path) -> None:
    _check(model, algorithm, gpus, tmp_path)


@pytest.mark.nightly
@pytest.mark.parametrize(("model", "algorithm", "gpus"), [case for case in ALL if case not in SOME])
def test_what_fits_is_accepted_as_a_bundle_everywhere_else(
    model: str, algorithm: str, gpus: str, tmp_path: Path
) -> None:
    _check(model, algorithm, gpus, tmp_path)


def _check(model: str, algorithm: str, gpus: str, folder: Path) -> None:
    data = {"prompts": DATA["train"], "heldout": DATA["heldout"]}
    rewards = [{"kind": "answer_matcher"}]
    asked = {"policy": model, "algorithm": algorithm, "hardware": gpus, "data": data, "rewards": rewards}
    budget = find_best_plan(job_from(asked))
    if budget.verdict is not Verdict.FITS:
        assert gpus.startswith(("1x", "2x")) or "32B" in model, "none of the larger ones is too small"
        return
    plan = require_executable(budget)
    assert plan.schedule.placement is budget.choice.arrangement.placement
    assert plan.zero_stage == budget.choice.trainer.zero_stage
    for device in budget.ledger.devices:
        expected = budget.ledger.device_peak(device).num_bytes
        assert plan.ledger.device_peak(device).num_bytes == expected, device
    write_bundle(plan, folder)
    assert read_bundle(folder) == execution_spec(plan)
    assert read_plan(folder / "plan.json").job == plan.job
