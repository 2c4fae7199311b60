"""Losses and advantages by the names under which an algorithm's declaration asks for them.

A user's own file (`algorithm.path`) is looked into first; it is run here, and only here.
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
"""The losses of policy_losses.py."""


def find_loss(spec: AlgorithmSpec) -> Callable[..., Any]:
    """The loss that an algorithm names (`losses.inputs.PolicyLoss`). Raises: SpecError."""
    name = spec.declaration.loss
    own = _find_in_user_file(spec, name)
    if own is None and name in OWN:
        own = getattr(importlib.import_module("rlplan.runtime.losses.policy_losses"), name)  # it needs torch
    return own or _missing(spec, "loss", name, OWN)


def find_advantage(spec: AlgorithmSpec) -> Advantage:
    """The advantage that an algorithm names. Raises: SpecError."""
    name = spec.declaration.advantage
    return _find_in_user_file(spec, name) or ADVANTAGES.get(name) or _missing(spec, "advantage", name, ADVANTAGES)


def check_algorithm(spec: AlgorithmSpec) -> None:
    """Whether advantage and loss are there. Raises: SpecError. The loss's own file is not loaded: it needs torch."""
    find_advantage(spec)
    if spec.declaration.loss not in OWN:
        find_loss(spec)


def _find_in_user_file(spec: AlgorithmSpec, name: str) -> Callable[..., Any] | None:
    found = getattr(_run(spec.path.rpartition(":")[0]), name, None) if spec.path else None
    return found if callable(found) else None


@lru_cache(maxsize=4)
def _run(path: str) -> ModuleType:
    """A user's file as a module. Raises: SpecError."""
    found = importlib.util.spec_from_file_location("rlplan_user_algorithm", path)
    if found is None or found.loader is None:
        raise _unusable(path, "its name does not end in .py")
    module = importlib.util.module_from_spec(found)
    try:
        with contextlib.redirect_stdout(sys.stderr):  # what it prints is no result of ours
            found.loader.exec_module(module)
    except (Exception, SystemExit) as error:  # whatever the file raises
        raise _unusable(path, f"{type(error).__name__}: {error}") from None
    return module


def _unusable(path: str, why: str) -> SpecError:
    return SpecError(
        f"{path} cannot be run: {why}",
        where="algorithm.path",
        rule="a Python file that can be imported on every host of the run",
        way_out="mend the file",
    )


def _missing(spec: AlgorithmSpec, kind: str, name: str, known: Any) -> Any:
    raise SpecError(
        f"{spec.name} names the {kind} {name!r}, which does not exist",
        where=f"algorithm.path: {spec.path}" if spec.path else f"algorithm.name: {spec.name}",
        rule=f"a function of the same file, or one of {', '.join(known)}.{did_you_mean(name, known)}",
        way_out="define it there, or name another",
    )
