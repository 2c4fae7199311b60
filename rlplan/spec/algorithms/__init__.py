"""The algorithms, each in a file of its own: a torch-free declaration under the name `ALGORITHM`.

In: the files beside and below this one. Out: `ALGORITHMS`, by name. A new file is a new algorithm; no list is kept. A
file is named like its algorithm, with `_pp` for `++`, and imported when its algorithm is asked for.
"""

from collections.abc import Iterator, Mapping
from functools import cache, cached_property
from importlib import import_module
from pkgutil import walk_packages

from rlplan.spec.declaration import Algorithm


class _Declared(Mapping[str, Algorithm]):
    @cached_property
    def _modules(self) -> dict[str, str]:
        modules = [module.name for module in walk_packages(__path__, f"{__name__}.") if not module.ispkg]
        return {name.rpartition(".")[2].replace("_pp", "++"): name for name in modules}

    def __getitem__(self, name: str) -> Algorithm:
        return _declaration(self._modules[name], name)

    def __contains__(self, name: object) -> bool:
        return name in self._modules

    def __iter__(self) -> Iterator[str]:
        return iter(self._modules)

    def __len__(self) -> int:
        return len(self._modules)


@cache
def _declaration(module: str, name: str) -> Algorithm:
    declared: Algorithm = import_module(module).ALGORITHM
    assert declared.name == name, f"{module} declares {declared.name}"
    return declared


ALGORITHMS: Mapping[str, Algorithm] = _Declared()
"""Every declared algorithm by name."""

DEFAULT = "grpo"
"""What a job that names none is trained by."""
