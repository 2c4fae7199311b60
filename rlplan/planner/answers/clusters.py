"""Rental costs: dollars and energy of a plan, and the clusters that are worth their price.

In: plans, prices, clusters as typed. Out: a Bill per plan, the Pareto front of time and money. Left out: planning them
(api.py plans each like any job); hosts, storage, traffic and cooling.

Energy is an upper bound: each GPU at its board power for the whole step. Time and money on the front are per token, so
that jobs with different batch sizes can be compared.
"""

import math
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rlplan.errors import SpecError
from rlplan.planner.plan import Plan
from rlplan.spec.base import shorten_value
from rlplan.spec.files.job_forms import expand_hardware
from rlplan.spec.hardware.catalogue import get_gpu
from rlplan.spec.hardware.prices import WAY_OUT, Prices

JOULES_PER_KWH = 3.6e6
MAX_CLUSTERS = 64
"""Most clusters in one comparison; each one is a search."""
MOST_GPUS = 1024
"""Most GPUs of one kind that a budget buys."""
MAX_BUDGET = 1e9
"""Largest budget in dollars per hour."""
_GPUS = re.compile(r"^\d+\s*[xX*]")
_KIND = re.compile(r"^[A-Za-z0-9 _.-]+$")
WHERE = "command line: --hardware"


@dataclass(frozen=True)
class Quote:
    """The price used for a GPU."""

    gpu: str
    dollars: float
    """Dollars per GPU-hour."""
    source: str
    """Provider of the price."""
    date: str
    """Date of the price; empty if the user or the job stated it."""
    age_days: int | None
    """Days since that date."""
    is_old: bool
    """Whether the price is likely outdated (prices.py: OLD_DAYS)."""


@dataclass(frozen=True)
class Bill:
    """Cost of a plan. A field is None if a price, a power or the seconds are unknown."""

    dollars_per_hour: float | None
    """Dollars per hour for all GPUs."""
    dollars_per_step: float | None
    run_s: float | None
    """Seconds of a complete run with evaluations and checkpoints."""
    dollars_per_run: float | None
    kwh_per_step: float | None
    """Upper bound of the energy per step: full power all the time."""
    kwh_per_run: float | None
    """Upper bound of the energy per run."""
    tokens_per_dollar: float | None
    """Trained tokens (prompts and responses) per dollar."""
    quotes: tuple[Quote, ...]
    """Prices used."""
    unpriced: tuple[str, ...]
    """GPUs without a known price."""
    unmetered: tuple[str, ...]
    """GPUs whose profiles state no power."""

    def as_json(self) -> dict[str, Any]:
        """JSON for other tools."""
        return asdict(self)


def compute_bill(plan: Plan, prices: Prices, step_s: float | None = None) -> Bill:
    """Compute the cost of a plan. step_s: simulated or measured seconds of a step, instead of the predicted ones.

    Counts: every GPU for every second of the run, whether it works or waits.

    >>> round(8 * 3.99 * 3600 / 3600, 2)  # 8 GPUs at 3.99 dollars for an hour
    31.92
    """
    pools = _list_pools(plan)
    quoted_prices = {gpu: prices.find_price(gpu, plan.asked.hardware.price_per_gpu_hour) for gpu, _, _ in pools}
    unpriced = tuple(gpu for gpu, price in quoted_prices.items() if price is None)
    unmetered = tuple(gpu for gpu, _, watts in pools if watts is None)
    dollars = {gpu: price.dollars for gpu, price in quoted_prices.items() if price}
    hourly = None if unpriced else math.fsum(dollars[gpu] * count for gpu, count, _ in pools)
    watts = None if unmetered else sum((power or 0) * count for _, count, power in pools)
    seconds = step_s if step_s is not None else plan.seconds or None
    run_s = _predict_run_s(plan, seconds)
    per_step = _multiply(hourly, seconds, 1 / 3600)
    tokens = plan.tokens_per_s * plan.seconds
    return Bill(
        dollars_per_hour=hourly,
        dollars_per_step=per_step,
        run_s=run_s,
        dollars_per_run=_multiply(hourly, run_s, 1 / 3600),
        kwh_per_step=_multiply(watts, seconds, 1 / JOULES_PER_KWH),
        kwh_per_run=_multiply(watts, run_s, 1 / JOULES_PER_KWH),
        tokens_per_dollar=tokens / per_step if per_step else None,
        quotes=tuple(
            Quote(
                gpu, price.dollars, price.source, price.date, price.age_days(prices.today), price.is_old(prices.today)
            )
            for gpu, price in quoted_prices.items()
            if price
        ),
        unpriced=unpriced,
        unmetered=unmetered,
    )


def _list_pools(plan: Plan) -> list[tuple[str, int, int | None]]:
    """List (GPU, count, watts per GPU) for each pool; a CPU host by its profile's name, without watts."""
    hardware = plan.job.hardware
    if plan.is_on_host:
        return [(hardware.profile, hardware.num_devices, None)]
    named = [(hardware.profile, hardware.num_devices)]
    if hardware.generation is not None:
        named.append((hardware.generation.profile, hardware.generation.num_devices))
    gpus = [(get_gpu(name, where="hardware.profile"), count) for name, count in named]
    return [(gpu.name, count, gpu.power.value if gpu.power else None) for gpu, count in gpus]


def format_hardware(plan: Plan) -> str:
    """Format the devices of a plan for `hardware=`; for a CPU host, its profile's name."""
    pools = _list_pools(plan)
    return pools[0][0] if plan.is_on_host else " + ".join(f"{count}x{gpu}" for gpu, count, _ in pools)


def _predict_run_s(plan: Plan, step_s: float | None) -> float | None:
    if plan.timing is None or step_s is None:
        return None
    num_steps = plan.job.workload.num_steps
    return plan.timing.run_s(plan.schedule, num_steps) + num_steps * (step_s - plan.seconds)


def _multiply(*factors: float | None) -> float | None:
    result = 1.0
    for factor in factors:
        if factor is None:
            return None
        result *= factor
    return result


def mark_pareto_front(points: Sequence[tuple[float, float] | None]) -> tuple[bool, ...]:
    """Mark each (time, money) that no other point beats in one value without losing in the other. None is never on the
    front.

    >>> mark_pareto_front([(1, 9), (2, 4), (3, 5), None, (2, 4)])
    (True, True, False, False, True)
    """

    def is_beaten(point: tuple[float, float]) -> bool:
        return any(other and other != point and other[0] <= point[0] and other[1] <= point[1] for other in points)

    return tuple(point is not None and not is_beaten(point) for point in points)


def read_clusters(typed: Sequence[str], prices: Prices, budget: float | None) -> tuple[tuple[str, ...], dict[str, str]]:
    """Read (clusters to plan, skipped clusters with reasons).

    typed: `8xH100`, `8xH100 + 8xL40S`. With a budget, a GPU kind alone (`H100`) means as many as the budget buys, as a
    power of two. With a budget and no cluster, every kind with a price is planned. Raises: SpecError.
    """
    if budget is not None and not 0 < budget <= MAX_BUDGET:
        raise SpecError(
            f"a budget of {budget:g} dollars an hour buys nothing",
            where="command line: --budget-per-hour",
            rule=f"dollars above 0 and at most {MAX_BUDGET:g}",
            way_out="for example --budget-per-hour 30",
        )
    words = [word.strip() for text in typed for word in text.split(",")]
    if budget is not None and not words:
        # no cluster named: try every GPU that has a price
        words = list(prices.names)
    if len(words) > MAX_CLUSTERS:
        raise SpecError(
            f"{len(words)} clusters are named",
            where=WHERE,
            rule=f"at most {MAX_CLUSTERS}: each is a search of its own",
            way_out="name fewer",
        )
    taken: list[str] = []
    left_out: dict[str, str] = {}
    for word in words:
        cluster, why = _buy_cluster(word, prices, budget) if budget is not None else (_expand_cluster(word), "")
        if why:
            left_out[word] = why
        elif cluster not in taken:
            taken.append(cluster)
    return tuple(taken), left_out


def _expand_cluster(word: str) -> str:
    """Expand a cluster to the form COUNTxGPU. Raises: SpecError."""
    long = expand_hardware(word, where=WHERE)
    is_plain = _GPUS.match(word) and "generation" not in long
    return f"{long['num_devices']}x{long['profile']}" if is_plain else word


def _buy_cluster(word: str, prices: Prices, budget: float) -> tuple[str, str]:
    """Buy (cluster, reason if none): a kind alone becomes as many GPUs as the budget buys. Raises: SpecError."""
    is_kind = bool(_KIND.match(word)) and not _GPUS.match(word)
    name = get_gpu(word, where=WHERE).name if is_kind else ""
    cluster = f"1x{name}" if is_kind else _expand_cluster(word)
    dollars = _sum_hourly_prices(cluster, prices)
    if dollars is None:
        return "", f"its price is not known: {WAY_OUT}"
    if dollars > budget:
        return "", f"${dollars:.2f} an hour, more than the budget of ${budget:g}"
    if not is_kind:
        return cluster, ""
    return f"{1 << (min(MOST_GPUS, int(budget / dollars)).bit_length() - 1)}x{name}", ""


def _sum_hourly_prices(cluster: str, prices: Prices) -> float | None:
    """Sum the hourly prices of a cluster's GPUs; None if one has no price."""
    long: dict[str, Any] = expand_hardware(cluster, where=WHERE)
    total = 0.0
    for pool in (long, long.get("generation")):
        if pool is None:
            continue
        price = prices.find_price(get_gpu(pool["profile"], where=WHERE).name)
        if price is None:
            return None
        total += price.dollars * pool["num_devices"]
    return total


def explain_empty_selection(typed: Sequence[str], left_out: dict[str, str]) -> SpecError:
    """Build the error for an empty selection of clusters."""
    words = "; ".join(f"{shorten_value(name)[1:-1]}: {why}" for name, why in list(left_out.items())[:8])
    return SpecError(
        f"none of {len(left_out)} clusters is available" if left_out else "no cluster is named",
        where=WHERE if typed else "command line: --budget-per-hour",
        rule=words or "a cluster is written as COUNTxGPU",
        way_out=f"raise the budget{', or leave --hardware out for all kinds that it buys' * bool(typed)}"
        if left_out
        else "--hardware 8xH100,16xL40S",
    )
