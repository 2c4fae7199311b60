"""Whole runs of every algorithm's example, and of one of a user's own: they end well, and peaks are as predicted."""

import json
import re
from pathlib import Path

import pytest

from benchmarks.learning.example_record import GOALS, RESUMED, ExampleCurve, is_as_seed_0, read_run
from benchmarks.learning.example_runs import CASES as EXAMPLE_CASES
from benchmarks.learning.example_runs import interrupt_and_resume
from benchmarks.learning.record import LEARNING_RATE_0
from rlplan.spec.parts.algorithm import ALGORITHMS
from tests.docs.documentation import DOCS, read, section
from tests.factories import write_job
from tests.runtime.conftest import FinishedRun, Runner, finish, start
from tests.runtime.runs.beside_the_plan import process_peaks

pytestmark = [pytest.mark.engine, pytest.mark.nightly]

SHORT = ("workload.num_steps=3", "workload.num_heldout_prompts=64", "workload.evaluate_every=3")
CASES: dict[str, tuple[str, ...]] = {name: (name,) for name in ALGORITHMS} | {
    "ppo": ("ppo", "algorithm.value_warmup_steps=1"),
    "corrected mini-batches": ("gspo", "algorithm.importance=truncate", "workload.mini_batch_size=128"),
    "replaced while it runs ahead": (
        "dapo",
        "placement.placement=disaggregated",
        "placement.max_staleness=1",
        "algorithm.importance=mask",
        "algorithm.importance_low=0.5",
        "algorithm.importance_high=5",
    ),
    "pairs with adapters on shared passes": ("dpo", "training.lora={rank: 4}", "training.ulysses=2"),
}


def check(run: FinishedRun) -> None:
    assert run.exit_code == 0, run.stderr
    assert [row["step"] for row in run.metrics if row["step"] > 0] == [1, 2, 3]
    for process, (predicted, measured) in process_peaks(run).items():
        assert measured <= predicted <= measured * 1.15, (process, predicted, measured)


@pytest.mark.parametrize("case", CASES)
def test_it_ends_well_within_its_prediction(run_job: Runner, case: str) -> None:
    name, *overrides = CASES[case]
    check(run_job(f"examples/algorithms/{name}.yaml", *SHORT, *overrides))


@pytest.mark.parametrize("name", ["cispo", "dapo", "gspo", "ppo", "rloo"])
def test_in_bf16_a_policy_that_does_not_move_clips_nothing(run_job: Runner, name: str) -> None:
    """Two updates a step of size 0: engine and trainer differ, yet every ratio is 1, to the bit."""
    bf16 = ("training.dtype=bfloat16", "rollout.dtype=bfloat16")
    still = ("algorithm.learning_rate=0", "workload.mini_batch_size=128", "workload.num_steps=2")
    more = ("workload.evaluate_every=2", *(("algorithm.value_warmup_steps=0",) if name == "ppo" else ()))
    run = run_job(f"examples/algorithms/{name}.yaml", *SHORT, *bf16, *still, *more)
    assert run.exit_code == 0, run.stderr
    rows = [row for row in run.metrics if row["step"] > 0]
    assert [row["policy/clip_fraction"] for row in rows] == [0.0, 0.0]
    assert [row["policy/ratio_max"] for row in rows] == [1.0, 1.0]
    assert all(row["sync/logprob_difference_mean"] > 1e-5 for row in rows)
    assert all(row["importance/mean"] == pytest.approx(1, abs=0.01) for row in rows)


def test_in_bf16_a_kl_in_the_rewards_is_the_same_with_one_update_and_with_two(run_job: Runner) -> None:
    """Two epochs of size 0 have the gradient of one. The engine's log-probs with kl_coef 10 would drown the reward."""
    bf16 = ("training.dtype=bfloat16", "rollout.dtype=bfloat16", "algorithm.importance=none")
    still = ("algorithm.learning_rate=0", "algorithm.kl_coef=10", "workload.num_steps=1", "workload.evaluate_every=1")
    job, epochs = "examples/algorithms/reinforce++.yaml", "workload.num_epochs_per_step"
    runs = [run_job(job, *SHORT, *bf16, *still, f"{epochs}={count}") for count in (1, 2)]
    assert [run.exit_code for run in runs] == [0, 0], runs[0].stderr + runs[1].stderr
    first, second = (run.metrics[-1] if "policy/grad_norm" in run.metrics[-1] else run.metrics[-2] for run in runs)
    assert first["sync/logprob_difference_mean"] > 1e-4, "else nothing is compared"
    assert second["reward/mean"] == first["reward/mean"]
    assert second["policy/grad_norm"] == pytest.approx(first["policy/grad_norm"], rel=1e-3)


def test_an_algorithm_of_one_s_own_runs(run_job: Runner, tmp_path: Path) -> None:
    code = re.search(r"```python\n(.*?)```", section(read(DOCS / "algorithms.md"), "One of your own"), re.DOTALL)
    assert code
    (tmp_path / "my_algorithm.py").write_text(code.group(1))
    job = write_job(
        tmp_path, algorithm={"path": "my_algorithm.py:MINE", "name": "positive_only", "learning_rate": 1e-5}
    )
    run = run_job(str(job), *SHORT)
    assert run.exit_code == 0, run.stderr


def check_stages(curves: list[ExampleCurve]) -> None:
    assert curves
    for curve in curves:
        assert curve.has_passed, curve
        assert is_as_seed_0(curve, curves), curve


def read_stages(folder: Path, example: str, case: str) -> list[ExampleCurve]:
    return [read_run(folder, example, stage, case) for name, stage in GOALS if name == example]


def test_three_stages_run_from_one_file_and_a_stopped_one_goes_on_to_the_same_figures(
    run_job: Runner, tmp_path: Path
) -> None:
    """SFT, a reward model, PPO by its scores alone; asked again, nothing is run again."""
    run = run_job("examples/three-stage.yaml")
    assert run.exit_code == 0, run.stderr
    curves = read_stages(run.folder, "three-stage", "seed 0")
    again = finish(start("run", "examples/three-stage.yaml", "--resume", str(run.folder)), run.folder)
    assert again.exit_code == 0, again.stderr
    assert again.stderr.count("already finished in") == 3
    stopped = interrupt_and_resume(tmp_path / "stopped", "examples/three-stage.yaml")
    check_stages(curves + read_stages(stopped, "three-stage", RESUMED))


@pytest.mark.parametrize("seed", [1, 2])
def test_each_of_three_stages_gets_better_in_other_seeds(run_job: Runner, seed: int) -> None:
    run = run_job("examples/three-stage.yaml", f"seed={seed}")
    assert run.exit_code == 0, run.stderr
    check_stages(read_stages(run.folder, "three-stage", f"seed {seed}"))


def test_stages_that_learn_at_rate_0_get_no_better(run_job: Runner) -> None:
    run = run_job("examples/three-stage.yaml", *EXAMPLE_CASES["three-stage"][LEARNING_RATE_0])
    assert run.exit_code == 0, run.stderr
    check_stages(read_stages(run.folder, "three-stage", LEARNING_RATE_0))


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_a_policy_learns_to_call_a_tool_on_the_runtime(run_job: Runner, seed: int) -> None:
    run = run_job("examples/tools.yaml", f"seed={seed}")
    assert run.exit_code == 0, run.stderr
    (curve,) = read_stages(run.folder, "tools", f"seed {seed}")
    check_stages([curve])
    assert curve.steps[-1] <= 60


def test_a_policy_of_62_million_parameters_learns_from_random_weights(run_job: Runner) -> None:
    """The first 20 steps of SFT, and two of GRPO; the whole is benchmarks/learning/example_runs.py."""
    short = ("stages.sft.workload.num_steps=20", "stages.grpo.workload.num_steps=2")
    run = run_job("examples/from-random-weights.yaml", *short)
    assert run.exit_code == 0, run.stderr
    sft, _ = read_stages(run.folder, "from-random-weights", "seed 0")
    assert sft.values[0] < 0.01
    assert sft.values[-1] > 0.2
    rows = [json.loads(line) for line in (run.folder / "grpo" / "metrics.jsonl").read_text().splitlines()]
    assert max(row["sync/logprob_difference_mean"] for row in rows if row["step"] > 0) < 2e-2


def test_what_is_exported_at_a_save_is_loaded_by_transformers_and_makes_a_reward(run_job: Runner) -> None:
    """A reward model of two steps, exported after the first, judges the quickstart's rollouts."""
    save = ("checkpoints.every=1", "checkpoints.exports_policy=true", "workload.num_steps=2")
    run = run_job("examples/algorithms/reward_modeling.yaml", *save)
    assert run.exit_code == 0, run.stderr
    exported = run.folder / "exports" / "step-1"
    assert "# reward_modeling" in (exported / "README.md").read_text()
    judged = run_job("examples/quickstart.yaml", f"roles.reward.path={exported}", *SHORT)
    assert judged.exit_code == 0, judged.stderr
    assert "reward/reward_model/mean" in judged.metrics[-1]
