"""The value of a Python expression where its text alone tells it: constants, names, and a few calls.

In: a syntax tree, what names stand for. Out: a constant, an object that a call makes, or the text of what only running
would tell. Left out: statements and functions of the script's own (statements.py).
"""

import ast
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import isfinite
from typing import Any, TypeGuard

from rlplan.foreign.settings import Given, typed
from rlplan.foreign.unknown import is_known, unknown

MAX_PARTS = 200
"""Nodes of one expression without containers: each may be a call deeper, of the 1,000 that Python allows."""
MAX_NUMBER, MAX_TEXT = 1 << 60, 10_000
MAX_ITEMS, MAX_NESTED = 10_000, 40
"""Of a list, a mapping or an object with all that lies in it, and how deep."""
MAX_WORK = 300_000
"""Expressions and parts of values that are looked at in all."""
ALWAYS = ("torch.cuda.is_available", "torch.cuda.is_bf16_supported", "is_bf16_supported", "is_bfloat16_supported")
"""Calls that hold on every machine that rlplan plans for."""
_OF_LAUNCHERS = {"LOCAL_RANK": "0", "RANK": "0"}
"""Environment variables that launchers set; `WORLD_SIZE` is only known when it runs."""
LONG = "an expression of very many parts"
_DEEP = (ast.BinOp, ast.BoolOp, ast.Attribute, ast.Subscript, ast.Call)
_BINARY: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.BitOr: operator.or_,
}
_COMPARED: dict[type[ast.cmpop], Callable[[Any, Any], Any]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Is: operator.is_,
    ast.IsNot: operator.is_not,
    ast.In: lambda one, other: one in other,
    ast.NotIn: lambda one, other: one not in other,
}
_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "int": int,
    "float": float,
    "str": str,
    "bool": bool,
    "min": min,
    "max": max,
    "round": round,
    "list": list,
    "tuple": tuple,
}
DEFAULTS: dict[str, dict[str, Any]] = {
    "ModelConfig": {
        "attn_implementation": None,
        "bnb_4bit_quant_storage": None,
        "bnb_4bit_quant_type": "nf4",
        "dtype": "float32",
        "load_in_4bit": False,
        "load_in_8bit": False,
        "lora_alpha": 32,
        "lora_dropout": 0.05,
        "lora_r": 16,
        "lora_target_modules": None,
        "model_revision": "main",
        "use_bnb_nested_quant": False,
        "use_peft": False,
    }
}
"""Fields of TRL's own classes as parsers make them where nothing is said (1.16.0, trainer/model_config.py)."""
_MODULES = ("torch", "os")
_UNCHANGED = ("to", "cuda", "half", "bfloat16", "float", "eval", "train")
"""Methods of a model that give the model."""


@dataclass
class Made:
    """An object that a call makes. name: the call's. given: its keywords, with their places."""

    name: str
    given: dict[str, Given] = field(default_factory=dict)
    line: int = 0
    own: Any = None
    """The script's own class of which it is."""

    def of(self, key: str) -> Any:
        """What a keyword is given; None without it."""
        return self.given[key].value if key in self.given else None


class Values:
    """Expressions of one script. names: what they stand for. outside: what `--set` and flags say, by name."""

    def __init__(self, file: str, outside: Mapping[str, str]) -> None:
        self.file, self.outside = file, outside
        self.names: dict[str, Any] = {}
        self.used: set[str] = set()
        self.spent = 0
        self.made: list[Made] = []

    def value(self, node: ast.expr) -> Any:
        """A constant, a `Made`, or `unknown` with the expression's text."""
        self.spent += 1
        if self.spent > MAX_WORK:
            return unknown(LONG)
        if isinstance(node, _DEEP) and sum(1 for _ in ast.walk(node)) > MAX_PARTS and not _has_container(node):
            return unknown(LONG)
        try:
            found = self._value(node)
        except RecursionError:
            return unknown(LONG)
        except (ValueError, TypeError, ArithmeticError, LookupError, AttributeError, MemoryError):
            return unknown(text_of(node))
        is_large = isinstance(found, int) and abs(found) > MAX_NUMBER
        is_large = is_large or (isinstance(found, str) and len(found) > MAX_TEXT)
        is_large = is_large or (isinstance(found, float) and not isfinite(found))
        return unknown(LONG) if is_large or not self._is_small(node, found) else found

    def _is_small(self, node: ast.expr, found: Any) -> bool:
        """Whether a value that an expression makes has few parts; those of names were counted when they were made."""
        if isinstance(node, ast.Name | ast.Attribute | ast.Constant) or not isinstance(found, list | dict | Made):
            return True
        return self.takes(found)

    def takes(self, value: Any) -> bool:
        """Whether a value is small enough, and there is work left for it."""
        parts = num_parts(value)
        self.spent += parts
        return parts <= MAX_ITEMS and self.spent <= MAX_WORK

    def place(self, node: ast.AST) -> str:
        """The file and the line."""
        return f"{self.file}:{getattr(node, 'lineno', 0)}"

    def _value(self, node: ast.expr) -> Any:
        match node:
            case ast.Constant():
                return node.value
            case ast.Name():
                return self.names[node.id] if node.id in self.names else self._outside(node.id, node)
            case ast.List() | ast.Tuple() | ast.Set():
                return [self.value(one) for one in node.elts]
            case ast.Dict():
                return self._mapping(node)
            case ast.JoinedStr():
                return self._text(node)
            case ast.IfExp():
                test = self.truth(node.test)
                return unknown(text_of(node)) if test is None else self.value(node.body if test else node.orelse)
            case ast.Attribute():
                return self._attribute(node)
            case ast.Call():
                return self.call(node)
            case ast.Subscript():
                return self._item(node)
            case ast.NamedExpr():
                self.names[node.target.id] = found = self.value(node.value)
                return found
        return self._computed(node)

    def _computed(self, node: ast.expr) -> Any:
        """Operators."""
        match node:
            case ast.UnaryOp():
                if isinstance(node.op, ast.Not):
                    test = self.truth(node.operand)
                    return unknown(text_of(node)) if test is None else not test
                one = known(self.value(node.operand))
                return -one if isinstance(node.op, ast.USub) else one
            case ast.BoolOp():
                for part in node.values[:-1]:
                    test = self.truth(part)
                    if test is None:
                        return unknown(text_of(node))
                    if test is isinstance(node.op, ast.Or):
                        return self.value(part)
                return self.value(node.values[-1])
            case ast.BinOp():
                return _combined(node.op, known(self.value(node.left)), known(self.value(node.right)))
            case ast.Compare(ops=[op], comparators=[other]):
                return _COMPARED[type(op)](known(self.value(node.left)), known(self.value(other)))
        return unknown(text_of(node))

    def truth(self, node: ast.expr) -> bool | None:
        """Whether an expression holds; None where only running would tell."""
        if isinstance(node, ast.Compare) and isinstance(node.left, ast.Name) and node.left.id == "__name__":
            return isinstance(node.ops[0], ast.Eq)
        found = self.value(node)
        return bool(found) if not isinstance(found, str) or is_known(found) else None

    def _outside(self, name: str, node: ast.expr) -> Any:
        if name in self.outside:
            self.used.add(name)
            return typed(self.outside[name])
        return unknown(text_of(node))

    def _mapping(self, node: ast.Dict) -> dict[Any, Any]:
        found: dict[Any, Any] = {}
        for key, value in zip(node.keys, node.values, strict=True):
            if key is None:
                found |= self.merged(value)
            else:
                found[known(self.value(key))] = self.value(value)
        return found

    def merged(self, node: ast.expr) -> dict[Any, Any]:
        """What stands behind `**`. Raises: ValueError where it is not known."""
        found = self.value(node)
        if not isinstance(found, dict):
            raise ValueError(text_of(node))
        return found

    def _text(self, node: ast.JoinedStr) -> str:
        parts = []
        for part in node.values:
            if isinstance(part, ast.FormattedValue):
                if part.format_spec is not None:
                    raise ValueError("a format")
                found = known(self.value(part.value))
                if not isinstance(found, str | int | float):
                    raise ValueError("an object as text")
                parts.append(str(found))
            elif isinstance(part, ast.Constant):
                parts.append(str(part.value))
        return "".join(parts)

    def _attribute(self, node: ast.Attribute) -> Any:
        if isinstance(node.value, ast.Name) and node.value.id in _MODULES and node.value.id not in self.names:
            return node.attr if node.value.id == "torch" else unknown(text_of(node))
        owner = self.value(node.value)
        given = owner.given if isinstance(owner, Made) else getattr(owner, "defaults", None) or {}
        if node.attr in given:
            return given[node.attr].value
        if isinstance(owner, Made) and node.attr in (usual := DEFAULTS.get(owner.name, {})):
            return usual[node.attr]
        return self._outside(ast.unparse(node), node)

    def _item(self, node: ast.Subscript) -> Any:
        if isinstance(node.value, ast.Attribute) and ast.unparse(node.value) == "os.environ":
            return self._outside(str(self.value(node.slice)), node)
        owner = self.value(node.value)
        return owner[known(self.value(node.slice))] if isinstance(owner, dict | list) else unknown(text_of(node))

    def call(self, node: ast.Call) -> Any:
        """What a call gives, of those that are known."""
        name, text = name_of(node.func), ast.unparse(node.func)
        if text in ("os.environ.get", "os.getenv"):
            variable = str(self.value(node.args[0]))
            if variable in self.outside or variable == "WORLD_SIZE" or len(node.args) < 2:
                return _OF_LAUNCHERS.get(variable) or self._outside(variable, node)
            return _OF_LAUNCHERS.get(variable) or self.value(node.args[1])
        if text in ALWAYS:
            return True
        if isinstance(node.func, ast.Name) and (found := self._builtin(node, name)) is not None:
            return found
        if (found := self._copied(node, name)) is not None:
            return found
        if isinstance(node.func, ast.Attribute):
            owner = self.value(node.func.value)
            if isinstance(owner, dict) and name in _OF_MAPPINGS:
                return self._of_mapping(owner, node, name)
            if isinstance(owner, list) and name in ("append", "extend") and len(node.args) == 1:
                more = self.value(node.args[0])
                owner += [more] if name == "append" else more if isinstance(more, list) else []
                if not self.takes(owner):
                    owner[:] = [unknown(LONG)]
                return None
            if name in _UNCHANGED and isinstance(owner, Made):
                return owner
        return unknown(text_of(node))

    def _builtin(self, node: ast.Call, name: str) -> Any:
        """A function of Python's own; None for any other."""
        if name == "range":
            return list(range(*(min(int(known(self.value(one))), MAX_ITEMS) for one in node.args)))
        if name == "dict":
            return self.keywords(node) if not node.args else {**self.merged(node.args[0]), **self.keywords(node)}
        if name in _FUNCTIONS:
            return _FUNCTIONS[name](*(known(self.value(one)) for one in node.args))
        if name == "getattr" and text_of(node.args[0]) == "torch":  # a type by its name
            return known(self.value(node.args[1]))
        if name == "vars" and isinstance(owner := self.value(node.args[0]), Made):
            return {key: one.value for key, one in owner.given.items()}
        return None

    def _copied(self, node: ast.Call, name: str) -> Any:
        """An object again, with changes; a default of a command line's option. None for any other call."""
        if name in ("Option", "Argument") and node.args:  # typer's and click's
            return self.value(node.args[0])
        if name in ("replace", "copy", "deepcopy") and node.args:
            owner = self.value(node.args[0])
            if isinstance(owner, Made):
                more = {key: Given(value, self.place(node)) for key, value in self.keywords(node).items()}
                return Made(owner.name, owner.given | more, owner.line, owner.own)
        return None

    def _of_mapping(self, owner: dict[Any, Any], node: ast.Call, name: str) -> Any:
        """A method of a mapping; those that change it do."""
        given = [self.value(one) for one in node.args]
        if name == "update":
            for more in (*given, self.keywords(node)):
                owner.update(more if isinstance(more, dict) else {})
            return None
        if name in ("items", "keys", "values", "copy"):
            found = getattr(owner, name)()
            return found if name == "copy" else [list(one) if isinstance(one, tuple) else one for one in found]
        return getattr(owner, name)(*(known(given[0]), *given[1:]))

    def keywords(self, node: ast.Call) -> dict[str, Any]:
        """Keywords of a call, those behind `**` among them. Raises: ValueError where these are not known."""
        found: dict[str, Any] = {}
        for one in node.keywords:
            found |= self.merged(one.value) if one.arg is None else {one.arg: self.value(one.value)}
        return found


def _combined(op: ast.operator, left: Any, right: Any) -> Any:
    """Two values under an operator. Raises: ValueError for formats, repeated texts and large powers."""
    if isinstance(left, str) and isinstance(op, ast.Mod):
        raise ValueError("a format")
    if isinstance(op, ast.Mult) and (isinstance(left, str | list) or isinstance(right, str | list)):
        raise ValueError("a repeated text")
    if not isinstance(op, ast.Pow):
        return _BINARY[type(op)](left, right)
    if not isinstance(left, int) or right not in range(64) or abs(left) >= 1 << 20:
        raise ValueError("a large power")
    return left**right


def known(value: Any) -> Any:
    """A value that is known. Raises: ValueError."""
    if isinstance(value, str) and not is_known(value):
        raise ValueError(value)
    return value


_OF_MAPPINGS = ("get", "pop", "setdefault", "update", "items", "keys", "values", "copy")


def num_parts(value: Any) -> int:
    """Parts of a value with all that lies in it; more than MAX_ITEMS where it is that large, or nested too deep: one
    that holds itself never ends.
    """
    left, num = [(value, 0)], 0
    while left and num <= MAX_ITEMS:
        one, depth = left.pop()
        num += 1 if depth <= MAX_NESTED else MAX_ITEMS + 1
        inner = list(one.values()) if isinstance(one, dict) else one if isinstance(one, list) else []
        if isinstance(one, Made):
            inner = [part.value for part in one.given.values()]
        left += [(part, depth + 1) for part in inner]
    return num


def is_made(value: Any, end: str | tuple[str, ...]) -> TypeGuard[Made]:
    """Whether a value is an object whose class ends so."""
    return isinstance(value, Made) and value.name.endswith(end)


def _has_container(node: ast.AST) -> bool:
    return any(isinstance(one, ast.Dict | ast.List | ast.Tuple | ast.keyword) for one in ast.walk(node))


def text_of(node: ast.expr) -> str:
    """The expression as it stands in a message."""
    try:
        return ast.unparse(node)[:200]
    except RecursionError:
        return LONG


def name_of(node: ast.expr) -> str:
    """The last word of what is called."""
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""
