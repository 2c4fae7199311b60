"""Losses and advantages by their names in algorithm declarations.

A user's own file (`algorithm.path`) takes precedence. Only this module executes it.
"""

import contextlib
import importlib.util
import sys
from collections.abc import Callable
from functools import lru_cache
from types import ModuleType
from typing import Any

from rlplan.errors import SpecError, did_you_mean
from rlplan.runtime.losses.advantages import ADVANTAGES, Advantage
from rlplan.spec.parts.algorithm import AlgorithmSpec

OWN = (
    *("clipped_ratio", "sequence_ratio", "answer_ratio", "log_prob", "clipped_weight"),
    *("preference", "squared_preference", "unpaired_preference", "ranking"),
)
"""Names of the losses in policy_losses.py."""


def find_loss(spec: AlgorithmSpec) -> Callable[..., Any]:
    """Find an algorithm's loss (`losses.inputs.PolicyLoss`). Raises: SpecError."""
    name = spec.declaration.loss
    loss = _find_in_user_file(spec, name)
    if loss is None and name in OWN:
        loss = getattr(importlib.import_module("rlplan.runtime.losses.policy_losses"), name)  # lazy: it imports torch
    return loss or _raise_missing(spec, "loss", name, OWN)


def find_advantage(spec: AlgorithmSpec) -> Advantage:
    """Find an algorithm's advantage function. Raises: SpecError."""
    name = spec.declaration.advantage
    return _find_in_user_file(spec, name) or ADVANTAGES.get(name) or _raise_missing(spec, "advantage", name, ADVANTAGES)


def check_algorithm(spec: AlgorithmSpec) -> None:
    """Check that advantage and loss exist, without importing policy_losses.py and torch. Raises: SpecError."""
    find_advantage(spec)
    if spec.declaration.loss not in OWN:
        find_loss(spec)


def _find_in_user_file(spec: AlgorithmSpec, name: str) -> Callable[..., Any] | None:
    function = getattr(_import_file(spec.path.rpartition(":")[0]), name, None) if spec.path else None
    return function if callable(function) else None


@lru_cache(maxsize=4)
def _import_file(path: str) -> ModuleType:
    """Import a user's file as a module. Raises: SpecError."""
    module_spec = importlib.util.spec_from_file_location("rlplan_user_algorithm", path)
    if module_spec is None or module_spec.loader is None:
        raise _unusable_error(path, "its name does not end in .py")
    module = importlib.util.module_from_spec(module_spec)
    try:
        with contextlib.redirect_stdout(sys.stderr):  # rlplan's results are on stdout
            module_spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:  # whatever the file raises
        raise _unusable_error(path, f"{type(error).__name__}: {error}") from None
    return module


def _unusable_error(path: str, why: str) -> SpecError:
    return SpecError(
        f"{path} cannot be run: {why}",
        where="algorithm.path",
        rule="a Python file that can be imported on every host of the run",
        way_out="fix the file",
    )


def _raise_missing(spec: AlgorithmSpec, kind: str, name: str, known: Any) -> Any:
    raise SpecError(
        f"{spec.name} names the {kind} {name!r}, which does not exist",
        where=f"algorithm.path: {spec.path}" if spec.path else f"algorithm.name: {spec.name}",
        rule=f"a function of the same file, or one of {', '.join(known)}.{did_you_mean(name, known)}",
        way_out="define it there, or name another",
    )
