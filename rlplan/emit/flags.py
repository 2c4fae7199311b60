"""The keys that the pinned DeepSpeed and vLLM know, shipped as data, so that a bundle is checked without them.

In: an ExecutionSpec. Out: nothing, or an EmitError that names the key. `rlplan.runtime.host.engine_keys` checks the
same keys against the versions that are installed, and a test checks that this data equals the pinned versions' own
lists.
"""

import json
from collections.abc import Mapping
from functools import cache
from importlib import resources
from typing import TYPE_CHECKING, Any

from rlplan.errors import EmitError, did_you_mean
from rlplan.spec.base import shorten

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
    for role, config in spec.deepspeed.items():
        check_engine_file(f"deepspeed/{role}.json", config)
    for role, arguments in spec.vllm.items():
        check_engine_file(f"vllm/{role}.json", arguments)


def check_engine_file(file: str, config: Mapping[str, Any]) -> None:
    """The keys of one file of a bundle; others than the engines' hold none of theirs. Raises: EmitError."""
    engine, known = file.partition("/")[0], known_keys()
    if engine == "vllm":
        refuse_unknown(config, known["vllm"]["engine_arguments"], file, known["vllm"]["version"])
    if engine != "deepspeed":
        return
    version = known["deepspeed"]["version"]
    refuse_unknown(config, known["deepspeed"]["top_level"], file, version)
    zero = config.get("zero_optimization")
    if not isinstance(zero, dict):
        raise EmitError(
            f"zero_optimization is {shorten(zero)}",
            where=f"{file}: zero_optimization",
            rule="a mapping with the ZeRO stage and its buckets",
            way_out="emit the bundle again with this rlplan",
        )
    refuse_unknown(zero, known["deepspeed"]["zero_optimization"], f"{file}: zero_optimization", version)


def refuse_unknown(config: Mapping[str, Any], allowed: list[str], where: str, version: str) -> None:
    """Raises: EmitError for the first key of `config` that is not allowed."""
    for key in config:
        if key not in allowed:
            raise EmitError(
                f"key {shorten(key)} is unknown to {version}",
                where=where,
                rule=f"a key of {version}." + did_you_mean(key, allowed),
                way_out="remove the key, or emit the bundle again with this rlplan",
            )
