"""Trainers of published runs, with their defaults as values of job keys.

In: a point, trainers.yaml. Out: the Trainer of its run. Left out: stated settings (settings.py), kernels that no job
key names.
"""

import re
from pathlib import Path

from rlplan.accuracy.points import MeasuredPoint, Statistic
from rlplan.spec.base import Spec, validate
from rlplan.spec.files.yaml import read_yaml


class Trainer(Spec):
    """One trainer, with its defaults."""

    name: str
    words: tuple[str, ...] = ()
    """Words in its addresses and names."""
    framework: str = "verl"
    """Framework of its jobs; the one with the nearest backends, where the trainer has no profile."""
    backend: str = "fsdp2"
    """Backend of its jobs where no ZeRO stage is stated."""
    logits: str = "plain"
    recompute: str | None = None
    """Default recomputation; None where a point must state it."""
    selective: str | None = None
    """Meaning of `selective` alone."""
    has_master: bool = False
    """Whether weights are stored in fp32 and cast to bf16 for the passes."""
    targets: tuple[str, ...] = ("q_proj", "v_proj")
    """Default layers of LoRA."""
    rank: int = 8
    """Default rank of LoRA."""
    adapts_experts: bool = False
    """Whether LoRA adapts every routed expert where a point names no layers."""
    has_expert_modules: bool = False
    """Whether routed experts are linear modules, which `all-linear` adapts."""
    dropout: float = 0.0
    """Dropout on LoRA's input."""
    has_fp32_adapters: bool = False
    """Whether adapters are fp32 with 16-bit weights, as in PEFT."""
    upcasts_rest: bool = False
    """Whether all other weights are fp32 with a 4-bit base (`prepare_model_for_kbit_training`)."""
    is_sharded: bool = False
    """Whether several GPUs imply FSDP."""
    logit_tile: int = 0
    """Bytes of fp32 logits per chunk, of 128 to 4,096 rows; 0 without a limit in bytes."""
    vocab_chunk: int = 0
    """Words per chunk, where the vocabulary is chunked instead of the tokens; 0 otherwise."""
    is_compiled: bool = False
    """Whether its recipes use torch.compile by default."""
    micro_batches: int = 1
    """Micro-batches per step in its own tables."""
    length: int = 0
    """Tokens of a sequence in its own recipes; 0 where a point must state it."""
    reports: Statistic = Statistic.UNSTATED
    """Statistic that its own log calls the peak."""


class _Trainers(Spec):
    trainers: tuple[Trainer, ...]


_FILE = Path(__file__).with_suffix(".yaml")
TRAINERS = validate(_Trainers, read_yaml(_FILE, "the trainers"), file=str(_FILE)).trainers
_BY_NAME = {trainer.name: trainer for trainer in TRAINERS}
AGILERL, AUTOMODEL, FOUNDRY = _BY_NAME["agilerl"], _BY_NAME["automodel"], _BY_NAME["llm-foundry"]
MEGATRON, PRIME_RL = _BY_NAME["megatron"], _BY_NAME["prime-rl"]
TORCHTITAN, TORCHTUNE = _BY_NAME["torchtitan"], _BY_NAME["torchtune"]
TORCH = Trainer(name="torch")
"""A plain loop around torch 2.13, and any trainer that is not named."""


def find_trainer(point: MeasuredPoint) -> Trainer:
    """The trainer that a point names, in its settings, else in its model, source or id.

    >>> measured = {"value": 1, "unit": "GiB"}
    >>> find_trainer(MeasuredPoint(id="a", kind="train_peak", source="https://github.com/pytorch/torchtune",
    ...     measured=measured)).name
    'torchtune'
    """
    stated = " ".join(str(point.settings.get(key, "")) for key in ("framework", "trainer", "recipe"))
    for text in (stated, str(point.model), point.source, point.id):
        for trainer in TRAINERS:
            if any(re.search(rf"(^|[^a-z]){re.escape(word)}", text.lower()) for word in trainer.words):
                return trainer
    return TORCH
