"""A trainer rank on live DeepSpeed: what it accumulates does not depend on how the mini-batch is cut."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rlplan.memory.forecast_trainer import TrainerForecast
from rlplan.vocabulary import PERSISTENT_KINDS, ActionKind
from tests.runtime.live_trainer import exercise, plan_of

pytestmark = pytest.mark.engine

SMALL = {"training.persistence_threshold": 200}
STAGES = {
    f"{dtype}, stage {stage}": {
        "exercise": "source",
        "overrides": {**SMALL, "training.dtype": dtype, "training.zero_stage": stage},
    }
    for dtype in ("float32", "bfloat16")
    for stage in range(4)
}
SWAPPED = ("float32, stage 0", "bfloat16, stage 1", "float32, stage 2", "bfloat16, stage 3")
SWAPS = {f"swapped, {name}": {**STAGES[name], "exercise": "swap"} for name in SWAPPED}

SCRIPT = """
import json, sys
from rlplan.emit.execution import execution_spec
from rlplan.runtime.experience import TrainSample
from rlplan.runtime.workers.policy_trainer import PolicyTrainer
from tests.factories import make_plan

from rlplan.runtime.packing import pack_shares

limit, passes = int(sys.argv[1]), int(sys.argv[2])
plan = make_plan(
    **{"hardware.num_devices": 1, "training.max_tokens_per_micro_batch": limit, "algorithm.kl_coef": 0.0}
)
trainer = PolicyTrainer("policy_trainer/0", plan.job, execution_spec(plan).deepspeed["policy"], 1)
trainer.import_libraries()
trainer.start(0, 1, trainer.open_rendezvous(0), plan.job.policy.path)
samples = []
for i in range(16):
    n = 2 + i % 5
    response = tuple(3 + (i * j) % 12 for j in range(n))
    samples.append(TrainSample((5, 6, 7), response, (-1.0,) * n, (), ((-1.0) ** i,) * n))
(packs,) = pack_shares([3 + len(s.response_tokens) for s in samples], 1, limit)
micro = [[samples[index] for index in pack] for pack in packs]
assert len(micro) == passes, [len(part) for part in micro]
micro.append([])  # a dummy teaches nothing
sums = trainer.forward_backward(micro, [[1 / (16 * len(s.response_tokens)) for s in part] for part in micro])
norm = trainer.optimizer_step()["grad_norm"]
weights = [float(p.double().sum()) for p in trainer.engine.module.parameters()]
print("RESULT" + json.dumps({"norm": norm, "loss": sums["loss"], "tokens": sums["num_tokens"], "weights": weights}))
"""


def _result(limit: int, passes: int) -> dict[str, float]:
    environment = {**os.environ, "DS_ACCELERATOR": "cpu", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(limit), str(passes)],
        capture_output=True,
        text=True,
        timeout=120,
        env=environment,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    line = next(line for line in done.stdout.splitlines() if line.startswith("RESULT"))
    result: dict[str, float] = json.loads(line.removeprefix("RESULT"))
    return result


def test_gradient_and_step_are_the_same_in_one_two_and_uneven_micro_batches() -> None:
    # 16 sequences of 5 to 9 tokens, 110 in all
    whole, halves, uneven = (_result(*cut) for cut in ((200, 1), (56, 2), (24, 5)))
    for cut in (halves, uneven):
        assert cut["norm"] == pytest.approx(whole["norm"], rel=1e-4)
        assert cut["loss"] == pytest.approx(whole["loss"], rel=1e-4, abs=1e-7)
        assert cut["tokens"] == whole["tokens"]
        assert cut["weights"] == pytest.approx(whole["weights"], rel=1e-5, abs=1e-4)
    assert whole["norm"] > 0.01


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    """What every case gave on two ranks, in one start of the processes."""
    return exercise(2, STAGES | SWAPS, Path(tmp_path_factory.mktemp("ranks")))


@pytest.mark.parametrize("name", STAGES)
def test_the_source_gives_every_weight_whole_and_alike_on_every_rank(
    two_ranks: dict[str, list[Any]], name: str
) -> None:
    first, second = two_ranks[name]
    assert first["seen"] == first["meta"] == second["seen"]
    assert first["sums"] == second["sums"]
    kind = f"torch.{name.split(',')[0]}"
    assert {dtype for dtype, *_ in first["seen"].values()} == {kind}
    assert first["seen"]["model.embed_tokens.weight"] == [kind, 64, 128]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_stage_makes_the_same_steps(two_ranks: dict[str, list[Any]], dtype: str) -> None:
    tolerance = 1e-5 if dtype == "float32" else 2e-2
    whole = two_ranks[f"{dtype}, stage 0"]
    for stage in (1, 2, 3):
        for mine, other in zip(two_ranks[f"{dtype}, stage {stage}"], whole, strict=True):
            for step, expected in zip(mine["log"], other["log"], strict=True):
                assert step == pytest.approx(expected, rel=tolerance, abs=tolerance)
            assert sum(mine["sums"].values()) == pytest.approx(sum(other["sums"].values()), rel=tolerance)


@pytest.mark.parametrize("name", SWAPPED)
def test_states_that_were_parked_on_disk_come_back_bit_for_bit(two_ranks: dict[str, list[Any]], name: str) -> None:
    for stayed, swapped in zip(two_ranks[name], two_ranks[f"swapped, {name}"], strict=True):
        assert swapped["log"] == stayed["log"]
        assert set(swapped["parked"]["components"].values()) == {0}
        assert swapped["back"]["components"] == swapped["before"]["components"]


@pytest.mark.parametrize("name", SWAPPED)
def test_the_states_after_a_step_are_predicted_to_the_byte(two_ranks: dict[str, list[Any]], name: str) -> None:
    plan = plan_of(2, STAGES[name])
    action = next(action for action in plan.schedule.step if action.kind is ActionKind.OPTIMIZER_STEP)
    for rank, answer in enumerate(two_ranks[f"swapped, {name}"]):
        forecast = TrainerForecast(
            plan.job, plan.job.load_model(), plan.job.load_profile(), plan.schedule.layout("policy_trainer"), rank
        )
        held = forecast.resident(action, "steady")
        for kind in PERSISTENT_KINDS:
            assert answer["before"]["components"].get(kind.value, 0) == held.get(kind, 0), (rank, kind)
