"""Typed access to the settings of a point: a wrong or missing setting refuses the point, with the reason.

In: a point's settings and its GPU's name in the source's words. Out: numbers, words, total bytes of a GPU.
Left out: the meaning of settings for memory.
"""

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from rlplan.accuracy.points import MeasuredPoint
from rlplan.accuracy.predictions import CannotPredict
from rlplan.errors import SpecError
from rlplan.spec.base import shorten_value
from rlplan.spec.files.yaml import read_yaml
from rlplan.spec.hardware.catalogue import get_gpu
from rlplan.spec.hardware.profile import GpuProfile
from rlplan.units import GIB

WORDS: dict[str, Any] = read_yaml(Path(__file__).parent / "data" / "words.yaml", "the words of points")
"""Words of published tables (data/words.yaml documents each part)."""
KEYS: dict[str, tuple[str, ...]] = {name: tuple(keys) for name, keys in WORDS["keys"].items()}
"""Spellings of a training run's settings, by meaning."""
MAX_COUNT = 1 << 40
"""Larger than any token count, batch or length that a machine could hold."""
LEAST_OF_NAME, MOST_OF_NAME = 0.85, 1.05
"""Driver-reported memory relative to the size in a GPU's name; another ratio means another GPU.

ECC and firmware reduce it: an L4 of 24 GB reports 92 %, a T4 of 16 GB 91 %.
"""
MAX_RANKS = 1 << 16
"""Larger than any degree of parallelism."""
UNLIMITED = 1 << 20
"""Smallest default that means no limit, and is not reported as an assumption."""


class Settings:
    """The settings of one point. Every reader raises CannotPredict for an unusable value."""

    def __init__(self, point: MeasuredPoint) -> None:
        self._values: dict[str, Any] = point.settings

    def __contains__(self, key: str) -> bool:
        return self._values.get(key) is not None

    def assume(self, key: str, value: object) -> None:
        """Record the value that is assumed for a setting that is not stated."""
        noted = getattr(self._values, "assumed", None)
        if isinstance(noted, dict):
            noted[key] = str(value)

    def raw(self, key: str) -> Any:
        """The untyped value; None without one."""
        return self._values.get(key)

    def read_count(self, key: str, default: int | None = None, *, at_least: int = 1) -> int:
        """A whole number, also from a text of digits. default: for a missing key; without it, the point is refused."""
        value = self._values.get(key)
        if value is None:
            value = default
            if default and 1 < default < UNLIMITED:
                self.assume(key, default)
        if isinstance(value, str) and re.fullmatch(r"\s*\d[\d,]{0,15}\s*", value):
            value = int(value.replace(",", ""))
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int) or not at_least <= value <= MAX_COUNT:
            raise CannotPredict(self._describe_fault(key, value, f"a whole number from {at_least}"))
        return value

    def first(self, keys: tuple[str, ...]) -> str | None:
        """The first stated key. Keys with the same value count as read, too."""
        stated = next((key for key in keys if key in self), None)
        if stated is not None:
            for key, value in self._values.items():
                if key in keys and value == self._values[stated]:
                    self._values.get(key)
        return stated

    def join_words(self, keys: Iterable[str]) -> str:
        """The stated ones of some keys with their values, as `key=value` in lower case."""
        return " ".join(f"{key}={self._values.get(key)}" for key in keys if key in self).lower()

    def degree(self, *keys: str) -> int:
        """A degree of parallelism, 1 by default."""
        key = self.first(keys)
        degree = self.read_count(key) if key else 1
        if degree > MAX_RANKS:
            raise CannotPredict(f"setting '{key}' is {degree}; no machine has more than {MAX_RANKS} ranks")
        return degree

    def number(self, key: str, default: float | None = None, *, low: float = 0.0, high: float = 1e15) -> float:
        """A number, also from the start of a text such as `0.90 (assumed default)`."""
        value = self._values.get(key)
        if value is None:
            value = default
            if default and default > 0:
                self.assume(key, default)
        if isinstance(value, str) and (match := re.match(r"\s*(\d+(?:\.\d+)?)", value)):
            value = float(match.group(1))
        if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
            raise CannotPredict(self._describe_fault(key, value, f"a number from {low:g} to {high:g}"))
        return float(value)

    def word(self, key: str, default: str = "") -> str:
        """A text; the default for null or a missing key."""
        value = self._values.get(key)
        if value is None:
            return default
        if not isinstance(value, str):
            raise CannotPredict(self._describe_fault(key, value, "a word"))
        return value

    def flag(self, key: str, default: bool = False) -> bool:
        """A boolean, also from a word."""
        value = self._values.get(key)
        if value is None:
            return default
        if isinstance(value, str):
            value = {"true": True, "false": False}.get(value.strip().lower(), value)
        if not isinstance(value, bool):
            raise CannotPredict(self._describe_fault(key, value, "true or false"))
        return value

    def element_bytes(self, *keys: str, default: str = "bf16") -> int:
        """Bytes per element of the data type that the first stated key names."""
        key = next((key for key in keys if key in self), keys[0])
        word = self.word(key, default).lower().replace("torch.", "").split()[0:1]
        text = word[0] if word else default
        text = default if text in ("auto", "none") else text
        if text not in ELEMENT_BYTES:
            raise CannotPredict(self._describe_fault(key, text, "one of " + ", ".join(ELEMENT_BYTES)))
        return ELEMENT_BYTES[text]

    @staticmethod
    def _describe_fault(key: str, value: Any, rule: str) -> str:
        state = "is not stated" if value is None else f"is {shorten_value(value)}"
        return f"setting '{key}' {state}; it must be {rule}"


ELEMENT_BYTES: dict[str, int] = WORDS["element_bytes"]
"""Bytes per element by the names in logs and flags."""
_TOTAL = re.compile(r"(\d+(?:\.\d+)?)\s*GiB", re.IGNORECASE)
_NOISE = re.compile(
    r"\(.*?\)|,.*$|-?class\b|\b\d+(\.\d+)?\s*tb/s|\b\d+\s*w(atts?)?\b|\b\d+\s*[x*]\s*(?=[a-z])|\btesla\b|\bgpus?\b|\bhbm\w*|\bsingle\b"
    r"|\b(nvidia|geforce|blackwell|workstation|server|edition|generation)\b",
    re.IGNORECASE,
)


def unit_bytes(point: MeasuredPoint) -> int:
    """Bytes of one unit of the measurement. Raises: CannotPredict for a unit that is no size."""
    size = point.measured.bytes_per_unit
    if size is None:
        raise CannotPredict(f"unit {shorten_value(point.measured.unit)} is no size")
    return size


def find_gpu(point: MeasuredPoint) -> GpuProfile | None:
    """The profile of the GPU that a point names in the source's words; None for an unknown one.

    >>> find_gpu(MeasuredPoint(id="a", kind="k", gpu="2x RTX 4090", measured={"value": 1, "unit": "GiB"})).name
    'rtx-4090'
    """
    text = re.sub(r"\brtx(?=\d)", "rtx-", (point.gpu or "").lower().replace("_", "-"))
    base = re.sub(r"\s+", " ", _NOISE.sub(" ", text)).strip(" -")
    size = re.search(r"(?<![a-z\d])(\d+)\s*gb?\b", base) or re.search(r"(?<=\d)-(\d\d)$", base)
    bare = re.sub(r"[ -]*\d+\s*gb?\b|(?<=\d)-\d\d$", "", base).strip(" -")
    sized = [f"{bare}-{size.group(1)}gb", f"{bare}-sxm-{size.group(1)}gb"] if size else []
    spelled = (*sized, base, bare, f"rtx-{bare}", bare.replace("-sxm", ""), f"{bare}-80gb")
    joined = [re.sub(r"sxm\d", "sxm", name) for name in spelled]
    for name in joined:
        try:
            profile = get_gpu(name.replace(" ", "-"), where=point.id)
        except SpecError:
            continue
        if size is None or LEAST_OF_NAME <= profile.memory.value / (int(size.group(1)) * GIB) <= MOST_OF_NAME:
            return profile
    return None


def total_bytes(point: MeasuredPoint) -> int:
    """Driver-reported bytes of the GPU: stated in the settings or the GPU's name, else the profile's.

    Raises: CannotPredict where neither is known.
    """
    settings = Settings(point)
    for key in ("total_gpu_memory_gib", "total_gpu_memory_gib_approx", "gpu_total_gib", "total_gib"):
        if key in settings:
            return int(settings.number(key, low=0.1) * GIB)
    if match := _TOTAL.search(point.gpu or ""):
        return int(float(match.group(1)) * GIB)
    profile = find_gpu(point)
    if profile is None:
        raise CannotPredict(f"the memory of '{shorten_value(point.gpu)}' is not known, and no setting says it")
    return profile.memory.value
