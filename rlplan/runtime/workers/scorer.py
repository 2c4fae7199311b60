"""Scorer: a frozen model that judges responses: the reference's or a teacher's log-probs, a reward model's reward.

In: prompts with responses. Out: one number a response token, of a reward model one in all.
"""

import gc
from collections.abc import Sequence
from typing import Any

import torch

from rlplan.runtime.experience import SequencePair
from rlplan.runtime.logprob_model import LogprobModel, judge_packed
from rlplan.runtime.start_checkpoint import load_language_model, load_scalar_model, warm_up
from rlplan.runtime.value_model import ValueModel, whole_sequences
from rlplan.runtime.workers.deepspeed_engine import TORCH_DTYPES
from rlplan.runtime.workers.memory_meter import give_memory_back, storage_bytes
from rlplan.runtime.workers.worker import Worker
from rlplan.spec.job import JobSpec
from rlplan.vocabulary import MemoryKind, Role


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
        self.model_folder = model_folder
        dtype = TORCH_DTYPES[self.job.training.dtype]
        if self.role == Role.REWARD:
            self.model = ValueModel(load_scalar_model(model_folder, dtype).requires_grad_(False))
        else:
            language_model = load_language_model(model_folder, dtype).requires_grad_(False)
            self.model = LogprobModel(language_model, self.job.workload.temperature, entropies="none")

    def offload(self, destination: str) -> None:
        """Let the model go until `reload`: it is frozen, so its own files hold it already, whatever the destination."""
        self.model = None
        gc.collect()
        give_memory_back()

    def reload(self) -> None:
        """Load the model again."""
        self.start(self.model_folder)

    @torch.no_grad()
    def score(self, pairs: Sequence[SequencePair], role: str) -> list[tuple[float, ...]]:
        """Of each response, micro-batch by micro-batch."""
        max_tokens = self.job.max_tokens_per_micro_batch
        if self.role == Role.REWARD:
            return judge_packed(whole_sequences(pairs), max_tokens, self.model)
        return judge_packed(pairs, max_tokens, lambda batch: self.model(batch)[0])

    def components(self) -> dict[tuple[str, str], int]:
        """Bytes of the frozen parameters."""
        if self.model is None:
            return {}
        return {(self.role, MemoryKind.WEIGHTS.value): storage_bytes(self.model.parameters())}
