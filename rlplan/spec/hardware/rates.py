"""Rates: bytes per second, FLOP per second and watts, as integers; decimal units exist only in text.

In: text such as `3.35TB/s`, `989.4TFLOP/s` or `700W` from a YAML file. Out: an integer, or text for display. Left out:
binary units, since vendors give rates in powers of ten; bits (`400Gb/s` is written 50GB/s).
"""

import re
from fractions import Fraction
from functools import partial

_BYTE_RATES = {"MB/s": 10**6, "GB/s": 10**9, "TB/s": 10**12}
_FLOP_RATES = {"GFLOP/s": 10**9, "TFLOP/s": 10**12, "PFLOP/s": 10**15}
_WATTS = {"W": 1, "kW": 1000}
_TEXT = re.compile(r"^\s*(\d+(?:\.\d+)?)\s*([A-Za-z/]+)\s*$")
MAX_RATE = (1 << 63) - 1


def _parse(text: str | int, *, units: dict[str, int], example: str) -> int:
    """A rate in the smallest unit, from an integer or a number with a unit. Raises: ValueError with the rule.

    >>> parse_bytes_per_s("3.35TB/s"), parse_watts("1.4kW")
    (3350000000000, 1400)
    """
    rule = f"a rate is an integer or a number with one of {', '.join(units)}, as in {example}"
    if isinstance(text, bool) or not isinstance(text, str | int):
        raise ValueError(rule)
    if isinstance(text, int):
        rate = text
    else:
        match = _TEXT.match(text)
        if match is None or match.group(2) not in units:
            raise ValueError(rule)
        rate = int(Fraction(match.group(1)) * units[match.group(2)])
    if not 0 < rate <= MAX_RATE:
        raise ValueError("a rate is above zero and below 9.2e18")
    return rate


parse_bytes_per_s = partial(_parse, units=_BYTE_RATES, example="50GB/s")
"""Bytes per second from `3.35TB/s` or an integer."""
parse_flops_per_s = partial(_parse, units=_FLOP_RATES, example="312TFLOP/s")
"""Operations per second from `989.4TFLOP/s` or an integer; integer operations count as FLOP."""
parse_watts = partial(_parse, units=_WATTS, example="700W")
"""Watts from `700W` or an integer."""


def _format(rate: float, *, units: dict[str, int]) -> str:
    """A rate for display, with four significant figures.

    >>> format_bytes_per_s(56_250_000_000), format_flops_per_s(2_250_000_000_000_000)
    ('56.25 GB/s', '2.25 PFLOP/s')
    """
    unit = next((name for name in reversed(units) if rate >= units[name]), next(iter(units)))
    return f"{rate / units[unit]:.4g} {unit}"


format_bytes_per_s = partial(_format, units=_BYTE_RATES)
format_flops_per_s = partial(_format, units=_FLOP_RATES)
