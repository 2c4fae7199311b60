"""Whole runs with each way to train: Ulysses, AutoTP, a base in 4 bits, moments in 8 bits."""

import pytest

from tests.factories import EXAMPLES
from tests.runtime.conftest import Runner
from tests.runtime.runs.beside_the_plan import check_run

pytestmark = [pytest.mark.engine, pytest.mark.nightly]

NAMES = sorted(path.stem for path in (EXAMPLES / "training").glob("*.yaml"))


@pytest.mark.parametrize("name", NAMES)
def test_every_way_to_train_is_run_as_planned(run_job: Runner, name: str) -> None:
    short = ("workload.num_steps=3", "workload.num_heldout_prompts=16", "workload.evaluate_every=3")
    check_run(run_job(f"examples/training/{name}.yaml", *short), 3)
