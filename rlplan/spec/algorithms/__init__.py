"""The algorithms, each in a file of its own: a torch-free declaration under the name `ALGORITHM`.

In: the files beside and below this one. Out: `ALGORITHMS`, by name. A new file is a new algorithm; no list is kept.
"""

from importlib import import_module
from pkgutil import walk_packages

from rlplan.spec.declaration import Algorithm


def _declared() -> dict[str, Algorithm]:
    modules = [module for module in walk_packages(__path__, f"{__name__}.") if not module.ispkg]
    found = [import_module(module.name).ALGORITHM for module in modules]
    return {algorithm.name: algorithm for algorithm in found}


ALGORITHMS: dict[str, Algorithm] = _declared()
"""Every declared algorithm by name."""

DEFAULT = "grpo"
"""What a job that names none is trained by."""
