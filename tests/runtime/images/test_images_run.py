"""Images in prompts: three GRPO steps, log-probs that agree, peaks as predicted, the tower back where it was."""

from pathlib import Path

import pytest

from rlplan.spec.models.headers import read_checkpoint
from tests.runtime.conftest import Runner
from tests.runtime.images.with_images import image_job
from tests.runtime.runs.beside_the_plan import process_peaks

pytestmark = pytest.mark.engine


@pytest.mark.nightly
def test_three_steps_over_images_agree_with_the_engine_and_with_the_plan(run_job: Runner, tmp_path: Path) -> None:
    run = run_job(str(image_job(tmp_path)))
    assert run.exit_code == 0, run.stderr
    steps = [row for row in run.metrics if row["step"] > 0]
    assert [row["step"] for row in steps] == [1, 2, 3]
    assert max(row["policy/grad_norm"] for row in steps[:2]) > 0, "weights that were handed over had changed"
    assert max(row["sync/logprob_difference_mean"] for row in steps) <= 1e-4
    for process, (predicted, measured) in process_peaks(run).items():
        assert measured * 0.98 <= predicted <= measured * 1.15, (process, predicted, measured)
    kept = read_checkpoint(run.folder / "policy")
    assert {(t.name, t.shape) for t in kept} == {(t.name, t.shape) for t in read_checkpoint(tmp_path / "model")}
