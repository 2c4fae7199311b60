"""`rlplan compare JOB --hardware 8xH100,16xL40S`: which GPUs to rent; and jobs, plans and runs side by side."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rlplan.errors import NoFeasiblePlanError, SpecError
from rlplan_cli.options import AlgorithmName, AsJson, Model, with_grouped_options

if TYPE_CHECKING:
    from rlplan.comparison import CompareResult


Sources = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[JOB|PLAN|RUN]... [KEY=VALUE]...",
        help="Jobs, plans, bundles, run folders, and overrides of all of them; or use --model.",
        show_default=False,
    ),
]
Clusters = Annotated[
    list[str] | None,
    typer.Option(help="Clusters, such as 8xH100,16xL40S; with a budget a kind alone too.", show_default=False),
]
Price = Annotated[
    list[str] | None,
    typer.Option(metavar="GPU=DOLLARS", help="Your price of a GPU for an hour; repeat.", show_default=False),
]
PriceFile = Annotated[Path | None, typer.Option(help="Your prices: a YAML file.", show_default=False)]
Budget = Annotated[
    float | None, typer.Option(help="Dollars an hour: what it buys of each kind of GPU.", show_default=False)
]
PageFile = Annotated[
    Path | None,
    typer.Option("--out", "-o", help="Write a page that lays them side by side: a .html file.", show_default=False),
]


@dataclass(frozen=True)
class Compared:
    """What is compared, on which clusters, at which prices."""

    words: Sources = None
    hardware: Clusters = None
    price: Price = None
    prices: PriceFile = None
    budget_per_hour: Budget = None
    model: Model = None
    algorithm: AlgorithmName = None

    @property
    def price_sources(self) -> list[Any]:
        """What is typed, and the file."""
        own = {name: dollars for name, _, dollars in (one.partition("=") for one in self.price or ())}
        return [own, *([self.prices] if self.prices else [])]


@with_grouped_options
def command(asked: Compared, out: PageFile = None, as_json: AsJson = False) -> None:
    """Say what a job takes and costs on several clusters. Without clusters: jobs, plans and runs side by side."""
    from rlplan.api import compare
    from rlplan.sources import split_words
    from rlplan_cli.render.compare import show_comparison
    from rlplan_cli.render.terminal import note, print_json
    from rlplan_cli.render.waiting import waiting

    sources, overrides = split_words(asked.words or [])
    if out is not None:
        _check_page(out)
    named: list[Any] = [*sources, *_named(asked.model, asked.algorithm)]
    if not named:
        raise _nothing_to_compare()
    with waiting("planning") as listen:
        found = compare(
            *named,
            overrides=overrides,
            hardware=asked.hardware or (),
            prices=asked.price_sources,
            budget_per_hour=asked.budget_per_hour,
            listen=listen,
        )
    if out is not None:
        _write_page(found, out)
    if as_json:
        print_json(found.as_json())
    else:
        show_comparison(found)
    if out is not None:
        note(f"page written to {out}")
    if not any(one.fits for one in found.results):
        raise NoFeasiblePlanError(
            f"none of {len(found.results)} fits",
            where="command line",
            rule="memory of a GPU at the high end of every interval; the table says what is short",
            way_out=f"`rlplan plan JOB hardware={_first_cluster(found.clusters.typed)}` names changes that make it fit",
        )


def _first_cluster(clusters: tuple[str, ...]) -> str:
    return clusters[0] if clusters else "8xH100"


def _named(model: str | None, algorithm: str | None) -> list[dict[str, str]]:
    """A job by its model's name."""
    return [] if model is None else [{"policy": model} | ({"algorithm": algorithm} if algorithm else {})]


def _write_page(found: "CompareResult", out: Path) -> None:
    from rlplan.report.plans.comparison import side_of, write_comparison
    from rlplan.results import RunResult

    pairs = zip(found.results, found.rows(), strict=True)
    write_comparison([side_of(one.run if isinstance(one, RunResult) else one.plan, row) for one, row in pairs], out)


def _check_page(out: Path) -> None:
    if out.suffix != ".html":
        raise SpecError(
            f"'{out.name}' is no page",
            where="command line: --out",
            rule="a file that ends in .html",
            way_out=f"--out {out.with_suffix('.html')}",
        )


def _nothing_to_compare() -> SpecError:
    return SpecError(
        "nothing to compare",
        where="command line",
        rule="a job file, a plan, a bundle or a run folder, several of them, or --model",
        way_out="for example: rlplan compare --model Qwen/Qwen2.5-7B --hardware 8xH100,16xL40S",
    )
