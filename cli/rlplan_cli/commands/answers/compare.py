"""`rlplan compare JOB --hardware 8xH100,16xL40S`: compares clusters for a job, or jobs, plans and runs."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rlplan.errors import NoFeasiblePlanError, SpecError
from rlplan_cli.options import AlgorithmName, AsJson, Model, flatten_options

if TYPE_CHECKING:
    from rlplan.comparison import CompareResult


Sources = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="JOB|PLAN|RUN|KEY=VALUE",
        help="Jobs, plans, bundles or run folders, with overrides for all of them; or use --model.",
    ),
]
Clusters = Annotated[
    list[str] | None,
    typer.Option(
        "--gpus", "--hardware", help="Clusters, such as 8xH100,16xL40S; with a budget also GPUs without a count."
    ),
]
Price = Annotated[list[str] | None, typer.Option(metavar="GPU=DOLLARS", help="Your price of one GPU-hour; repeatable.")]
PriceFile = Annotated[Path | None, typer.Option(help="YAML file with your prices.")]
Budget = Annotated[float | None, typer.Option(help="Dollars per hour; compares the clusters that it buys of each GPU.")]
Memo = Annotated[bool, typer.Option("--memo", help="Print one page for a decision, as Markdown.")]
PageFile = Annotated[Path | None, typer.Option("--out", "-o", help="Write the comparison as a page: a .html file.")]


@dataclass(frozen=True)
class Compared:
    """The jobs, clusters and prices to compare."""

    words: Sources = None
    hardware: Clusters = None
    price: Price = None
    prices: PriceFile = None
    budget_per_hour: Budget = None
    model: Model = None
    algorithm: AlgorithmName = None

    @property
    def price_sources(self) -> list[Any]:
        """Prices from the command line, then the file of prices."""
        typed = {name: dollars for name, _, dollars in (price.partition("=") for price in self.price or ())}
        return [typed, *([self.prices] if self.prices else [])]


@flatten_options
def command(asked: Compared, out: PageFile = None, memo: Memo = False, as_json: AsJson = False) -> None:
    """Compare time and cost of a job on several clusters. Without clusters, compare jobs, plans and runs."""
    from rlplan.api import compare
    from rlplan.sources import is_job_path, split_words
    from rlplan.spec.hardware.typed import is_hardware
    from rlplan_cli.render.compare import show_comparison
    from rlplan_cli.render.terminal import note, print_json
    from rlplan_cli.render.waiting import waiting

    sources, overrides = split_words(asked.words or [])
    if sources and not any(map(is_job_path, sources)):  # words: qwen3 8b grpo 8xH100,16xL40S
        words = [word for word in sources if not is_hardware(word)]
        sources = [*filter(is_hardware, sources), *([" ".join(words)] if words else [])]
    if out is not None:
        _check_page(out)
    jobs: list[Any] = [*sources, *_build_job(asked.model, asked.algorithm)]
    if not jobs:
        raise _nothing_to_compare()
    with waiting("planning") as listen:
        comparison = compare(
            *jobs,
            overrides=overrides,
            hardware=asked.hardware or (),
            prices=asked.price_sources,
            budget_per_hour=asked.budget_per_hour,
            listen=listen,
        )
    if out is not None:
        _write_page(comparison, out)
    if as_json:
        print_json(comparison.as_json())
    elif memo:
        from rlplan_cli.render.memo import format_memo

        print(format_memo(comparison))
    else:
        show_comparison(comparison)
    if out is not None:
        note(f"page written to {out}")
    if not any(result.fits for result in comparison.results):
        clusters = comparison.clusters.typed
        raise NoFeasiblePlanError(
            f"none of {len(comparison.results)} fits",
            where="command line",
            rule="the worst-case memory must fit into a GPU; the table shows the shortage",
            way_out=f"`rlplan plan JOB hardware={clusters[0] if clusters else '8xH100'}` lists remedies",
        )


def _build_job(model: str | None, algorithm: str | None) -> list[dict[str, str]]:
    """The job of --model and --algorithm; empty without a model."""
    return [] if model is None else [{"policy": model} | ({"algorithm": algorithm} if algorithm else {})]


def _write_page(comparison: "CompareResult", out: Path) -> None:
    from rlplan.report.plans.comparison import make_side, write_comparison
    from rlplan.results import RunResult

    pairs = zip(comparison.results, comparison.rows(), strict=True)
    write_comparison(
        [make_side(result.run if isinstance(result, RunResult) else result.plan, row) for result, row in pairs], out
    )


def _check_page(out: Path) -> None:
    if out.suffix != ".html":
        raise SpecError(
            f"'{out.name}' is not a page",
            where="command line: --out",
            rule="a file name that ends in .html",
            way_out=f"--out {out.with_suffix('.html')}",
        )


def _nothing_to_compare() -> SpecError:
    return SpecError(
        "nothing to compare",
        where="command line",
        rule="one or more jobs, plans, bundles or run folders, or --model",
        way_out="for example: rlplan compare --model Qwen/Qwen2.5-7B --hardware 8xH100,16xL40S",
    )
