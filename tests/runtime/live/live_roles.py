"""Exercises of a live trainer rank with adapters or a value head: what they say, before and after they were trained."""

import tempfile
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tests.runtime.live.live_trainer import LiveRank


def flat(values: list[tuple[float, ...]]) -> list[float]:
    return [value for each in values for value in each]


class Learner:
    """A rank's trainer, the same samples again and again, and what is said of them."""

    def __init__(self, live: "LiveRank") -> None:
        from rlplan.runtime.rollout.experience import SequencePair
        from tests.runtime.live.live_trainer import make_samples

        self.live, self.trainer = live, live.trainer
        self.micro_batches, self.weights = make_samples(live)
        self.pairs = [SequencePair(s.prompt_tokens, s.response_tokens) for batch in self.micro_batches for s in batch]

    def add_logprobs(self, role: str) -> None:
        """Add the reference's or teacher's log-probabilities to each sample, for the loss."""
        scores, key = iter(self.live.call("score", self.pairs, role)), f"{role}_logprobs"
        self.micro_batches = [[replace(s, **{key: next(scores)}) for s in batch] for batch in self.micro_batches]

    def train(self, num_steps: int) -> None:
        for _ in range(num_steps):
            self.live.call("forward_backward", self.micro_batches, self.weights)
            self.live.call("optimizer_step")

    def logprobs(self) -> list[float]:
        """The policy's own."""
        import torch

        with torch.no_grad():
            return flat(self.trainer._score_pairs(self.pairs, lambda batch: self.trainer.engine.module(batch)[0]))

    def score_shared(self, role: str) -> list[float]:
        """Log-probabilities of a role that shares the policy's weights."""
        return flat(self.live.call("score", self.pairs, role))

    def score_separately(self, folder: str) -> list[float]:
        """Log-probabilities of a scorer that has loaded a folder."""
        from rlplan.runtime.workers.scorer import Scorer

        scorer = Scorer("scorer/reference/0", self.live.job, "reference", 1)
        scorer.start(folder)
        return flat(scorer.score(self.pairs, "reference"))

    def score_with_peft(self, adapter: Path) -> list[float]:
        """PEFT's own reading of an adapter, on the untouched base."""
        import torch
        from peft import PeftModel

        from rlplan.runtime.models.logprob_model import LogprobModel, list_numbers, score_packed
        from rlplan.runtime.models.start_checkpoint import load_language_model

        job = self.live.job
        model = PeftModel.from_pretrained(load_language_model(job.policy.path), str(adapter))
        judge = LogprobModel(model.base_model.model, 1.0, entropies="none")
        with torch.no_grad():
            return flat(
                score_packed(self.pairs, job.max_tokens_per_micro_batch, lambda batch: judge(batch)[0], list_numbers)
            )

    def states(self) -> dict[str, Any]:
        """Bytes by kind, those that the plan says, and the names of what is handed over."""
        predicted = {
            row.kind.value: row.resident_bytes
            for row in self.live.plan.ledger.rows
            if (row.run_phase, row.action_id, row.process) == ("steady", "optimizer_step", "policy_trainer/0")
        }
        names = [name for name, _ in self.live.call("weights")]
        return {"components": self.live.measured("components")["components"], "predicted": predicted, "names": names}


def adapted(live: "LiveRank") -> dict[str, Any]:
    """Steps of adapters: what the base said and says, what the policy says, and what was saved says elsewhere."""
    learner = Learner(live)
    answer: dict[str, Any] = {"start": learner.logprobs()}
    learner.train(2)
    answer |= {"trained": learner.logprobs(), "reference": learner.score_shared("reference")}
    answer["components"] = live.measured("components")["components"]
    with tempfile.TemporaryDirectory() as folder:
        live.call("save", folder, live.job.policy.path)
        answer["saved"] = learner.score_separately(folder)
    return answer


def adapters(live: "LiveRank") -> dict[str, Any]:
    """Three steps of adapters: the base, the reference before and after, and what was saved, merged and not."""
    learner = Learner(live)
    base, before = learner.score_separately(live.job.policy.path), learner.score_shared("reference")
    learner.train(3)
    with tempfile.TemporaryDirectory() as folder:
        live.call("save", folder, live.job.policy.path)
        saved = {"merged": learner.score_separately(folder), "peft": learner.score_with_peft(Path(folder) / "adapter")}
    reference = [before, learner.score_shared("reference")]
    return {"base": base, "reference": reference, "trained": learner.logprobs(), **saved, **learner.states()}


def role_adapters(live: "LiveRank") -> dict[str, Any]:
    """Three steps from a given adapter beside those of reference and teacher: what each says, and PEFT of each."""
    learner, job = Learner(live), live.job
    lora, teacher = job.training.lora, job.roles.teacher.adapter
    assert lora is not None
    assert teacher is not None
    answer = {"start": learner.score_with_peft(Path(str(lora.path))), "other": learner.score_with_peft(Path(teacher))}
    answer |= {"policy": [learner.logprobs()], "reference": [], "teacher": []}
    for role in ("reference", "teacher"):
        learner.add_logprobs(role)
    for num_steps in (0, 3):
        learner.train(num_steps)
        for role in ("reference", "teacher"):
            answer[role].append(learner.score_shared(role))
    answer["policy"].append(learner.logprobs())
    with tempfile.TemporaryDirectory() as folder:
        live.call("save", folder, live.job.policy.path)
        answer |= {
            "merged": learner.score_separately(folder),
            "peft": learner.score_with_peft(Path(folder) / "adapter"),
        }
    return answer | learner.states()


def value_head(live: "LiveRank") -> dict[str, Any]:
    """Values of a value head on the policy's backbone before and after ten steps."""
    learner = Learner(live)
    first = learner.score_shared("value")
    learner.train(10)
    return {"values": [first, learner.score_shared("value")], **learner.states()}
