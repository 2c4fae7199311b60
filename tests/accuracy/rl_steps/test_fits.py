"""Recipes that were published as running fit with their layout forced; the file is one that `rlplan accuracy` reads."""

from pathlib import Path

import pytest

from rlplan.accuracy.compare import compare_point
from rlplan.accuracy.files.reading import read_points
from rlplan.accuracy.points import MeasuredPoint
from rlplan.accuracy.rl_steps.fits import forced_job
from rlplan.accuracy.rl_steps.settings import read_rl_run
from rlplan.planner.machine import search_of
from rlplan.spec.files.job_file import job_from

RECIPES = {point.id: point for point in read_points(Path(__file__).parent / "recipes.json")}


def changed(point: MeasuredPoint, **settings: object) -> MeasuredPoint:
    return point.model_copy(update={"settings": point.settings | settings})


@pytest.mark.parametrize("name", RECIPES)
def test_a_published_recipe_fits_with_its_layout(name: str) -> None:
    compared = compare_point(RECIPES[name])
    assert (compared.predicted, compared.relative_error, compared.reason) == ("fits", 0.0, None)


def test_the_layout_is_the_published_one() -> None:
    point = RECIPES["verl-dsv3-96"]
    job = forced_job(point, read_rl_run(point))
    assert (job["hardware"], job["target"]) == ("12xhgx-h20", "megatron")
    assert job["training"] == {
        "tp": 8,
        "pp": 12,
        "cp": 1,
        "ep": 8,
        "offloads_optimizer": True,
        "gradient_checkpointing": True,
    }
    assert job["rollout"] == {"tp": 32, "attention_dp": 1, "has_cuda_graphs": False, "quantization": "none"}
    assert read_rl_run(RECIPES["verl-235b-32"]).choice.ep == 4  # over tensor parallel ranks too: 32 / pp 8


def test_671b_on_96_gpus_hands_over_within_a_tenth_of_the_peak_that_verl_reports() -> None:
    """66 GB of a GPU, 1.5 to 1.6 TB of a node's memory (its page dpsk.md). It was 138 GiB, and more than 2 TiB."""
    point = RECIPES["verl-dsv3-96"]
    ledger = search_of(job_from(forced_job(point, read_rl_run(point)))).run(with_others=False).ledger
    sync = [row for row in ledger.rows if row.action_id == "sync_weights" and row.run_phase == "steady"]
    others = 2_300_000_000  # context and communicators of the reference, which waits
    assert sum(row.peak_bytes for row in sync if row.space == "device") + others == pytest.approx(66e9, rel=0.1)
    assert max(ledger.host_peak(host).num_bytes for host in ledger.hosts) == pytest.approx(1.6e12, rel=0.2)


def test_half_of_the_gpus_do_not_hold_it_and_the_point_is_wrong() -> None:
    point = changed(RECIPES["verl-235b-32"], train_tp_cp_ep_pp="[4,1,4,4]").model_copy(update={"gpu": "16x H20"})
    compared = compare_point(point)
    assert compared.predicted == "does not fit"
    assert compared.relative_error == 1.0


def test_a_point_that_says_neither_true_nor_false_is_refused() -> None:
    point = RECIPES["verl-235b-32"]
    wrong = point.model_copy(update={"measured": point.measured.model_copy(update={"value": 66.0})})
    assert "true or false" in str(compare_point(wrong).reason)
