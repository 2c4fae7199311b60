"""Speculative decoding on GPUs: as many drafted tokens as make a step fastest at a stated acceptance rate, or none."""

from typing import Any

from rlplan.planner.answers.families import list_what_ifs
from rlplan.planner.plan import Plan
from rlplan.planner.search import find_best_plan
from rlplan.spec.files.job_file import load_job
from rlplan.vocabulary import MemoryKind
from tests.factories import EXAMPLES

KIND = MemoryKind.ACTIVATIONS


def plan(backend: str = "fsdp2", **rollout: Any) -> Plan:
    keys = [
        "workload.num_prompts_per_step=16",
        "rollout.tp=1",
        "rollout.max_num_seqs=64",
        f"training.backend={backend}",
    ]
    keys += ["training.zero_stage=3", "placement.placement=colocated", "training.gradient_checkpointing=true"]
    overrides = [f"rollout.{key}={value}" for key, value in rollout.items()]
    return find_best_plan(load_job(EXAMPLES / "grpo-7b-8xh100.yaml", keys + overrides), with_others=False)


def test_as_many_as_make_a_step_fastest_are_drafted_and_the_steps_of_others_are_named() -> None:
    best = plan(speculative_tokens="auto", acceptance_rate=0.6)
    chosen = best.job.rollout.speculative_tokens
    assert chosen > 0
    assert best.seconds < plan().seconds
    assert any(f"rollout.speculative_tokens auto is {chosen}; step times by value" in note for note in best.notes)


def test_nothing_is_drafted_at_an_unknown_or_a_low_acceptance_rate() -> None:
    assert plan(speculative_tokens="auto").job.rollout.speculative_tokens == 0
    assert plan(speculative_tokens="auto", acceptance_rate=0.01).job.rollout.speculative_tokens == 0


def test_drafts_of_an_unknown_acceptance_rate_gain_nothing_and_the_plan_says_so() -> None:
    best = plan(speculative_tokens=3)
    assert best.seconds >= plan().seconds
    assert any("rollout.acceptance_rate is not stated" in note for note in best.notes)


def test_each_drafted_token_is_a_row_of_logits_more() -> None:
    """16 prompts of 8 samples on 8 engines: 64 sequences at once at most; a row is 14 bytes of 152,064 words."""
    few, many = (plan(speculative_tokens=count, acceptance_rate=0.6) for count in (0, 16))
    peaks = [
        max(
            row.peak_bytes
            for row in drafted.ledger.rows
            if row.process.startswith("rollout_engine") and row.kind is KIND
        )
        for drafted in (few, many)
    ]
    assert peaks[1] > peaks[0]


def test_explain_asks_for_other_numbers_of_drafts_where_a_rate_is_stated() -> None:
    asked = {word for change in list_what_ifs(plan(acceptance_rate=0.6)) for word in change.overrides}
    assert {"rollout.speculative_tokens=1", "rollout.speculative_tokens=4"} <= asked
