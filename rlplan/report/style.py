"""The look of every chart: one colour for each memory kind, phase and resource; their names are `vocabulary.words_of`.

In: enums and words. Out: colours, titles. Left out: what is drawn (memory.py), the page's own colours (page.css).

The colours of kinds were searched for the largest distance between any two of them as people see them with full colour
vision and without red, green or blue cones (CIE 76 after Machado 2009): at least 14 for all, 23 for what fills a GPU.
tests/report/test_style.py holds it. Names stand in the areas all the same.
"""

from rlplan.timing.cost import Resource
from rlplan.vocabulary import MemoryKind, Phase

MUTED = "#66727f"

KIND_COLORS = {
    MemoryKind.PROCESS: "#d5dae0",
    MemoryKind.CONTEXT: "#a9b3bd",
    MemoryKind.FRAGMENTATION: "#77838f",
    MemoryKind.WEIGHTS: "#544d8d",
    MemoryKind.PACKED_WEIGHTS: "#9fcbf7",
    MemoryKind.MASTER_WEIGHTS: "#6d8dd8",
    MemoryKind.OPTIMIZER: "#d7655b",
    MemoryKind.GRADIENTS: "#f0ad36",
    MemoryKind.KV_CACHE: "#7a2ab8",
    MemoryKind.COMM_BUFFERS: "#51aac8",
    MemoryKind.SYNC_STAGING: "#a2a143",
    MemoryKind.CHECKPOINT_STAGING: "#cba98f",
    MemoryKind.CUDA_GRAPHS: "#8a3d62",
    MemoryKind.ACTIVATIONS: "#1d641f",
    MemoryKind.LOGITS: "#f0e08a",
}
"""From the bottom of a stack to its top: what was there before any model, what stays, what comes and goes."""

PHASE_COLORS = {
    Phase.START: "#c9ced5",
    Phase.ROLLOUT: "#8fbbe8",
    Phase.SCORE: "#e6cf6d",
    Phase.TRAIN: "#f0a983",
    Phase.SYNC: "#84c9a5",
    Phase.SWITCH: "#bda6dd",
    Phase.EVALUATE: "#a7bb93",
    Phase.CHECKPOINT: "#cbb19b",
}

RESOURCE_COLORS = {
    Resource.COMPUTE: "#d7655b",
    Resource.MEMORY: "#f0ad36",
    Resource.LATENCY: "#8a3d62",
    Resource.DEVICE_LINK: "#51aac8",
    Resource.NETWORK: "#544d8d",
    Resource.HOST_LINK: "#9fcbf7",
    Resource.HOST: "#a2a143",
    Resource.DISK: "#7a5a4b",
    Resource.IDLE: "#d5dae0",
}


def phase_color(phase: str) -> str:
    """The colour of a phase; an unknown phase is grey."""
    return PHASE_COLORS[Phase(phase)] if phase in list(Phase) else MUTED


def sentence(name: str) -> str:
    """A name in words at the beginning of a title; a name of the user's own stays as it is.

    >>> sentence("greedy accuracy"), sentence("length_score")
    ('Greedy accuracy', 'length_score')
    """
    return name[0].upper() + name[1:] if " " in name else name


def percent(value: float, digits: int = 1, *, signed: bool = False) -> str:
    """A fraction as text.

    >>> percent(0.1234), percent(0.05, 0, signed=True), percent(-0.05, signed=True)
    ('12.3 %', '+5 %', '\u22125.0 %')
    """
    return f"{100 * value:{'+' if signed else ''}.{digits}f} %".replace("-", "\u2212")
