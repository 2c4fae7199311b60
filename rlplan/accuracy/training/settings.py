"""The settings of a training run in the many spellings of published tables.

In: a point. Out: tokens, ranks, recomputation and data types, as far as they are stated. Raises CannotPredict where a
setting that decides the peak is missing: nothing is guessed.
Left out: a trainer's defaults (trainers.py), models (named_models.py).
"""

import re
from dataclasses import dataclass
from typing import Any, get_args

from rlplan.accuracy.points import MeasuredPoint
from rlplan.accuracy.predictions import CannotPredict
from rlplan.accuracy.settings import KEYS, WORDS, Settings
from rlplan.spec.base import shorten_value
from rlplan.spec.parts.training import RecomputedModule
from rlplan.vocabulary import Dtype


def _name_technique(word: str) -> str:
    """The name of a technique; the word itself for an unknown one.

    >>> [_name_technique(word) for word in ("activation_checkpointing", "fuse_optimizer_step_into_backward", "liger")]
    ['act_ckpt', 'optimizer_in_bwd', 'liger']
    """
    return next((name for pattern, name in WORDS["techniques"].items() if re.search(pattern, word)), word)


class RunSettings(Settings):
    """Settings by meaning, each under one of several keys."""

    def __init__(self, point: MeasuredPoint) -> None:
        super().__init__(point)
        self.gpu = point.gpu or ""
        key = self.first(("cumulative_techniques", "techniques"))
        self.lists_techniques, techniques = key is not None, self.raw(key) if key else ()
        known = [str(word) for word in techniques] if isinstance(techniques, list | tuple) else [str(techniques)]
        self.techniques = frozenset(_name_technique(re.sub(r"[\s\-]+", "_", word.lower())) for word in known)

    def require(self, keys: tuple[str, ...], meaning: str) -> int:
        """A count under one of several keys. Raises: CannotPredict where none is stated."""
        key = self.first(keys)
        if key is None:
            raise CannotPredict(f"the {meaning} is not stated")
        return self.read_count(key)

    def says(self, *words: str) -> bool | None:
        """Whether a technique is used: a flag, or a word in the list of techniques; None where neither is stated."""
        for word in words:
            if word in self.techniques:
                return True
            value = self.raw(word)
            value = {"true": True, "false": False}.get(value.lower(), value) if isinstance(value, str) else value
            if isinstance(value, bool):
                return value
        return False if self.lists_techniques else None

    @property
    def text(self) -> str:
        """Method and quantization as one lower-case text."""
        words = [self.raw(key) for key in KEYS["method"]]
        listed = [str(word).lower() for word in words if isinstance(word, str)]
        return " ".join(listed + sorted(self.techniques & {"lora", "qlora"}))


HOSTS = re.compile(r"\s*(\d+)\s*(?:nodes?\s*)?(?:x|\*|of)\s*([1-8]|16)\s*[x* ]\s*(?=[a-z])(?!gi?b)", re.IGNORECASE)
"""Hosts and GPUs per host before a GPU's name."""


def num_ranks(settings: RunSettings) -> int:
    """GPUs of the run: stated, else from the name of the hardware.

    >>> num_ranks(RunSettings(MeasuredPoint(id="a", kind="k", gpu="2x RTX3090", measured={"value": 1, "unit": "GiB"})))
    2
    >>> num_ranks(RunSettings(MeasuredPoint(id="a", kind="k", gpu="4x8 H100", measured={"value": 1, "unit": "s"})))
    32
    """
    key = settings.first(KEYS["gpus"])
    if key:
        return settings.read_count(key)
    if match := HOSTS.match(settings.gpu):
        return int(match.group(1)) * int(match.group(2))
    match = re.match(r"\s*(\d+)\s*(x\b|x(?=[a-z])|gpus?\b|\*)", settings.gpu, re.IGNORECASE)
    return int(match.group(1)) if match else _multiply_degrees(settings)


def _multiply_degrees(settings: RunSettings) -> int:
    """The product of the stated degrees of parallelism."""
    ranks = settings.degree("dp", "data_parallel")
    for keys in (("tp", "tensor_parallel"), ("pp", "pipeline_parallel"), ("cp", "context_parallel"), KEYS["ulysses"]):
        ranks *= settings.degree(*keys)
    return ranks


def check_data_parallel(settings: RunSettings, num_ranks: int) -> None:
    """Raises: CannotPredict for a stated data-parallel degree that does not divide the GPUs."""
    stated = settings.degree("dp", "data_parallel")
    if num_ranks % stated:
        raise CannotPredict(f"setting 'dp' is {stated}, which does not divide {num_ranks} GPUs")


@dataclass(frozen=True)
class Tokens:
    """One micro-batch on one rank."""

    sequences: int
    length: int
    """Tokens of each sequence."""

    @property
    def num(self) -> int:
        """Tokens of a micro-batch."""
        return self.sequences * self.length


def read_tokens(settings: RunSettings) -> Tokens:
    """Tokens of the largest micro-batch, with every sequence at full length. Raises: CannotPredict where not stated."""
    if (
        settings.lists_techniques
        and "packed" not in settings.techniques
        and settings.first(KEYS["sequence"]) == "max_seq"
    ):
        raise CannotPredict("the samples are not packed and the length of the longest is not stated")
    length = settings.require(KEYS["sequence"], "sequence length")
    return Tokens(settings.require(KEYS["batch"], "micro-batch size"), length)


FULL, NONE = "layers", "none"
"""Recomputation policies beside the values of `training.recomputed`: whole layers, and none."""
Recomputed = str | tuple[str, ...]
"""Recomputation policy: a value of `training.recomputed`, FULL or NONE."""


def read_recompute(settings: RunSettings, default: str | None, selective: str | None = None) -> Recomputed:
    """The recomputation policy of a run.

    default: the trainer's; without one the policy must be stated. selective: the trainer's meaning of that word alone.
    """
    if settings.lists_techniques:
        return FULL if settings.says("act_ckpt", "activation_checkpointing") else NONE
    key = settings.first(KEYS["recompute"])
    if key is None:
        if default is None:
            raise CannotPredict("whether activations are recomputed is not stated")
        settings.assume("recompute", default)
        return default
    recomputed = parse_recompute(settings.raw(key), key)
    return selective if selective is not None and recomputed == ("core_attn",) else recomputed


def recomputed_modules(value: Any) -> tuple[str, ...]:
    """Megatron's recomputed modules in a list of names; empty for other words.

    >>> recomputed_modules("core_attn+layernorm"), recomputed_modules(["moe_act"])
    (('core_attn', 'layernorm'), ('moe_act',))
    >>> recomputed_modules("selective"), recomputed_modules("mlp, head")
    ((), ())
    """
    text = " ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
    words = frozenset(re.findall(r"\w+", text.lower())) - {"selective"}
    return tuple(sorted(words)) if words <= frozenset(get_args(RecomputedModule)) else ()


def parse_recompute(value: Any, key: str = "recompute") -> Recomputed:
    """The recomputation policy of a trainer's words.

    >>> [parse_recompute(word) for word in (True, "selective(op)", "reentrant full", "none", "selective 2")]
    ['layers', 'selective', 'layers', 'none', 'every_other_layer']
    >>> parse_recompute("per-op SAC"), parse_recompute("core_attn")  # torchtitan's, Megatron's
    ('selective', ('core_attn',))
    """
    word = str(value).lower()
    if value is False or word in ("none", "off", "no", "false", "no ac", "disabled"):
        return NONE
    if modules := recomputed_modules(value):
        return modules
    if "selective" in word or re.search(r"\bsac\b", word):
        if "op" in word:
            return "selective"
        return "every_other_layer" if re.search(r"\b2\b", word) else ("core_attn",)
    if value is True or any(
        name in word for name in ("full", "true", "reentrant", "block", "all", "uniform", "unsloth", "recompute")
    ):
        return FULL
    raise CannotPredict(f"setting '{key}' is {shorten_value(value)}; known are full, selective and none")


@dataclass(frozen=True)
class Precision:
    """Data types of weights."""

    stored: Dtype
    """Data type between steps."""
    compute: Dtype
    """Data type in the passes."""


def read_precision(settings: RunSettings, *, has_master: bool) -> Precision:
    """Data types of weights. has_master: the trainer keeps fp32 weights by default.

    >>> point = MeasuredPoint(id="a", kind="k", settings={"dtype": "bf16-mixed"}, measured={"value": 1, "unit": "GiB"})
    >>> read_precision(RunSettings(point), has_master=False)
    Precision(stored=<Dtype.FLOAT32: 'float32'>, compute=<Dtype.BFLOAT16: 'bfloat16'>)
    """
    flagged = _find_flag(settings)
    key = settings.first(("dtype", "precision")) or flagged
    word = str(settings.raw(key)).lower() if key else "bf16"
    if key is None and settings.first(KEYS["base_dtype"]) is None:
        settings.assume("precision", word)
    word = word.split(",")[0] or word  # words after a comma describe the gradient reduction
    if key is not None and key == flagged:
        word = key
    elif key is None and (base := settings.first(KEYS["base_dtype"])):
        stated = str(settings.raw(base)).lower()
        word = word if re.search(r"4|hqq", stated) else stated
    narrow = Dtype.FLOAT16 if re.search(r"fp16|float16(?<!bfloat16)|half", word) else Dtype.BFLOAT16
    if any(name in word for name in ("mixed", "amp", "autocast")):
        return Precision(Dtype.FLOAT32, narrow)
    if any(name in word for name in ("fp32", "float32", "32-true")):
        return Precision(Dtype.FLOAT32, Dtype.FLOAT32)
    if not any(
        name in word for name in ("bf16", "fp16", "bfloat16", "float16", "16-true", "half", "fp8", "float8", "nvfp4")
    ):
        raise CannotPredict(f"setting '{key}' is {shorten_value(word)}, which is not modelled")
    return Precision(Dtype.FLOAT32 if has_master else narrow, narrow)


FLAGS = ("bf16", "fp16", "fp32")
"""Trainer flags that are named after a dtype."""


def _find_flag(settings: RunSettings) -> str | None:
    """The dtype whose flag is true; None without flags. Raises: CannotPredict where none or several are true."""
    stated = [key for key in FLAGS if key in settings]
    chosen = [key for key in stated if settings.flag(key)]
    if stated and len(chosen) != 1:
        raise CannotPredict(f"settings {', '.join(stated)} do not say which type the passes compute in")
    return chosen[0] if chosen else None


def read_optimizer(settings: RunSettings) -> str:
    """The value of `training.optimizer`, AdamW by default. Raises: CannotPredict."""
    word = str(settings.raw("optimizer") or "adamw").lower()
    if settings.raw("optimizer") is None:
        settings.assume("optimizer", word)
    if settings.says("adamw8bit", "adamw_8bit"):
        return "adamw_8bit"
    if not re.search(r"4-?bit|mini|galore|apollo|lomo|paged", word):
        if "8bit" in word or "8-bit" in word:
            return "adamw_8bit"
        if "muon" in word:
            return "muon"
        if "adam" in word or "lora" in word or "distributed optimizer" in word:  # LoRA+ and LoRA-FA are AdamW
            return "adamw"
    raise CannotPredict(f"setting 'optimizer' is {shorten_value(word)}, which a job cannot express")
