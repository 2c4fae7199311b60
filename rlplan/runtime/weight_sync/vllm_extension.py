"""The vLLM extension for weight sync: one WeightTransferEngine for all transports and contents.

vLLM imports this module in every worker process, because `worker_extension_cls` names a class of it. The import
registers the backend. Weights are loaded through vLLM's layerwise reload. A plain `load_weights` would fail half-way on
a CPU, where vLLM has packed the linear weights into opaque buffers. Written against vLLM 0.32.
"""

import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from vllm.distributed.weight_transfer import WeightTransferEngineFactory
from vllm.distributed.weight_transfer.base import WeightTransferEngine, WeightTransferInitInfo, WeightTransferUpdateInfo
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload, layerwise

from rlplan.emit.vllm import WEIGHT_TRANSFER_BACKEND
from rlplan.memory.weight_sync.packets import Packet
from rlplan.runtime.weight_sync.channel import Endpoint, Update, VerificationReport
from rlplan.runtime.weight_sync.contents.checkpoint_names import rename_for_checkpoint
from rlplan.runtime.weight_sync.engine_state import (
    LoadRecord,
    checksum_state,
    copy_buffered,
    find_buffered_parameters,
    list_padded_parameters,
    set_loaded_sizes,
)
from rlplan.runtime.weight_sync.receiver import PolicyReceiver


@dataclass
class ChannelInfo(WeightTransferInitInfo):
    endpoint: Endpoint
    packets: tuple[Packet, ...] = field(repr=False)
    """The packets of an update, in order."""

    reader: int
    """This process's number among all processes of all engines."""

    takes_deltas: bool = False


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):
    update: Update


class PolicyTransferEngine(WeightTransferEngine[ChannelInfo, UpdateInfo]):
    """Loads an update into the model in three calls: start, receive, finish. A failure leaves mixed versions.

    apply_s: seconds that vLLM spent on the last update: unpacking, loading, packing. copied_bytes: size of the last
    update's tensors that were copied because vLLM buffered them.
    """

    init_info_cls = ChannelInfo
    update_info_cls = UpdateInfo
    receiver: PolicyReceiver | None = None
    apply_s = 0.0
    copied_bytes = 0
    record: LoadRecord | None = None

    @property
    def num_bytes(self) -> int:
        return self.receiver.num_bytes if self.receiver else 0

    def init_transfer_engine(self, init_info: ChannelInfo) -> None:
        if self.receiver is None:
            self.receiver = PolicyReceiver(
                init_info.packets, self.model_config.dtype, init_info.reader, takes_deltas=init_info.takes_deltas
            )
        self.receiver.connect(init_info.endpoint)

    def start_weight_update(self) -> None:
        """Bring the model back into the state in which weights can be loaded."""
        start = time.perf_counter()
        if self.device.type == "cpu":
            for module in self.model.modules():
                _pack_experts_at_every_load(getattr(module, "quant_method", None))
        set_loaded_sizes(self.model)  # before the reload, which reads them to count the elements of a layer
        initialize_layerwise_reload(self.model)
        self.copied_bytes = 0
        self.apply_s = time.perf_counter() - start

    def receive_weights(self, update_info: UpdateInfo) -> None:
        """Load all received weights. After a failure, incomplete layers get their old tensors back."""
        assert self.receiver is not None, "the channel is opened first"
        tensors = self.receiver.tensors(update_info.update, self._before_release)
        weights = rename_for_checkpoint(self.model_config.hf_config.architectures[0], tensors)
        try:
            if update_info.update.verifies:
                self._load_recorded(weights)
            else:
                self.model.load_weights(weights)
            for _ in tensors:  # `load_weights` may return before the generator is exhausted
                raise RuntimeError("the model did not load all weights")
        except BaseException:
            tensors.close()
            self.record = None
            self._end_failed_reload()
            raise
        self.apply_s += self.receiver.report.applied_s

    def finish_weight_update(self) -> None:
        """Pack the weights that are not packed yet."""
        start = time.perf_counter()
        finalize_layerwise_reload(self.model, self.model_config)
        if self.device.type == "cpu":  # vLLM 0.32 does not repack a tied head on a CPU
            for module in self.model.modules():
                if isinstance(module, VocabParallelEmbedding):
                    module.quant_method.process_weights_after_loading(module)
        self.apply_s += time.perf_counter() - start

    def _load_recorded(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        self.record = LoadRecord()
        with self.record.watch_loaders():
            self.model.load_weights(self.record.track_weights(weights))
        self.record.kept_back += find_buffered_parameters(self.model, self.record.memories)

    def _before_release(self, payload: torch.Tensor) -> None:
        if self.record is not None:
            self.record.end_packet(payload)
        self.copied_bytes += copy_buffered(self.model, payload)

    def state(self) -> dict[str, int]:
        """Checksums of all parameters of the engine."""
        return checksum_state(self.model)

    def verification(self, before: dict[str, int]) -> VerificationReport:
        """Result of loading the same weights a second time. before: the state before that."""
        assert self.record is not None, "the weights were loaded a second time"
        after = self.state()
        different = tuple(name for name in before.keys() | after.keys() if before.get(name) != after.get(name))
        report = VerificationReport(
            len(after),
            tuple(sorted(different)),
            tuple(self.record.untaken),
            tuple(self.record.kept_back),
            tuple(list_padded_parameters(self.model)),
        )
        self.record = None
        return report

    def shutdown(self) -> None:
        if self.receiver is not None:
            self.receiver.close()

    def _end_failed_reload(self) -> None:
        """End a failed reload: all layers are complete, with mixed versions.

        vLLM itself would continue with the tensors that it has buffered.
        """
        for layer in self.model.modules():
            information = layerwise.get_layerwise_info(layer)
            if not information.can_load():
                continue
            if information.kernel_tensors is not None:
                layerwise._place_kernel_tensors(layer, information)
            information.reset()


def _pack_experts_at_every_load(method: Any) -> None:
    """Let vLLM pack a layer's experts again after each reload on a CPU.

    vLLM 0.32 packs experts only while the layer has no kernel (unquantized_fused_moe_method.py, `_setup_kernel`), so it
    would read reloaded ones unpacked. Removing the kernel first makes vLLM pack them as at the start.
    """
    set_up = getattr(type(method), "_setup_kernel", None)
    if set_up is None:
        return

    def set_up_anew(**tensors: Any) -> None:
        method.moe_kernel = None
        set_up(method, **tensors)

    method._setup_kernel = set_up_anew


class WeightSyncExtension:
    """Empty extension of vLLM's worker; naming it makes vLLM import this module in the worker process."""


_registered: Any = WeightTransferEngineFactory._registry
if WEIGHT_TRANSFER_BACKEND not in _registered:
    WeightTransferEngineFactory.register_engine(WEIGHT_TRANSFER_BACKEND, PolicyTransferEngine)
