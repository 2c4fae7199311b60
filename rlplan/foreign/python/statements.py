"""A Python script followed statement by statement, as far as its text alone tells what it does.

In: a syntax tree. Out: the trainers and configurations that it makes, in order, and notes on branches that only running
would choose. Followed: functions of its own, dataclasses, argument parsers with their defaults. Each loop is passed
through once. Left out: expressions (values.py), what a trainer is told in the end (file.py).
"""

import ast
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rlplan.foreign.python.values import Made, Values, is_made, name_of, text_of
from rlplan.foreign.settings import Given, typed
from rlplan.foreign.words import unknown
from rlplan.records import dataclass

MAX_DEPTH, MAX_CALLS = 8, 1_000
"""Calls of the script's own functions within each other, and in all."""
POSITIONAL = {
    "GRPOTrainer": ("model", "reward_funcs", "args"),
    "SFTTrainer": ("model", "args"),
    "DPOTrainer": ("model", "ref_model", "args"),
    "KTOTrainer": ("model", "ref_model", "args"),
    "RewardTrainer": ("model", "args"),
    "from_pretrained": ("path",),
    "get_peft_model": ("model", "peft_config"),
}
"""What the first arguments of a call are, where they have no names. Of a configuration the first is its folder."""
_ENDS = ("Config", "Trainer")
_CLASS_PARSERS = ("HfArgumentParser", "TrlParser", "H4ArgumentParser")
_PARSED_CLASSES = ("parse_args_into_dataclasses", "parse_args_and_config", "parse")


@dataclass(frozen=True)
class _Function:
    node: ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class _Class:
    """base: the outermost class that it is made of and that is not the script's own."""

    base: str
    defaults: dict[str, Given]


class _ReturnError(Exception):
    def __init__(self, value: Any) -> None:
        super().__init__()
        self.value = value


class Script(Values):
    """One script. made: trainers and configurations, in order. has_own_flags: whether it has an argument parser of its
    own, whose options are none of the trainer's.
    """

    def __init__(self, tree: ast.Module, file: str, outside: Mapping[str, str]) -> None:
        super().__init__(file, outside)
        self.notes: list[str] = []
        self.has_own_flags = False
        self.depth = self.calls = 0
        self.functions: dict[ast.AST, bool] = {}
        try:
            self._run(tree.body)
            while uncalled := [node for node, is_called in self.functions.items() if not is_called]:
                self._called(_Function(uncalled[0]), None)  # type: ignore[arg-type]
        except _ReturnError:
            pass

    def _run(self, body: Iterable[ast.stmt]) -> None:
        for statement in body:
            self._statement(statement)

    def _statement(self, node: ast.stmt) -> None:
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                self.names[node.name] = _Function(node)
                self.functions.setdefault(node, False)
            case ast.ClassDef():
                self._class(node)
            case ast.Assign():
                found = self.value(node.value)
                for target in node.targets:
                    self._bind(target, found)
            case ast.AnnAssign(value=ast.expr() as given):
                self._bind(node.target, self.value(given))
            case ast.AugAssign():
                read = ast.parse(ast.unparse(node.target), mode="eval").body
                self._bind(node.target, self.value(ast.BinOp(read, node.op, node.value)))
            case ast.Expr():
                self.value(node.value)
            case ast.Return():
                raise _ReturnError(None if node.value is None else self.value(node.value))
            case ast.If():
                self._branches(node)
            case _:
                self._blocks(node)

    def _blocks(self, node: ast.stmt) -> None:
        """Loops, `with`, `try`: each body once, and no handlers of errors."""
        match node:
            case ast.For() | ast.AsyncFor():
                self._bind(node.target, unknown(text_of(node.target)))
                self._run(node.body)
            case ast.While():
                self._run(node.body)
            case ast.With() | ast.AsyncWith():
                for item in node.items:
                    found = self.value(item.context_expr)
                    if item.optional_vars is not None:
                        self._bind(item.optional_vars, found)
                self._run(node.body)
            case ast.Try() | ast.TryStar():
                self._run([*node.body, *node.orelse, *node.finalbody])

    def _branches(self, node: ast.If) -> None:
        """The branch that is taken; both where only running would tell, the first one last, for it is the usual one."""
        test = self.truth(node.test)
        if test is not None:
            self._run(node.body if test else node.orelse)
            return
        before = len(self.made)
        for body in (node.orelse, node.body):
            try:
                self._run(body)
            except _ReturnError as returned:
                if body is node.body and not node.orelse:
                    continue  # what follows is for the other case
                raise returned from None
        if len(self.made) > before:
            said = f"whether {text_of(node.test)} holds is not known before it runs"
            self.notes.append(f"{self.place(node)}: {said}; it is read as if it did")

    def _bind(self, target: ast.expr, value: Any) -> None:
        match target:
            case ast.Name():
                if target.id in self.outside:
                    self.used.add(target.id)
                    value = typed(self.outside[target.id])
                self.names[target.id] = value
            case ast.Tuple() | ast.List():
                parts = value if isinstance(value, list) and len(value) == len(target.elts) else None
                for index, one in enumerate(target.elts):
                    self._bind(one, unknown(text_of(one)) if parts is None else parts[index])
            case ast.Attribute():
                owner = self.value(target.value)
                if isinstance(owner, Made):
                    owner.given[target.attr] = Given(value, self.place(target))
            case ast.Subscript():
                owner, key = self.value(target.value), self.value(target.slice)
                if isinstance(owner, dict) and isinstance(key, str):
                    owner[key] = value

    def _class(self, node: ast.ClassDef) -> None:
        """Its fields with their defaults; methods are followed as functions that nobody calls."""
        base, defaults = node.name, dict[str, Given]()
        for one in reversed(node.bases):
            known = self.names.get(name_of(one))
            base = known.base if isinstance(known, _Class) else name_of(one) if name_of(one).endswith(_ENDS) else base
            defaults |= known.defaults if isinstance(known, _Class) else {}
        for statement in node.body:
            if isinstance(statement, ast.AnnAssign | ast.Assign) and statement.value is not None:
                targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
                given = Given(self._default(statement.value), self.place(statement))
                defaults |= {one.id: given for one in targets if isinstance(one, ast.Name)}
            elif isinstance(statement, ast.FunctionDef):
                self.functions.setdefault(statement, False)
        self.names[node.name] = _Class(base, defaults)

    def _default(self, node: ast.expr) -> Any:
        """A field's default, also within `field(...)`."""
        if isinstance(node, ast.Call) and name_of(node.func) == "field":
            parts = {one.arg: one.value for one in node.keywords}
            made = parts.get("default_factory")
            node = parts.get("default") or (made.body if isinstance(made, ast.Lambda) else None) or ast.Constant(None)
        return self.value(node)

    def call(self, node: ast.Call) -> Any:
        """What a call gives; trainers and configurations are kept."""
        name = name_of(node.func)
        own = self.names.get(name) if isinstance(node.func, ast.Name) else None
        if isinstance(own, _Function):
            return self._called(own, node)
        if isinstance(own, _Class):
            return self._made(own.base, node, own.defaults)
        if name.endswith(_ENDS) and name[:1].isupper():
            return self._made(name, node)
        if name == "from_pretrained":
            return self._made(name, node)
        if name == "get_peft_model":
            whole = self._made(name, node)
            model = whole.of("model")
            return Made("from_pretrained", (model.given if isinstance(model, Made) else {}) | whole.given)
        if name in ("prepare_model_for_kbit_training", "deepcopy") and node.args:
            return self.value(node.args[0])
        if name == "setattr" and len(node.args) == 3:
            owner, key = self.value(node.args[0]), self.value(node.args[1])
            if isinstance(owner, Made) and isinstance(key, str):
                owner.given[key] = Given(self.value(node.args[2]), self.place(node))
            return None
        found = self._parser(node, name)
        return super().call(node) if found is None else found

    def _made(self, name: str, node: ast.Call, defaults: Mapping[str, Given] | None = None) -> Made:
        given = dict(defaults or {})
        names = POSITIONAL.get(name, ("output_dir",) if name.endswith("Config") else ())
        for key, one in zip(names, node.args, strict=False):
            given[key] = Given(self.value(one), self.place(one))
        for keyword in node.keywords:
            place = self.place(keyword.value)
            if keyword.arg is not None:
                given[keyword.arg] = Given(self.value(keyword.value), place)
            elif isinstance(more := self.value(keyword.value), dict):
                given |= {str(key): Given(value, place) for key, value in more.items()}
            else:
                self.notes.append(f"{place}: what **{text_of(keyword.value)} gives {name} is not known before it runs")
        made = Made(name, given, node.lineno)
        self.made.append(made)
        return made

    def _parser(self, node: ast.Call, name: str) -> Any:
        """Argument parsers: of options one by one, and of classes. None for any other call."""
        if name == "ArgumentParser":
            self.has_own_flags = True
            return Made(name)
        if name in _CLASS_PARSERS:
            classes = node.args[0] if node.args else next((one.value for one in node.keywords), ast.Constant(None))
            listed = classes.elts if isinstance(classes, ast.Tuple | ast.List) else [classes]
            return Made("ClassParser", {name_of(one): Given(one, "") for one in listed})
        if not isinstance(node.func, ast.Attribute):
            return None
        owner = self.value(node.func.value) if name in (*_PARSED_CLASSES, *_OPTION_CALLS) else None
        if is_made(owner, "ClassParser") and name in _PARSED_CLASSES:
            return [self._of_class(key) for key in owner.given]
        if is_made(owner, "ArgumentParser"):
            return self._options(owner, node, name)
        return None

    def _of_class(self, name: str) -> Made:
        """What a parser makes of a class without flags: its defaults."""
        own = self.names.get(name)
        made = Made(own.base, dict(own.defaults)) if isinstance(own, _Class) else Made(name)
        for key in made.given:
            for outside in self.outside:
                if outside.rpartition(".")[2] == key:
                    self.used.add(outside)
                    made.given[key] = Given(typed(self.outside[outside]), f"--set {outside}")
        self.made.append(made)
        return made

    def _options(self, parser: Made, node: ast.Call, name: str) -> Any:
        """`add_argument` keeps a default; `parse_args` gives them all, with what is said outside."""
        if name == "add_argument":
            flags = [str(self.value(one)) for one in node.args]
            words = self.keywords(node)
            option = str(words.get("dest") or next((one for one in flags if one.startswith("--")), "").strip("-"))
            switch = {"store_true": False, "store_false": True}.get(str(words.get("action")))
            if "default" in words or switch is not None or not words.get("required"):
                value = words.get("default", switch)
                parser.given[option.replace("-", "_")] = Given(value, self.place(node))
            return ""
        if name in ("add_argument_group", "add_mutually_exclusive_group"):
            return parser
        given = dict(parser.given)
        for outside, text in self.outside.items():
            option = outside.rpartition(".")[2].replace("-", "_")
            if option in given or "." not in outside:
                self.used |= {outside} if option in given else set()
                given[option] = Given(typed(text), f"--set {outside}")
        parsed = Made("Namespace", given)
        return [parsed, []] if name == "parse_known_args" else parsed

    def _called(self, function: _Function, node: ast.Call | None) -> Any:
        """What a function of the script's own gives; without a call its parameters are their defaults, or not known."""
        self.functions[function.node] = True
        self.calls += 1
        if self.depth >= MAX_DEPTH or self.calls > MAX_CALLS:
            return unknown(function.node.name)
        outer, self.depth = self.names, self.depth + 1
        self.names = {**outer, **self._arguments(function.node.args, node)}
        try:
            self._run(function.node.body)
        except _ReturnError as returned:
            return returned.value
        finally:
            self.names, self.depth = outer, self.depth - 1
        return None

    def _arguments(self, parameters: ast.arguments, node: ast.Call | None) -> dict[str, Any]:
        """By parameter: what a call gives it, its default, or what is said outside."""
        named = [*parameters.posonlyargs, *parameters.args, *parameters.kwonlyargs]
        found: dict[str, Any] = {one.arg: self._outside(one.arg, ast.Name(one.arg)) for one in named}
        found |= _paired([*parameters.posonlyargs, *parameters.args], [self.value(one) for one in parameters.defaults])
        for parameter, default in zip(parameters.kwonlyargs, parameters.kw_defaults, strict=True):
            if default is not None:
                found[parameter.arg] = self.value(default)
        if node is not None:
            found |= dict(zip((one.arg for one in named), (self.value(one) for one in node.args), strict=False))
            found |= {one.arg: self.value(one.value) for one in node.keywords if one.arg is not None}
        return found


_OPTION_CALLS = (
    "add_argument",
    "add_argument_group",
    "add_mutually_exclusive_group",
    "parse_args",
    "parse_known_args",
)


def _paired(parameters: Sequence[ast.arg], defaults: Sequence[Any]) -> dict[str, Any]:
    """The last parameters with their defaults."""
    last = parameters[len(parameters) - len(defaults) :]
    return {one.arg: value for one, value in zip(last, defaults, strict=True)}
