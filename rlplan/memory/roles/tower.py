"""Memory that a vision tower adds to a process whose prompts have images, action by action.

The tower is frozen. It encodes one image at a time, before the decoder's pass begins.

In: the whole model, the forecast of the process without a tower. Out: bytes by kind.
Left out: the prompts' pixels in the driver.

Symbols: P patches of the largest image, v the tower's width, w width of its MLP, p pixel values of a patch, e bytes of
an element.
"""

from dataclasses import dataclass

from rlplan.dataflow.schedule import Action
from rlplan.memory.ledger import RunPhase
from rlplan.memory.predict import Bytes, Forecast
from rlplan.spec.model import ModelSpec
from rlplan.vocabulary import ActionKind, MemoryKind

WITH_PASSES = (ActionKind.TRAIN_FORWARD_BACKWARD, ActionKind.SCORE, ActionKind.GENERATE, ActionKind.EVALUATE)
COPIES = 2
"""Copies of the pixel values: the image processor's array, and the tower's input."""


def tower_bytes(model: ModelSpec, element_bytes: int) -> int:
    """Bytes of the tower's weights in one process. model: the model with its tower."""
    return element_bytes * sum(tensor.numel for tensor in model.parameters if tensor.name.startswith("model.visual."))


def image_pass_bytes(model: ModelSpec, num_patches: int, element_bytes: int) -> int:
    """Bytes in flight while the tower encodes one image of P patches, without gradients.

    Counts: e P (2w + 5v + 2p): the MLP's gate and up; hidden state, residual, norm, queries with keys and values; the
    pixels twice. Assumes: attention keeps no scores of P squared.
    """
    if model.vision is None:
        return 0
    sizes = model.vision.sizes
    numbers = sizes["c"] * sizes["t"] * sizes["s"] ** 2 if "c" in sizes else sizes.get("p", 3 * 14**2)
    return element_bytes * num_patches * (2 * sizes["w"] + 5 * sizes["v"] + COPIES * numbers)


@dataclass(frozen=True)
class WithTower(Forecast):
    """The forecast of a process with a tower and a decoder. See `predict.Forecast`."""

    decoder: Forecast
    weights: int
    """Bytes of the tower's weights."""
    in_flight: int
    """Bytes of one image's pass."""
    cache: int = 0
    """Bytes of image embeddings that an engine caches."""

    def predict_resident(self, action: Action, run_phase: RunPhase) -> Bytes:
        """Bytes after the action."""
        return self._add_weights(self.decoder.predict_resident(action, run_phase))

    def predict_peak(self, action: Action, run_phase: RunPhase) -> Bytes:
        """Bytes at the process's peak inside the action."""
        sizes = self._add_weights(self.decoder.predict_peak(action, run_phase))
        if action.kind in WITH_PASSES:
            own = sizes.get(MemoryKind.ACTIVATIONS, 0)
            sizes[MemoryKind.ACTIVATIONS] = max(own, self.in_flight) + self.cache
        return sizes

    def predict_loaded(self, action: Action) -> Bytes:
        """Bytes inside the action before the process repacks its weights."""
        return self._add_weights(self.decoder.predict_loaded(action))

    def _add_weights(self, sizes: Bytes) -> dict[MemoryKind, int]:
        """Add the tower's weights wherever the decoder's are in memory."""
        more = self.weights if MemoryKind.WEIGHTS in sizes else 0
        return {kind: size + more if kind is MemoryKind.WEIGHTS else size for kind, size in sizes.items()}
