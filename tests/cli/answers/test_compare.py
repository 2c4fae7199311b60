"""`rlplan compare` as a user types it: the table at two widths, the picture, JSON, budgets, prices that are none."""

import json
import re
import shlex
from pathlib import Path

import pytest

from rlplan.spec.files.job_file import load_job
from tests.cli.conftest import Call
from tests.factories import ROOT

JOB = "examples/grpo-7b-8xh100.yaml"
CLUSTERS = ("--hardware", "8xH100,8xH200")
MINE = ("--price", "h100=2", "--price", "h200=3")


@pytest.mark.parametrize("width", [80, 140])
def test_the_table_fits_its_terminal_and_names_time_and_money(
    rlplan: Call, monkeypatch: pytest.MonkeyPatch, width: int
) -> None:
    from rlplan_cli.render import terminal

    monkeypatch.setattr(terminal.stdout, "width", width)
    answer = rlplan("compare", JOB, *CLUSTERS, *MINE)
    assert (answer.exit_code, answer.err) == (0, "")
    table, message, rest = answer.out.partition("Pareto-optimal")[0].partition("Hidden in a narrow terminal: ")
    assert bool(message) == (width == 80)
    assert rest.startswith("memory, ") or not message
    assert all(len(line) <= width for line in table.splitlines())
    for word in ("8x h100-sxm", "8x h200-sxm", "step time", "$/step", "run time", "$/run", "tokens/$"):
        assert word in table
    assert ("$/hour" in table) is (width == 140)
    assert "h100-sxm $2, h200-sxm $3 (your own)" in answer.out


def test_layouts_on_the_front_are_typed_as_they_are_printed(rlplan: Call) -> None:
    answer = rlplan("compare", JOB, *CLUSTERS, *MINE)
    printed = [shlex.split(line) for line in answer.out.splitlines() if line.startswith("  hardware=")]
    assert printed
    for words in printed:
        assert load_job(ROOT / JOB, words).hardware.num_devices == 8


def test_rows_are_dollars_of_the_users_prices_and_one_of_them_is_on_the_front(rlplan: Call) -> None:
    result = json.loads(rlplan("compare", JOB, *CLUSTERS, *MINE, "--json").out)
    rows = result["rows"]
    assert [row["dollars_per_hour"] for row in rows] == [16.0, 24.0]
    assert all(row["dollars_per_step"] == pytest.approx(row["dollars_per_hour"] * row["step_s"] / 3600) for row in rows)
    assert any(row["is_on_front"] for row in rows)
    assert result["schema_version"] == 2


def test_a_page_lays_clusters_side_by_side(rlplan: Call, tmp_path: Path) -> None:
    page = tmp_path / "clusters.html"
    answer = rlplan("compare", JOB, "--hardware", "8xH100", "-o", page)
    assert answer.exit_code == 0
    assert page.read_text().startswith("<!doctype html>")
    assert f"page written to {page}" in answer.err
    refused = rlplan("compare", JOB, *CLUSTERS, "-o", tmp_path / "money.pdf")
    assert refused.exit_code == 2
    assert "'money.pdf' is not a page" in refused.err


def test_a_budget_says_what_it_leaves_out(rlplan: Call) -> None:
    answer = rlplan("compare", JOB, "--hardware", "h100,16xH100,h20", "--budget-per-hour", "10", *MINE)
    assert answer.exit_code == 0
    assert "4x h100-sxm" in answer.out
    assert "16xH100: left out: $32.00 an hour, more than the budget of $10" in answer.out
    assert "h20: left out: its price is not known" in answer.out


def test_an_old_and_an_unknown_price_are_named(rlplan: Call, tmp_path: Path) -> None:
    prices = tmp_path / "prices.yaml"
    prices.write_text("h100: {dollars: 2, source: an old list, date: 2024-01-31}")
    answer = rlplan("compare", JOB, "--hardware", "8xH100,8xH20", "--prices", prices)
    assert answer.exit_code == 0
    assert re.search(r"an old list, read on 2024-01-31, \d+ days ago", answer.out)
    assert "Prices of h100-sxm are older than 90 days" in answer.out
    assert "No price for h20" in answer.out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((JOB, *CLUSTERS, "--price", "h100=-1"), "'h100=-1' is not a price"),
        ((JOB, *CLUSTERS, "--price", "h100=0"), "'h100=0' is not a price"),
        ((JOB, *CLUSTERS, "--price", "h1000=2"), "hardware profile 'h1000' is unknown"),
        ((JOB, "--hardware", "H100"), "leaves open: one h100-sxm"),
        ((JOB, "--budget-per-hour", "0"), "buys nothing"),
        ((JOB, "--hardware", "8xH100", "--budget-per-hour", "1"), "none of 1 clusters is available"),
        (CLUSTERS, "nothing to compare"),
        (("missing.yaml", *CLUSTERS), "missing.yaml"),
        ((JOB, "workload.nonsense=1", *CLUSTERS), "nonsense"),
    ],
)
def test_what_cannot_be_asked_is_one_message_with_exit_code_2(
    rlplan: Call, words: tuple[str, ...], message: str
) -> None:
    answer = rlplan("compare", *words)
    assert (answer.exit_code, answer.out) == (2, "")
    assert message in answer.err


def test_where_nothing_fits_the_table_says_what_is_short_and_the_exit_code_is_1(rlplan: Call) -> None:
    answer = rlplan("compare", "--model", "Qwen/Qwen2.5-7B", "--hardware", "1xL4")
    assert answer.exit_code == 1
    assert "too much for a GPU" in answer.out
    assert "rlplan plan JOB hardware=1xl4" in answer.err


def test_a_cluster_that_contradicts_the_job_is_said_beside_the_others(rlplan: Call) -> None:
    answer = rlplan("compare", JOB, "rollout.tp=4", "--hardware", "8xH100,2xH100")
    assert answer.exit_code == 0
    assert "2xh100-sxm: cannot be built: " in answer.out
