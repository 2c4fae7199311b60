"""The card beside a model that a run writes: job, data, metrics and plan, and no path of the machine."""

import json
from pathlib import Path

from rlplan.runtime.checkpoints.model_card import model_card
from rlplan.vocabulary import ActionKind
from tests.factories import make_plan


def test_a_card_says_job_data_metrics_and_plan(tmp_path: Path) -> None:
    plan = make_plan()
    (tmp_path / "data.json").write_text(json.dumps({"num_prompts": 2000, "num_heldout_prompts": 256}))
    rows = [{"step": 0, "evaluate/greedy_accuracy": 0.25}, {"step": 2, "evaluate/greedy_accuracy": 0.5}, {"step": 3}]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    card = model_card(plan, tmp_path, 2)
    for line in (
        "The weights are those at step 2 of 3.",
        "| base model | sorter |",
        "| held out | heldout.jsonl |",
        "| training prompts | 2000 |",
        "| evaluate/greedy_accuracy | 0.5 (step 2) |",
        "| hardware | 2 x cpu-host |",
    ):
        assert line in card
    assert str(Path(plan.job.policy.path).parent) not in card


def test_a_card_is_written_before_anything_was_measured(tmp_path: Path) -> None:
    assert "None yet." in model_card(make_plan(), tmp_path, -1)


def test_an_export_follows_every_checkpoint_where_it_is_asked_for() -> None:
    keys = {"checkpoints.every": 2, "checkpoints.exports_policy": True}
    step = {action.id: action for action in make_plan(**keys).schedule.step}
    export = step["export"]
    assert (export.kind, export.every, export.after) == (ActionKind.CHECKPOINT, 2, ("save_states",))
    assert "export" in step["sync_weights"].after
    assert "export" not in {action.id for action in make_plan(**{"checkpoints.every": 2}).schedule.step}
