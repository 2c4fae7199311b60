"""A view stands for a schedule: the same actions in the same order, one process for all that are alike, and counts."""

from dataclasses import replace
from itertools import product

import pytest

from rlplan.dataflow.build import build_schedule, build_view
from rlplan.dataflow.choice import NO_TRAINER, Arrangement, Choice, EngineChoice
from rlplan.spec.resolved import SettledJob
from rlplan.vocabulary import Placement
from tests.factories import gpu_job


def job(algorithm: str, gpus: int, num_mini_batches: int) -> SettledJob:
    sizes = (f"workload.num_prompts_per_step={2 * num_mini_batches}", "workload.num_samples_per_prompt=2")
    ladder = (*sizes, "workload.mini_batch_size=4", "placement.max_staleness=1", "checkpoints.every=1")
    asked = {"policy": "Qwen/Qwen2.5-0.5B", "hardware": f"{gpus}xH100", "algorithm": algorithm}
    return gpu_job(asked, ladder)


ARRANGEMENTS = {
    "hybrid": Arrangement(Placement.HYBRID, 8, 8),
    "hybrid, frozen roles offloaded": Arrangement(Placement.HYBRID, 8, 8, offloaded="frozen"),
    "colocated": Arrangement(Placement.COLOCATED, 8, 8, offloaded="all", sleeps=True),
    "disaggregated": Arrangement(Placement.DISAGGREGATED, 4, 4),
    "scoring alone": Arrangement(Placement.DISAGGREGATED, 2, 4, 2),
    "asynchronous": Arrangement(Placement.DISAGGREGATED, 4, 4, is_async=True),
}


@pytest.mark.parametrize("arrangement", ARRANGEMENTS.values(), ids=ARRANGEMENTS)
@pytest.mark.parametrize(("algorithm", "num_mini_batches"), list(product(("grpo", "ppo"), (1, 2, 5))))
def test_a_view_has_the_actions_of_every_schedule_that_it_stands_for(
    algorithm: str, num_mini_batches: int, arrangement: Arrangement
) -> None:
    asked = job(algorithm, 8, num_mini_batches)
    trainer = replace(NO_TRAINER, zero_stage=3)
    whole = build_schedule(asked, Choice(arrangement, trainer, EngineChoice(2, 0), "disk"))
    view = build_view(asked, arrangement)
    assert view.groups == whole.groups
    first = {layout.processes[0][0] for layout in whole.layouts}
    assert {name for name, _ in view.processes} == first
    for (_, seen), (_, there) in zip(view.parts, whole.parts, strict=True):
        alike = [action for action in there if (action.mini_batch or 0) < 2]
        assert [action.id for action in seen] == [action.id for action in alike]
        for represented, other in zip(seen, alike, strict=True):
            assert (represented.kind, represented.role, represented.device_group, represented.stream) == (
                other.kind,
                other.role,
                other.device_group,
                other.stream,
            )
            assert represented.processes == tuple(name for name in other.processes if name in first)
        assert sum(action.repeat for action in seen) == len(there)


def test_an_engine_wakes_its_weights_first_then_takes_the_new_ones_and_its_kv_cache_last() -> None:
    names = [action.id for action in build_view(job("grpo", 8, 1), ARRANGEMENTS["colocated"]).step]
    order = ("sleep_engine", "reload_role/policy", "wake_weights", "sync_weights", "offload_role/policy")
    places = [names.index(name) for name in (*order, "wake_kv_cache")]
    assert places == sorted(places)


def test_given_answers_need_no_engine() -> None:
    names = [action.id for action in build_view(job("dpo", 8, 1), ARRANGEMENTS["hybrid"], has_engine=False).step]
    assert names[0] == "take_answers"
    assert not {"generate", "sync_weights", "evaluate"} & set(names)
