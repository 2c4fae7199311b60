"""A memo stores results of pure methods by their frozen arguments. One search owns it and shares it with searches it
starts.

A memoized method depends only on its arguments, which form the key, and on facts of its object that never change.
Nobody writes keys by hand: a method with one result for several candidates takes only what they have in common. Objects
with equal facts share a table, so a search on fewer GPUs, or for a job with other choices, reuses results.

In: facts, methods. Out: tables of results. Left out: the facts of each class (roles.py, times.py, candidates.py).
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
"""Most recently used tables that a memo keeps: `explain` asks about some forty jobs with six tables each."""


class Memo:
    """Tables of results. is_on=False stores nothing, so that tests can prove that caching changes no answer."""

    def __init__(self, *, is_on: bool = True) -> None:
        self.is_on = is_on
        self._tables: deque[tuple[tuple[object, ...], Table]] = deque(maxlen=MOST_TABLES)

    def get_table(self, *facts: object) -> Table:
        """Get the table of all objects with equal facts. The first fact names the class that owns the methods."""
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
        """Create a table for a single object."""
        return {} if self.is_on else _Forgetful()


class _Forgetful(Table):
    """A table that stores nothing."""

    def __setitem__(self, key: tuple[object, ...], value: Any) -> None:
        pass


class HasTable(Protocol):
    """An object with memoized methods."""

    known: Table


Owner = TypeVar("Owner", bound=HasTable)


def memoize(
    method: Callable[Concatenate[Owner, Parameters], Result],
) -> Callable[Concatenate[Owner, Parameters], Result]:
    """Compute a method once per facts of its object and arguments, which must be hashable."""

    @wraps(method)
    def look_up(self: Owner, *arguments: Parameters.args, **named: Parameters.kwargs) -> Result:
        key = (method, arguments, *named.items()) if named else (method, arguments)
        try:
            return self.known[key]  # type: ignore[no-any-return]
        except KeyError:
            result = self.known[key] = method(self, *arguments, **named)
            return result

    return cast(Callable[Concatenate[Owner, Parameters], Result], look_up)
