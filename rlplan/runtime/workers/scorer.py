"""Scorer: a frozen model that scores responses with log-probs (reference, teacher) or with a reward (reward model).

In: prompts with responses. Out: one number per response token; a reward model gives one per response.
A process holds the full model, or one shard if the plan says so. Shards use DeepSpeed's ZeRO-3, which gathers one layer
at a time; while loading, no rank holds more than one full tensor.
"""

import gc
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from rlplan.runtime.device.layer import device_of
from rlplan.runtime.images.tower import attach_tower, get_tower
from rlplan.runtime.measure.memory_meter import give_memory_back, read_pages, storage_bytes
from rlplan.runtime.models.logprob_model import LogprobModel, list_numbers
from rlplan.runtime.models.sharded_loading import build_sharded
from rlplan.runtime.models.start_checkpoint import load_language_model, load_scalar_model, warm_up
from rlplan.runtime.models.value_model import ValueModel, append_dummy_tokens
from rlplan.runtime.rollout.experience import SequencePair, TeacherTokens
from rlplan.runtime.workers.trainer.deepspeed_engine import (
    TORCH_DTYPES,
    import_deepspeed,
    join_ranks,
    score_in_lock_step,
    score_teacher,
    shard_frozen,
)
from rlplan.runtime.workers.trainer.offloaded_states import OffloadedStates
from rlplan.runtime.workers.worker import Worker, disable_garbage_collection
from rlplan.runtime.workers.worker_device import empty_device_cache, use_device, worker_device
from rlplan.spec.resolved import ResolvedJob
from rlplan.vocabulary import MemoryKind, Role


class Scorer(Worker):
    """See the module docstring. engine: DeepSpeed's, if the weights are sharded; else None."""

    def __init__(self, process: str, job: ResolvedJob, role: str, num_threads: int) -> None:
        super().__init__(process)
        self.job, self.role, self.num_threads = job, role, num_threads
        self.model: Any = None
        self.engine: Any = None
        self.device = torch.device("cpu")
        self.offloaded = OffloadedStates()

    @disable_garbage_collection()
    def import_libraries(self) -> None:
        torch.set_num_threads(self.num_threads)
        warm_up(self.job.load_model().architecture, backward=False)
        if self.job.placement.spreads_scoring:
            import_deepspeed()

    def start(self, model_folder: str) -> None:
        self.model_folder, self.device = model_folder, worker_device(self.job)
        load = load_scalar_model if self._is_scalar else load_language_model
        model = load(model_folder, self._dtype)
        if self.job.takes_images:
            attach_tower(model, Path(self.job.policy.path))
        self.model = self._wrap_model(model).to(self.device)
        if device_of(self.device) is None:
            read_pages(self._storages())  # the file is only mapped so far; the plan counts the weights from the start

    def start_share(
        self, rank: int, world_size: int, address: tuple[str, int], model_folder: str, config: dict[str, Any]
    ) -> None:
        """Load the model and keep this rank's shard of the weights. config: the bundle's DeepSpeed configuration."""
        self.model_folder, self.device = model_folder, worker_device(self.job)
        timeout_s = self.job.limits.rank_timeout_s
        join_ranks(rank, world_size, address, timeout_s, self.take_listener(), device_of(self.device))
        self.engine = shard_frozen(
            self._wrap_model(build_sharded(model_folder, config, self._dtype, is_scalar=self._is_scalar)), config
        )
        self.model = self.engine.module

    @property
    def _is_scalar(self) -> bool:
        return self.role == Role.REWARD

    @property
    def _dtype(self) -> torch.dtype:
        return TORCH_DTYPES[self.job.training.dtype]

    def _wrap_model(self, model: Any) -> Any:
        model.requires_grad_(False)
        if self._is_scalar:
            return ValueModel(model)
        # The engine samples at this temperature, so log-probs must be computed at it as well.
        return LogprobModel(model, self.job.workload.temperature, entropies="none")

    def offload(self, destination: str) -> None:
        """Free the model's memory until `reload`.

        On a CPU host an unsharded model is dropped, whatever the destination: its files on disk hold the weights.
        Weights on a GPU, and shards anywhere, are offloaded.
        """
        if self.engine is None and device_of(self.device) is None:
            self.model = None
            gc.collect()
        else:
            self.offloaded.offload(self._storages(), in_memory=destination == "host")
            empty_device_cache(self.device)
        give_memory_back()

    def reload(self) -> None:
        if self.model is None:
            self.start(self.model_folder)
        else:
            self.offloaded.reload()

    @torch.no_grad()
    def score(self, pairs: Sequence[SequencePair], role: str) -> list[tuple[float, ...]] | list[TeacherTokens]:
        """Score each response, micro-batch by micro-batch."""
        max_tokens = self.job.max_tokens_per_micro_batch
        scores: list[tuple[float, ...]] | list[TeacherTokens]
        with use_device(self.device):
            if self._is_scalar:
                scores = score_in_lock_step(append_dummy_tokens(pairs), max_tokens, self.model, list_numbers)
            elif self.role == Role.TEACHER and self.job.algorithm.teacher_top_k:
                scores = score_teacher(pairs, self.job, self.model)
            else:
                scores = score_in_lock_step(pairs, max_tokens, lambda batch: self.model(batch)[0], list_numbers)
        empty_device_cache(self.device)
        return scores

    def components(self) -> dict[tuple[str, str], int]:
        """Bytes of the frozen parameters in this process."""
        if self.model is None:
            return {}
        tower = None if self._is_scalar else get_tower(self.model.language_model)
        num_bytes = sum(storage.nbytes() for storage in self._storages()) + (tower.num_bytes if tower else 0)
        return {(self.role, MemoryKind.WEIGHTS.value): num_bytes}

    def _storages(self) -> list[torch.UntypedStorage]:
        """Distinct storages of the weights; for a shard its partitions and the parameters that ZeRO-3 never shards."""
        candidates = [tensor for p in self.model.parameters() for tensor in (p.data, getattr(p, "ds_tensor", None))]
        tensors = [tensor for tensor in candidates if tensor is not None and storage_bytes([tensor])]
        storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage() for tensor in tensors}
        return list(storages.values())
