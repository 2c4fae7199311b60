"""Rates: bytes per second, FLOP per second and watts, as integers; decimal units exist only in text.

In: text such as `3.35TB/s`, `989.4TFLOP/s` or `700W` from a YAML file. Out: an integer, or text to show.
Left out: binary units (vendors give rates in powers of ten), refused, and bits but for slow links (of a GPU or a node
`400Gb/s` is written 50GB/s).
"""

import re
from fractions import Fraction

_BYTE_RATES = {"MB/s": 10**6, "GB/s": 10**9, "TB/s": 10**12}
_LINK_RATES = {**_BYTE_RATES, "Mb/s": 125_000, "Gb/s": 125_000_000}
_FLOP_RATES = {"GFLOP/s": 10**9, "TFLOP/s": 10**12, "PFLOP/s": 10**15}
_WATTS = {"W": 1, "kW": 1000}
_TEXT = re.compile(r"^\s*(\d+(?:\.\d+)?)\s*([A-Za-z/]+)\s*$")
MAX_RATE = (1 << 63) - 1


def parse_bytes_per_s(text: str | int) -> int:
    """Bytes per second from `3.35TB/s` or an integer. Raises: ValueError with the rule.

    >>> parse_bytes_per_s("3.35TB/s")
    3350000000000
    """
    return _parse(text, _BYTE_RATES, "50GB/s")


def parse_link_rate(text: str | int) -> int:
    """Bytes per second of a link between places, of which people speak in bits. Raises: ValueError with the rule.

    >>> parse_link_rate("590Mb/s")
    73750000
    """
    return _parse(text, _LINK_RATES, "590Mb/s")


def parse_flops_per_s(text: str | int) -> int:
    """Operations per second from `989.4TFLOP/s` or an integer; integer operations count as FLOP. Raises: ValueError.

    >>> parse_flops_per_s("989.4TFLOP/s")
    989400000000000
    """
    return _parse(text, _FLOP_RATES, "312TFLOP/s")


def parse_watts(text: str | int) -> int:
    """Watts from `700W` or an integer. Raises: ValueError with the rule.

    >>> parse_watts("1.4kW")
    1400
    """
    return _parse(text, _WATTS, "700W")


def format_bytes_per_s(rate: float) -> str:
    """Bytes per second for people: four significant figures.

    >>> format_bytes_per_s(3_350_000_000_000), format_bytes_per_s(56_250_000_000)
    ('3.35 TB/s', '56.25 GB/s')
    """
    return _format(rate, _BYTE_RATES)


def format_flops_per_s(rate: float) -> str:
    """Operations per second for people: four significant figures.

    >>> format_flops_per_s(989_400_000_000_000), format_flops_per_s(2_250_000_000_000_000)
    ('989.4 TFLOP/s', '2.25 PFLOP/s')
    """
    return _format(rate, _FLOP_RATES)


def _parse(text: str | int, units: dict[str, int], example: str) -> int:
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


def _format(rate: float, units: dict[str, int]) -> str:
    unit = next((name for name in reversed(units) if rate >= units[name]), next(iter(units)))
    return f"{rate / units[unit]:.4g} {unit}"
