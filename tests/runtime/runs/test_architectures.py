"""Every architecture that runs: three GRPO steps, log-probs that agree in fp32, peaks as predicted."""

from pathlib import Path

import pytest

from tests.runtime.conftest import Runner
from tests.runtime.runs.architectures import ARCHITECTURES, job_of
from tests.runtime.runs.beside_the_plan import process_peaks

pytestmark = pytest.mark.engine

IN_EVERY_TEST = ("Gemma2ForCausalLM", "MixtralForCausalLM")
"""A window, caps and multipliers in one; experts that are named otherwise in the other."""


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[] if n in IN_EVERY_TEST else pytest.mark.nightly) for n in ARCHITECTURES]
)
def test_three_steps_agree_with_the_engine_and_with_the_plan(run_job: Runner, tmp_path: Path, name: str) -> None:
    run = run_job(str(job_of(name, tmp_path)))
    assert run.exit_code == 0, run.stderr
    steps = [row for row in run.metrics if row["step"] > 0]
    assert [row["step"] for row in steps] == [1, 2, 3]
    assert max(row["sync/logprob_difference_mean"] for row in steps) <= 1e-4
    for process, (predicted, measured) in process_peaks(run).items():
        assert measured * 0.98 <= predicted <= measured * 1.15, (process, predicted, measured)
