"""The keys that the pinned DeepSpeed and vLLM know, shipped as data, so that a bundle is checked without them.

In: an ExecutionSpec. Out: nothing, or an EmitError that names the key. `rlplan.runtime.engine_keys` checks the same
keys against the versions that are installed, and a test checks that this data equals the pinned versions' own lists.
"""

import json
from collections.abc import Mapping
from functools import cache
from importlib import resources
from typing import TYPE_CHECKING, Any

from rlplan.errors import EmitError, did_you_mean

if TYPE_CHECKING:
    from rlplan.emit.execution import ExecutionSpec


@cache
def known_keys() -> dict[str, Any]:
    """{"deepspeed": {"version", "top_level", "zero_optimization"}, "vllm": {"version", "engine_arguments"}}."""
    text = (resources.files("rlplan.emit") / "known_keys.json").read_text(encoding="utf-8")
    data: dict[str, Any] = json.loads(text)
    return data


def check_keys(spec: "ExecutionSpec") -> None:
    """Raises: EmitError for a key that the pinned engine does not know."""
    known = known_keys()
    for role, config in spec.deepspeed.items():
        refuse_unknown(config, known["deepspeed"]["top_level"], f"deepspeed/{role}.json", known["deepspeed"]["version"])
        zero = config.get("zero_optimization")
        if not isinstance(zero, dict):
            raise EmitError(
                f"zero_optimization is {json.dumps(zero)}",
                where=f"deepspeed/{role}.json: zero_optimization",
                rule="a mapping with the ZeRO stage and its buckets",
                way_out="emit the bundle again with this rlplan",
            )
        refuse_unknown(
            zero,
            known["deepspeed"]["zero_optimization"],
            f"deepspeed/{role}.json: zero_optimization",
            known["deepspeed"]["version"],
        )
    for role, arguments in spec.vllm.items():
        refuse_unknown(arguments, known["vllm"]["engine_arguments"], f"vllm/{role}.json", known["vllm"]["version"])


def refuse_unknown(config: Mapping[str, Any], allowed: list[str], where: str, version: str) -> None:
    """Raises: EmitError for the first key of `config` that is not allowed."""
    for key in config:
        if key not in allowed:
            raise EmitError(
                f"key '{key}' is unknown to {version}",
                where=where,
                rule=f"a key of {version}." + did_you_mean(key, allowed),
                way_out="remove the key, or emit the bundle again with this rlplan",
            )
