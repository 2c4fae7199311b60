"""The keys that the pinned DeepSpeed and vLLM know, as data, so that emitted files are checked without importing them.

In: `known_keys.json`, made by `python -m tests.emit.known_keys` where both are installed. tests/runtime/host holds it
to the installed packages.
"""

import json
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

from rlplan.emit.execution import ExecutionSpec


@cache
def known_keys() -> dict[str, Any]:
    """{"deepspeed": {"version", "top_level", "zero_optimization"}, "vllm": {"version", "engine_arguments"}}."""
    data: dict[str, Any] = json.loads(Path(__file__).with_name("known_keys.json").read_text(encoding="utf-8"))
    return data


def unknown_keys(spec: ExecutionSpec) -> set[str]:
    """The keys of what will run that the pinned engines do not know."""
    deepspeed, arguments = known_keys()["deepspeed"], known_keys()["vllm"]["engine_arguments"]
    unknown = {key for engine in spec.vllm.values() for key in engine} - set(arguments)
    for config in spec.deepspeed.values():
        unknown |= set(config) - set(deepspeed["top_level"])
        unknown |= set(config["zero_optimization"]) - set(deepspeed["zero_optimization"])
    return unknown


def installed_keys() -> dict[str, Any]:
    """The same of the installed packages."""
    from rlplan.runtime.host import engine_keys

    return {
        "deepspeed": {
            "version": f"deepspeed {version('deepspeed')}",
            "top_level": engine_keys.deepspeed_top_level(),
            "zero_optimization": engine_keys.zero_keys(),
        },
        "vllm": {"version": f"vllm {engine_keys.vllm_version()}", "engine_arguments": engine_keys.vllm_arguments()},
    }


if __name__ == "__main__":
    print(json.dumps(installed_keys(), indent=1))
