"""The algorithms, each in a file of its own: a torch-free declaration under the name `ALGORITHM`.

In: the files beside this one. Out: `ALGORITHMS`, by name. A new file is a new algorithm; no list has to be kept.
"""

from importlib import import_module
from pkgutil import iter_modules

from rlplan.spec.declaration import Algorithm


def _declared() -> dict[str, Algorithm]:
    found = [import_module(f"{__name__}.{module.name}").ALGORITHM for module in iter_modules(__path__)]
    return {algorithm.name: algorithm for algorithm in found}


ALGORITHMS: dict[str, Algorithm] = _declared()
"""Every declared algorithm by name."""

DEFAULT = "grpo"
"""What a job that names none is trained by."""
