"""Units: bytes are `int`, seconds are `float`; GiB exists only in text.

In: a number, or text such as `80GiB` from a YAML file. Out: a number, or text to show.
Left out: rates of anything but bytes and tokens.
"""

import re
from fractions import Fraction

KIB, MIB, GIB, TIB = 1 << 10, 1 << 20, 1 << 30, 1 << 40
_SUFFIXES = {"B": 1, "KiB": KIB, "MiB": MIB, "GiB": GIB, "TiB": TIB}
_DECIMAL = {"kB": 10**3, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_BYTES = re.compile(r"^\s*(\d+(?:\.\d+)?)\s*([A-Za-z]+)\s*$")
MAX_BYTES = (1 << 63) - 1
BYTES_RULE = (
    f"a byte count is an integer of bytes or a number with one of {', '.join(_SUFFIXES)}, as in 64MiB; GB and so on "
    "are powers of ten, as on a data sheet"
)


def ceil_div(numerator: int, denominator: int) -> int:
    """The smallest integer not below numerator / denominator.

    >>> ceil_div(7, 2)
    4
    """
    return -(-numerator // denominator)


def round_up(value: int, multiple: int) -> int:
    """`value` rounded up to a multiple.

    >>> round_up(1_000_003, 4)
    1000004
    """
    return ceil_div(value, multiple) * multiple


def parse_bytes(text: str | int) -> int:
    """Bytes from `64MiB`, `1.5GiB`, `80GB` or an integer. A bare `80G` is an error, since it is ambiguous.

    Raises: ValueError with the rule.

    >>> parse_bytes("64MiB"), parse_bytes("80GB")
    (67108864, 80000000000)
    """
    if isinstance(text, bool) or not isinstance(text, str | int):
        raise ValueError(BYTES_RULE)
    if isinstance(text, int):
        if text < 0:
            raise ValueError("a byte count is not negative")
        count = text
    else:
        match = _BYTES.match(text)
        unit = (_SUFFIXES | _DECIMAL).get(match.group(2)) if match else None
        if match is None or unit is None:
            raise ValueError(BYTES_RULE)
        count = int(Fraction(match.group(1)) * unit)
    if count > MAX_BYTES:
        raise ValueError("a byte count is below 8388608TiB")
    return count


_TOKENS = re.compile(r"\s*(\d+(?:[.,]\d+)?)\s*([kK]?)\s*")


def parse_tokens(text: str | int) -> int:
    """A number of tokens from `16k` (1,024 each), `4096` or an integer. Raises: ValueError with the rule.

    >>> parse_tokens("16k"), parse_tokens("1.5K"), parse_tokens("4096")
    (16384, 1536, 4096)
    """
    if not isinstance(text, str):
        return text
    match = _TOKENS.fullmatch(text)
    if match is None:
        raise ValueError("a number of tokens is a whole number, or one with k for 1,024, as in 16k")
    return int(Fraction(match[1].replace(",", ".")) * (1024 if match[2] else 1))


def format_bytes(count: float) -> str:
    """Bytes for display: three significant figures in a fitting unit.

    >>> format_bytes(3 * GIB), format_bytes(1536), format_bytes(0)
    ('3.00 GiB', '1.50 KiB', '0 B')
    """
    sign, size = ("-" if count < 0 else ""), abs(count)
    for suffix in ("TiB", "GiB", "MiB", "KiB"):
        if size >= _SUFFIXES[suffix]:
            value = size / _SUFFIXES[suffix]
            digits = 2 if value < 10 else 1 if value < 100 else 0
            return f"{sign}{value:.{digits}f} {suffix}"
    return f"{sign}{size:.0f} B"


def format_seconds(seconds: float) -> str:
    """Seconds for display.

    >>> format_seconds(0.0042), format_seconds(75), format_seconds(0.9999)
    ('4.2 ms', '1 min 15 s', '1.00 s')
    """
    if seconds < 0.9995:  # from here on, three digits would round to 1e+03 ms
        return f"{seconds * 1000:.3g} ms"
    if seconds < 60:
        return f"{seconds:.3g} s" if seconds >= 10 else f"{seconds:.2f} s"
    minutes, remainder = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {remainder} s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min"


def format_rate(per_second: float, what: str = "tokens") -> str:
    """A rate for display.

    >>> format_rate(12345.6)
    '12,346 tokens/s'
    """
    return f"{per_second:,.0f} {what}/s"
