"""Which settings of a point its predictor has read, and what is said of the others.

In: a point. Out: the same point with settings that remember what was asked for; then, of those that nobody asked for,
why they do not matter. One that is neither read nor known to be without effect refuses the point by its name: the
prediction would be of another run. Left out: what settings mean (settings.py and the modules of each kind).
"""

from collections.abc import Mapping
from typing import Any, Self

from rlplan.accuracy.points import MeasuredPoint
from rlplan.accuracy.registry import CannotPredict
from rlplan.accuracy.without_effect import why_without_effect
from rlplan.errors import did_you_mean
from rlplan.spec.base import shorten


class ReadSettings(dict[str, Any]):
    """Settings that remember which keys were asked for; going through all of them asks for none.

    A nested `lora: {rank: 64}` is read as `lora_rank: 64`. Copies share the memory.
    """

    def __init__(self, values: Mapping[str, Any], asked: set[str] | None = None) -> None:
        super().__init__(_flat(values))
        self.asked: set[str] = set() if asked is None else asked

    def get(self, key: str, default: Any = None) -> Any:
        self.asked.add(key)
        return super().get(key, default)

    def __getitem__(self, key: str) -> Any:
        self.asked.add(key)
        return super().__getitem__(key)

    def __contains__(self, key: object) -> bool:
        self.asked.add(str(key))
        return super().__contains__(key)

    def __or__(self, other: Mapping[str, Any]) -> Self:  # type: ignore[override]
        return type(self)({**self, **other}, self.asked)


def _flat(values: Mapping[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in values.items():
        if key == "lora" and isinstance(value, dict):
            found |= {f"lora_{name.removeprefix('lora_')}": one for name, one in value.items()}
        else:
            found[key] = value
    return found


def watched(point: MeasuredPoint) -> MeasuredPoint:
    """The point with settings that remember what is asked for; keys beside `settings` count as settings too."""
    return point.model_copy(update={"settings": ReadSettings({**(point.model_extra or {}), **point.settings})})


def unread(point: MeasuredPoint) -> dict[str, str]:
    """Of a watched point's settings that nobody asked for: why each is without effect. null says nothing.

    Raises: CannotPredict for a setting of which that is not known.
    """
    settings = point.settings
    assert isinstance(settings, ReadSettings)
    asked = frozenset(settings.asked)
    found: dict[str, str] = {}
    for name, value in settings.items():
        if name in asked or value is None:
            continue
        why = why_without_effect(point.kind, name, settings)
        if why is None:
            near = did_you_mean(name, sorted(asked))
            raise CannotPredict(
                f"setting '{name}' is {shorten(value)}, which no formula of {point.kind} reads, and a prediction "
                f"without it would be of another run.{near} Remarks belong under `note`"
            )
        found[name] = why
    return found
