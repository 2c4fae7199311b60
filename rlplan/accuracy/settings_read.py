"""Tracking of the settings that a predictor reads, so that no setting is ignored silently.

A setting that is neither read nor known to have no effect refuses the point: the prediction would be of another run.

In: a point. Out: the point with settings that record reads and assumed values; the unread settings, each with the
reason why it has no effect. Left out: the meaning of settings (settings.py and the modules of each kind).
"""

from collections.abc import Mapping
from typing import Any, Self

from rlplan.accuracy.points import MeasuredPoint
from rlplan.accuracy.predictions import CannotPredict
from rlplan.accuracy.settings import WORDS
from rlplan.accuracy.without_effect import why_without_effect
from rlplan.errors import did_you_mean
from rlplan.spec.base import shorten_value

OF_TRAINING = ("train_peak", "train_steady", "throughput_train")


class ReadSettings(dict[str, Any]):
    """Settings that record which keys were read; iteration over all of them reads none.

    A nested `lora: {rank: 64}` is read as `lora_rank: 64`. Copies share the record. assumed: values for keys that are
    not stated.
    """

    def __init__(
        self, values: Mapping[str, Any], asked: set[str] | None = None, assumed: dict[str, str] | None = None
    ) -> None:
        super().__init__(_flatten_lora(values))
        self.asked: set[str] = set() if asked is None else asked
        self.assumed: dict[str, str] = {} if assumed is None else assumed

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
        return type(self)({**self, **other}, self.asked, self.assumed)


def _flatten_lora(values: Mapping[str, Any]) -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in values.items():
        if key == "lora" and isinstance(value, dict):
            flat |= {f"lora_{name.removeprefix('lora_')}": inner for name, inner in value.items()}
        else:
            flat[key] = value
    return flat


_OURS = {alias: name for name, aliases in WORDS["spellings"].items() for alias in (name, *aliases)}
"""Names of training settings in points, by all their spellings."""


def normalize_names(values: Mapping[str, Any]) -> dict[str, Any]:
    """Settings of a training run under the names that the readers know; a name that is also stated itself stays.

    Megatron's `recompute_granularity` and `recompute_modules` are one setting: the modules, where they are named.

    >>> normalize_names({"TP": 2, "expert_model_parallel_size": 8, "recompute_granularity": "selective",
    ...     "recompute_modules": ["moe_act"]})
    {'tp': 2, 'ep': 8, 'recompute': ['moe_act']}
    """
    renamed: dict[str, Any] = {}
    for name, value in values.items():
        ours = _OURS.get(name.lower(), name)
        renamed[name if ours in values and ours != name else ours] = value
    granularity, modules = renamed.pop("recompute_granularity", None), renamed.pop("recompute_modules", None)
    if (modules or granularity) and "recompute" not in renamed:
        renamed["recompute"] = modules if modules and str(granularity).lower() != "full" else granularity
    return renamed


def watch_settings(point: MeasuredPoint) -> MeasuredPoint:
    """The point with settings that record reads; keys beside `settings` count as settings too."""
    values = {**(point.model_extra or {}), **point.settings}
    values = normalize_names(values) if point.kind in OF_TRAINING else values
    return point.model_copy(update={"settings": ReadSettings(values)})


def list_assumed(point: MeasuredPoint) -> dict[str, str]:
    """Values that the predictor of a watched point assumed for settings that are not stated."""
    settings = point.settings
    return dict(settings.assumed) if isinstance(settings, ReadSettings) else {}


def find_unread(point: MeasuredPoint) -> dict[str, str]:
    """Unread settings of a watched point, each with the reason why it has no effect; null values are ignored.

    Raises: CannotPredict for a setting without such a reason.
    """
    settings = point.settings
    assert isinstance(settings, ReadSettings)
    asked = frozenset(settings.asked)
    reasons: dict[str, str] = {}
    for name, value in settings.items():
        if name in asked or value is None:
            continue
        why = why_without_effect(point.kind, name, settings)
        if why is None:
            near = did_you_mean(name, sorted(asked))
            raise CannotPredict(
                f"setting '{name}' is {shorten_value(value)}, which no formula of {point.kind} reads, and a prediction "
                f"without it would be of another run.{near} Remarks belong under `note`"
            )
        reasons[name] = why
    return reasons
