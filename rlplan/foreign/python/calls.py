"""Calls within a script: its own functions, classes and methods, argument parsers, and constructors of trainers.

In: a call. Out: its value; objects of trainers and configurations are recorded. Left out: statements (statements.py),
calls of libraries (values.py).
"""

import ast
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rlplan.foreign.python.unsloth import add_default, is_unsloth
from rlplan.foreign.python.values import MAX_ITEMS, MAX_WORK, Made, Values, get_dotted_name, get_name, is_made, simplify
from rlplan.foreign.settings import Given, parse_word
from rlplan.foreign.unknown import is_known, mark_unknown, strip_marks

MAX_DEPTH, MAX_CALLS = 8, 1_000
"""Nesting and number of calls of the script's own functions: a script may recurse without end."""
POSITIONAL = {
    "GRPOTrainer": ("model", "reward_funcs", "args"),
    "SFTTrainer": ("model", "args"),
    "DPOTrainer": ("model", "ref_model", "args"),
    "KTOTrainer": ("model", "ref_model", "args"),
    "RewardTrainer": ("model", "args"),
    "from_pretrained": ("path",),
    "get_peft_model": ("model", "peft_config"),
    "execute_train": ("train_args", "num_gpus_per_node", "megatron_model_type", "train_script"),
}
"""Names of positional arguments. The first one of a configuration is its output folder."""
LAUNCH = "execute_train"
"""The function of slime and miles that starts a training with a text of options (utils/external_utils)."""
_ALIASES = {"UnslothTrainer": "SFTTrainer"}
"""Trainers of other packages that take what their base class takes. Source: unsloth/trainer.py."""
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
    """A function that the script defines."""

    node: ast.FunctionDef | ast.AsyncFunctionDef
    is_global: bool = True
    """Whether it sees the script's names, and not those of an enclosing function."""


@dataclass(frozen=True, eq=False)
class OwnClass:
    """A class that the script defines."""

    name: str
    base: str
    """Its nearest base class from a library, or its own name."""
    defaults: dict[str, Given]
    methods: dict[str, ast.FunctionDef]
    fields: dict[str, None]
    """Names of annotated fields, in order."""


class ReturnError(Exception):
    """A `return`, with its value."""

    def __init__(self, value: Any) -> None:
        super().__init__()
        self.value = value


class Calls(Values):
    """Calls of one script."""

    def __init__(self, text: str, file: str, outside: Mapping[str, str]) -> None:
        super().__init__(text, file, outside)
        self.notes: list[str] = []
        self.has_own_flags = False
        """Whether the script has its own argument parser, whose options are not the trainer's."""
        self.depth = self.num_calls = 0
        self.followed_to = 0
        """Line of the last trainer that was created within the work limit."""
        self.module = self.names
        """Names of the script itself, outside all functions."""
        self.functions: dict[ast.FunctionDef | ast.AsyncFunctionDef, bool] = {}
        """Whether each function was called."""
        self.aliases: dict[str, str] = {}
        """Original names of imports, by the name in the script."""
        self.flags: dict[str, tuple[str, Any]] = {}
        """Attribute and switch value of each parser option."""
        self.shared: set[str] = set()
        """Names that the current function declares `global` or `nonlocal`."""
        self.perhaps: list[Any] = []
        """Return values of the current function in branches that may not be taken."""

    def run(self, body: Iterable[ast.stmt]) -> None:
        """Follow statements."""
        raise NotImplementedError

    def call(self, node: ast.Call, owner: Any = None) -> Any:
        """The value of a call; trainers and configurations are recorded."""
        name = self.aliases.get(get_name(node.func), get_name(node.func))
        own = self.value(node.func) if isinstance(node.func, ast.Name) else None
        if isinstance(own, Function):
            return self.call_function(own, node)
        if isinstance(own, OwnClass):
            return self._create_object(own, node)
        if name == "from_pretrained" and get_dotted_name(node.func).startswith("PeftModel"):
            model = self.value(node.args[0]) if node.args else None
            lora = Given(Made("LoraConfig"), self.place(node))
            return Made(name, (dict(model.entries) if isinstance(model, Made) else {}) | {"peft_config": lora})
        if name in ("from_pretrained", "from_dict", LAUNCH) or (name.endswith(_ENDS) and name[:1].isupper()):
            instance = self._record(name, node)
            text = get_dotted_name(node.func)
            return add_default(instance, text, self.place(node)) if is_unsloth(text) else instance
        if name == "get_peft_model":
            wrapped = self._record(name, node)
            model = wrapped.get("model")
            if "peft_config" not in wrapped.entries:  # unsloth's takes what LoraConfig does
                adapters = {key: entry for key, entry in wrapped.entries.items() if key not in ("model", "args")}
                wrapped.entries["peft_config"] = Given(Made("LoraConfig", adapters, node.lineno), self.place(node))
            before = model if isinstance(model, Made) else Made("from_pretrained")
            return Made(before.name, before.entries | wrapped.entries)
        if name == "prepare_model_for_kbit_training" and node.args:
            return self.value(node.args[0])
        if name == "setattr" and len(node.args) == 3:
            self._set_attribute(node)
            return None
        if isinstance(node.func, ast.Attribute):
            owner = self.value(node.func.value)
        for call in (self._call_method, self._call_parser):
            if (result := call(node, name, owner)) is not None:
                return result
        return super().call(node, owner)

    def _value(self, node: ast.expr) -> Any:
        if not isinstance(node, ast.Lambda):
            return super()._value(node)
        body: list[ast.stmt] = [ast.copy_location(ast.Return(node.body), node)]
        return Function(ast.copy_location(ast.FunctionDef("lambda", node.args, body, []), node))

    def _evaluate_attribute(self, node: ast.Attribute) -> Any:
        owner = self.names.get(node.value.id) if isinstance(node.value, ast.Name) else None
        if isinstance(owner, Made) and isinstance(owner.own, OwnClass) and node.attr in owner.own.methods:
            method = owner.own.methods[node.attr]
            if {get_name(decorator) for decorator in method.decorator_list} & {"property", "cached_property"}:
                return self.call_function(Function(method), ast.Call(node, [], []), [owner])
        return super()._evaluate_attribute(node)

    def _set_attribute(self, node: ast.Call) -> None:
        """`setattr`."""
        owner, key = self.value(node.args[0]), self.value(node.args[1])
        if isinstance(owner, Made) and isinstance(key, str) and is_known(key):
            self.give(owner, key, Given(self.value(node.args[2]), self.place(node)))
        elif isinstance(owner, Made):
            self.notes.append(f"{self.place(node)}: what {self.quote(node)} sets is known only at run time")

    def give(self, owner: Made, key: str, entry: Given) -> None:
        """Set an attribute, unless the object would then contain itself."""
        before = owner.entries.get(key)
        owner.entries[key] = entry
        if not self.takes(owner):
            owner.entries |= {key: before} if before is not None else {}
            if before is None:
                del owner.entries[key]

    def _call_method(self, node: ast.Call, name: str, owner: Any) -> Any:
        """The value of a method call of the script's own class; None for any other call."""
        if is_made(owner, _ENDS) and name.startswith("set_"):
            self.notes.append(f"{self.place(node)}: what {self.quote(node)[:80]} sets is not read")
        own = owner.own if isinstance(owner, Made) else owner
        if not isinstance(own, OwnClass) or name not in own.methods:
            return None
        marks = {get_name(decorator) for decorator in own.methods[name].decorator_list}
        first = [] if "staticmethod" in marks or (owner is own and "classmethod" not in marks) else [owner]
        return self.call_function(Function(own.methods[name]), node, first)

    def _create_object(self, own: OwnClass, node: ast.Call) -> Made:
        """An object of the script's own class, after its constructor."""
        if "__init__" in own.methods:
            instance = Made(own.base, dict(own.defaults), node.lineno, own)
            if own.base != own.name:  # the constructor usually passes its arguments to the base class
                instance.entries |= self._record(own.base, node, own).entries
            self.made.append(instance)
            self.call_function(Function(own.methods["__init__"]), node, [instance])
            return instance
        instance = self._record(own.base, node, own)
        if "__post_init__" in own.methods:
            self.call_function(Function(own.methods["__post_init__"]), ast.Call(node.func, [], []), [instance])
        return instance

    def _record(self, name: str, node: ast.Call, own: OwnClass | None = None) -> Made:
        entries = dict(own.defaults) if own else {}
        name = _ALIASES.get(name, name)
        names: Sequence[str] = POSITIONAL.get(name, ("output_dir",) if name.endswith("Config") else ())
        keys = own.fields if own and own.base == own.name else names
        for key, value in zip(keys, self._evaluate_positional(node), strict=False):
            entries[key] = Given(value, self.place(node))
        for keyword in node.keywords:
            place = self.place(keyword.value)
            if keyword.arg is not None:
                entries[keyword.arg] = Given(self.value(keyword.value), place)
            elif isinstance(more := self.value(keyword.value), dict):
                entries |= {str(key): Given(value, place) for key, value in more.items()}
            else:
                self.notes.append(f"{place}: what **{self.quote(keyword.value)} gives {name} is known only at run time")
        instance = Made(name, entries, node.lineno, own)
        self.made.append(instance)
        if name.endswith(("Trainer", LAUNCH)) and self.spent <= MAX_WORK:
            self.followed_to = node.lineno
        return instance

    def default(self, node: ast.expr) -> Any:
        """The default of a dataclass field, also within `field(...)`."""
        if isinstance(node, ast.Call) and get_name(node.func) == "field":
            parts = {keyword.arg: keyword.value for keyword in node.keywords}
            factory = parts.get("default_factory")
            node = (
                parts.get("default")
                or (factory.body if isinstance(factory, ast.Lambda) else None)
                or ast.Constant(None)
            )
        return self.value(node)

    def _call_parser(self, node: ast.Call, name: str, owner: Any) -> Any:
        """The value of a call of an argument parser, of options or of dataclasses; None for any other call."""
        if name == "ArgumentParser":
            self.has_own_flags = True
            return Made(name)
        if name in _CLASS_PARSERS:
            classes = (
                node.args[0] if node.args else next((keyword.value for keyword in node.keywords), ast.Constant(None))
            )
            listed = self.value(classes)
            if not self.takes(listed):
                return None
            names = [
                item.name if isinstance(item, OwnClass) else strip_marks(str(simplify(item))).rpartition(".")[2]
                for item in (listed if isinstance(listed, list) else [listed])
            ]
            return Made("ClassParser", {class_name: Given(None, "") for class_name in names})
        if not isinstance(node.func, ast.Attribute) or name not in (*_PARSED_CLASSES, *_OPTION_CALLS):
            return None
        if is_made(owner, "ClassParser") and name in _PARSED_CLASSES:
            mapping = self.value(node.args[0]) if name == "parse_dict" and node.args else None
            flags = (
                {}
                if name == "parse_dict"
                else {key: entry.value for key, entry in self._read_typed_flags(node).items()}
            )
            instances: list[Any] = [
                self._parse_class(key, mapping if isinstance(mapping, dict) else flags) for key in owner.entries
            ]
            has_rest = any(
                keyword.arg == "return_remaining_strings" and self.value(keyword.value) for keyword in node.keywords
            )
            return [*instances, []] if has_rest else instances
        return self._call_options(owner, node, name) if is_made(owner, "ArgumentParser") else None

    def _parse_class(self, name: str, values: Mapping[Any, Any]) -> Made:
        """The object of a dataclass that a parser returns: defaults, with the parsed values."""
        own = self.names.get(name)
        instance = Made(own.base, dict(own.defaults), 0, own) if isinstance(own, OwnClass) else Made(name)
        instance.entries |= {str(key): Given(value, self.file) for key, value in values.items()}
        for key in instance.entries:
            for outside in self.outside:
                if outside.rpartition(".")[2] == key:
                    self.used.add(outside)
                    instance.entries[key] = Given(parse_word(self.outside[outside]), f"--set {outside}")
        if isinstance(own, OwnClass) and "__post_init__" in own.methods:
            self.call_function(Function(own.methods["__post_init__"]), ast.Call(ast.Name(name), [], []), [instance])
        self.made.append(instance)
        return instance

    def _call_options(self, parser: Made, node: ast.Call, name: str) -> Any:
        """The value of a parser's method: `add_argument` records a default, `parse_args` returns them all."""
        if name == "add_argument":
            flags = [flag for argument in node.args if isinstance(flag := self.value(argument), str)]
            words = {key: value for key, value in self.keywords(node).items() if not isinstance(value, list | dict)}
            option = str(words.get("dest") or next((flag for flag in flags if flag.startswith("--")), "").strip("-"))
            option = option.replace("-", "_")
            switch = {"store_true": False, "store_false": True}.get(str(words.get("action")))
            for flag in flags:
                self.flags[flag.strip("-").replace("-", "_")] = option, None if switch is None else not switch
            if "default" in words or switch is not None or not words.get("required"):
                value = words.get("default", switch)
                is_text = isinstance(value, str) and is_known(value) and "type" in words
                parser.entries[option] = Given(parse_word(str(value)) if is_text else value, self.place(node))
            return ""
        if name == "set_defaults":
            parser.entries.update({key: Given(value, self.place(node)) for key, value in self.keywords(node).items()})
            return ""
        if name in ("add_argument_group", "add_mutually_exclusive_group"):
            return parser
        entries = parser.entries | self._read_typed_flags(node)
        for outside, text in self.outside.items():
            last = outside.rpartition(".")[2].replace("-", "_")
            option, switch = self.flags.get(last, (last, None))
            if option in entries or "." not in outside:
                self.used |= {outside} if option in entries else set()
                is_switched = switch is not None and parse_word(text) is True
                entries[option] = Given(switch if is_switched else parse_word(text), f"--set {outside}")
        parsed = Made("Namespace", entries)
        return [parsed, []] if name == "parse_known_args" else parsed

    def _read_typed_flags(self, node: ast.Call) -> dict[str, Given]:
        """Flags in a list of words that the script passes to its parser."""
        arguments = self.value(node.args[0]) if node.args else None
        words = arguments if isinstance(arguments, list) and self.takes(arguments) else []
        entries: dict[str, Given] = {}
        for at, word in enumerate(words):
            if isinstance(word, str) and word.startswith("-") and len(word) > 1:
                flag, separator, value = word.lstrip("-").partition("=")
                after = words[at + 1] if at + 1 < len(words) else None
                is_switch = not separator and (after is None or str(after).startswith("--"))
                text = value if separator else str(after)
                option, switch = self.flags.get(flag.replace("-", "_"), (flag.replace("-", "_"), None))
                flag_value = (True if switch is None else switch) if is_switch else parse_word(text)
                entries[option] = Given(flag_value, self.place(node))
        return entries

    def call_function(self, function: Function, node: ast.Call | None, first: Sequence[Any] = ()) -> Any:
        """The return value of the script's own function. first: arguments before those of the call, such as `self`.

        Without a call its parameters have their defaults, or are unknown.
        """
        self.functions[function.node] = True
        self.num_calls += 1
        if self.depth >= MAX_DEPTH or self.num_calls > MAX_CALLS:
            return mark_unknown(function.node.name)
        outer, shared, perhaps = self.names, self.shared, self.perhaps
        if self.depth == 0:
            self.module = outer
        seen = self.module if function.is_global else outer
        self.spent += len(seen) // 4  # they are copied
        self.names, self.shared, self.perhaps = (
            {**seen, **self._bind_arguments(function.node.args, node, first)},
            set(),
            [],
        )
        self.depth += 1
        result: Any = None
        try:
            self.run(function.node.body)
        except ReturnError as returned:
            result = returned.value
        shared_values = {name: self.names[name] for name in self.shared if name in self.names}
        if any(type(value) is not type(result) or value != result for value in self.perhaps) and not isinstance(
            result, Made
        ):
            result = mark_unknown(f"{function.node.name}()")
        self.names, self.shared, self.perhaps = outer, shared, perhaps
        self.module.update(shared_values)
        self.names.update(shared_values)
        self.depth -= 1
        return result

    def _bind_arguments(self, parameters: ast.arguments, node: ast.Call | None, first: Sequence[Any]) -> dict[str, Any]:
        """The value of each parameter: the call's, its default, or one from outside."""
        named = [*parameters.posonlyargs, *parameters.args]
        values: dict[str, Any] = {
            argument.arg: self._look_up_outside(argument.arg, ast.Name(argument.arg))
            for argument in (*named, *parameters.kwonlyargs)
        }
        last = named[len(named) - len(parameters.defaults) :]
        values |= {
            argument.arg: self.value(default) for argument, default in zip(last, parameters.defaults, strict=True)
        }
        if node is None:  # a command line calls it, whose parser fills the classes of its parameters
            classes = {argument.arg: get_name(argument.annotation) for argument in named if argument.annotation}
            values |= {
                name: self._parse_class(kind, {})
                for name, kind in classes.items()
                if isinstance(self.names.get(kind), OwnClass)
            }
        for parameter, default in zip(parameters.kwonlyargs, parameters.kw_defaults, strict=True):
            if default is not None:
                values[parameter.arg] = self.value(default)
        positional = [*first, *self._evaluate_positional(node)] if node is not None else [*first]
        values |= dict(zip((argument.arg for argument in named), positional, strict=False))
        words = self._evaluate_keywords(node) if node is not None else {}
        known = {argument.arg for argument in (*named, *parameters.kwonlyargs)}
        values |= {key: value for key, value in words.items() if key in known}
        if parameters.vararg is not None:
            values[parameters.vararg.arg] = positional[len(named) :]
        if parameters.kwarg is not None:
            values[parameters.kwarg.arg] = {key: value for key, value in words.items() if key not in known}
        return values

    def _evaluate_positional(self, node: ast.Call) -> list[Any]:
        values: list[Any] = []
        for argument in node.args:
            value = self.value(argument.value if isinstance(argument, ast.Starred) else argument)
            values += value if isinstance(argument, ast.Starred) and isinstance(value, list) else [value]
            if len(values) > MAX_ITEMS:
                raise ValueError("very many arguments")
        return values

    def _evaluate_keywords(self, node: ast.Call) -> dict[str, Any]:
        try:
            return self.keywords(node)
        except ValueError as error:
            self.notes.append(f"{self.place(node)}: what **{error} gives is known only at run time")
            return {str(keyword.arg): self.value(keyword.value) for keyword in node.keywords if keyword.arg is not None}
