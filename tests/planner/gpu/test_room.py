"""Among layouts within 1 % of the fastest, the search takes the one that leaves room, compared with every candidate."""

import pytest

from rlplan.planner.gpu.scored_candidates import ScoredCandidate, rank_simplicity
from rlplan.planner.gpu.search import GpuSearch
from rlplan.planner.margins import ENOUGH_ROOM, SAME_SPEED, rank_roominess
from rlplan.planner.plan_parts import Verdict
from rlplan.planner.search import find_best_plan
from rlplan.planner.setting import read_setting
from rlplan.spec.resolved import SettledJob
from rlplan.units import GIB
from tests.factories import gpu_job
from tests.planner.gpu.oracle import Oracle

SMALL_SPACE = ("placement.placement=colocated", "training.tp=1", "training.ulysses=1", "rollout.max_num_seqs=256")
TIGHT = [
    ("Qwen/Qwen2.5-7B", "8xH100", "grpo", *SMALL_SPACE),
    ("Qwen/Qwen2.5-7B", "4xH100", "sft"),
    ("meta-llama/Llama-3.2-3B", "2xL40S", "grpo", *SMALL_SPACE),
]


def job(model: str, gpus: str, algorithm: str, *overrides: str) -> SettledJob:
    return gpu_job({"policy": model, "hardware": gpus, "algorithm": algorithm}, overrides)


def test_a_layout_that_leaves_megabytes_gives_way_to_one_that_leaves_gigabytes_for_less_than_one_per_cent() -> None:
    spec = job("Qwen/Qwen2.5-7B", "8xH100", "grpo", "hardware.memory=76.2GiB")  # an H100 whose driver keeps more
    search, chosen = GpuSearch(spec, read_setting(spec)), find_best_plan(spec)
    fastest = search.find_best().plan
    assert fastest.headroom_bytes < 0.1 * GIB
    assert chosen.verdict is Verdict.FITS
    assert chosen.headroom_bytes > 7 * GIB
    assert chosen.seconds <= fastest.seconds * (1 + SAME_SPEED)
    assert any("the fastest layout takes" in note and "in the worst case" in note for note in chosen.notes)


@pytest.mark.parametrize("asked", TIGHT)
def test_no_candidate_as_fast_leaves_more_of_the_room_that_counts(asked: tuple[str, str, str, str]) -> None:
    """Every combination of the oracle's raw axes; the rule is `roominess`, and nothing else is shared."""
    spec = job(*asked)
    setting = read_setting(spec)
    search = GpuSearch(spec, setting)
    plan = search.run(with_others=False, may_leave_idle=False)

    def order(scored: ScoredCandidate) -> tuple[object, ...]:
        return rank_roominess(scored.choice, search.compute_headroom(scored), setting.capacity, scored.timing.seconds)

    fitting = [tried for tried in Oracle(spec, setting).run() if tried.rank == 0]
    limit = min(tried.seconds for tried in fitting) * (1 + SAME_SPEED)
    as_fast = [search.score(tried.choice) for tried in fitting if tried.seconds <= limit]
    roomiest = min(as_fast, key=lambda scored: (*order(scored), *rank_simplicity(scored.choice)))
    most = search.compute_headroom(roomiest)
    assert plan.seconds <= limit * (1 + 1e-9)
    if plan.headroom_bytes < ENOUGH_ROOM * setting.capacity:
        assert order(search.score(plan.choice)) <= order(roomiest)
    assert plan.headroom_bytes >= min(most, int(ENOUGH_ROOM * setting.capacity))


def test_a_layout_that_leaves_room_enough_is_not_given_up_for_one_that_offloads_for_more() -> None:
    plan = find_best_plan(job("Qwen/Qwen2.5-0.5B", "2xH100", "grpo"))
    assert not plan.choice.trainer.offloads_optimizer
    assert plan.choice.arrangement.offloaded == "none"
    assert plan.headroom_bytes > ENOUGH_ROOM * 79 * GIB


def test_passes_that_hold_fewer_rollouts_than_was_asked_for_are_said_with_both_numbers() -> None:
    overrides = ("workload.micro_batch_size_per_gpu=64", "workload.mini_batch_size=64")
    notes = find_best_plan(job("Qwen/Qwen2.5-0.5B", "8xH100", "grpo", *overrides)).notes
    assert [note for note in notes if "micro_batch_size_per_gpu 64" in note and "allow micro-batches of 8" in note]
    assert not any("micro_batch" in note for note in find_best_plan(job("Qwen/Qwen2.5-0.5B", "8xH100", "grpo")).notes)
