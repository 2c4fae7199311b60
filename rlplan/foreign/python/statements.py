"""Abstract interpretation of a Python script: its statements are followed as far as the text decides what happens.

In: a syntax tree. Out: the trainers and configurations that it creates, in order, and notes on values that are known
only at run time. A name becomes unknown where branches that are chosen at run time give it different values.
Left out: expressions (values.py), calls of the script's own functions (calls.py), a trainer's settings (file.py).
"""

import ast
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from rlplan.foreign.python.calls import MAX_CALLS, Calls, Function, OwnClass, ReturnError
from rlplan.foreign.python.values import LONG, MAX_QUOTE, MAX_WORK, Made, get_dotted_name, get_name, is_made, simplify
from rlplan.foreign.settings import Given, parse_word
from rlplan.foreign.unknown import is_known, mark_unknown

_USUAL = ("main", "train", "run")
"""Functions that a command line usually calls; they are followed before others."""
MAX_PASSES = 2_000
"""Loop iterations in all."""

MAX_OBJECTS = 200
"""Objects whose changes in branches are compared."""
_NOTHING = object()


def _differ(values: Sequence[Any]) -> bool:
    return any(type(value) is not type(values[0]) or value != values[0] for value in values)


def _mark_difference(name: str, values: Sequence[Any]) -> str:
    """The unknown value of a name that differs between branches; of options that a branch extends, the rest is known.

    >>> from rlplan.foreign.unknown import strip_marks
    >>> strip_marks(_mark_difference("args", ["--lr 1 ", "--lr 1 --bf16 "])), strip_marks(_mark_difference("x", [1, 2]))
    ('--lr 1 --bf16 ', 'x')
    """
    shortest, *others = sorted((value for value in values if isinstance(value, str)), key=len) or [""]
    is_extended = len(others) + 1 == len(values) and all(other.startswith(shortest) for other in others)
    if is_extended and shortest.endswith(" "):
        return f"{shortest}{mark_unknown(others[-1].removeprefix(shortest).strip())} "
    return mark_unknown(name)


def _list_case_bodies(node: ast.Match) -> list[list[ast.stmt]]:
    """The bodies of all cases, the first one last, and an empty one for no match."""
    return [[], *(case.body for case in reversed(node.cases))]


def _copy(value: Any) -> Any:
    """A copy of a mapping or a list, which a branch may change."""
    return dict(value) if isinstance(value, dict) else list(value) if isinstance(value, list) else value


class _Objects:
    """Attributes of objects before branches and after each of them."""

    def __init__(self, objects: Sequence[Made]) -> None:
        self.objects = objects[:MAX_OBJECTS]
        self.before = [dict(instance.entries) for instance in self.objects]
        self.after: list[list[dict[str, Given]]] = []
        self.size = sum(map(len, self.before))

    def restore(self) -> None:
        """Reset to the state before the branches."""
        for instance, entries in zip(self.objects, self.before, strict=True):
            instance.entries = dict(entries)

    def keep(self) -> None:
        """Record the state after a branch."""
        self.after.append([instance.entries for instance in self.objects])

    def merge(self, place: str) -> None:
        """Keep attributes that are equal after all branches, and mark the others as unknown."""
        for index, instance in enumerate(self.objects if self.after else ()):
            branches = [left[index] for left in self.after]
            instance.entries = dict(branches[-1])
            for key in {key for branch in branches for key in branch}:
                if _differ([branch[key].value if key in branch else _NOTHING for branch in branches]):
                    instance.entries[key] = Given(mark_unknown(key), place)


class _EndError(Exception):
    """A `break` or `continue`."""


class Script(Calls):
    """One script, followed from its first statement to its last."""

    def __init__(
        self, tree: ast.Module, text: str, file: str, outside: Mapping[str, str], most_work: int = MAX_WORK
    ) -> None:
        """most_work: limit on the work of one top-level statement; what a longer one sets is unknown."""
        super().__init__(text, file, outside)
        self.passes = 0
        for statement in tree.body:
            self.limit = min(MAX_WORK, self.spent + most_work)
            with suppress(ReturnError, _EndError):
                self.run([statement])
            if self.spent > self.limit < MAX_WORK:
                self._forget(statement)
        self.limit = MAX_WORK
        for node in sorted(self.functions, key=lambda function: function.name not in _USUAL):
            if not self.followed_to and not self.functions[node] and self.num_calls < MAX_CALLS:
                self.call_function(Function(node), None)  # the script never calls it, so a command line does

    def run(self, body: Iterable[ast.stmt]) -> None:
        """Follow statements. Raises: ReturnError."""
        for statement in body:
            self.spent += 1
            if self.spent > self.limit:
                return  # read_python refuses the script, or follows it with a limit for each statement
            try:
                self._follow_statement(statement)
            except RecursionError:
                self.notes.append(f"{self.place(statement)}: {LONG}, which is not followed")

    def _forget(self, statement: ast.stmt) -> None:
        """Mark the names as unknown that a statement sets which was too long to be followed."""
        self.notes.append(f"{self.place(statement)} takes too long to be followed; what it sets is unknown")
        for node in ast.walk(statement):
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                self.names[node.id] = mark_unknown(LONG)

    def _follow_statement(self, node: ast.stmt) -> None:
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                self.names[node.name] = Function(node, self.depth == 0)
                self.functions.setdefault(node, False)
            case ast.ClassDef():
                self._define_class(node)
            case ast.Assign():
                value = self.value(node.value)
                for target in node.targets:
                    self._assign(target, value)
            case ast.AnnAssign(value=ast.expr() as annotated):
                self._assign(node.target, self.value(annotated))
            case ast.AugAssign():
                self._assign_augmented(node)
            case ast.Expr():
                self.value(node.value)
            case ast.Return():
                raise ReturnError(None if node.value is None else self.value(node.value))
            case _:
                self._follow_block(node)

    def _follow_block(self, node: ast.stmt) -> None:
        """Branches, loops, `with`, and `try` without its exception handlers."""
        match node:
            case ast.If():
                test = self.truth(node.test)
                if test is None:
                    self._follow_either([node.orelse, node.body], f"whether {self.quote(node.test)} holds", node)
                else:
                    self.run(node.body if test else node.orelse)
            case ast.Match():
                self._follow_match(node)
            case ast.For() | ast.AsyncFor():
                self._follow_for_loop(node)
            case ast.While():
                self._follow_while(node)
            case ast.With() | ast.AsyncWith():
                for item in node.items:
                    context = self.value(item.context_expr)
                    if item.optional_vars is not None:
                        self._assign(item.optional_vars, context)
                self.run(node.body)
            case ast.Try() | ast.TryStar():
                self.run([*node.body, *node.orelse, *node.finalbody])
            case _:
                self._follow_names(node)

    def _follow_names(self, node: ast.stmt) -> None:
        """`break` and `continue`, and statements that only declare or delete names."""
        match node:
            case ast.Break() | ast.Continue():
                raise _EndError(type(node).__name__.lower())
            case ast.Global() | ast.Nonlocal():
                self.spent += len(node.names)
                self.shared |= set(node.names)
            case ast.ImportFrom():
                self.aliases |= {alias.asname: alias.name for alias in node.names if alias.asname is not None}
            case ast.Delete():
                self.spent += len(node.targets)
                for target in node.targets:
                    self._delete(target)

    def _follow_for_loop(self, node: ast.For | ast.AsyncFor) -> None:
        iterable = self.value(node.iter)
        items = list(iterable) if isinstance(iterable, dict | list) else None
        if items is None or self.passes + len(items) > MAX_PASSES:
            self._assign(node.target, mark_unknown(self.quote(node.target)))
            self._follow_either([[], node.body], f"what {self.quote(node.iter)} holds", node)
            return
        self.passes += len(items)
        for item in items:
            self._assign(node.target, item)
            if self._run_iteration(node.body):
                return

    def _run_iteration(self, body: Sequence[ast.stmt]) -> bool:
        """Run one loop iteration; True after a `break`."""
        try:
            self.run(body)
        except _EndError as end:
            return str(end) == "break"
        return False

    def _follow_while(self, node: ast.While) -> None:
        while (test := self.truth(node.test)) is not None and self.passes < MAX_PASSES:
            if not test:
                return
            self.passes += 1
            if self._run_iteration(node.body):
                return
        self._follow_either([[], node.body], f"whether {self.quote(node.test)} holds", node)

    def _follow_match(self, node: ast.Match) -> None:
        """The matching case, among values and `_`; all cases where the match is known only at run time."""
        subject = self.value(node.subject)
        for case in node.cases:
            matched = self._match(case.pattern, subject)
            guard = True if case.guard is None or not matched else self.truth(case.guard)
            if matched is None or guard is None:
                self._follow_either(_list_case_bodies(node), f"which case {self.quote(node.subject)} is", node)
                return
            if matched and guard:
                self.run(case.body)
                return

    def _match(self, pattern: ast.pattern, subject: Any) -> bool | None:
        """Whether a value matches a pattern of values, `_`, `|` and sequences; None where only a run decides."""
        match pattern:
            case ast.MatchAs(pattern=None):
                return True
            case _ if isinstance(subject, str) and not is_known(subject):
                return None
            case ast.MatchValue():
                return bool(self.value(pattern.value) == subject)
            case ast.MatchSingleton():
                return pattern.value is subject
            case ast.MatchOr():
                answers = [self._match(part, subject) for part in pattern.patterns]
                return True if True in answers else None if None in answers else False
            case ast.MatchSequence() if isinstance(subject, list) and len(subject) == len(pattern.patterns):
                answers = [self._match(part, item) for part, item in zip(pattern.patterns, subject, strict=True)]
                return False if False in answers else None if None in answers else True
        return None

    def _follow_either(self, bodies: Sequence[Sequence[ast.stmt]], what: str, node: ast.stmt) -> None:
        """Follow alternative bodies, the most likely one last; values that differ afterwards become unknown.

        what: the undecided condition, for the note.
        """
        before, num_made, returned = dict(self.names), len(self.made), list[Any]()
        # copies of names, lists and objects count as work
        shallow = sum(len(value) for value in before.values() if isinstance(value, list | dict))
        self.spent += len(self.made) // 4 + len(bodies) * (2 * len(before) + shallow // 4)
        if self.spent > self.limit:
            return
        objects = _Objects([instance for instance in (*self.made, *before.values()) if isinstance(instance, Made)])
        self.spent += len(bodies) * objects.size
        after: list[dict[str, Any]] = []
        for body in bodies:
            self.names = {name: _copy(value) for name, value in before.items()}
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
            if not any(isinstance(value, Made) for value in values) and _differ(values):
                self.names[name] = _mark_difference(name, values)
        objects.merge(self.place(node))
        if len(self.made) > num_made:
            read = "its first branch is read" if isinstance(node, ast.If | ast.Match) else "its body is read once"
            self.notes.append(f"{self.place(node)}: {what} is known only at run time; {read}")
        if returned and not after:
            same = all(value == returned[-1] for value in returned)
            raise ReturnError(returned[-1] if same or isinstance(returned[-1], Made) else mark_unknown(what))
        self.perhaps += returned

    def _assign(self, target: ast.expr, value: Any) -> None:
        match target:
            case ast.Name():
                if target.id in self.outside:
                    self.used.add(target.id)
                    value = parse_word(self.outside[target.id])
                self.names[target.id] = value
            case ast.Tuple() | ast.List():
                if is_made(value, "from_pretrained"):  # unsloth returns the model and a tokenizer
                    value = [value, *(mark_unknown(self.quote(element)) for element in target.elts[1:])]
                parts = value if isinstance(value, list) and len(value) == len(target.elts) else None
                for index, element in enumerate(target.elts):
                    self._assign(element, mark_unknown(self.quote(element)) if parts is None else parts[index])
            case ast.Attribute():
                owner = self.value(target.value)
                if isinstance(owner, Made):
                    self.give(owner, target.attr, Given(value, self.place(target)))
                elif isinstance(owner, OwnClass):
                    owner.defaults[target.attr] = Given(value, self.place(target))
            case ast.Subscript() if get_dotted_name(target.value) == "os.environ":
                self.environment[str(simplify(self.value(target.slice)))[:MAX_QUOTE]] = value
            case ast.Subscript():
                self._assign_item(target, value)

    def _assign_augmented(self, node: ast.AugAssign) -> None:
        """`a += b`; a mapping or a list changes in place, for all its names."""
        owner, more = self.value(node.target), self.value(node.value)
        if isinstance(owner, dict) and isinstance(more, dict) and isinstance(node.op, ast.BitOr):
            owner.update(more)
        elif isinstance(owner, list) and isinstance(more, list) and isinstance(node.op, ast.Add):
            owner += list(more)
        else:
            changed = ast.copy_location(ast.BinOp(node.target, node.op, node.value), node)
            self._assign(node.target, self.value(changed))
            return
        if not self.takes(owner):
            owner.clear()

    def _assign_item(self, target: ast.Subscript, value: Any) -> None:
        """Set an element, unless the list or the mapping would then contain itself."""
        owner, key = self.value(target.value), self.value(target.slice)
        is_item = isinstance(owner, list) and isinstance(key, int) and -len(owner) <= key < len(owner)
        if is_item or (isinstance(owner, dict) and isinstance(key, str)):
            items: Any = owner
            items[key] = value
            if not self.takes(items):
                items[key] = mark_unknown(LONG)

    def _delete(self, target: ast.expr) -> None:
        if isinstance(target, ast.Name):
            self.names.pop(target.id, None)
        elif isinstance(target, ast.Subscript):
            owner, key = self.value(target.value), self.value(target.slice)
            if isinstance(owner, dict) and isinstance(key, str):
                owner.pop(key, None)

    def _define_class(self, node: ast.ClassDef) -> None:
        """Record a class: its fields with defaults, and its methods."""
        own_class = OwnClass(node.name, node.name, {}, {}, {})
        for parent in reversed(node.bases):
            known = self.names.get(get_name(parent))
            if isinstance(known, OwnClass):
                base = node.name if known.base == known.name else known.base
                methods, defaults = own_class.methods | known.methods, own_class.defaults | known.defaults
                own_class = OwnClass(node.name, base, defaults, methods, known.fields)
            elif get_name(parent).endswith(("Config", "Trainer")):
                base = self.aliases.get(get_name(parent), get_name(parent))
                own_class = OwnClass(node.name, base, own_class.defaults, own_class.methods, own_class.fields)
        defaults, methods, fields = dict(own_class.defaults), dict(own_class.methods), dict(own_class.fields)
        self.spent += len(defaults) + len(methods) + len(fields)
        for statement in node.body:
            if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
                fields[statement.target.id] = None
            if isinstance(statement, ast.AnnAssign | ast.Assign) and statement.value is not None:
                targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
                entry = Given(self.default(statement.value), self.place(statement))
                defaults |= {target.id: entry for target in targets if isinstance(target, ast.Name)}
            elif isinstance(statement, ast.FunctionDef):
                methods[statement.name] = statement
                self.functions.setdefault(statement, False)
        self.names[node.name] = OwnClass(node.name, own_class.base, defaults, methods, fields)
