"""Methods of parameter-efficient training by the names that tables use, and what each keeps for its backward pass.

In: the words of a method. Out: a Method, None for full training. Raises CannotPredict for those not described here.
Left out: bytes of a point (adapters.py).

Symbols: i and o the input and output width of an adapted layer, a bytes of an adapter's element.
Source: PEFT 0.18's tuners, from knowledge of the source, not installed here.
"""

import math
import re

from rlplan.accuracy.registry import CannotPredict
from rlplan.accuracy.training.settings import RunSettings
from rlplan.records import dataclass
from rlplan.spec.base import shorten


@dataclass(frozen=True)
class Method:
    """What is trained, and what it keeps of each adapted layer for the backward pass."""

    name: str
    reads_inputs: bool = True
    """The layer's input is kept."""
    outputs: int = 0
    """Elements in a's type, for each output."""
    output_copies: int = 0
    """Elements in the model's type, for each output."""
    changes: int = 0
    """Dense changes of the weights (i*o), in a's type."""
    change_copies: int = 0
    """Dense changes of the weights, in the model's type."""
    shares_inputs: bool = False
    """Inputs are kept as they are, in the model's type."""
    copies_table: bool = False
    """A tied head reads a copy of the table."""
    adds_tokens: bool = False
    """Trained tokens stand before every sequence."""
    trains_norms: bool = False
    scales: bool = False
    """IA3's vectors."""
    is_lora: bool = False


LORA = Method("lora", is_lora=True)
"""Two matrices beside each layer, of one rank: they differ in how they start."""
DORA = Method("dora", outputs=1, output_copies=1, is_lora=True)
"""PEFT's tuners/lora/dora.py: `(scale - 1) * base_result + scale * lora_result` keeps both products."""
_DENSE = Method("dense", changes=1)
"""A dense change of the weights, which the product keeps: loha, lokr, fourierft, waveft (`get_delta_weight`)."""
_LIKE_LORA = Method("like lora")
"""Reads the inputs of the same layers into fewer or shared numbers; what a rank's width keeps is left out (r/h)."""
_WITHOUT_INPUTS = Method("tokens", reads_inputs=False)
_TOKENS = Method("virtual tokens", reads_inputs=False, adds_tokens=True)

METHODS: dict[str, Method] = {
    **dict.fromkeys(("qlora", "lora", "rslora", "pissa", "loftq", "olora", "eva", "corda", "loraga", "arrow"), LORA),
    **dict.fromkeys(("dora", "qdora"), DORA),
    **dict.fromkeys(("adalora", "vblora", "delora", "oft", "c3a", "gralora"), _LIKE_LORA),
    **dict.fromkeys(("lorafa", "bone", "miss"), _WITHOUT_INPUTS),
    "shira": Method("shira", shares_inputs=True, change_copies=1),
    **dict.fromkeys(("vera", "pvera"), Method("vera", reads_inputs=False, outputs=1)),
    "road": Method("road", reads_inputs=False, outputs=2),
    "randlora": Method("randlora", outputs=1, changes=1),
    **dict.fromkeys(("loha", "lokr", "fourierft", "waveft"), _DENSE),
    "ia3": Method("ia3", scales=True),
    "lntuning": Method("ln_tuning", trains_norms=True),
    **dict.fromkeys(("prompt", "prompttuning", "ptuning"), _TOKENS),
    **dict.fromkeys(("prefix", "prefixtuning"), _WITHOUT_INPUTS),
    "trainabletokens": Method("rows", reads_inputs=False, copies_table=True),
}
"""Methods by name without dashes. LoRA-FA's first matrix is frozen, so its input is not kept; Bone and MiSS sum theirs
up to a rank's width first; SHiRA adds its sparse change to the weights in their own type; VeRA's matrices are frozen,
and its scales multiply outputs; RoAd turns outputs, in two products; RandLoRA's bases are as wide as the narrower side;
trained rows are put into a copy of the table."""
FULL = frozenset({"full", "sft", "pretrain", "pretraining", "fft", "finetune", "finetuning", "finetuned"})
LORA_RANKS = ("rank", "lora_rank", "lora_r", "lora_dim", "r")
LORA_FLAGS = ("lora", "use_lora", "is_lora", "has_lora")
ALGORITHMS = ("algo", "algorithm")
POLICY_GRADIENTS = frozenset({"grpo", "drgrpo", "dapo", "gspo", "rloo", "reinforce", "cispo"})
PREFERENCE = frozenset({"dpo", "orpo", "kto", "simpo", "ppo", "grpo", "rlhf", "kd", "distillation", "reward"})
_BACKENDS = ("custom", "bnb", "hqq")
"""How fsdp_qlora writes its own modules: `hqq_lora`."""


def method_of(settings: RunSettings, hint: str = "") -> Method | None:
    """What is trained beside frozen weights; None for full training. hint: the point's id, which may say the variant.

    >>> from rlplan.accuracy.points import MeasuredPoint
    >>> point = MeasuredPoint(id="a", kind="k", settings={"method": "qlora nf4"}, measured={"value": 1, "unit": "GiB"})
    >>> method_of(RunSettings(point)).name, method_of(RunSettings(point), "rank32-dora").name
    ('lora', 'dora')
    """
    words = [*_words(settings.text), *sorted(settings.techniques & {"dora", "qdora"})]
    if found := PREFERENCE & set(words):
        raise CannotPredict(f"{sorted(found)[0].upper()} has more passes than one, which are not modelled here")
    named = next((METHODS[word] for word in words if word in METHODS), None)
    if named is None and (key := _lora_key(settings)):
        if FULL & set(words):
            raise CannotPredict(f"'{settings.text}' is full training, and setting '{key}' speaks of LoRA")
        named = LORA
    _check_algorithm(settings, named)
    if named is LORA:
        variants = [*words, *_words(hint), *(["dora"] if settings.raw("use_dora") is True else [])]
        return next((METHODS[word] for word in variants if word in ("dora", "qdora", "lorafa")), LORA)
    if named is None and "method" in settings and not (FULL & set(words)):
        raise CannotPredict(f"method {shorten(settings.raw('method'))} is not modelled")
    return named


def _lora_key(settings: RunSettings) -> str | None:
    """The setting that says that LoRA is trained, without the method being named: a rank above 0, or a flag."""
    if settings.says(*LORA_FLAGS):
        return next(key for key in LORA_FLAGS if settings.says(key))
    key = settings.first(LORA_RANKS)
    return key if key and settings.count(key, at_least=0) else None


def _check_algorithm(settings: RunSettings, method: Method | None) -> None:
    """Raises: CannotPredict where an algorithm has passes or models that a training step of the policy alone has not.

    A step of a policy gradient is one pass like any other; beside full training stands a reference, which the point
    does not speak of, while with LoRA it is the frozen model itself.
    """
    words = set(_words(str(settings.raw(settings.first(ALGORITHMS) or "") or "")))
    if not words or words <= FULL | {"sft"}:
        return
    if not words <= POLICY_GRADIENTS or method is None or not method.is_lora:
        name = " ".join(sorted(words)).upper()
        raise CannotPredict(f"{name} has passes or models beside the policy's, which the point does not state")


def num_prompt_tokens(trainable: int, hidden: int) -> int | None:
    """Trained tokens before each sequence by the number of parameters; None where no number of them gives it.

    Counts: rows of h; or p-tuning's, behind an encoder of three layers and e units: n*h + e^2 + e*(2h + 2) + h.
    Source: PEFT 0.18 tuners/p_tuning/model.py, from knowledge of the source.

    >>> num_prompt_tokens(614_400, 3072), num_prompt_tokens(20 * 3072 + 3 * (3072 * 3072 + 3072), 3072)
    (200, 20)
    >>> num_prompt_tokens(20 * 64 + 128 * 128 + 128 * 130 + 64, 64), num_prompt_tokens(1_000_001, 3072)
    (20, None)
    """
    if trainable % hidden == 0 and trainable // hidden <= LIKELY_PROMPT:
        return trainable // hidden
    for tokens in range(1, LONGEST_PROMPT):
        rest = trainable - hidden - tokens * hidden
        units = math.isqrt(max(0, (hidden + 1) ** 2 + rest)) - (hidden + 1)
        if units > 0 and units % UNITS == 0 and units * units + units * (2 * hidden + 2) == rest:
            return tokens
    return trainable // hidden if trainable % hidden == 0 and trainable // hidden <= LONGEST_PROMPT else None


LIKELY_PROMPT, LONGEST_PROMPT = 512, 4096
"""Tokens up to which a whole number of rows is taken for a prompt without an encoder; beyond any prompt."""
UNITS = 64
"""Encoders are a multiple of this wide: any width would give a number of tokens for too many numbers of parameters."""


def _words(text: str) -> list[str]:
    """Words without dashes; `full-finetuning` and `hqq_lora` are two, `p-tuning` and `LN Tuning` are one."""
    found: list[str] = []
    for word in re.findall(r"[a-z0-9_\-]+", text.lower().replace(" tuning", "tuning")):
        joined = re.sub(r"[_\-]", "", word)
        parts = re.split(r"[_\-]", word)
        is_split = joined not in METHODS and (parts[0] in _BACKENDS or set(parts) & (FULL | {"dora", "lorafa"}))
        found += parts if is_split else [joined]
    return found
