"""Every architecture that runs: three GRPO steps, log-probs that agree in fp32 and bf16, peaks as predicted."""

from pathlib import Path

import pytest

from rlplan.spec.models.headers import read_checkpoint
from tests.runtime.conftest import FinishedRun, Runner
from tests.runtime.runs.architectures import ARCHITECTURES, WITH_TOWERS, make_job
from tests.runtime.runs.beside_the_plan import check_steps

pytestmark = pytest.mark.engine

IN_BF16 = ("Qwen3ForCausalLM", "Gemma2ForCausalLM", "Qwen3MoeForCausalLM", "Qwen2_5_VLForConditionalGeneration")
"""Plain, a window with caps, experts, and the language part of a vision-language model."""


def test_a_window_caps_and_multipliers_agree_where_the_engine_starts_anew_each_step(colocated_run: FinishedRun) -> None:
    """Gemma 2; experts, of Mixtral, are in the run of tests/runtime/processes/test_own_host.py."""
    check_steps(colocated_run, within=1e-4)


@pytest.mark.nightly
@pytest.mark.parametrize("name", [*ARCHITECTURES, *WITH_TOWERS])
def test_three_steps_agree_with_the_engine_and_with_the_plan(run_job: Runner, tmp_path: Path, name: str) -> None:
    run = run_job(str(make_job(name, tmp_path)))
    check_steps(run, within=1e-4)
    if name in WITH_TOWERS:
        kept = read_checkpoint(run.folder / "policy")
        assert {(t.name, t.shape) for t in kept} == {(t.name, t.shape) for t in read_checkpoint(tmp_path / "model")}


@pytest.mark.nightly
@pytest.mark.parametrize("name", IN_BF16)
def test_three_steps_in_bf16_agree_as_far_as_bf16_does(run_job: Runner, tmp_path: Path, name: str) -> None:
    job = make_job(name, tmp_path, **{"training.dtype": "bfloat16", "rollout.dtype": "bfloat16"})
    check_steps(run_job(str(job)), within=2e-2)
