"""What calls give that a script's own text explains: functions, classes and methods of its own, argument parsers, and
constructors of trainers and configurations, which are kept.

In: a call. Out: its value. Left out: statements (statements.py), calls of libraries (values.py).
"""

import ast
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rlplan.foreign.python.unsloth import is_unsloth, loaded
from rlplan.foreign.python.values import MAX_ITEMS, MAX_WORK, Made, Values, is_made, name_of, num_parts, text_of
from rlplan.foreign.settings import Given, typed
from rlplan.foreign.unknown import is_known, shown, unknown

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
_ENDS = ("Config", "Trainer", "TrainingArguments")
_CLASS_PARSERS = ("HfArgumentParser", "TrlParser", "H4ArgumentParser")
_PARSED_CLASSES = ("parse_args_into_dataclasses", "parse_args_and_config", "parse", "parse_dict")
_OPTION_CALLS = (
    "add_argument",
    "add_argument_group",
    "add_mutually_exclusive_group",
    "set_defaults",
    "parse_args",
    "parse_known_args",
)


@dataclass(frozen=True, eq=False)
class Function:
    """A function of the script's own."""

    node: ast.FunctionDef | ast.AsyncFunctionDef
    is_global: bool = True
    """Whether it sees the names of the script, not those of the function that it stands in."""


@dataclass(frozen=True, eq=False)
class OwnClass:
    """A class of the script's own. base: the outermost class that it is made of and that is not, or itself. fields: in
    order.
    """

    name: str
    base: str
    defaults: dict[str, Given]
    methods: dict[str, ast.FunctionDef]
    fields: list[str]


class ReturnError(Exception):
    """A `return`, with its value."""

    def __init__(self, value: Any) -> None:
        super().__init__()
        self.value = value


class Calls(Values):
    """Calls of one script. made: trainers and configurations, in order. has_own_flags: whether it has an argument
    parser of its own, whose options are none of the trainer's.
    """

    def __init__(self, file: str, outside: Mapping[str, str]) -> None:
        super().__init__(file, outside)
        self.notes: list[str] = []
        self.has_own_flags = False
        self.depth = self.num_calls = 0
        self.followed_to = 0
        """The line of the last trainer that was made before the script became too long."""
        self.module = self.names
        """Names of the script itself, outside all functions."""
        self.functions: dict[ast.FunctionDef | ast.AsyncFunctionDef, bool] = {}
        """Of every function whether it was called."""
        self.aliases: dict[str, str] = {}
        """What is imported under another name."""
        self.flags: dict[str, tuple[str, Any]] = {}
        """Options of parsers: the attribute that each sets, and a switch's value."""
        self.shared: set[str] = set()
        """Names that the function that runs gives the whole script."""
        self.perhaps: list[Any] = []
        """What the function that runs would return in branches that are not known to be taken."""

    def run(self, body: Iterable[ast.stmt]) -> None:
        """Follow statements."""
        raise NotImplementedError

    def call(self, node: ast.Call) -> Any:
        """What a call gives; trainers and configurations are kept."""
        name = self.aliases.get(name_of(node.func), name_of(node.func))
        own = self.value(node.func) if isinstance(node.func, ast.Name) else None
        if isinstance(own, Function):
            return self.called(own, node)
        if isinstance(own, OwnClass):
            return self._object(own, node)
        if name == "from_pretrained" and text_of(node.func).startswith("PeftModel"):
            model = self.value(node.args[0]) if node.args else None
            lora = Given(Made("LoraConfig"), self.place(node))
            return Made(name, (dict(model.given) if isinstance(model, Made) else {}) | {"peft_config": lora})
        if name in ("from_pretrained", "from_dict") or (name.endswith(_ENDS) and name[:1].isupper()):
            made = self._made(name, node)
            return loaded(made, self.place(node)) if is_unsloth(text_of(node.func)) else made
        if name == "get_peft_model":
            whole = self._made(name, node)
            model = whole.of("model")
            if "peft_config" not in whole.given:  # unsloth's takes what LoraConfig does
                adapters = {key: one for key, one in whole.given.items() if key not in ("model", "args")}
                whole.given["peft_config"] = Given(Made("LoraConfig", adapters, node.lineno), self.place(node))
            before = model if isinstance(model, Made) else Made("from_pretrained")
            return Made(before.name, before.given | whole.given)
        if name == "prepare_model_for_kbit_training" and node.args:
            return self.value(node.args[0])
        if name == "setattr" and len(node.args) == 3:
            self._set(node)
            return None
        if isinstance(node.func, ast.Attribute):
            found = self._method(node, name)
            if found is not None:
                return found
        found = self._parser(node, name)
        return super().call(node) if found is None else found

    def _value(self, node: ast.expr) -> Any:
        if not isinstance(node, ast.Lambda):
            return super()._value(node)
        body: list[ast.stmt] = [ast.copy_location(ast.Return(node.body), node)]
        return Function(ast.copy_location(ast.FunctionDef("lambda", node.args, body, []), node))

    def _set(self, node: ast.Call) -> None:
        """`setattr`."""
        owner, key = self.value(node.args[0]), self.value(node.args[1])
        if isinstance(owner, Made) and isinstance(key, str) and is_known(key):
            self.give(owner, key, Given(self.value(node.args[2]), self.place(node)))
        elif isinstance(owner, Made):
            self.notes.append(f"{self.place(node)}: what {text_of(node)} sets is not known before it runs")

    def give(self, owner: Made, key: str, given: Given) -> None:
        """Set an attribute; not where the object would hold itself."""
        before = dict(owner.given)
        owner.given[key] = given
        if num_parts(owner) > MAX_ITEMS:
            owner.given = before

    def _method(self, node: ast.Call, name: str) -> Any:
        """A method of the script's own; None for any other."""
        assert isinstance(node.func, ast.Attribute), "a method"
        owner = self.value(node.func.value)
        if is_made(owner, _ENDS) and name.startswith("set_"):
            self.notes.append(f"{self.place(node)}: what {text_of(node)[:80]} sets is not read")
        own = owner.own if isinstance(owner, Made) else owner
        if not isinstance(own, OwnClass) or name not in own.methods:
            return None
        marks = {name_of(one) for one in own.methods[name].decorator_list}
        first = [] if "staticmethod" in marks or (owner is own and "classmethod" not in marks) else [owner]
        return self.called(Function(own.methods[name]), node, first)

    def _object(self, own: OwnClass, node: ast.Call) -> Made:
        """An object of a class of the script's own: its fields, and what its constructor does."""
        if "__init__" in own.methods:
            made = Made(own.base, dict(own.defaults), node.lineno, own)
            if own.base != own.name:  # its constructor hands on what it is given
                made.given |= self._made(own.base, node, own).given
            self.made.append(made)
            self.called(Function(own.methods["__init__"]), node, [made])
            return made
        made = self._made(own.base, node, own)
        if "__post_init__" in own.methods:
            self.called(Function(own.methods["__post_init__"]), ast.Call(node.func, [], []), [made])
        return made

    def _made(self, name: str, node: ast.Call, own: OwnClass | None = None) -> Made:
        given = dict(own.defaults) if own else {}
        names: Sequence[str] = POSITIONAL.get(name, ("output_dir",) if name.endswith("Config") else ())
        keys = own.fields if own and own.base == own.name else names
        for key, one in zip(keys, self._positional(node), strict=False):
            given[key] = Given(one, self.place(node))
        for keyword in node.keywords:
            place = self.place(keyword.value)
            if keyword.arg is not None:
                given[keyword.arg] = Given(self.value(keyword.value), place)
            elif isinstance(more := self.value(keyword.value), dict):
                given |= {str(key): Given(value, place) for key, value in more.items()}
            else:
                self.notes.append(f"{place}: what **{text_of(keyword.value)} gives {name} is not known before it runs")
        made = Made(name, given, node.lineno, own)
        self.made.append(made)
        if name.endswith("Trainer") and self.spent <= MAX_WORK:
            self.followed_to = node.lineno
        return made

    def default(self, node: ast.expr) -> Any:
        """A field's default, also within `field(...)`."""
        if isinstance(node, ast.Call) and name_of(node.func) == "field":
            parts = {one.arg: one.value for one in node.keywords}
            made = parts.get("default_factory")
            node = parts.get("default") or (made.body if isinstance(made, ast.Lambda) else None) or ast.Constant(None)
        return self.value(node)

    def _parser(self, node: ast.Call, name: str) -> Any:
        """Argument parsers: of options one by one, and of classes. None for any other call."""
        if name == "ArgumentParser":
            self.has_own_flags = True
            return Made(name)
        if name in _CLASS_PARSERS:
            classes = node.args[0] if node.args else next((one.value for one in node.keywords), ast.Constant(None))
            listed = self.value(classes)
            names = [
                one.name if isinstance(one, OwnClass) else shown(str(one)).rpartition(".")[2]
                for one in (listed if isinstance(listed, list) else [listed])
            ]
            return Made("ClassParser", {one: Given(None, "") for one in names})
        if not isinstance(node.func, ast.Attribute) or name not in (*_PARSED_CLASSES, *_OPTION_CALLS):
            return None
        owner = self.value(node.func.value)
        if is_made(owner, "ClassParser") and name in _PARSED_CLASSES:
            said = self.value(node.args[0]) if name == "parse_dict" and node.args else None
            flags = {} if name == "parse_dict" else {key: one.value for key, one in self._typed_flags(node).items()}
            found: list[Any] = [self._of_class(key, said if isinstance(said, dict) else flags) for key in owner.given]
            has_rest = any(one.arg == "return_remaining_strings" and self.value(one.value) for one in node.keywords)
            return [*found, []] if has_rest else found
        return self._options(owner, node, name) if is_made(owner, "ArgumentParser") else None

    def _of_class(self, name: str, said: Mapping[Any, Any]) -> Made:
        """What a parser makes of a class: its defaults, and what it is told."""
        own = self.names.get(name)
        made = Made(own.base, dict(own.defaults), 0, own) if isinstance(own, OwnClass) else Made(name)
        made.given |= {str(key): Given(value, self.file) for key, value in said.items()}
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
            option = option.replace("-", "_")
            switch = {"store_true": False, "store_false": True}.get(str(words.get("action")))
            for flag in flags:
                self.flags[flag.strip("-").replace("-", "_")] = option, None if switch is None else not switch
            if "default" in words or switch is not None or not words.get("required"):
                value = words.get("default", switch)
                is_text = isinstance(value, str) and is_known(value) and "type" in words
                parser.given[option] = Given(typed(str(value)) if is_text else value, self.place(node))
            return ""
        if name == "set_defaults":
            parser.given.update({key: Given(value, self.place(node)) for key, value in self.keywords(node).items()})
            return ""
        if name in ("add_argument_group", "add_mutually_exclusive_group"):
            return parser
        given = parser.given | self._typed_flags(node)
        for outside, text in self.outside.items():
            last = outside.rpartition(".")[2].replace("-", "_")
            option, switch = self.flags.get(last, (last, None))
            if option in given or "." not in outside:
                self.used |= {outside} if option in given else set()
                is_switched = switch is not None and typed(text) is True
                given[option] = Given(switch if is_switched else typed(text), f"--set {outside}")
        parsed = Made("Namespace", given)
        return [parsed, []] if name == "parse_known_args" else parsed

    def _typed_flags(self, node: ast.Call) -> dict[str, Given]:
        """Flags that the script itself gives its parser, as a list of words."""
        given = self.value(node.args[0]) if node.args else None
        words = given if isinstance(given, list) else []
        found: dict[str, Given] = {}
        for at, word in enumerate(words):
            if isinstance(word, str) and word.startswith("-") and len(word) > 1:
                flag, separator, value = word.lstrip("-").partition("=")
                after = words[at + 1] if at + 1 < len(words) else None
                is_switch = not separator and (after is None or str(after).startswith("--"))
                text = value if separator else str(after)
                option, switch = self.flags.get(flag.replace("-", "_"), (flag.replace("-", "_"), None))
                value_of = (True if switch is None else switch) if is_switch else typed(text)
                found[option] = Given(value_of, self.place(node))
        return found

    def called(self, function: Function, node: ast.Call | None, first: Sequence[Any] = ()) -> Any:
        """What a function of the script's own gives; without a call its parameters are their defaults, or not known.

        first: what stands before the arguments: the object of a method.
        """
        self.functions[function.node] = True
        self.num_calls += 1
        if self.depth >= MAX_DEPTH or self.num_calls > MAX_CALLS:
            return unknown(function.node.name)
        outer, shared, perhaps = self.names, self.shared, self.perhaps
        if self.depth == 0:
            self.module = outer
        seen = self.module if function.is_global else outer
        self.names, self.shared, self.perhaps = {**seen, **self._arguments(function.node.args, node, first)}, set(), []
        self.depth += 1
        result: Any = None
        try:
            self.run(function.node.body)
        except ReturnError as returned:
            result = returned.value
        kept = {name: self.names[name] for name in self.shared if name in self.names}
        if any(type(one) is not type(result) or one != result for one in self.perhaps) and not isinstance(result, Made):
            result = unknown(f"{function.node.name}()")
        self.names, self.shared, self.perhaps = outer, shared, perhaps
        self.module.update(kept)
        self.names.update(kept)
        self.depth -= 1
        return result

    def _arguments(self, parameters: ast.arguments, node: ast.Call | None, first: Sequence[Any]) -> dict[str, Any]:
        """By parameter: what a call gives it, its default, or what is said outside."""
        named = [*parameters.posonlyargs, *parameters.args]
        found: dict[str, Any] = {
            one.arg: self._outside(one.arg, ast.Name(one.arg)) for one in (*named, *parameters.kwonlyargs)
        }
        last = named[len(named) - len(parameters.defaults) :]
        found |= {one.arg: self.value(default) for one, default in zip(last, parameters.defaults, strict=True)}
        for parameter, default in zip(parameters.kwonlyargs, parameters.kw_defaults, strict=True):
            if default is not None:
                found[parameter.arg] = self.value(default)
        given = [*first, *self._positional(node)] if node is not None else [*first]
        found |= dict(zip((one.arg for one in named), given, strict=False))
        words = self._keywords_of(node) if node is not None else {}
        known = {one.arg for one in (*named, *parameters.kwonlyargs)}
        found |= {key: value for key, value in words.items() if key in known}
        if parameters.vararg is not None:
            found[parameters.vararg.arg] = given[len(named) :]
        if parameters.kwarg is not None:
            found[parameters.kwarg.arg] = {key: value for key, value in words.items() if key not in known}
        return found

    def _positional(self, node: ast.Call) -> list[Any]:
        found: list[Any] = []
        for one in node.args:
            value = self.value(one.value if isinstance(one, ast.Starred) else one)
            found += value if isinstance(one, ast.Starred) and isinstance(value, list) else [value]
        return found

    def _keywords_of(self, node: ast.Call) -> dict[str, Any]:
        try:
            return self.keywords(node)
        except ValueError as error:
            self.notes.append(f"{self.place(node)}: what **{error} gives is not known before it runs")
            return {str(one.arg): self.value(one.value) for one in node.keywords if one.arg is not None}
