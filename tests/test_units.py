"""Units: numbers worked by hand, and properties over all sizes."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlplan.units import (
    GIB,
    MAX_BYTES,
    MIB,
    TIB,
    ceil_div,
    format_bytes,
    format_rate,
    format_seconds,
    parse_bytes,
    round_up,
)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (0, 0),
        (4096, 4096),
        ("0B", 0),
        ("1KiB", 1024),
        ("64MiB", 67_108_864),
        ("1.5GiB", 1_610_612_736),
        (" 2 TiB ", 2 * TIB),
        ("80GB", 80_000_000_000),  # what is printed on the box: powers of ten, less than GiB would be
        ("512 MB", 512_000_000),
        ("0.1KiB", 102),  # 102.4, and a capacity rounds down
        ("9007199254740993B", 9_007_199_254_740_993),  # 2**53 + 1, which no float holds
    ],
)
def test_byte_counts_are_read_exactly(text: str | int, expected: int) -> None:
    assert parse_bytes(text) == expected


@pytest.mark.parametrize(
    "text",
    [
        "80G",
        "80gib",
        "80",
        "GiB",
        "",
        "-1GiB",
        "1e3MiB",
        "1,5GiB",
        "0x10B",
        "80 GiB x",
        -1,
        True,
        1.5,
        None,
        [],
    ],
)
def test_a_byte_count_without_a_clear_unit_is_refused(text: object) -> None:
    with pytest.raises(ValueError, match="byte count"):
        parse_bytes(text)  # type: ignore[arg-type]


@pytest.mark.parametrize("text", [MAX_BYTES + 1, 10**400, "8388608TiB", "9" * 400 + "GiB"])
def test_a_byte_count_that_no_machine_has_is_refused(text: str | int) -> None:
    with pytest.raises(ValueError, match="below 8388608TiB"):
        parse_bytes(text)


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.00 KiB"),
        (10 * MIB, "10.0 MiB"),
        (654 * MIB, "654 MiB"),
        (1023.4 * MIB, "1023 MiB"),
        (3 * GIB, "3.00 GiB"),
        (-2 * MIB, "-2.00 MiB"),
        (5000 * TIB, "5000 TiB"),
    ],
)
def test_bytes_are_shown_in_the_unit_that_fits(count: float, text: str) -> None:
    assert format_bytes(count) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0, "0 ms"),
        (0.0042, "4.2 ms"),
        (2.5, "2.50 s"),
        (12.34, "12.3 s"),
        (75.0, "1 min 15 s"),
        (3599.7, "1 h 0 min"),
        (7322.0, "2 h 2 min"),
    ],
)
def test_seconds_are_shown_in_the_unit_that_fits(seconds: float, text: str) -> None:
    assert format_seconds(seconds) == text


def test_a_rate_names_what_it_counts() -> None:
    assert format_rate(9_999.5, "rollouts") == "10,000 rollouts/s"


@given(st.integers(0, 10**12), st.integers(1, 10**6))
def test_rounding_up_gives_the_smallest_multiple_that_is_not_below(value: int, multiple: int) -> None:
    rounded = round_up(value, multiple)
    assert rounded % multiple == 0
    assert 0 <= rounded - value < multiple
    assert ceil_div(value, multiple) * multiple == rounded


@given(st.integers(0, MAX_BYTES))
def test_whole_bytes_survive_reading_and_any_size_can_be_shown(count: int) -> None:
    assert parse_bytes(f"{count}B") == count
    assert format_bytes(count).split()[1] in ("B", "KiB", "MiB", "GiB", "TiB")
