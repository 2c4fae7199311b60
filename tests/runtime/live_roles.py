"""A trainer with adapters or a value head in a process of its own; what it saw is printed as JSON for the test."""

import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ["DS_ACCELERATOR"] = "cpu"
os.environ["HF_HUB_OFFLINE"] = "1"

import torch

from rlplan.emit.execution import execution_spec
from rlplan.runtime.experience import SequencePair, TrainSample
from rlplan.runtime.workers.policy_trainer import PolicyTrainer
from rlplan.runtime.workers.scorer import Scorer
from rlplan.vocabulary import Role
from tests.factories import make_plan

NUM_SAMPLES = 16


def samples() -> list[TrainSample]:
    made = []
    for i in range(NUM_SAMPLES):
        n = 2 + i % 5
        response = tuple(3 + (i * j) % 12 for j in range(n))
        made.append(
            TrainSample((5, 6, 7), response, (-1.0,) * n, (-1.0,) * n, ((-1.0) ** i,) * n, (), (0.0,) * n, (1.0,) * n)
        )
    return made


PREDICTED: dict[str, int] = {}
"""Bytes that the plan says the trainer holds after a step, by kind."""
PAIRS = [SequencePair(sample.prompt_tokens, sample.response_tokens) for sample in samples()]


def started(**overrides: Any) -> PolicyTrainer:
    plan = make_plan(**{"hardware.num_devices": 1, **overrides})
    trainer = PolicyTrainer("policy_trainer/0", plan.job, execution_spec(plan).deepspeed["policy"], 1)
    trainer.import_libraries()
    trainer.start(0, 1, trainer.open_rendezvous("127.0.0.1", 0), plan.job.policy.path)
    PREDICTED.update(
        (row.kind.value, row.resident_bytes)
        for row in plan.ledger.rows
        if (row.moment, row.action_id, row.process) == ("steady", "optimizer_step", "policy_trainer/0")
    )
    return trainer


def train(trainer: PolicyTrainer, num_steps: int) -> None:
    weights = [1 / (NUM_SAMPLES * len(sample.response_tokens)) for sample in samples()]
    for _ in range(num_steps):
        trainer.forward_backward([samples()], [weights])
        trainer.optimizer_step()


def logprobs(trainer: PolicyTrainer) -> list[float]:
    with torch.no_grad():
        return flat(trainer._judge(PAIRS, lambda batch: trainer.engine.module(batch)[0]))


def scored(trainer: PolicyTrainer, folder: str) -> list[float]:
    scorer = Scorer("scorer/reference/0", trainer.job, "reference", 1)
    scorer.start(folder)
    return flat(scorer.score(PAIRS, Role.REFERENCE))


def flat(values: list[tuple[float, ...]]) -> list[float]:
    return [value for each in values for value in each]


def with_peft(trainer: PolicyTrainer, folder: Path) -> list[float]:
    """PEFT's own reading of what was written, on the untouched base."""
    from peft import PeftModel

    from rlplan.runtime.logprob_model import LogprobModel, judge_packed
    from rlplan.runtime.start_checkpoint import load_language_model

    model = PeftModel.from_pretrained(load_language_model(trainer.job.policy.path), str(folder / "adapter"))
    judge = LogprobModel(model.base_model.model, 1.0, entropies="none")
    with torch.no_grad():
        return flat(judge_packed(PAIRS, trainer.job.max_tokens_per_micro_batch, lambda batch: judge(batch)[0]))


def adapters(folder: Path) -> dict[str, Any]:
    stage = int(os.environ.get("ZERO_STAGE", "2"))
    lora = {"rank": 4, "alpha": 8.0}
    trainer = started(**{"training.lora": lora, "training.zero_stage": stage, "algorithm.learning_rate": 1e-3})
    base = scored(trainer, trainer.job.policy.path)
    before = flat(trainer.score(PAIRS, Role.REFERENCE))
    train(trainer, 3)
    trainer.save(str(folder), trainer.job.policy.path)
    return {
        "base": base,
        "reference": [before, flat(trainer.score(PAIRS, Role.REFERENCE))],
        "trained": logprobs(trainer),
        "merged": scored(trainer, str(folder)),
        "peft": with_peft(trainer, folder),
        "components": {kind: size for (_, kind), size in trainer.components().items()},
        "predicted": PREDICTED,
        "names": [name for name, _ in trainer.weights()],
    }


def value_head() -> dict[str, Any]:
    trainer = started(**{"algorithm.name": "ppo", "roles.value.shares_backbone": True, "algorithm.learning_rate": 1e-3})
    first = flat(trainer.score(PAIRS, Role.VALUE))
    train(trainer, 5)
    components = {kind: size for (_, kind), size in trainer.components().items()}
    names = [name for name, _ in trainer.weights()]
    values = [first, flat(trainer.score(PAIRS, Role.VALUE))]
    return {"values": values, "components": components, "names": names, "predicted": PREDICTED}


if __name__ == "__main__":
    result = adapters(Path(sys.argv[2])) if sys.argv[1] == "adapters" else value_head()
    print("RESULT" + json.dumps(result))
