"""Unsloth's model arguments as keys of TRL: a base model in 4 bits, and its own engine.

In: a call of `FastLanguageModel.from_pretrained`. Out: keys with their places. Left out: Unsloth's own kernels.
Source: unsloth/models/loader.py, `FastLanguageModel.from_pretrained` and its defaults; unsloth/models/rl.py, the values
that it writes into TRL's configurations.
"""

import re
from collections.abc import Iterator, Mapping
from typing import Any

from rlplan.foreign.python.values import Made
from rlplan.foreign.settings import Given

LOADED = "unsloth.from_pretrained"
"""The name under which such a call is recorded."""
_CLASS = re.compile(r"(?:unsloth\.)?Fast\w*Model\.from_pretrained")
_OTHERWISE = ("load_in_4bit", "load_in_8bit", "load_in_16bit", "load_in_fp8", "full_finetuning", "quantization_config")
"""Arguments that replace the default, a base model in 4 bits."""
_DEFAULTS = {
    "per_device_train_batch_size": 4,
    "gradient_accumulation_steps": 2,
    "weight_decay": 0.001,
    "optim": "adamw_8bit",
    "learning_rate": 5e-05,
}
"""Defaults of TRL's configurations that Unsloth replaces."""
_ONLINE_DEFAULTS = {"beta": 0.001, "loss_type": "bnpo", "vllm_importance_sampling_correction": False}
"""The same for GRPO."""
_BATCH, _STEPS, _GROUP = "per_device_train_batch_size", "gradient_accumulation_steps", "num_generations"
_LOADED_VISION = f"vision.{LOADED}"
_STANDBY = "UNSLOTH_VLLM_STANDBY"
WHOLE_MODULES = ("embed_tokens", "lm_head")
"""Target modules that `get_peft_model` trains in full. Source: unsloth/models/llama.py."""


def is_unsloth(text: str) -> bool:
    """Whether the text of a call loads one of Unsloth's models.

    >>> is_unsloth("FastLanguageModel.from_pretrained"), is_unsloth("AutoModelForCausalLM.from_pretrained")
    (True, False)
    """
    return _CLASS.fullmatch(text) is not None


def add_default(model: Made, text: str, place: str) -> Made:
    """The call with its default, a base model in 4 bits, unless an argument replaces it. text: of the function."""
    if model.entries.keys().isdisjoint(_OTHERWISE):
        model.entries["load_in_4bit"] = Given(True, place)
    return Made(_LOADED_VISION if "Vision" in text else LOADED, model.entries, model.line, model.own)


def list_keys(model: Made, *, is_online: bool) -> Iterator[tuple[str, Given]]:
    """TRL's keys for the call. is_online: whether the trainer generates rollouts."""
    if "max_seq_length" in model.entries and not is_online:
        yield "max_seq_length", model.entries["max_seq_length"]
    fast = model.entries.get("fast_inference", Given(False, "Unsloth's default of fast_inference"))
    yield "unsloth.fast_inference", fast
    if is_online and fast.value is True:
        yield "use_vllm", fast
        yield "vllm_mode", Given("colocate", fast.place)
        yield "vllm_gpu_memory_utilization", model.entries.get("gpu_memory_utilization", Given(0.5, fast.place))


def list_defaults(*, is_online: bool) -> Iterator[tuple[str, Given]]:
    """TRL's keys with Unsloth's defaults. is_online: whether the trainer generates rollouts."""
    for key, value in (_DEFAULTS | (_ONLINE_DEFAULTS if is_online else {})).items():
        yield key, Given(value, f"Unsloth's default of {key}")


def list_standby(model: Made, environment: Mapping[str, Any], entries: Mapping[str, Given]) -> dict[str, Given]:
    """TRL's keys where the script sets the variable by which the KV cache sleeps while the policy trains.

    Unsloth ignores it for vision models.
    Source: unsloth_zoo/vllm_utils.py (`load_vllm`), which replaces the fraction of the GPU too; models/rl.py.
    """
    engine, is_off = entries.get("unsloth.fast_inference"), str(environment.get(_STANDBY, "0")) == "0"
    if engine is None or engine.value is not True or is_off or model.name == _LOADED_VISION:
        return {}
    return {"unsloth.standby": Given(True, engine.place), "vllm_enable_sleep_mode": Given(True, _STANDBY)}


def enlarge_batch(entries: dict[str, Given]) -> str:
    """Set the micro-batch to a whole group where Unsloth does, and return the note on it; empty without a change.

    One process trains, because Unsloth's notebooks start no others.
    """
    sizes = {key: entries[key].value if key in entries else 8 for key in (_BATCH, _STEPS, _GROUP)}
    is_given = "steps_per_generation" in entries or "generation_batch_size" in entries
    if is_given or not all(isinstance(size, int) and size > 0 for size in sizes.values()):
        return ""
    if sizes[_BATCH] * sizes[_STEPS] % sizes[_GROUP] == 0:
        return ""
    entries[_BATCH] = Given(sizes[_GROUP], f"Unsloth, in place of {sizes[_BATCH]}")
    return f"{_BATCH} = {sizes[_BATCH]} is raised to {_GROUP} = {sizes[_GROUP]}, as Unsloth does, to train whole groups"
