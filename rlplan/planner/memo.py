"""Memo: what pure methods gave, by their frozen arguments; owned by a search and shared with the searches that it asks.

A memoized method reads its arguments, which are its key as they are, and the facts of its object, which never change.
Nobody lists a key by hand: a method that gives the same for several candidates takes only what these have in common.
Objects whose facts are equal have one table, so that a search on fewer GPUs, or of a job with other choices, goes on
with what is known. Switched off (`Memo(is_on=False)`) everything is computed whenever it is asked for.

In: facts, methods. Out: tables of results. Left out: which facts a method needs (roles.py, times.py, candidates.py).
"""

from collections import deque
from collections.abc import Callable
from functools import wraps
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar, cast

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")
Table = dict[tuple[object, ...], Any]
"""Results by method and arguments."""
MOST_TABLES = 256
"""Tables that a memo keeps, the last used ones: `explain` asks about some forty jobs, each with six tables."""


class Memo:
    """Tables of results. is_on: False keeps nothing, for tests that what is kept changes no answer."""

    def __init__(self, *, is_on: bool = True) -> None:
        self.is_on = is_on
        self._tables: deque[tuple[tuple[object, ...], Table]] = deque(maxlen=MOST_TABLES)

    def get_table(self, *facts: object) -> Table:
        """The table of all objects with equal facts; the first of them says whose methods these are."""
        if not self.is_on:
            return _Forgetful()
        for index, entry in enumerate(self._tables):
            if entry[0] == facts:
                del self._tables[index]
                self._tables.appendleft(entry)
                return entry[1]
        table: Table = {}
        self._tables.appendleft((facts, table))
        return table

    def create_table(self) -> Table:
        """A table for one object alone."""
        return {} if self.is_on else _Forgetful()


class _Forgetful(Table):
    """Keeps nothing."""

    def __setitem__(self, key: tuple[object, ...], value: Any) -> None:
        pass


class HasTable(Protocol):
    """An object with memoized methods."""

    known: Table


Owner = TypeVar("Owner", bound=HasTable)


def memoize(
    method: Callable[Concatenate[Owner, Parameters], Result],
) -> Callable[Concatenate[Owner, Parameters], Result]:
    """A method that is computed once for its object's facts and its arguments, which are frozen."""

    @wraps(method)
    def look_up(self: Owner, *arguments: Parameters.args, **named: Parameters.kwargs) -> Result:
        key = (method, arguments, *named.items()) if named else (method, arguments)
        try:
            return self.known[key]  # type: ignore[no-any-return]
        except KeyError:
            result = self.known[key] = method(self, *arguments, **named)
            return result

    return cast(Callable[Concatenate[Owner, Parameters], Result], look_up)
