"""Costs of plans by hand, clusters that a budget buys, and the Pareto front against its definition."""

import datetime as dt

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlplan.errors import SpecError
from rlplan.planner.answers.clusters import compute_bill, mark_pareto_front, read_clusters
from rlplan.planner.machine import open_search
from rlplan.planner.plan import Plan
from rlplan.planner.search import find_plan
from rlplan.spec.files.job_file import job_from, load_job
from rlplan.spec.hardware.prices import read_prices
from tests.factories import QUICKSTART

PRICES = read_prices(["h100=2", "l40s=1"], today=dt.date(2026, 11, 23))


def make_plan(hardware: str, **placement: object) -> Plan:
    job = {"policy": "Qwen/Qwen2.5-0.5B", "algorithm": "grpo", "hardware": hardware, "placement": placement}
    return open_search(job_from(job)).run()


def test_a_bill_is_hours_times_gpus_times_the_price() -> None:
    plan = make_plan("2xH100")
    bill = compute_bill(plan, PRICES)
    assert bill.dollars_per_hour == 4.0
    assert bill.dollars_per_step == pytest.approx(4.0 * plan.seconds / 3600)
    assert bill.run_s is not None
    assert bill.run_s >= plan.seconds * plan.job.workload.num_steps * 0.999
    assert bill.dollars_per_run == pytest.approx(4.0 * bill.run_s / 3600)
    assert bill.kwh_per_step == pytest.approx(2 * 700 * plan.seconds / 3.6e6)
    assert bill.tokens_per_dollar == pytest.approx(1e6 / (2 * plan.gpu_hours_per_million_tokens))
    slower = compute_bill(plan, PRICES, 2 * plan.seconds)
    assert slower.dollars_per_step == pytest.approx(2 * bill.dollars_per_step)


def test_an_unknown_price_is_none_and_named() -> None:
    bill = compute_bill(make_plan("2xH20"), PRICES)
    assert (bill.dollars_per_run, bill.kwh_per_run, bill.unpriced, bill.unmetered) == (None, None, ("h20",), ("h20",))
    host = compute_bill(find_plan(load_job(QUICKSTART)), PRICES)
    assert (host.unpriced, host.unmetered) == (("cpu-host",), ("cpu-host",))


def test_two_kinds_of_gpus_are_added_up() -> None:
    both = make_plan("2xH100 + 4xL40S", placement="disaggregated", num_generation_devices=4)
    assert compute_bill(both, PRICES).dollars_per_hour == 2 * 2.0 + 4 * 1.0


def test_a_budget_buys_a_power_of_two_of_a_kind_and_leaves_out_what_costs_more() -> None:
    taken, left_out = read_clusters(["h100,l40s", "16xH100", "2xH100 + 2xL40S", "h20"], PRICES, 15)
    assert taken == ("4xh100-sxm", "8xl40s", "2xH100 + 2xL40S")
    assert list(left_out) == ["16xH100", "h20"]
    assert "$32.00 an hour, more than the budget of $15" in left_out["16xH100"]
    assert "its price is not known" in left_out["h20"]
    every, _ = read_clusters([], PRICES, 1000)
    assert {"256xh100-sxm", "512xl40s"} <= set(every)


def test_a_cluster_that_is_named_twice_is_planned_once() -> None:
    assert read_clusters(["8xH100,8xh100-sxm"], PRICES, None)[0] == ("8xh100-sxm",)


@pytest.mark.parametrize(
    ("typed", "budget", "words"),
    [
        (["8xH1000"], None, "did you mean"),
        (["H100"], None, "'H100' leaves open: one h100-sxm; write 8xh100"),
        (["0xH100"], None, "names no GPUs"),
        (["8xH100,,"], None, "no GPUs are named"),
        (["cpu-host"], 5.0, "kind cpu"),
        ([], 0.0, "buys nothing"),
        ([], -3.0, "buys nothing"),
        ([], float("nan"), "buys nothing"),
        ([f"{n}xH100" for n in range(1, 66)], None, "at most 64"),
    ],
)
def test_clusters_that_are_none_are_refused(typed: list[str], budget: float | None, words: str) -> None:
    with pytest.raises(SpecError) as caught:
        read_clusters(typed, PRICES, budget)
    assert words.lower() in str(caught.value).lower()


Points = st.lists(st.none() | st.tuples(st.integers(1, 9), st.integers(1, 9)), max_size=12)


@given(Points)
def test_the_front_holds_what_nothing_beats(points: list[tuple[int, int] | None]) -> None:
    front = mark_pareto_front(points)
    known = [point for point in points if point]
    for point, is_on in zip(points, front, strict=True):
        beaten = point is None or any(b != point and b[0] <= point[0] and b[1] <= point[1] for b in known)
        assert is_on is not beaten
    assert any(front) == bool(known)
