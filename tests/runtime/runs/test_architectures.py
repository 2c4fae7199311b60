"""Every architecture that runs: three GRPO steps, log-probs that agree in fp32 and bf16, peaks as predicted."""

from pathlib import Path

import pytest

from rlplan.spec.models.headers import read_checkpoint
from tests.runtime.conftest import FinishedRun, Runner
from tests.runtime.runs.architectures import ARCHITECTURES, WITH_TOWERS, job_of
from tests.runtime.runs.beside_the_plan import process_peaks

pytestmark = pytest.mark.engine

IN_EVERY_TEST = ("Gemma2ForCausalLM", "MixtralForCausalLM")
"""A window, caps and multipliers in one; experts that are named otherwise in the other."""

IN_BF16 = ("Qwen3ForCausalLM", "Gemma2ForCausalLM", "Qwen3MoeForCausalLM", "Qwen2_5_VLForConditionalGeneration")
"""Plain, a window with caps, experts, and the language part of a vision-language model."""


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[] if n in IN_EVERY_TEST else pytest.mark.nightly) for n in (*ARCHITECTURES, *WITH_TOWERS)]
)
def test_three_steps_agree_with_the_engine_and_with_the_plan(run_job: Runner, tmp_path: Path, name: str) -> None:
    run = run_job(str(job_of(name, tmp_path)))
    _check_steps(run, within=1e-4)
    if name in WITH_TOWERS:
        kept = read_checkpoint(run.folder / "policy")
        assert {(t.name, t.shape) for t in kept} == {(t.name, t.shape) for t in read_checkpoint(tmp_path / "model")}


@pytest.mark.nightly
@pytest.mark.parametrize("name", IN_BF16)
def test_three_steps_in_bf16_agree_as_far_as_bf16_does(run_job: Runner, tmp_path: Path, name: str) -> None:
    job = job_of(name, tmp_path, **{"training.dtype": "bfloat16", "rollout.dtype": "bfloat16"})
    _check_steps(run_job(str(job)), within=2e-2)


def _check_steps(run: FinishedRun, *, within: float) -> None:
    """within: of a step's mean difference of log-probs."""
    assert run.exit_code == 0, run.stderr
    steps = [row for row in run.metrics if row["step"] > 0]
    assert [row["step"] for row in steps] == [1, 2, 3]
    assert max(row["policy/grad_norm"] for row in steps[:2]) > 0, "weights that were handed over had changed"
    assert max(row["sync/logprob_difference_mean"] for row in steps) <= within
    for process, (predicted, measured) in process_peaks(run).items():
        assert measured * 0.98 <= predicted <= measured * 1.15, (process, predicted, measured)
