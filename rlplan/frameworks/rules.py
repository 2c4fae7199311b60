"""Rules of a framework: the values of a job's keys that its configuration can express and its trainer can run.

In: rules of a profile, and the values of a job's keys. Out: which values a search may try, which open keys have only
one value, and which stated values the framework lacks. Left out: the framework's own configuration keys (keys/).

A key that a job leaves open is checked once a search has chosen its value. A rule whose condition depends on an open
key is not checked before that.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from typing import Any

OPEN = "auto"
"""Value of a key that a job leaves open."""
SHARE = "share"
"""Value of a rule for `rollout.max_num_seqs`: an engine's equal share of a step's rollouts."""


@dataclass(frozen=True)
class Rule:
    """The values of one key that a framework supports."""

    key: str
    """Dotted key of a job."""
    why: str
    """Reason for users: a sentence without its full stop."""
    only: tuple[Any, ...] = ()
    """Supported values; `=KEY` is the value of another key. If there is only one, an open key is set to it."""
    searched: tuple[Any, ...] = ()
    """Values that a search tries for an open key, if they are fewer than `only`."""
    when: Mapping[str, Any] = field(default_factory=dict)
    """Values of other keys that are the rule's condition."""
    reads_more: bool = False
    """Whether the framework has more values, which are read from its files but never exported."""

    @property
    def tried(self) -> tuple[Any, ...]:
        """The values that a search may try."""
        return self.searched or self.only


def format_value(value: Any) -> str:
    """A value as typed on a command line: `true`, `null`, `8`."""
    return {"True": "true", "False": "false", "None": "null"}.get(str(value), str(value))


def matches(value: Any, wanted: Any) -> bool:
    """Whether a value meets a condition.

    A condition is a value, a list of values, a bound (`>1`), `*` (anything but None), `{not: ...}`, or `{has: ...}`, a
    word that the value's text contains.

    >>> matches(4, ">1"), matches("host", ["none", "host"]), matches(None, "*"), matches(True, "true")
    (True, True, False, True)
    """
    if value is wanted:  # the usual case of a search, which asks many times
        return True
    if wanted == "*":
        return value is not None
    if type(value) is type(wanted) and type(value) in (bool, int, float):
        return bool(value == wanted)
    if isinstance(wanted, Mapping):
        return str(wanted["has"]) in str(value) if "has" in wanted else not matches(value, wanted["not"])
    if isinstance(wanted, list | tuple):
        return any(matches(value, option) for option in wanted)
    if isinstance(wanted, str) and wanted[:1] in ("<", ">"):
        if not _is_number(value):
            return False
        bound = float(wanted[1:])
        return bool(value > bound if wanted[0] == ">" else value < bound)
    if _is_number(value) and _is_number(wanted):
        return bool(value == wanted)  # 0 and 0.0
    return format_value(value).lower() == format_value(wanted).lower()


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


class RuleBook:
    """The rules of one job's framework."""

    def __init__(self, rules: Sequence[Rule], value_of: Callable[[str], Any]) -> None:
        """value_of: returns the job's value of a key, and OPEN for a key that the job leaves open."""
        self._rules, self._value_of = tuple(rules), cache(value_of)
        self._by_keys: dict[tuple[str, ...], tuple[Rule, ...]] = {}
        self._known: dict[tuple[tuple[str, Any], ...], bool] = {}
        self._allowed: dict[tuple[int, bool, type[Any], Any], bool] = {}

    def __bool__(self) -> bool:
        return bool(self._rules)

    def replace_values(self, changes: Mapping[str, Any]) -> "RuleBook":
        """The rules with other values of some keys."""
        return RuleBook(self._rules, lambda key: changes[key] if key in changes else self._value_of(key))

    def allows(self, chosen: Mapping[str, Any]) -> bool:
        """Whether the framework supports values that a search has chosen, together with those of the job."""
        if not self._rules:
            return True
        key = tuple(chosen.items())
        if key not in self._known:  # a search asks for the same choices many times
            self._known[key] = next(self.find_broken(chosen), None) is None
        return self._known[key]

    def find_broken(self, chosen: Mapping[str, Any]) -> Iterator[Rule]:
        """Rules that chosen values break."""
        for rule in self._rules_about(tuple(chosen)):
            value = chosen[rule.key] if rule.key in chosen else self._value_of(rule.key)
            is_open = rule.key in chosen and self._value_of(rule.key) == OPEN
            if value != OPEN and not self._is_allowed(rule, value, is_open) and self._holds(rule, chosen):
                yield rule

    def find_lacking(self) -> Iterator[tuple[Rule, Any]]:
        """Rules that the job's own values break, each with the value."""
        for rule in self._rules:
            value = self._value_of(rule.key)
            # a share depends on the number of engines, which only a search decides
            is_judged = value != OPEN and rule.only != (SHARE,)
            if is_judged and not matches(value, self._fill(rule.only)) and self._holds(rule, {}):
                yield rule, value

    def cure(self, rule: Rule) -> Any:
        """A value with which a key no longer breaks a rule."""
        return self._fill(rule.only)[0]

    def _is_allowed(self, rule: Rule, value: Any, is_open: bool) -> bool:
        """Whether a rule allows a value of an open key, or of one that the job sets."""
        # rules and lists have no hash; True equals 1
        key = id(rule), is_open, type(value), value if value.__hash__ else repr(value)
        if key not in self._allowed:
            self._allowed[key] = matches(value, self._fill(rule.tried if is_open else rule.only))
        return self._allowed[key]

    def _fill(self, values: Sequence[Any]) -> tuple[Any, ...]:
        """Values of a rule, with each `=KEY` replaced by the job's value of that key."""
        return tuple(self._value_of(value[1:]) if str(value).startswith("=") else value for value in values)

    def settle(self) -> dict[str, Any]:
        """Keys that the job leaves open and for which the framework has only one value."""
        settled: dict[str, Any] = {}
        for rule in self._rules:
            tried = self._fill(rule.tried)
            is_one = len(tried) == 1 and tried[0] not in (OPEN, SHARE)
            if is_one and self._value_of(rule.key) == OPEN and self._holds(rule, settled):
                settled.setdefault(rule.key, tried[0])
        return settled

    def values(self, key: str, chosen: Mapping[str, Any]) -> tuple[Any, ...] | None:
        """The values of an open key to try together with chosen ones; None if no rule restricts it."""
        options = (rule.tried for rule in self._rules if rule.key == key and self._holds(rule, chosen))
        return next(options, None)

    @cached_property
    def _judged(self) -> frozenset[str]:
        """Keys whose values in the job break rules. They are reported before the search, or planned as stated."""
        return frozenset(rule.key for rule, _ in self.find_lacking())

    def _rules_about(self, keys: tuple[str, ...]) -> tuple[Rule, ...]:
        """Rules that the values of these keys may break."""
        if keys not in self._by_keys:
            among = frozenset(keys)
            judged = (rule for rule in self._rules if rule.key not in self._judged and rule.only != (SHARE,))
            about = (rule for rule in judged if rule.key in among or not among.isdisjoint(rule.when))
            self._by_keys[keys] = tuple(rule for rule in about if self._may_hold(rule, among))
        return self._by_keys[keys]

    def _may_hold(self, rule: Rule, among: frozenset[str]) -> bool:
        """Whether the parts of a rule's condition hold that do not depend on chosen values."""
        return all(self._is_met(key, wanted, {}) for key, wanted in rule.when.items() if key not in among)

    def _holds(self, rule: Rule, chosen: Mapping[str, Any]) -> bool:
        """Whether a rule's condition holds, whatever values the open keys get."""
        return all(self._is_met(key, wanted, chosen) for key, wanted in rule.when.items())

    def _is_met(self, key: str, wanted: Any, chosen: Mapping[str, Any]) -> bool:
        value = chosen[key] if key in chosen else self._value_of(key)
        if value != OPEN:
            return matches(value, wanted)
        about = (rule for rule in self._rules if rule.key == key)
        possible = next((rule.tried for rule in about if self._is_certain(rule)), ())
        return bool(possible) and all(matches(value, wanted) for value in possible)

    def _is_certain(self, rule: Rule) -> bool:
        """Whether the job's own values meet a rule's condition."""
        values = {key: self._value_of(key) for key in rule.when}
        return all(value != OPEN and matches(value, rule.when[key]) for key, value in values.items())
