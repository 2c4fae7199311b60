"""A trainer rank on live DeepSpeed: what it accumulates does not depend on how the mini-batch is cut."""

import json
import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.engine

SCRIPT = """
import json, sys
from rlplan.emit.execution import execution_spec
from rlplan.runtime.experience import TrainSample
from rlplan.runtime.workers.policy_trainer import PolicyTrainer
from tests.factories import make_plan

size = int(sys.argv[1])
plan = make_plan(**{"hardware.num_devices": 1, "workload.micro_batch_size_per_gpu": size, "algorithm.kl_coef": 0.0})
trainer = PolicyTrainer("policy_trainer/0", plan.job, execution_spec(plan).deepspeed["policy"], 1)
trainer.import_libraries()
trainer.start(0, 1, trainer.open_rendezvous(0), plan.job.policy.path)
samples = [
    TrainSample((5, 6, 7), tuple(3 + (i * j) % 12 for j in range(2 + i % 5)), (-1.0,) * (2 + i % 5), (), (-1.0) ** i)
    for i in range(16)
]
sums = trainer.forward_backward(samples, [[1 / (16 * len(s.response_tokens))] * len(s.response_tokens) for s in samples])
norm = trainer.optimizer_step()["grad_norm"]
weights = [float(p.double().sum()) for p in trainer.engine.module.parameters()]
print("RESULT" + json.dumps({"norm": norm, "loss": sums["loss"], "tokens": sums["num_tokens"], "weights": weights}))
"""


def _result(micro_batch_size: int) -> dict[str, float]:
    environment = {**os.environ, "DS_ACCELERATOR": "cpu", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(micro_batch_size)],
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
    whole, halves, uneven = (_result(size) for size in (16, 8, 5))
    for cut in (halves, uneven):
        assert cut["norm"] == pytest.approx(whole["norm"], rel=1e-4)
        assert cut["loss"] == pytest.approx(whole["loss"], rel=1e-4, abs=1e-7)
        assert cut["tokens"] == whole["tokens"]
        assert cut["weights"] == pytest.approx(whole["weights"], rel=1e-5, abs=1e-4)
    assert whole["norm"] > 0.01
