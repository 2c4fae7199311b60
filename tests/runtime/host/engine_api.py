"""The API of vLLM, DeepSpeed, Ray and torch.cuda that the runtime uses, as a table to check installed packages.

In: the installed packages. Out: a signature of each name; `engine_api.json` is the table, as the CUDA builds say it,
made by `python -m tests.runtime.host.engine_api` in an environment for GPUs. A name is `module:object` or
`module:Class.member`. Left out: types and values of defaults, and attributes of what the engines return.
"""

import enum
import importlib
import inspect
import json
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

TABLE = Path(__file__).with_name("engine_api.json")
ABSENT = "absent"
ENUM = "enum"
OLDER_SIGNATURES = {
    "torch.nn.attention.varlen:varlen_attn": {
        "2.11": "(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, return_aux=, scale=, window_size=)"
    }
}
"""Signatures in older releases that the runtime accepts too, by name and release."""
LONGEST = 60
"""Arguments: a class with more has its names in tests/emit/known_keys.json."""


@cache
def recorded_api() -> dict[str, str]:
    """The table: a signature by name."""
    text = TABLE.read_text(encoding="utf-8")
    table: dict[str, str] = json.loads(text)
    return table


def accepted_signatures(name: str) -> set[str]:
    """The recorded signature, and those of older releases that the runtime accepts."""
    return {recorded_api()[name], *OLDER_SIGNATURES.get(name, {}).values()}


def signature_of(name: str) -> str:
    """Signature in the installed package: arguments by name, with `=` after optional ones; otherwise its kind."""
    result, path = _module_of(name.replace(":", ".").split("."))
    for part in path:
        owner = result
        result = getattr(owner, part, ABSENT)
        if result is ABSENT:
            return "attribute" if inspect.isclass(owner) and _assigns(owner, part) else ABSENT
    if isinstance(result, enum.EnumType):
        return ENUM  # the arguments of its call differ between releases of Python
    if not callable(result):
        return "module" if inspect.ismodule(result) else "value"
    try:
        parameters = inspect.signature(result).parameters.values()
    except (TypeError, ValueError):
        return "callable"
    return f"({', '.join(map(_word, parameters))})" if len(parameters) <= LONGEST else "callable"


def _module_of(names: list[str]) -> tuple[Any, list[str]]:
    """The longest module that a dotted name begins with, and the rest of the name."""
    for cut in range(len(names), 0, -1):
        with suppress(ImportError):
            return importlib.import_module(".".join(names[:cut])), names[cut:]
    return None, names


def _assigns(kind: type, name: str) -> bool:
    """Whether objects of a class have an attribute of the name, by the class's own source."""
    return f"self.{name}" in inspect.getsource(kind)


def _word(parameter: inspect.Parameter) -> str:
    stars: dict[Any, str] = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}
    is_needed = parameter.default is inspect.Parameter.empty
    return f"{stars.get(parameter.kind, '')}{parameter.name}{'' if is_needed else '='}"


if __name__ == "__main__":
    table = {name: signature_of(name) for name in recorded_api()}
    TABLE.write_text(json.dumps(table, indent=1, sort_keys=True) + "\n", "utf-8")
