"""The versions of the policy's adapter that an engine holds: one for what begins, others for what is under way.

In: versions as they arrive, vLLM's names of samples that begin and end. Out: the `LoRARequest` of each sample, and its
version. A sample ends under the version that it began with: its log-probs are those of one policy, and its keys and
values stay right, which vLLM tells apart from other versions' by the adapter's name.
Left out: how vLLM takes one in (weight_sync/contents/adapter.py); how many there can be (memory/weight_sync).
"""

from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from rlplan.runtime.weight_sync.channel import sync_error
from rlplan.runtime.weight_sync.contents.adapter import take_adapter
from rlplan.spec.resolved import ResolvedJob

if TYPE_CHECKING:
    import torch


class HeldAdapters:
    """See the module docstring. num_slots: versions that vLLM has room for; 0 where it gets whole weights.

    version: with which samples begin; that of the weights alone as long as no adapter has come. newest: the one that
    arrived last, with which they begin from `switch` on.
    """

    def __init__(self, num_slots: int, version: int) -> None:
        self.num_slots = num_slots
        self.version = self.newest = version
        self._held: dict[int, tuple[Any, Mapping[str, int]]] = {}
        self._begun: dict[str, int] = {}
        self._num_under_way: Counter[int] = Counter()

    @property
    def versions(self) -> list[int]:
        """Versions that are held, the oldest first."""
        return sorted(self._held)

    def begin(self, sample: str) -> Any:
        """What a sample computes with beside the weights: a request of vLLM's; None where no adapter has come yet."""
        if not self.num_slots:
            return None
        self._begun[sample] = self.version
        self._num_under_way[self.version] += 1
        return self._held[self.version][0] if self._held else None

    def end(self, llm: Any, sample: str) -> int | None:
        """The version that a sample was begun with, which goes with its last sample; None for whole weights."""
        if not self.num_slots:
            return None
        version = self._begun.pop(sample)
        self._num_under_way[version] -= 1
        self._let_go(llm)
        return version

    def take(
        self,
        llm: Any,
        job: ResolvedJob,
        tensors: "Mapping[str, torch.Tensor]",
        version: int,
        checksums: Mapping[str, int],
    ) -> None:
        """Take a version in, beside those that samples are under way with.

        One that is here already stays, as where all engines are sent what another one lost; not where it came otherwise
        and nothing was begun with it, as where it is sent again because it was wrong.
        Raises: RunError where samples take all slots: vLLM would drop a version of theirs without a word. With
        `max_staleness` there is always one (memory/weight_sync/adapters.py, num_adapter_versions says why).
        """
        # In a batch with any adapter vLLM 0.32 on a CPU gives samples without one that of the last slot.
        assert self._held or not self._begun, "the first version comes before samples that go on beside it"
        if not self._keeps(version, checksums):
            self._make_room(llm, version)
            self._held[version] = take_adapter(llm, job, tensors, version), checksums
        self.newest = version
        if self.version not in self._held:  # the first one, of a new engine or of one that was restarted
            self.version = version

    def switch(self, llm: Any, version: int | None = None) -> None:
        """Samples begin with the newest version from now on, or with one that another rank names."""
        self.version = self.newest if version is None else version
        self._let_go(llm)

    def _keeps(self, version: int, checksums: Mapping[str, int]) -> bool:
        if version not in self._held:
            return False
        return self._num_under_way[version] > 0 or self._held[version][1] == checksums

    def _make_room(self, llm: Any, version: int) -> None:
        """Of what nothing is under way with, the version that samples begin with goes last."""
        self.newest = self.version
        self._let_go(llm)
        if version in self._held:
            self._remove_unused(llm, {version})
        if len(self._held) >= self.num_slots:
            self._remove_unused(llm, set(self._held))
        if len(self._held) >= self.num_slots:
            held = ", ".join(map(str, self.versions))
            raise sync_error(
                f"version {version} finds no slot for its adapter: samples of versions {held} are under way, and there "
                f"are {self.num_slots} slots"
            )

    def _let_go(self, llm: Any) -> None:
        self._remove_unused(llm, set(self._held) - {self.version, self.newest})

    def _remove_unused(self, llm: Any, versions: set[int]) -> None:
        for version in versions:
            if not self._num_under_way[version]:
                adapter, _ = self._held.pop(version)
                llm.llm_engine.remove_lora(adapter.lora_int_id)
