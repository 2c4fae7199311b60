"""The search skips chains whose leanest choice does not fit, without counting them."""

from collections import defaultdict
from random import Random

import pytest

from rlplan.errors import RlplanError
from rlplan.planner.checks.gpus import check_job
from rlplan.planner.gpu.search import GpuSearch
from rlplan.planner.gpu.streams import _build_chain_key, find_engine_floor
from rlplan.planner.gpu.tables import fit
from rlplan.planner.setting import read_setting
from tests.factories import gpu_job
from tests.planner.gpu.test_search_oracle import _draw

SOME = 3
"""Arrangements of a job."""


def searches(seeds: range) -> list[GpuSearch]:
    """Searches of random jobs that may also offload parameters."""
    chains = []
    for seed in seeds:
        keys = dict(_draw(Random(seed))) | {"training.offloads_parameters": "auto"}
        top = {key: keys.pop(key) for key in ("policy", "algorithm", "hardware")}
        try:
            job = gpu_job(top, [f"{key}={value}" for key, value in keys.items()])
            setting = read_setting(job)
            check_job(job, setting)
        except RlplanError:
            continue
        chains.append(GpuSearch(job, setting))
    return chains


@pytest.mark.parametrize("seeds", [range(4), pytest.param(range(4, 80), marks=pytest.mark.nightly)])
def test_no_choice_of_a_chain_leaves_more_room_on_a_device_than_the_leanest(seeds: range) -> None:
    for search in searches(seeds):
        for arrangement in search.space.arrangements[:SOME]:
            floor = find_engine_floor(search.scorer, arrangement, search.space.list_engines(arrangement))
            parts = search.roles.parts(arrangement)
            chains = defaultdict(list)
            for sweep in search.space.list_sweeps(arrangement):
                trainer_bytes = search.roles.sum_trainer_bytes(arrangement, sweep.choices[-1])
                chains[_build_chain_key(sweep)].append(
                    (sum(sweep.savings), fit(trainer_bytes, floor, parts.capacities))
                )
            for chain in chains.values():
                leanest = max(chain, key=lambda entry: entry[0])[1]
                assert leanest.slack_high == max(need.slack_high for _, need in chain)
                assert leanest.slack_expected == max(need.slack_expected for _, need in chain)


@pytest.mark.parametrize("seeds", [range(4), pytest.param(range(4, 80), marks=pytest.mark.nightly)])
def test_a_layout_that_lacks_much_on_many_ranks_fits_on_no_fewer(seeds: range) -> None:
    for search in searches(seeds):
        for arrangement in search.space.arrangements[:SOME]:
            for sweep in search.space.list_sweeps(arrangement):
                choice, nothing = sweep.choices[-1], search.roles.nothing(arrangement)
                parts = search.roles.sum_trainer_bytes(arrangement, choice), nothing
                states = search.roles.sum_state_bytes(arrangement, choice), nothing
                for rank in (0, 1):
                    slack = search.scorer.compute_slack(arrangement, parts, rank)
                    assert slack <= search.scorer.compute_slack(arrangement, states, rank)
                    assert slack < 0 or not search.scorer.is_hopeless(arrangement, choice, rank)
