"""The engine's side of a weight sync: a WeightTransferEngine that reads buckets from shared memory.

vLLM imports this module in every worker process, for it is named as `worker_extension_cls`; importing it registers the
backend there. Weights go through vLLM's own layerwise reload, because on CPU the linear weights were packed into opaque
buffers after loading and a plain `load_weights` fails half-way. Same signatures from vLLM 0.25.1 to 0.33.
"""

from dataclasses import dataclass
from typing import Any

from vllm.distributed.weight_transfer import WeightTransferEngineFactory
from vllm.distributed.weight_transfer.base import WeightTransferEngine, WeightTransferInitInfo, WeightTransferUpdateInfo
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from rlplan.emit.vllm import WEIGHT_TRANSFER_BACKEND
from rlplan.memory.transitions import Bucket
from rlplan.runtime.weight_sync.shared_memory import BucketReader


@dataclass
class ArenaInfo(WeightTransferInitInfo):
    """Where the shared memory is. num_bytes: its size."""

    path: str = ""
    num_bytes: int = 0


@dataclass
class BucketInfo(WeightTransferUpdateInfo):
    """One bucket that now lies in the arena."""

    bucket: Bucket | None = None


class SharedMemoryEngine(WeightTransferEngine[ArenaInfo, BucketInfo]):
    """Loads buckets into the model. A session is start, any number of buckets, finish; it is not transactional."""

    init_info_cls = ArenaInfo
    update_info_cls = BucketInfo
    _reader: BucketReader | None = None

    def init_transfer_engine(self, init_info: ArenaInfo) -> None:
        """Map the arena."""
        self._reader = BucketReader(init_info.path, init_info.num_bytes)

    def start_weight_update(self) -> None:
        """Take the model back to the form in which it can be loaded."""
        initialize_layerwise_reload(self.model)

    def receive_weights(self, update_info: BucketInfo) -> None:
        """Load one bucket."""
        assert update_info.bucket is not None, "an update names a bucket"
        assert self._reader is not None, "the arena is opened first"
        self.model.load_weights(self._reader.read(update_info.bucket, self.model_config.dtype))

    def finish_weight_update(self) -> None:
        """Pack what is not packed yet. Tied heads are packed anew: vLLM 0.32 leaves the old pack in place on CPU."""
        finalize_layerwise_reload(self.model, self.model_config)
        if self.device.type == "cpu":
            for module in self.model.modules():
                if isinstance(module, VocabParallelEmbedding):
                    module.quant_method.process_weights_after_loading(module)

    def shutdown(self) -> None:
        """Unmap the arena, where one was opened."""
        if self._reader is not None:
            self._reader.close()


class WeightSyncExtension:
    """Nothing is added to vLLM's worker: naming this class makes vLLM import this module there."""


def _register() -> None:
    registered: Any = WeightTransferEngineFactory._registry
    if WEIGHT_TRANSFER_BACKEND not in registered:
        WeightTransferEngineFactory.register_engine(WEIGHT_TRANSFER_BACKEND, SharedMemoryEngine)


_register()
