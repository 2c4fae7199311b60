"""Records: what the standard library's dataclasses do, compared with them, class by class."""

import copy
import dataclasses
import inspect
import pickle
from collections.abc import Callable
from dataclasses import FrozenInstanceError, field
from typing import Any

import pytest

from rlplan.records import dataclass

Kinds = list[tuple[Any, tuple[Any, ...], dict[str, Any]]]
"""(class, positional arguments, keyword arguments) of each kind of dataclass that is used here."""


def of_fields(decorated: Callable[..., Any]) -> Kinds:
    """Frozen, with every kind of field."""

    @decorated(frozen=True)
    class Frozen:
        """A frozen one."""

        a: int
        b: str = "x"
        c: tuple[int, ...] = ()

    @decorated(frozen=True, slots=True)
    class Slots:
        """Without a dictionary."""

        a: int
        b: dict[str, int] = field(default_factory=dict, compare=False, repr=False)
        c: int = field(init=False, repr=False, compare=False)

        def __post_init__(self) -> None:
            object.__setattr__(self, "c", self.a + 1)

    @decorated(frozen=True)
    class Below(Frozen):
        """With one field more, and another default."""

        b: str = "y"
        d: float = 0.5

    @decorated(frozen=True, kw_only=True)
    class ByKeyword:
        """Whose fields have to be named."""

        a: int = 3
        b: int

    @decorated(frozen=True)
    class Mixed:
        """One field in place, one by name."""

        a: int = field(kw_only=True)
        b: int = 2

    return [
        (Frozen, (1,), {"c": (2,)}),
        (Slots, (1,), {}),
        (Below, (1, "z"), {}),
        (ByKeyword, (), {"b": 1}),
        (Mixed, (), {"a": 1}),
    ]


def of_methods(decorated: Callable[..., Any]) -> Kinds:
    """With every choice of methods."""

    @decorated(frozen=True, slots=True, order=True)
    class Ordered:
        """A version."""

        a: int
        b: int = 0

    @decorated
    class Changing:
        """That may be changed."""

        a: list[int] = field(default_factory=list)

    @decorated(frozen=True, eq=False)
    class Itself:
        """Equal to itself alone."""

        a: int

    @decorated(frozen=True, repr=False)
    class Unnamed:
        """Without a repr of its own."""

        a: int

    return [
        (Ordered, (1,), {}),
        (Changing, (), {}),
        (Itself, (1,), {}),
        (Unnamed, (1,), {}),
    ]


PAIRS = [
    pytest.param(ours, theirs, args, kwargs, id=ours.__name__)
    for (ours, args, kwargs), (theirs, _, _) in zip(
        of_fields(dataclass) + of_methods(dataclass),
        of_fields(dataclasses.dataclass) + of_methods(dataclasses.dataclass),
        strict=True,
    )
]


def refusal(call: Callable[[], Any]) -> tuple[type[Exception], str]:
    with pytest.raises(Exception) as caught:  # noqa: PT011  which one is compared
        call()
    return caught.type, str(caught.value)


@pytest.mark.parametrize(("ours", "theirs", "args", "kwargs"), PAIRS)
def test_a_record_is_what_a_dataclass_is(ours: Any, theirs: Any, args: Any, kwargs: Any) -> None:
    assert inspect.signature(ours).parameters.keys() == inspect.signature(theirs).parameters.keys()
    for mine, other in zip(*(inspect.signature(cls).parameters.values() for cls in (ours, theirs)), strict=True):
        assert (mine.kind, mine.annotation) == (other.kind, other.annotation)
        assert (mine.default is mine.empty) == (other.default is other.empty)
    one, other = ours(*args, **kwargs), theirs(*args, **kwargs)
    assert dataclasses.asdict(one) == dataclasses.asdict(other)
    assert [each.name for each in dataclasses.fields(one)] == [each.name for each in dataclasses.fields(other)]
    assert ours.__match_args__ == theirs.__match_args__
    assert ours.__doc__ == theirs.__doc__
    assert hasattr(one, "__dict__") == hasattr(other, "__dict__")
    if ours.__name__ != "Unnamed":
        assert repr(one) == repr(other)
    assert (one == ours(*args, **kwargs)) == (other == theirs(*args, **kwargs))
    assert one != other
    assert one != object()
    if other.__hash__ and ours.__name__ != "Itself":
        assert hash(one) == hash(other) == hash(ours(*args, **kwargs))
    assert (ours.__hash__ is None) == (theirs.__hash__ is None)
    if ours.__name__ != "Slots":  # has a field that no caller gives
        assert dataclasses.replace(one, a=5).a == dataclasses.replace(other, a=5).a == 5
    assert refusal(lambda: ours(nothing=1))[0] is refusal(lambda: theirs(nothing=1))[0] is TypeError
    assert refusal(lambda: ours(nothing=1))[1] == refusal(lambda: theirs(nothing=1))[1]


@pytest.mark.parametrize(("ours", "theirs", "args", "kwargs"), [pair for pair in PAIRS if pair.id != "Changing"])
def test_a_frozen_record_cannot_be_changed(ours: Any, theirs: Any, args: Any, kwargs: Any) -> None:
    one, other = ours(*args, **kwargs), theirs(*args, **kwargs)

    def delete(value: Any) -> None:
        del value.a

    assert refusal(lambda: setattr(one, "a", 2)) == refusal(lambda: setattr(other, "a", 2))
    assert refusal(lambda: delete(one)) == refusal(lambda: delete(other))
    assert refusal(lambda: setattr(one, "a", 2))[0] is FrozenInstanceError
    assert one.a == other.a


def test_records_that_have_an_order_are_compared_field_by_field() -> None:
    ours = next(pair.values[0] for pair in PAIRS if pair.id == "Ordered")
    assert sorted([ours(2), ours(1, 5), ours(1)]) == [ours(1), ours(1, 5), ours(2)]
    assert ours(1) <= ours(1) < ours(2) >= ours(1, 9)
    with pytest.raises(TypeError):
        _ = ours(1) < (1, 0)


@dataclass(frozen=True, slots=True)
class Sent:
    """At the top of a module, where pickle finds it."""

    a: int
    b: tuple[int, ...] = ()


@dataclass(frozen=True)
class Nested:
    """With another inside."""

    sent: Sent
    own: "Nested | None" = None


def test_records_are_pickled_and_copied() -> None:
    value = Nested(Sent(1, (2,)), Nested(Sent(3)))
    assert pickle.loads(pickle.dumps(value)) == copy.deepcopy(value) == copy.copy(value) == value


def test_a_record_inside_itself_is_printed() -> None:
    value = Nested(Sent(1))
    object.__setattr__(value, "own", value)
    assert repr(value) == "Nested(sent=Sent(a=1, b=()), own=...)"


def test_a_method_is_compiled_when_it_is_called_and_inherited_by_classes_below() -> None:
    @dataclass(frozen=True)
    class Above:
        """Not called yet."""

        a: int

    class Below(Above):
        """No dataclass itself."""

    first = Above.__init__
    assert Below(1).a == 1
    assert Above.__init__ is not first
    assert "__init__" not in vars(Below)
    assert Below(1) == Below(1) != Above(1)


def test_a_match_takes_fields_in_order() -> None:
    match Sent(1, (2,)):
        case Sent(a, (b,)):
            assert (a, b) == (1, 2)
        case _:
            pytest.fail("not matched")
