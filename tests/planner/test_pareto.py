"""The front of time against headroom: nothing that fits is better in both, and nothing on it is worse in both."""

from itertools import pairwise, takewhile

import pytest

from rlplan.planner.budget import read_setting
from rlplan.planner.gpu_remedies import find_budget
from rlplan.planner.gpu_search import GpuSearch
from rlplan.planner.pareto import LONGEST, find_pareto, with_pareto
from rlplan.spec.budget import BudgetSpec, make_budget

SHORT = ("workload.num_prompts_per_step=16", "workload.max_response_len=512", "workload.max_prompt_len=256")


def spec(algorithm: str, gpus: str) -> BudgetSpec:
    return make_budget({"model": "Qwen/Qwen2.5-0.5B", "gpus": gpus, "algorithm": algorithm}, SHORT)


@pytest.mark.parametrize(("algorithm", "gpus"), [("grpo", "2xL40S"), ("dpo", "4xH100"), ("ppo", "1xRTX4090")])
def test_no_candidate_that_fits_beats_the_front_in_both(algorithm: str, gpus: str) -> None:
    asked = spec(algorithm, gpus)
    search = GpuSearch(asked, read_setting(asked))
    longest = LONGEST * find_budget(asked).timing.seconds
    front = find_pareto(search, longest)
    assert front
    for faster, slower in pairwise(front):
        assert faster.timing.seconds <= slower.timing.seconds
        assert faster.headroom_bytes < slower.headroom_bytes
    every = GpuSearch(asked, read_setting(asked)).stream(0)
    for one in takewhile(lambda rated: rated.timing.seconds <= longest, every):
        room = search.alternative(one).headroom_bytes
        as_fast = [point for point in front if point.timing.seconds <= one.timing.seconds]
        assert max(point.headroom_bytes for point in as_fast) >= room


def test_the_front_begins_with_what_was_chosen() -> None:
    budget = with_pareto(find_budget(spec("dpo", "2xH100")))
    assert budget.pareto[0].candidate == budget.candidate
    assert budget.pareto[0].timing.seconds == budget.timing.seconds
