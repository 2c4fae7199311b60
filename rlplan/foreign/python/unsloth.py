"""Unsloth's model arguments as keys of TRL: a base model in 4 bits, and its own engine.

In: a call of `FastLanguageModel.from_pretrained`. Out: keys with their places. Left out: Unsloth's own kernels.
Source: unsloth/models/loader.py, `FastLanguageModel.from_pretrained` and its defaults.
"""

import re
from collections.abc import Iterator

from rlplan.foreign.python.values import Made
from rlplan.foreign.settings import Given

LOADED = "unsloth.from_pretrained"
"""The name under which such a call is recorded."""
_CLASS = re.compile(r"(?:unsloth\.)?Fast\w*Model\.from_pretrained")
_OTHERWISE = ("load_in_4bit", "load_in_8bit", "load_in_16bit", "load_in_fp8", "full_finetuning", "quantization_config")
"""Arguments that replace the default, a base model in 4 bits."""
WHOLE_MODULES = ("embed_tokens", "lm_head")
"""Target modules that `get_peft_model` trains in full (unsloth/models/llama.py)."""
SHARED = "Unsloth's engine shares the trainer's weights; they are counted twice, so less memory is needed"


def is_unsloth(text: str) -> bool:
    """Whether the text of a call loads one of Unsloth's models.

    >>> is_unsloth("FastLanguageModel.from_pretrained"), is_unsloth("AutoModelForCausalLM.from_pretrained")
    (True, False)
    """
    return _CLASS.fullmatch(text) is not None


def add_default(model: Made, place: str) -> Made:
    """The call with its default, a base model in 4 bits, unless an argument replaces it."""
    if model.entries.keys().isdisjoint(_OTHERWISE):
        model.entries["load_in_4bit"] = Given(True, place)
    return Made(LOADED, model.entries, model.line, model.own)


def list_keys(model: Made, *, is_online: bool) -> Iterator[tuple[str, Given]]:
    """TRL's keys for the call. is_online: whether the trainer generates rollouts."""
    if "max_seq_length" in model.entries and not is_online:
        yield "max_seq_length", model.entries["max_seq_length"]
    fast = model.entries.get("fast_inference")
    if is_online and fast is not None and fast.value is True:
        yield "use_vllm", fast
        yield "vllm_mode", Given("colocate", fast.place)
        yield "vllm_gpu_memory_utilization", model.entries.get("gpu_memory_utilization", Given(0.5, fast.place))
