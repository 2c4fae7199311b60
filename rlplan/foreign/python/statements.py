"""A Python script followed statement by statement, as far as its text alone tells what it does.

In: a syntax tree. Out: the trainers and configurations that it makes, in order, and notes on what only running would
tell. A name is not known where a branch, or a loop, that only running would choose gives it another value.
Left out: expressions (values.py), what a call of the script's own gives (calls.py), what a trainer is told (file.py).
"""

import ast
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from rlplan.foreign.python.calls import Calls, Function, OwnClass, ReturnError
from rlplan.foreign.python.values import LONG, MAX_WORK, Made, is_made, name_of, text_of
from rlplan.foreign.settings import Given, typed
from rlplan.foreign.unknown import is_known, unknown

_USUAL = ("main", "train", "run")
"""Functions that a command line calls, before others."""
MAX_PASSES = 2_000
"""Passes through loops in all."""

MAX_OBJECTS = 200
"""Objects whose changes in branches are looked at."""
_NOTHING = object()


def _differ(values: Sequence[Any]) -> bool:
    return any(type(one) is not type(values[0]) or one != values[0] for one in values)


def _any_case(node: ast.Match) -> list[list[ast.stmt]]:
    """The bodies of all cases, the first one last, and that none is taken."""
    return [[], *(case.body for case in reversed(node.cases))]


def _copied(value: Any) -> Any:
    """A mapping or a list that a branch may change."""
    return dict(value) if isinstance(value, dict) else list(value) if isinstance(value, list) else value


class _Objects:
    """What objects are given before branches and after each of them."""

    def __init__(self, objects: Sequence[Made]) -> None:
        self.objects = objects[:MAX_OBJECTS]
        self.before = [dict(one.given) for one in self.objects]
        self.after: list[list[dict[str, Given]]] = []
        self.size = sum(map(len, self.before))

    def restore(self) -> None:
        """As before the branches."""
        for one, given in zip(self.objects, self.before, strict=True):
            one.given = dict(given)

    def keep(self) -> None:
        """What a branch leaves."""
        self.after.append([one.given for one in self.objects])

    def merge(self, place: str) -> None:
        """What is the same after all branches; what differs is not known."""
        for index, one in enumerate(self.objects if self.after else ()):
            given = [left[index] for left in self.after]
            one.given = dict(given[-1])
            for key in {key for each in given for key in each}:
                if _differ([each[key].value if key in each else _NOTHING for each in given]):
                    one.given[key] = Given(unknown(key), place)


class _EndError(Exception):
    """`break` and `continue`."""


class Script(Calls):
    """One script. made: trainers and configurations, in order. notes: on what only running would tell."""

    def __init__(self, tree: ast.Module, file: str, outside: Mapping[str, str]) -> None:
        super().__init__(file, outside)
        self.passes = 0
        with suppress(ReturnError):
            self.run(tree.body)
        for node in sorted(self.functions, key=lambda one: one.name not in _USUAL):
            if not any(one.name.endswith("Trainer") for one in self.made) and not self.functions[node]:
                self.called(Function(node), None)  # nobody in the script calls it: a command line does

    def run(self, body: Iterable[ast.stmt]) -> None:
        """Follow statements. Raises: ReturnError."""
        for statement in body:
            if self.spent > MAX_WORK:
                return  # the script is refused
            try:
                self._statement(statement)
            except RecursionError:
                self.notes.append(f"{self.place(statement)}: {LONG}, which is not followed")

    def _statement(self, node: ast.stmt) -> None:
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                self.names[node.name] = Function(node, self.depth == 0)
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
                self._augment(node)
            case ast.Expr():
                self.value(node.value)
            case ast.Return():
                raise ReturnError(None if node.value is None else self.value(node.value))
            case _:
                self._blocks(node)

    def _blocks(self, node: ast.stmt) -> None:
        """Branches, loops, `with`, and `try` without its handlers of errors."""
        match node:
            case ast.If():
                test = self.truth(node.test)
                if test is None:
                    self._either([node.orelse, node.body], f"whether {text_of(node.test)} holds", node)
                else:
                    self.run(node.body if test else node.orelse)
            case ast.Match():
                self._match(node)
            case ast.For() | ast.AsyncFor():
                self._for(node)
            case ast.While():
                self._while(node)
            case ast.With() | ast.AsyncWith():
                for item in node.items:
                    found = self.value(item.context_expr)
                    if item.optional_vars is not None:
                        self._bind(item.optional_vars, found)
                self.run(node.body)
            case ast.Try() | ast.TryStar():
                self.run([*node.body, *node.orelse, *node.finalbody])
            case _:
                self._names(node)

    def _names(self, node: ast.stmt) -> None:
        """Ends of loops, and statements about names alone."""
        match node:
            case ast.Break() | ast.Continue():
                raise _EndError(type(node).__name__.lower())
            case ast.Global() | ast.Nonlocal():
                self.shared |= set(node.names)
            case ast.ImportFrom():
                self.aliases |= {one.asname: one.name for one in node.names if one.asname is not None}
            case ast.Delete():
                for target in node.targets:
                    self._delete(target)

    def _for(self, node: ast.For | ast.AsyncFor) -> None:
        found = self.value(node.iter)
        items = list(found) if isinstance(found, dict | list) else None
        if items is None or self.passes + len(items) > MAX_PASSES:
            self._bind(node.target, unknown(text_of(node.target)))
            self._either([[], node.body], f"what {text_of(node.iter)} holds", node)
            return
        self.passes += len(items)
        for item in items:
            self._bind(node.target, item)
            if self._pass(node.body):
                return

    def _pass(self, body: Sequence[ast.stmt]) -> bool:
        """One pass through a loop; whether it was the last."""
        try:
            self.run(body)
        except _EndError as end:
            return str(end) == "break"
        return False

    def _while(self, node: ast.While) -> None:
        while (test := self.truth(node.test)) is not None and self.passes < MAX_PASSES:
            if not test:
                return
            self.passes += 1
            if self._pass(node.body):
                return
        self._either([[], node.body], f"whether {text_of(node.test)} holds", node)

    def _match(self, node: ast.Match) -> None:
        """The case that is taken, of values and `_`; all of them where only running would tell."""
        subject = self.value(node.subject)
        if isinstance(subject, str) and not is_known(subject):
            self._either(_any_case(node), f"which case {text_of(node.subject)} is", node)
            return
        for case in node.cases:
            options = case.pattern.patterns if isinstance(case.pattern, ast.MatchOr) else [case.pattern]
            values = [self.value(one.value) for one in options if isinstance(one, ast.MatchValue)]
            values += [one.value for one in options if isinstance(one, ast.MatchSingleton)]
            is_any = isinstance(case.pattern, ast.MatchAs) and case.pattern.pattern is None
            guard = True if case.guard is None else self.truth(case.guard)
            if (len(values) < len(options) and not is_any) or guard is None:
                self._either(_any_case(node), f"which case {text_of(node.subject)} is", node)
                return
            if (is_any or subject in values) and guard:
                self.run(case.body)
                return

    def _either(self, bodies: Sequence[Sequence[ast.stmt]], what: str, node: ast.stmt) -> None:
        """Bodies of which only running would choose one, the usual one last; what they leave different is not known.

        what: is not known, in words.
        """
        before, num_made, returned = dict(self.names), len(self.made), list[Any]()
        objects = _Objects([one for one in (*self.made, *before.values()) if isinstance(one, Made)])
        self.spent += 4 * len(before) + objects.size
        after: list[dict[str, Any]] = []
        for body in bodies:
            self.names = {name: _copied(one) for name, one in before.items()}
            objects.restore()
            with suppress(_EndError):
                try:
                    self.run(body)
                except ReturnError as error:
                    returned.append(error.value)
                    continue
            after.append(self.names)
            objects.keep()
        self.names = after[-1] if after else dict(before)
        for name in {key for names in after for key in names}:
            values = [names.get(name) for names in after]
            if not any(isinstance(one, Made) for one in values) and _differ(values):
                self.names[name] = unknown(name)
        objects.merge(self.place(node))
        if len(self.made) > num_made:
            read = "its first branch is read" if isinstance(node, ast.If | ast.Match) else "its body is read once"
            self.notes.append(f"{self.place(node)}: {what} is not known before it runs; {read}")
        if returned and not after:
            same = all(one == returned[-1] for one in returned)
            raise ReturnError(returned[-1] if same or isinstance(returned[-1], Made) else unknown(what))
        self.perhaps += returned

    def _bind(self, target: ast.expr, value: Any) -> None:
        match target:
            case ast.Name():
                if target.id in self.outside:
                    self.used.add(target.id)
                    value = typed(self.outside[target.id])
                self.names[target.id] = value
            case ast.Tuple() | ast.List():
                if is_made(value, "from_pretrained"):  # unsloth gives a tokenizer too
                    value = [value, *(unknown(text_of(one)) for one in target.elts[1:])]
                parts = value if isinstance(value, list) and len(value) == len(target.elts) else None
                for index, one in enumerate(target.elts):
                    self._bind(one, unknown(text_of(one)) if parts is None else parts[index])
            case ast.Attribute():
                owner = self.value(target.value)
                if isinstance(owner, Made):
                    self.give(owner, target.attr, Given(value, self.place(target)))
                elif isinstance(owner, OwnClass):
                    owner.defaults[target.attr] = Given(value, self.place(target))
            case ast.Subscript():
                self._give_item(target, value)

    def _augment(self, node: ast.AugAssign) -> None:
        """`a += b`; a mapping or a list changes under all its names."""
        read = ast.parse(ast.unparse(node.target), mode="eval").body
        owner, more = self.value(read), self.value(node.value)
        if isinstance(owner, dict) and isinstance(more, dict) and isinstance(node.op, ast.BitOr):
            owner.update(more)
        elif isinstance(owner, list) and isinstance(more, list) and isinstance(node.op, ast.Add):
            owner += list(more)
        else:
            self._bind(node.target, self.value(ast.BinOp(read, node.op, node.value)))
            return
        if not self.takes(owner):
            owner.clear()

    def _give_item(self, target: ast.Subscript, value: Any) -> None:
        """Set an element; not where the list or the mapping would hold itself."""
        owner, key = self.value(target.value), self.value(target.slice)
        is_item = isinstance(owner, list) and isinstance(key, int) and -len(owner) <= key < len(owner)
        if is_item or (isinstance(owner, dict) and isinstance(key, str)):
            items: Any = owner
            items[key] = value
            if not self.takes(items):
                items[key] = unknown(LONG)

    def _delete(self, target: ast.expr) -> None:
        if isinstance(target, ast.Name):
            self.names.pop(target.id, None)
        elif isinstance(target, ast.Subscript):
            owner, key = self.value(target.value), self.value(target.slice)
            if isinstance(owner, dict) and isinstance(key, str):
                owner.pop(key, None)

    def _class(self, node: ast.ClassDef) -> None:
        """Its fields with their defaults, and its methods."""
        found = OwnClass(node.name, node.name, {}, {}, [])
        for one in reversed(node.bases):
            known = self.names.get(name_of(one))
            if isinstance(known, OwnClass):
                base = node.name if known.base == known.name else known.base
                methods, defaults = found.methods | known.methods, found.defaults | known.defaults
                found = OwnClass(node.name, base, defaults, methods, known.fields)
            elif name_of(one).endswith(("Config", "Trainer")):
                base = self.aliases.get(name_of(one), name_of(one))
                found = OwnClass(node.name, base, found.defaults, found.methods, found.fields)
        defaults, methods, fields = dict(found.defaults), dict(found.methods), list(found.fields)
        for statement in node.body:
            if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
                fields += [statement.target.id] * (statement.target.id not in fields)
            if isinstance(statement, ast.AnnAssign | ast.Assign) and statement.value is not None:
                targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
                given = Given(self.default(statement.value), self.place(statement))
                defaults |= {one.id: given for one in targets if isinstance(one, ast.Name)}
            elif isinstance(statement, ast.FunctionDef):
                methods[statement.name] = statement
                self.functions.setdefault(statement, False)
        self.names[node.name] = OwnClass(node.name, found.base, defaults, methods, fields)
