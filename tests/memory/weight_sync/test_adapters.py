"""Adapters in an engine: slots by version and vLLM's rank, and copies in the host's memory."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlplan.emit.vllm import engine_arguments
from rlplan.memory.weight_sync.adapters import EngineAdapters, find_engine_adapters, num_adapter_versions
from rlplan.simulate.staleness import must_wait, num_allowed
from rlplan.spec.resolved import ResolvedJob
from tests.factories import EXAMPLES, make_job

SORTER = str(EXAMPLES / "models" / "sorter")


def lora_job(**more: Any) -> ResolvedJob:
    place = {"placement.placement": "disaggregated", "placement.sync_content": "adapter"}
    return make_job(**{"policy.path": SORTER, "training.lora.rank": 4} | place | more)


def find_adapters(job: ResolvedJob) -> EngineAdapters:
    in_engine = find_engine_adapters(job)
    assert in_engine is not None
    return in_engine


@pytest.mark.parametrize("staleness", [0, 2])
def test_each_version_has_a_slot_of_what_a_live_engine_held(staleness: int) -> None:
    # vLLM 0.32.0 with this model, max_lora_rank 8, max_loras 1: 323,584 bytes of `lora_a_stacked` and `lora_b_stacked`.
    job = lora_job(**{"placement.max_staleness": staleness})
    assert find_adapters(job).slot_bytes(job.load_model()) == (staleness + 1) * 323_584
    assert engine_arguments(job)["max_loras"] == staleness + 1


def test_a_copy_has_the_rank_that_is_trained_and_the_layers_that_are() -> None:
    # rank 4 x (in + out = 256 + 192 + 192 + 256 + 3 x 512 a decoder layer) x 4 layers x 4 bytes
    job = lora_job()
    assert find_adapters(job).copy_bytes(job.load_model()) == 155_648
    ahead = lora_job(**{"placement.max_staleness": 1})
    assert find_adapters(ahead).copy_bytes(job.load_model()) == 2 * 155_648
    some = lora_job(**{"training.lora.target_modules": ["q_proj"]})
    assert (
        find_adapters(some).copy_bytes(job.load_model()) == 4 * (128 + 128) * 4 * 4
    )  # rank x (in + out) x layers x bytes


def test_a_sync_that_waits_for_what_is_under_way_needs_one_slot() -> None:
    job = lora_job(**{"placement.max_staleness": 3, "placement.partial_rollouts": False})
    assert engine_arguments(job)["max_loras"] == 1


def test_ranks_of_an_engine_have_whole_tables_and_share_the_rest() -> None:
    # Of four layers' A and B of rank 8 in fp32: q, k, v, gate, up cut by outputs (A whole), o and down by inputs.
    job = lora_job()
    model, in_engine = job.load_model(), find_adapters(job)
    tables = 2 * 8 * (model.vocab_size + model.hidden_size) * 4
    layer = (256 + 192 + 192 + 256 + 3 * 512) * 8 * 4
    h = 128
    whole = h * 3 + h * 2 + h + h  # q, k, v; gate, up; o, down
    assert in_engine.slot_bytes(model) == 4 * layer + tables
    assert in_engine.slot_bytes(model, tp=2) == 4 * ((layer // 32 - whole) // 2 + whole) * 32 + tables


@given(st.integers(1, 5), st.integers(1, 4), st.data())
def test_what_staleness_allows_under_way_leaves_a_slot_for_the_next_version(
    staleness: int, num_prompts: int, data: st.DataObject
) -> None:
    """A stream that begins as much as it may; what is under way ends in any order, as late as a step can do without."""
    begun: dict[int, int] = {}
    done: set[int] = set()
    for version in range(8):
        first = num_allowed(version - 1, staleness, num_prompts) if version else 0
        begun |= dict.fromkeys(range(first, num_allowed(version, staleness, num_prompts)), version)
        while True:
            taken = sorted(done)[:num_prompts]
            left_out = [under for number, under in begun.items() if number not in taken]
            if len(taken) == num_prompts and not must_wait(left_out, version, staleness, num_prompts):
                break
            done.add(data.draw(st.sampled_from(sorted(set(begun) - done))))
        for number in taken:
            del begun[number]
            done.remove(number)
        under_way = {under for number, under in begun.items() if number not in done}
        assert len(under_way | {version + 1}) <= num_adapter_versions(staleness)
