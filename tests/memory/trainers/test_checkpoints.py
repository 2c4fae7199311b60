"""Checkpoints in the plan: each trained element is saved once, its copy is there from the start, writing takes time."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlplan.memory.trainers.checkpoints import SAVED_BYTES, saved_bytes, saved_numel
from rlplan.memory.trainers.zero import ZeroSettings, ZeroStates
from rlplan.planner.plan import Plan
from rlplan.spec.model import Parameter
from rlplan.vocabulary import MemoryKind
from tests.factories import make_plan


@given(
    st.integers(0, 3), st.integers(1, 9), st.lists(st.integers(1, 50), min_size=1, max_size=6), st.sampled_from([2, 4])
)
def test_all_ranks_together_save_each_element_once(stage: int, ranks: int, sizes: list[int], width: int) -> None:
    parameters = tuple(Parameter(f"p{index}", (size,)) for index, size in enumerate(sizes))
    settings = ZeroSettings(stage=stage, num_ranks=ranks, weight_bytes=width)
    saved = [saved_numel(ZeroStates(settings, parameters, (), rank)) for rank in range(ranks)]
    assert sum(saved) == sum(sizes)
    assert min(saved) >= 0
    assert [saved_bytes(ZeroStates(settings, parameters, (), rank)) for rank in range(ranks)] == [
        SAVED_BYTES * numel for numel in saved
    ]


def staging(plan: Plan) -> dict[tuple[str, str, str], int]:
    rows = [row for row in plan.ledger.rows if row.kind is MemoryKind.CHECKPOINT_STAGING]
    assert all(row.resident_bytes == row.peak_bytes for row in rows)
    return {(row.process, row.run_phase, row.action_id): row.resident_bytes for row in rows}


def test_the_copy_is_held_from_the_start_and_nothing_without_one() -> None:
    plan = make_plan(**{"checkpoints.every": 2})
    numel = plan.job.load_model().num_parameters
    staged = staging(plan)
    first = {process: size for (process, run_phase, _), size in staged.items() if run_phase == "start"}
    assert sum(first.values()) == 12 * numel
    assert set(staged.values()) == set(first.values())
    assert {run_phase for _, run_phase, _ in staged} == {"start", "first", "steady", "finish"}
    for overrides in ({}, {"checkpoints.every": 2, "checkpoints.writes": "waiting"}):
        assert not staging(make_plan(**overrides))


def test_a_copy_takes_memory_traffic_and_writing_at_once_the_disk() -> None:
    seconds = {}
    for writes in ("beside", "waiting"):
        plan = make_plan(**{"checkpoints.every": 2, "checkpoints.writes": writes})
        assert plan.timing is not None
        cost = plan.timing.cost("step", "save_states")
        assert cost is not None
        seconds[writes] = cost.seconds
    assert 0 < seconds["beside"] < seconds["waiting"]


@pytest.mark.parametrize(("placement", "has_copy"), [("hybrid", True), ("colocated", False)])
def test_under_time_sharing_nothing_is_copied(placement: str, has_copy: bool) -> None:
    assert bool(staging(make_plan(**{"checkpoints.every": 1, "placement.placement": placement}))) is has_copy


def test_moments_in_eight_bits_are_copied_as_they_are_and_shared_layers_part_by_part() -> None:
    whole, quantised = (
        staging(make_plan(**{"checkpoints.every": 2, "hardware.num_devices": 1, **more}))
        for more in ({}, {"training.optimizer": "adamw_8bit"})
    )
    assert 0.45 < next(iter(quantised.values())) / next(iter(whole.values())) < 0.55  # 4 + 2 bytes, and scales, of 12
    shared = staging(make_plan(**{"checkpoints.every": 2, "training.tp": 2}))
    parts = {process: size for (process, run_phase, _), size in shared.items() if run_phase == "start"}
    assert len(set(parts.values())) == 1
    assert 12 * make_plan().job.load_model().num_parameters / 2 < parts["policy_trainer/0"]
