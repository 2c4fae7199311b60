"""Prices: the user's own come first, the bundled ones say who and when, and what is no price is named."""

import datetime as dt
from pathlib import Path

import pytest

from rlplan.errors import SpecError
from rlplan.spec.hardware.catalogue import get_gpu
from rlplan.spec.hardware.prices import OLD_DAYS, read_prices

TODAY = dt.date(2026, 11, 23)


def test_every_bundled_price_names_a_gpu_and_has_a_date_and_a_page() -> None:
    listed = read_prices(today=TODAY).listed
    assert {"h100-sxm", "h200-sxm", "l40s", "a100-sxm-80gb", "rtx-4090"} <= set(listed)
    for gpu, price in listed.items():
        assert get_gpu(gpu, where="").name == gpu
        assert "https://" in price.source
        assert price.age_days(TODAY) is not None
        assert 0.1 < price.dollars < 20


def test_a_clock_that_is_behind_the_bundled_list_takes_it_without_an_age() -> None:
    price = read_prices(today=dt.date(2020, 1, 1)).find_price("h100-sxm")
    assert price is not None
    assert price.age_days(dt.date(2020, 1, 1)) is None


def test_what_is_typed_comes_before_a_file_and_a_file_before_the_bundled_list(tmp_path: Path) -> None:
    file = tmp_path / "prices.yaml"
    file.write_text("h100: 2.1\nl40s: {dollars: 0.7, source: our cluster, date: 2026-11-01}\n")
    prices = read_prices(["h100=$1.5"], [file], today=TODAY)
    named = [prices.find_price(gpu) for gpu in ("h100-sxm", "l40s", "h200-sxm")]
    assert [price and price.dollars for price in named] == [1.5, 0.7, 4.59]
    assert [price and price.source.partition(",")[0] for price in named] == ["your own", "our cluster", "RunPod"]
    job = prices.find_price("h200-sxm", 3.0), prices.find_price("h100-sxm", 3.0)
    assert [price and price.dollars for price in job] == [3.0, 1.5]  # a job's own stands between typed and bundled
    assert prices.find_price("h20") is None


@pytest.mark.parametrize("typed", ["h100=-2", "h100=0", "h100=nan", "h100=inf", "h100=1e9", "h100=cheap", "h100", "=2"])
def test_a_price_that_is_none_is_answered_by_what_was_typed(typed: str) -> None:
    with pytest.raises(SpecError, match=r"is not a price|is unknown") as caught:
        read_prices([typed], today=TODAY)
    assert repr(typed)[1:-1] in caught.value.what or "hardware profile" in caught.value.what


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("h100: -2", "above 0"),
        ("h100: {dollars: 0}", "above 0"),
        ("h100: true", "above 0"),
        ("h1000: 2", "hardware profile 'h1000' is unknown"),
        ("dgx: 2", "unknown"),
        ("h100: 2\nh100-sxm: 3", "priced twice"),
        ("h100: {dollars: 2, date: '2026-13-01'}", "2026-13-01"),
        ("h100: {dollars: 2, date: 2027-01-01}", "today is 2026-11-23"),
        ("h100: {dollars: 2, euros: 3}", "euros"),
        ("- h100", "not a mapping"),
        ("", "not a mapping"),
    ],
)
def test_a_file_with_no_price_is_refused_with_its_key(tmp_path: Path, text: str, words: str) -> None:
    file = tmp_path / "prices.yaml"
    file.write_text(text)
    with pytest.raises(SpecError) as caught:
        read_prices((), [file], today=TODAY)
    assert words in str(caught.value)
    assert "prices.yaml" in caught.value.where


def test_a_price_is_old_after_a_quarter_of_a_year(tmp_path: Path) -> None:
    file = tmp_path / "prices.yaml"
    for days, is_old in ((OLD_DAYS, False), (OLD_DAYS + 1, True)):
        file.write_text(f"h100: {{dollars: 2, date: {TODAY - dt.timedelta(days=days)}}}")
        price = read_prices((), [file], today=TODAY).find_price("h100-sxm")
        assert price is not None
        assert price.is_old(TODAY) is is_old
