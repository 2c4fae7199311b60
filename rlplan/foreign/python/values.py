"""The value of a Python expression as far as its text decides it: constants, names, and a few calls.

Unlike the evaluator of reward assertions (runtime/rewards/assertions), it never fails: an expression that it cannot
evaluate becomes an unknown value with the expression's text.

In: a syntax tree, the values of names. Out: a constant, an object that a call creates, or an unknown value.
Left out: statements and functions of the script's own (statements.py).
"""

import ast
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import isfinite
from typing import Any, TypeGuard

from rlplan.foreign.settings import Given, parse_word
from rlplan.foreign.unknown import is_known, is_wholly_unknown, mark_unknown, strip_marks

MAX_NUMBER, MAX_TEXT = 1 << 60, 10_000
MAX_ITEMS, MAX_NESTED = 10_000, 40
"""Parts of a list, a mapping or an object with all its content, and its nesting."""
CHARACTERS = 64
"""Characters of a text that count as one part."""
MAX_DIGITS = 32
"""Digits to which a number is rounded: of more, Python computes a power of ten."""
MAX_QUOTE, MAX_QUOTED_LINES, MAX_DOTS = 200, 8, 16
MAX_WORK = 300_000
"""Statements, expressions, names and parts of values that are looked at in all."""
ALWAYS = ("torch.cuda.is_available", "torch.cuda.is_bf16_supported", "is_bf16_supported", "is_bfloat16_supported")
"""Calls that return True on every supported machine."""
_OF_LAUNCHERS = {"LOCAL_RANK": "0", "RANK": "0"}
"""Environment variables that launchers set; `WORLD_SIZE` is known only at run time."""
LONG = "an expression of very many parts"
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
    ast.In: lambda item, other: item in other,
    ast.NotIn: lambda item, other: item not in other,
}
_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "int": int,
    "float": float,
    "str": lambda value: str(simplify(value)),
    "bool": bool,
    "min": min,
    "max": max,
    "round": lambda number, digits=None: _round(number, digits),
    "list": list,
    "tuple": list,
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
    },
    "ExecuteTrainConfig": {
        "cuda_core_dump": False,
        "extra_env_vars": "",
        "num_nodes": 1,
        "output_dir": "shared_data",  # in the home folder of upstream's image
    },
}
"""Defaults of classes of libraries, as parsers return them without flags.

Sources: TRL 1.16.0, trainer/model_config.py; miles and slime, utils/external_utils/command_utils.py.
"""
_CONSTANTS = {
    "NUM_GPUS_OF_HARDWARE": {
        "B200": 8,
        "B300": 8,
        "GB200": 4,
        "GB300": 4,
        "H100": 8,
        "H200": 8,
        "MI350X": 8,
        "MI355X": 8,
    }
}
"""Constants of libraries. Source: miles, utils/external_utils/command_utils.py."""
_MODULES = ("torch", "os")
_UNCHANGED = ("to", "cuda", "half", "bfloat16", "float", "eval", "train")
"""Methods of a model that return the model."""


@dataclass
class Made:
    """An object that a call creates."""

    name: str
    """Last word of what is called."""
    entries: dict[str, Given] = field(default_factory=dict)
    """Arguments and attributes, with their places."""
    line: int = 0
    own: Any = None
    """The script's own class of the object; None for a library's."""

    def get(self, key: str) -> Any:
        """The value of an attribute; None without it."""
        return self.entries[key].value if key in self.entries else None


class Values:
    """Expressions of one script. text: its source. outside: values of `--set` and flags, by name."""

    def __init__(self, text: str, file: str, outside: Mapping[str, str]) -> None:
        self.lines, self.file, self.outside = text.encode().splitlines(), file, outside
        self.names: dict[str, Any] = {}
        self.environment: dict[str, Any] = {}
        """Variables that the script sets in `os.environ`."""
        self.used: set[str] = set()
        self.spent, self.limit = 0, MAX_WORK
        self.made: list[Made] = []

    def value(self, node: ast.expr) -> Any:
        """The value of an expression: a constant, a `Made`, or `unknown` with its text."""
        self.spent += 1
        if self.spent > self.limit:
            return mark_unknown(LONG)
        try:
            value = self._value(node)
        except RecursionError:
            return mark_unknown(LONG)
        except (ValueError, TypeError, ArithmeticError, LookupError, AttributeError):
            return mark_unknown(self.quote(node))
        if isinstance(value, bytes | complex) or value is Ellipsis:
            return mark_unknown(self.quote(node))
        if isinstance(node, ast.Name | ast.Attribute):
            return value  # measured when it was created
        is_large = isinstance(value, int) and abs(value) > MAX_NUMBER
        is_large = is_large or (isinstance(value, str) and len(value) > MAX_TEXT)
        is_large = is_large or (isinstance(value, float) and not isfinite(value))
        return mark_unknown(LONG) if is_large or not self.takes(value) else value

    def takes(self, *values: Any) -> bool:
        """Whether values are small enough, and within the work limit, of which they take as much as they have parts."""
        sizes = [count_parts(value) for value in values if isinstance(value, str | list | dict | Made)]
        self.spent += sum(sizes)
        return max(sizes, default=0) <= MAX_ITEMS and self.spent <= self.limit

    def quote(self, node: ast.expr) -> str:
        """The source of an expression, for messages; its beginning where it is long."""
        first, last = getattr(node, "lineno", 0), getattr(node, "end_lineno", 0)
        if not first or not last:  # this reader has made it
            return get_name(node) or LONG
        lines = self.lines[first - 1 : min(last, first + MAX_QUOTED_LINES)]
        if last - first < len(lines):
            lines[-1] = lines[-1][: node.end_col_offset]
        lines[0] = lines[0][node.col_offset :]
        words = b" ".join(line[: 4 * MAX_QUOTE].strip() for line in lines)
        return LONG if len(words) >= 4 * MAX_QUOTE else words.decode("utf-8", "ignore")[:MAX_QUOTE]

    def place(self, node: ast.AST) -> str:
        """The file and the line."""
        return f"{self.file}:{getattr(node, 'lineno', 0)}"

    def _value(self, node: ast.expr) -> Any:
        match node:
            case ast.Constant():
                return node.value
            case ast.Name():
                return self.names[node.id] if node.id in self.names else self._look_up_outside(node.id, node)
            case ast.List() | ast.Tuple() | ast.Set():
                return [self.value(element) for element in node.elts]
            case ast.Dict():
                return self._evaluate_dict(node)
            case ast.JoinedStr():
                return self._evaluate_text(node)
            case ast.IfExp():
                test = self.truth(node.test)
                return (
                    mark_unknown(self.quote(node)) if test is None else self.value(node.body if test else node.orelse)
                )
            case ast.Attribute():
                return self._evaluate_attribute(node)
            case ast.Call():
                return self.call(node)
            case ast.Subscript():
                return self._evaluate_item(node)
            case ast.NamedExpr():
                self.names[node.target.id] = value = self.value(node.value)
                return value
        return self._evaluate_operator(node)

    def _evaluate_operator(self, node: ast.expr) -> Any:
        """The value of an expression with an operator."""
        match node:
            case ast.UnaryOp():
                if isinstance(node.op, ast.Not):
                    test = self.truth(node.operand)
                    return mark_unknown(self.quote(node)) if test is None else not test
                operand = require_known(self.value(node.operand))
                return -operand if isinstance(node.op, ast.USub) else operand
            case ast.BoolOp():
                for part in node.values[:-1]:
                    test = self.truth(part)
                    if test is None:
                        return mark_unknown(self.quote(node))
                    if test is isinstance(node.op, ast.Or):
                        return self.value(part)
                return self.value(node.values[-1])
            case ast.BinOp():
                left, right = self.value(node.left), self.value(node.right)
                if isinstance(node.op, ast.Add) and isinstance(left, str) and isinstance(right, str):
                    both = is_wholly_unknown(left) and is_wholly_unknown(right)
                    return mark_unknown(self.quote(node)) if both else left + right
                return _combine(node.op, require_known(left), require_known(right))
            case ast.Compare(ops=[op], comparators=[other]):
                left, right = require_known(self.value(node.left)), require_known(self.value(other))
                if not self.takes(left, right):
                    raise ValueError(LONG)
                return _COMPARED[type(op)](left, right)
        return mark_unknown(self.quote(node))

    def truth(self, node: ast.expr) -> bool | None:
        """Whether an expression is true; None where that is known only at run time."""
        if isinstance(node, ast.Compare) and isinstance(node.left, ast.Name) and node.left.id == "__name__":
            return isinstance(node.ops[0], ast.Eq)
        value = self.value(node)
        return bool(value) if not isinstance(value, str) or is_known(value) else None

    def _look_up_outside(self, name: str, node: ast.expr) -> Any:
        if name in self.outside:
            self.used.add(name)
            return parse_word(self.outside[name])
        return mark_unknown(self.quote(node))

    def _evaluate_dict(self, node: ast.Dict) -> dict[Any, Any]:
        mapping: dict[Any, Any] = {}
        for key, value in zip(node.keys, node.values, strict=True):
            if key is None:
                mapping |= self.evaluate_mapping(value)
            else:
                mapping[require_known(self.value(key))] = self.value(value)
        return mapping

    def evaluate_mapping(self, node: ast.expr) -> dict[Any, Any]:
        """The mapping after `**`. Raises: ValueError where it is unknown."""
        mapping = self.value(node)
        if not isinstance(mapping, dict) or not self.takes(mapping):
            raise ValueError(self.quote(node))
        return mapping

    def _evaluate_text(self, node: ast.JoinedStr) -> str:
        parts, size = list[str](), 0
        for part in node.values:
            if isinstance(part, ast.FormattedValue):
                if part.format_spec is not None:
                    raise ValueError("a format")
                value = self.value(part.value)
                if not isinstance(value, str | int | float):
                    raise ValueError("an object as text")
                # a launcher's options are one text, of which the rest stays known
                parts.append(mark_unknown(f"{{{strip_marks(str(value))}}}") if is_wholly_unknown(value) else str(value))
            elif isinstance(part, ast.Constant):
                parts.append(str(part.value))
            size += len(parts[-1])
            if size > MAX_TEXT:
                raise ValueError(LONG)
        return "".join(parts)

    def _evaluate_attribute(self, node: ast.Attribute) -> Any:
        if node.attr in _CONSTANTS:
            return _CONSTANTS[node.attr]
        if isinstance(node.value, ast.Name) and node.value.id in _MODULES and node.value.id not in self.names:
            return node.attr if node.value.id == "torch" else mark_unknown(self.quote(node))
        owner = self.value(node.value)
        attributes = owner.entries if isinstance(owner, Made) else getattr(owner, "defaults", None) or {}
        if node.attr in attributes:
            return attributes[node.attr].value
        if isinstance(owner, Made) and node.attr in (usual := DEFAULTS.get(owner.name, {})):
            return usual[node.attr]
        return self._look_up_outside(get_dotted_name(node), node)

    def _evaluate_item(self, node: ast.Subscript) -> Any:
        if get_dotted_name(node.value) == "os.environ":
            variable = str(simplify(self.value(node.slice)))[:MAX_QUOTE]
            return self.environment.get(variable) or self._look_up_outside(variable, node)
        owner = self.value(node.value)
        return (
            owner[require_known(self.value(node.slice))]
            if isinstance(owner, dict | list)
            else mark_unknown(self.quote(node))
        )

    def call(self, node: ast.Call, owner: Any = None) -> Any:
        """The value of a call of a known library function. owner: that of a method."""
        name, text = get_name(node.func), get_dotted_name(node.func)
        if text in ("os.environ.get", "os.getenv"):
            variable = str(simplify(self.value(node.args[0])))[:MAX_QUOTE]
            if variable in self.environment:
                return self.environment[variable]
            if variable in self.outside or variable == "WORLD_SIZE" or len(node.args) < 2:
                return _OF_LAUNCHERS.get(variable) or self._look_up_outside(variable, node)
            return _OF_LAUNCHERS.get(variable) or self.value(node.args[1])
        if text in ALWAYS:
            return True
        if isinstance(node.func, ast.Name) and (result := self._call_builtin(node, name)) is not None:
            return result
        if (result := self._call_copy(node, name)) is not None:
            return result
        if isinstance(node.func, ast.Attribute):
            if isinstance(owner, dict) and name in _OF_MAPPINGS:
                return self._call_mapping(owner, node, name)
            if isinstance(owner, list) and name in ("append", "extend") and len(node.args) == 1:
                more = self.value(node.args[0])
                owner += [more] if name == "append" else more if isinstance(more, list) else []
                if not self.takes(owner):
                    owner[:] = [mark_unknown(LONG)]
                return None
            if name in _UNCHANGED and isinstance(owner, Made):
                return owner
        return mark_unknown(self.quote(node))

    def _call_builtin(self, node: ast.Call, name: str) -> Any:
        """The value of a call of a builtin; None for any other call."""
        if name == "range":
            numbers = range(*(int(require_known(self.value(argument))) for argument in node.args))
            if len(numbers) > MAX_ITEMS:
                raise ValueError("a long range")
            return list(numbers)
        if name == "dict":
            return (
                self.keywords(node) if not node.args else {**self.evaluate_mapping(node.args[0]), **self.keywords(node)}
            )
        if name in _FUNCTIONS:
            arguments = [require_known(self.value(argument)) for argument in node.args]
            if not self.takes(*arguments):
                raise ValueError(LONG)
            return _FUNCTIONS[name](*arguments)
        if name == "getattr" and get_name(node.args[0]) == "torch":  # a type by its name
            return require_known(self.value(node.args[1]))
        if name == "vars" and isinstance(owner := self.value(node.args[0]), Made):
            return {key: entry.value for key, entry in owner.entries.items()}
        return None

    def _call_copy(self, node: ast.Call, name: str) -> Any:
        """A copy of an object with changes, or the default of a typer or click option; None for any other call."""
        if name in ("Option", "Argument") and node.args:
            return self.value(node.args[0])
        if name in ("replace", "copy", "deepcopy") and node.args:
            owner = self.value(node.args[0])
            if isinstance(owner, Made):
                more = {key: Given(value, self.place(node)) for key, value in self.keywords(node).items()}
                return Made(owner.name, owner.entries | more, owner.line, owner.own)
        return None

    def _call_mapping(self, owner: dict[Any, Any], node: ast.Call, name: str) -> Any:
        """The value of a method of a mapping, which is changed in place."""
        arguments = [self.value(argument) for argument in node.args]
        if name == "update":
            for more in (*arguments, self.keywords(node)):
                owner.update(more if isinstance(more, dict) else {})
            return None
        if name in ("items", "keys", "values", "copy"):
            result = getattr(owner, name)()
            return result if name == "copy" else [list(item) if isinstance(item, tuple) else item for item in result]
        return getattr(owner, name)(*(require_known(arguments[0]), *arguments[1:]))

    def keywords(self, node: ast.Call) -> dict[str, Any]:
        """Keyword arguments of a call, including `**`. Raises: ValueError where those are unknown."""
        values: dict[str, Any] = {}
        for keyword in node.keywords:
            values |= (
                self.evaluate_mapping(keyword.value)
                if keyword.arg is None
                else {keyword.arg: self.value(keyword.value)}
            )
        return values


def _combine(op: ast.operator, left: Any, right: Any) -> Any:
    """The result of a binary operator. Raises: ValueError for formats, repeated texts and large powers."""
    if isinstance(op, ast.Add | ast.BitOr):
        return _BINARY[type(op)](left, right)
    if not isinstance(left, int | float) or not isinstance(right, int | float):
        raise ValueError("a format, or repeated parts")
    if not isinstance(op, ast.Pow):
        return _BINARY[type(op)](left, right)
    if not isinstance(left, int) or right not in range(64) or abs(left) >= 1 << 20:
        raise ValueError("a large power")
    return left**right


def _round(number: Any, digits: Any) -> Any:
    """Raises: ValueError for many digits."""
    if digits is not None and abs(digits) > MAX_DIGITS:
        raise ValueError("many digits")
    return round(number, digits)


def require_known(value: Any) -> Any:
    """The value itself. Raises: ValueError for an unknown one."""
    if isinstance(value, str) and not is_known(value):
        raise ValueError(value)
    return value


_OF_MAPPINGS = ("get", "pop", "setdefault", "update", "items", "keys", "values", "copy")


def count_parts(value: Any) -> int:
    """Parts of a value with all its content; more than MAX_ITEMS for a value that is too large or nested too deep.

    The limit on nesting stops at a value that contains itself.
    """
    left, num = [(value, 0)], 0
    while left and num <= MAX_ITEMS:
        item, depth = left.pop()
        num += 1 if depth <= MAX_NESTED else MAX_ITEMS + 1
        if isinstance(item, str):
            num += len(item) // CHARACTERS
        inner: Sequence[Any] = item if isinstance(item, list) else ()
        if isinstance(item, dict):
            inner = [*item.values(), *(key for key in item if isinstance(key, str) and len(key) > CHARACTERS)]
        if isinstance(item, Made):
            inner = [part.value for part in item.entries.values()]
        left += [(part, depth + 1) for part in inner]
    return num


def is_made(value: Any, end: str | tuple[str, ...]) -> TypeGuard[Made]:
    """Whether a value is an object whose class name has this ending."""
    return isinstance(value, Made) and value.name.endswith(end)


def simplify(value: Any) -> Any:
    """A value as JSON has it; an object that a call creates becomes the text of its call, and a date its own text.

    >>> simplify({1: [Made("LoraConfig")]})
    {'1': ['LoraConfig(...)']}
    """
    if isinstance(value, list | tuple):
        return [simplify(part) for part in value]
    if isinstance(value, dict):
        return {str(key): simplify(part) for key, part in value.items()}
    if value is None or isinstance(value, str | int | float):
        return value
    return f"{value.name}(...)" if hasattr(value, "name") else f"{value:%FT%T}" if hasattr(value, "strftime") else "..."


def get_dotted_name(node: ast.expr) -> str:
    """`a.b.c` of an attribute of names; empty for any other expression, and for a very long one."""
    parts = list[str]()
    while isinstance(node, ast.Attribute) and len(parts) < MAX_DOTS:
        parts.append(node.attr)
        node = node.value
    return ".".join([node.id, *reversed(parts)]) if isinstance(node, ast.Name) else ""


def get_name(node: ast.expr) -> str:
    """The last word of a dotted name."""
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""
