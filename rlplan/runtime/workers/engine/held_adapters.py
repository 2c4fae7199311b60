"""Adapter versions that an engine holds: one for new samples, older ones for samples that are still running.

In: versions as they arrive, vLLM's names of samples that begin and end. Out: the `LoRARequest` of each sample, and its
version. A sample finishes under the version that it began with, so its log-probs belong to one policy. Its KV cache
stays valid too, because vLLM separates cached blocks by the adapter's name.
Left out: how vLLM loads an adapter (weight_sync/contents/adapter.py); the number of slots (memory/weight_sync).
"""

from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from rlplan.runtime.weight_sync.channel import sync_error
from rlplan.runtime.weight_sync.contents.adapter import load_adapter
from rlplan.spec.resolved import ResolvedJob

if TYPE_CHECKING:
    import torch


class HeldAdapters:
    """See the module docstring. num_slots: versions that vLLM has room for; 0 where weight sync sends full weights.

    version: the version that new samples use; before the first adapter, that of the base weights. newest: the version
    that arrived last, which new samples use after `switch`.
    """

    def __init__(self, num_slots: int, version: int) -> None:
        self.num_slots = num_slots
        self.version = self.newest = version
        self._held: dict[int, tuple[Any, Mapping[str, int]]] = {}
        self._begun: dict[str, int] = {}
        self._num_under_way: Counter[int] = Counter()

    @property
    def versions(self) -> list[int]:
        """Loaded versions, oldest first."""
        return sorted(self._held)

    def begin(self, sample: str) -> Any:
        """Register a new sample and return its `LoRARequest`; None before the first adapter."""
        if not self.num_slots:
            return None
        self._begun[sample] = self.version
        self._num_under_way[self.version] += 1
        return self._held[self.version][0] if self._held else None

    def end(self, llm: Any, sample: str) -> int | None:
        """Unregister a sample, remove outdated versions, and return the sample's version; None for full weights."""
        if not self.num_slots:
            return None
        version = self._begun.pop(sample)
        self._num_under_way[version] -= 1
        self._remove_outdated(llm)
        return version

    def take(
        self,
        llm: Any,
        job: ResolvedJob,
        tensors: "Mapping[str, torch.Tensor]",
        version: int,
        checksums: Mapping[str, int],
    ) -> None:
        """Load a version beside those that running samples use.

        A version that is already loaded stays, for example when all engines receive what a restarted engine needs. It
        is replaced only if its checksums differ and no sample uses it, for example after a failed update.
        Raises: RunError where running samples occupy all slots: vLLM would silently drop one of their versions. With
        `max_staleness` a slot is always free (see num_adapter_versions in memory/weight_sync/adapters.py).
        """
        # In a batch with any adapter, vLLM 0.32 on a CPU applies the last slot's adapter to samples without one.
        assert self._held or not self._begun, "the first version arrives before any sample"
        if not self._is_loaded(version, checksums):
            self._make_room(llm, version)
            self._held[version] = load_adapter(llm, job, tensors, version), checksums
        self.newest = version
        if self.version not in self._held:  # the first version of a new or restarted engine
            self.version = version

    def switch(self, llm: Any, version: int | None = None) -> None:
        """Use the newest version for new samples, or the version that rank 0 names."""
        self.version = self.newest if version is None else version
        self._remove_outdated(llm)

    def _is_loaded(self, version: int, checksums: Mapping[str, int]) -> bool:
        if version not in self._held:
            return False
        return self._num_under_way[version] > 0 or self._held[version][1] == checksums

    def _make_room(self, llm: Any, version: int) -> None:
        """Free a slot by removing unused versions; the version of new samples goes last."""
        self.newest = self.version  # the arriving version replaces one that no sample has used yet
        self._remove_outdated(llm)
        if version in self._held:
            self._remove_unused(llm, {version})
        if len(self._held) >= self.num_slots:
            self._remove_unused(llm, set(self._held))
        if len(self._held) >= self.num_slots:
            loaded = ", ".join(map(str, self.versions))
            raise sync_error(
                f"no free slot for the adapter of version {version}: samples of versions {loaded} are running, and "
                f"there are {self.num_slots} slots"
            )

    def _remove_outdated(self, llm: Any) -> None:
        self._remove_unused(llm, set(self._held) - {self.version, self.newest})

    def _remove_unused(self, llm: Any, versions: set[int]) -> None:
        for version in versions:
            if not self._num_under_way[version]:
                adapter, _ = self._held.pop(version)
                llm.llm_engine.remove_lora(adapter.lora_int_id)
