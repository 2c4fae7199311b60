"""Scorer: a frozen model that gives log-probs of responses (the reference).

In: prompts with responses. Out: one log-prob a response token. Left out: learned rewards.
"""

from collections.abc import Sequence
from typing import Any

import torch

from rlplan.runtime.experience import SequencePair
from rlplan.runtime.logprob_model import LogprobModel, make_batch
from rlplan.runtime.packing import pack_best_fit
from rlplan.runtime.start_checkpoint import load_language_model, warm_up
from rlplan.runtime.workers.memory_meter import storage_bytes
from rlplan.runtime.workers.worker import Worker
from rlplan.spec.job import JobSpec
from rlplan.vocabulary import MemoryKind


class Scorer(Worker):
    """See the module docstring."""

    def __init__(self, process: str, job: JobSpec, role: str, num_threads: int) -> None:
        super().__init__(process)
        self.job, self.role, self.num_threads = job, role, num_threads
        self.model: Any = None

    def import_libraries(self) -> None:
        """Load the code that `start` needs, so that its memory alone can be measured."""
        torch.set_num_threads(self.num_threads)
        warm_up(self.job.load_model().architecture, backward=False)

    def start(self, model_folder: str) -> None:
        """Load the frozen model."""
        self.model = LogprobModel(
            load_language_model(model_folder).requires_grad_(False),
            self.job.workload.temperature,
            computes_entropy=False,
        )

    @torch.no_grad()
    def score(self, pairs: Sequence[SequencePair]) -> list[tuple[float, ...]]:
        """Log-probs of each response's tokens, micro-batch by micro-batch."""
        lengths = [len(pair.prompt_tokens) + len(pair.response_tokens) for pair in pairs]
        scores: dict[int, tuple[float, ...]] = {}
        for pack in pack_best_fit(lengths, self.job.max_tokens_per_micro_batch):
            batch = make_batch([pairs[index] for index in pack])
            logprobs, _ = self.model(batch)
            scores |= {
                index: tuple(part.tolist()) for index, part in zip(pack, logprobs.split(batch.lengths), strict=True)
            }
        return [scores[index] for index in range(len(pairs))]

    def components(self) -> dict[tuple[str, str], int]:
        """Bytes of the frozen parameters."""
        if self.model is None:
            return {}
        return {(self.role, MemoryKind.WEIGHTS.value): storage_bytes(self.model.parameters())}
