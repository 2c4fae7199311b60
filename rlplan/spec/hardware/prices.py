"""Prices of GPUs per hour, each with its source and date.

In: the bundled `hardware_profiles/prices/on-demand.yaml`, a user's file in the same form, options such as `h100=2.1`.
Out: a Price by GPU profile. Left out: storage, traffic, taxes, hosts without GPUs.

A user's file may be as short as `h100: 2.1`. Options take precedence over the file, and the file over the bundled list.
"""

import datetime as dt
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from rlplan.errors import SpecError
from rlplan.spec.base import Spec, shorten_value, validate
from rlplan.spec.files.yaml import read_yaml
from rlplan.spec.hardware.catalogue import get_gpu, profile_folder

MAX_DOLLARS = 1e6
"""Limit of a price in dollars per GPU and hour, equal to that of `hardware.price_per_gpu_hour`."""
OLD_DAYS = 90
"""Age in days above which a price is reported as old: on-demand prices have moved by 10 % and more within a quarter."""
WAY_OUT = "--price h100=2.1 sets a price, --prices FILE reads a file; hardware_profiles/README.md shows its format"


@dataclass(frozen=True)
class Price:
    """The price of one GPU for one hour."""

    dollars: float
    """US dollars."""
    source: str
    """Vendor or document that states the price."""
    date: str = ""
    """Day on which the source was read, YYYY-MM-DD; empty for a price typed now."""

    def age_days(self, today: dt.date) -> int | None:
        """Days since the source was read; None without a date, or if this machine's clock is earlier."""
        days = (today - dt.date.fromisoformat(self.date)).days if self.date else -1
        return days if days >= 0 else None

    def is_old(self, today: dt.date) -> bool:
        """Whether the price is probably outdated."""
        return (self.age_days(today) or 0) > OLD_DAYS


def _dollars(value: Any) -> Any:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= MAX_DOLLARS:
        raise ValueError(f"a price is a number of dollars above 0 and at most {MAX_DOLLARS:g}")
    return value


class PriceRow(Spec):
    """A price in a file."""

    dollars: Annotated[float, BeforeValidator(_dollars)]
    """US dollars per GPU and hour."""
    source: str = Field(default="", max_length=1000)
    """Vendor or document that states the price; empty: the file itself."""
    date: str = Field(default="", pattern=r"^(\d{4}-\d{2}-\d{2})?$")
    """Day on which the source was read."""


class PriceFile(Spec):
    """The contents of a price file."""

    schema_version: Literal[1] = 1
    prices: dict[str, PriceRow]
    """Prices by GPU profile or short name."""


@dataclass(frozen=True)
class Prices:
    """Known prices, by the name of a GPU profile."""

    own: Mapping[str, Price]
    """Prices given by the user."""
    listed: Mapping[str, Price]
    """Prices of the bundled list."""
    today: dt.date
    """Today's date, against which ages are computed."""

    def find_price(self, gpu: str, job_dollars: float | None = None) -> Price | None:
        """The price of one GPU for one hour; None if unknown. job_dollars: the price in the job, for its own GPUs."""
        if gpu not in self.own and job_dollars is not None:
            return Price(job_dollars, "hardware.price_per_gpu_hour")
        return self.own.get(gpu) or self.listed.get(gpu)

    @property
    def names(self) -> tuple[str, ...]:
        """Every GPU that has a price, most expensive first."""
        both = {**self.listed, **self.own}
        return tuple(sorted(both, key=lambda name: -both[name].dollars))


def read_prices(typed: Sequence[str] = (), files: Sequence[Path] = (), *, today: dt.date) -> Prices:
    """All known prices. typed: options such as `h100=2.1`. Raises: SpecError where a price is invalid or its GPU
    unknown.
    """
    own = {gpu: price for file in files for gpu, price in _read(file, today).items()}
    bundled = _read(profile_folder() / "prices" / "on-demand.yaml", dt.date.max)  # valid whatever this machine's clock
    return Prices({**own, **dict(_parse_option(text) for text in typed)}, bundled, today)


def _read(path: Path, today: dt.date) -> dict[str, Price]:
    data = read_yaml(path, "the price list")
    if isinstance(data, dict) and "prices" not in data:
        data = {"prices": data}
    if isinstance(data, dict) and isinstance(data["prices"], dict):
        rows = {str(key): row if isinstance(row, dict) else {"dollars": row} for key, row in data["prices"].items()}
        data = {**data, "prices": rows}
    file = validate(PriceFile, data, file=str(path), way_out=WAY_OUT)
    prices: dict[str, Price] = {}
    for name, row in file.prices.items():
        gpu = get_gpu(name, where=f"{path}: {name}").name
        if gpu in prices:
            raise SpecError(
                f"'{gpu}' is priced twice",
                where=f"{path}: {name}",
                rule="one price for each GPU; short names mean a profile",
                way_out="leave one of them out",
            )
        _check_date(row.date, today, f"{path}: {name}.date")
        prices[gpu] = Price(float(row.dollars), row.source or path.name, row.date)
    return prices


def _check_date(date: str, today: dt.date, where: str) -> None:
    try:
        is_later = bool(date) and dt.date.fromisoformat(date) > today
    except ValueError:
        is_later = True
    if is_later:
        raise SpecError(
            f"a price was read on {date}, today is {today}",
            where=where,
            rule="the date is a day of the calendar, not in the future",
            way_out="correct the date, or this machine's clock",
        )


def _parse_option(text: str) -> tuple[str, Price]:
    name, _, number = text.partition("=")
    try:
        dollars = float(_dollars(float(number.strip().removeprefix("$"))))
    except ValueError:
        raise SpecError(
            f"'{shorten_value(text)[1:-1]}' is not a price",
            where="command line: --price",
            rule=f"GPU=DOLLARS for one GPU and one hour, above 0 and at most {MAX_DOLLARS:g}",
            way_out="for example --price h100=2.1",
        ) from None
    return get_gpu(name, where="command line: --price").name, Price(dollars, "your own")
