"""What a vision tower adds to a process that sees images, action by action.

In: a job whose prompts have images, its whole model, the forecast of the process without a tower. Out: bytes by kind.
A tower is frozen and sees one image after the other, before the decoder's pass begins. Left out: the prompts' pixels,
which lie in the driver and with the samples.

Symbols: P patches of the largest image, v the tower's width, w of its MLP, p pixels' numbers in a patch, e bytes of an
element.
"""

from dataclasses import dataclass

from rlplan.dataflow.schedule import Action
from rlplan.memory.ledger import RunPhase
from rlplan.memory.predict import Bytes, Forecast
from rlplan.spec.model import ModelSpec
from rlplan.vocabulary import ActionKind, MemoryKind

WITH_PASSES = (ActionKind.TRAIN_FORWARD_BACKWARD, ActionKind.SCORE, ActionKind.GENERATE, ActionKind.EVALUATE)
COPIES = 2
"""Of pixels as numbers: in the processor's array, and as the tower's input."""


def tower_bytes(model: ModelSpec, element_bytes: int) -> int:
    """Bytes of the tower's weights in one process. model: with its tower."""
    return sum(one.numel for one in model.parameters if one.name.startswith("model.visual.")) * element_bytes


def image_pass_bytes(model: ModelSpec, num_patches: int, element_bytes: int) -> int:
    """Bytes in flight while the tower sees one image of P patches, without gradients.

    Counts: e P (2w + 5v): the MLP's gate and up; hidden state, residual, norm, queries with keys and values; and the
    pixels twice. Assumes: attention keeps no scores of P squared.
    """
    if model.vision is None:
        return 0
    sizes = model.vision.sizes
    numbers = sizes["c"] * sizes["t"] * sizes["s"] ** 2 if "c" in sizes else sizes.get("p", 3 * 14**2)
    return element_bytes * num_patches * (2 * sizes["w"] + 5 * sizes["v"] + COPIES * numbers)


@dataclass(frozen=True)
class WithTower(Forecast):
    """A process's forecast with a tower beside its decoder. See `predict.Forecast`."""

    decoder: Forecast
    weights: int
    """Bytes of the tower."""
    in_flight: int
    """Bytes of one image's pass."""
    kept: int = 0
    """Bytes of embeddings that an engine keeps of images once it has seen some."""

    def resident(self, action: Action, run_phase: RunPhase) -> Bytes:
        """Held when the action has ended."""
        held = dict(self.decoder.resident(action, run_phase))
        if MemoryKind.WEIGHTS in held:
            held[MemoryKind.WEIGHTS] += self.weights
        return held

    def peak(self, action: Action, run_phase: RunPhase) -> Bytes:
        """Held at the moment of the process's peak inside the action."""
        held = dict(self.decoder.peak(action, run_phase))
        if MemoryKind.WEIGHTS in held:
            held[MemoryKind.WEIGHTS] += self.weights
        if action.kind in WITH_PASSES:
            own = held.get(MemoryKind.ACTIVATIONS, 0)
            held[MemoryKind.ACTIVATIONS] = max(own, self.in_flight) + self.kept
        return held

    def loaded(self, action: Action) -> Bytes:
        """Held inside the action before the process repacked it."""
        held = dict(self.decoder.loaded(action))
        if MemoryKind.WEIGHTS in held:
            held[MemoryKind.WEIGHTS] += self.weights
        return held

    def on_host(self, action: Action, run_phase: RunPhase) -> Bytes:
        """Nothing: the device's memory is the host's."""
        return self.decoder.on_host(action, run_phase)
