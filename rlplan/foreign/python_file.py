"""Literal arguments of a Python script, read from its syntax tree: nothing of it is imported or run.

In: a script with calls such as `GRPOConfig(learning_rate=1e-6)`. Out: what each key is given, with its line.
Left out: arguments that are computed, which stay by their own text as something that only running would tell.
"""

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rlplan.errors import SpecError
from rlplan.foreign.settings import Given
from rlplan.foreign.table import given_trainers
from rlplan.foreign.words import unknown
from rlplan.reading import read_text

CALLS = {"GRPOConfig": "", "ModelConfig": "", "GRPOTrainer": "trainer.", "LoraConfig": "lora."}
"""Calls that are read, and what stands before their keywords; beside them `SFTConfig`, `SFTTrainer` and the like."""
RENAMED = {
    "trainer.model": "model_name_or_path",
    "lora.r": "lora_r",
    "lora.lora_alpha": "lora_alpha",
    "lora.target_modules": "lora_target_modules",
}

MAX_PARTS = 200
"""Nodes of a sum or a product that is read: each may be a call deeper, of the 1,000 that Python allows."""
LONG = "an expression of very many parts"


def read_python(path: Path) -> dict[str, Given]:
    """The keys that a script gives. Raises: SpecError where it is not Python."""
    try:
        tree = ast.parse(read_text(path, "the script"))
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise SpecError(
            f"the script is not Python: {error}",
            where=str(path),
            rule="Python 3, read and not run",
            way_out="mend that line, or give the shell script or YAML file that starts the training",
        ) from None
    constants = dict(_constants(tree))
    found: dict[str, Given] = {}
    for node in ast.walk(tree):
        name = _name(node.func) if isinstance(node, ast.Call) else ""
        kind = next((kind for kind in ("Config", "Trainer") if name.endswith(kind)), "")
        trainer = name.removesuffix(kind).lower()
        is_given = bool(kind) and trainer in given_trainers()
        if not isinstance(node, ast.Call) or not (is_given or name in CALLS):
            continue
        before = CALLS.get(name, "trainer." if kind == "Trainer" else "")
        place = f"{path.name}:{node.lineno}"
        if name == "LoraConfig":
            found["use_peft"] = Given(True, place)
        if is_given:
            found["trainer"] = Given(trainer, place)
        for keyword in node.keywords:
            if keyword.arg is None:
                continue
            key = RENAMED.get(before + keyword.arg, before + keyword.arg)
            found[key] = Given(_value(keyword.value, constants), f"{path.name}:{keyword.value.lineno}")
    return {key: given for key, given in found.items() if not key.startswith("trainer.")}


def _constants(tree: ast.AST) -> Iterator[tuple[str, Any]]:
    """Names that are given a literal once, anywhere in the script."""
    seen: dict[str, list[ast.expr]] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
            seen.setdefault(node.targets[0].id, []).append(node.value)
    for name, values in seen.items():
        if len(values) == 1:
            try:
                yield name, ast.literal_eval(values[0])
            except (ValueError, TypeError, MemoryError, RecursionError):
                continue


def _value(node: ast.expr, constants: dict[str, Any]) -> Any:
    if isinstance(node, ast.Name) and node.id in constants:
        return constants[node.id]
    if isinstance(node, ast.BinOp) and sum(1 for _ in ast.walk(node)) > MAX_PARTS:
        return unknown(LONG)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
        factors = [_value(side, constants) for side in (node.left, node.right)]
        if all(isinstance(one, int) and abs(one) < 1 << 40 for one in factors):
            return factors[0] * factors[1]
    try:
        found = ast.literal_eval(node)
    except (ValueError, TypeError, MemoryError, RecursionError):
        return unknown(_text_of(node))
    return str(found) if isinstance(found, list | tuple | dict | set) else found


def _text_of(node: ast.expr) -> str:
    """The expression as it stands in a message."""
    try:
        return ast.unparse(node)[:200]
    except RecursionError:
        return LONG


def _name(node: ast.expr) -> str:
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""
