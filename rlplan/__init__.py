"""rlplan: plan, estimate, run and report reinforcement learning of language models.

One idea: a plan is a schedule of actions, and the same schedule is estimated, searched, executed and reported.
Importing this package loads only this file and version.py. Each name in __all__ comes from api.py on first use.
"""

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

from rlplan.version import __version__

if TYPE_CHECKING:
    from rlplan.api import compare, emit, estimate, explain, explain_step, load_run, plan, simulate, solve

__all__ = [
    "__version__",
    "compare",
    "emit",
    "estimate",
    "explain",
    "explain_step",
    "load_run",
    "plan",
    "simulate",
    "solve",
]


class _Package(ModuleType):
    """Keeps public functions: importing the submodule `rlplan.emit`, for example, would replace the function `emit`."""

    def __setattr__(self, name: str, value: Any) -> None:
        if not (name in __all__ and isinstance(value, ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package


def __getattr__(name: str) -> Any:
    """A public function, imported on first use."""
    if name == "errors":
        return import_module("rlplan.errors")
    if name not in __all__:
        raise AttributeError(f"module 'rlplan' has no attribute '{name}'; it has {', '.join(__all__)}")
    return getattr(import_module("rlplan.api"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
