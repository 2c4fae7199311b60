"""Weight sync's staging: packets round an arena, copies for deltas."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlplan.memory.weight_sync.packets import (
    arena_bytes,
    plan_buckets,
    plan_packets,
    plan_policy_packets,
    shadow_bytes,
    staging_bytes,
    sync_staging_bytes,
)
from tests.factories import EXAMPLES, make_job, make_model

SORTER = str(EXAMPLES / "models" / "sorter")


@given(st.integers(1, 40_000), st.sampled_from([2, 4]), st.integers(1, 9))
def test_no_packet_is_written_over_one_that_may_still_be_read(
    bucket_bytes: int, dtype_bytes: int, num_layers: int
) -> None:
    parameters = make_model(num_layers=num_layers).parameters
    packets = plan_packets(parameters, dtype_bytes, bucket_bytes)
    assert [e.name for p in packets for e in p.bucket.entries] == [parameter.name for parameter in parameters]
    for index, packet in enumerate(packets):
        assert packet.after <= index, "a packet waits for earlier ones alone"
        for other in packets[packet.after : index]:
            apart = other.start + other.bucket.num_bytes <= packet.start
            assert apart or packet.start + packet.bucket.num_bytes <= other.start


@given(st.integers(1, 40_000), st.integers(1, 9))
def test_the_arena_is_at_most_the_largest_bucket(bucket_bytes: int, num_layers: int) -> None:
    parameters = make_model(num_layers=num_layers).parameters
    arena = arena_bytes(plan_packets(parameters, 4, bucket_bytes))
    assert arena <= staging_bytes(plan_buckets(parameters, 4, bucket_bytes))


def test_the_quickstart_s_weights_lie_in_the_arena_side_by_side() -> None:
    job = make_job(**{"policy.path": SORTER})
    model = job.load_model()
    packets = plan_policy_packets(job, model)
    assert len(packets) > 1
    assert arena_bytes(packets) == shadow_bytes(packets) == sync_staging_bytes(job, model) == 4 * model.num_parameters


@pytest.mark.parametrize(("transport", "content"), [("disk", "full"), ("gloo", "delta"), ("disk", "delta")])
def test_files_stage_a_packet_and_deltas_a_copy_more(transport: str, content: str) -> None:
    job = make_job(**{"policy.path": SORTER, "placement.transport": transport, "placement.sync_content": content})
    model, whole = job.load_model(), 4 * job.load_model().num_parameters
    largest = max(packet.bucket.num_bytes for packet in plan_policy_packets(job, model))
    staged = largest if transport == "disk" else whole
    assert sync_staging_bytes(job, model) == staged + (whole if content == "delta" else 0)


def test_adapters_alone_are_staged_where_they_alone_are_sent() -> None:
    # rank 4 x (in + out = 256 + 192 + 192 + 256 + 3 x 512 a decoder layer) x 4 layers x 4 bytes
    job = make_job(**{"policy.path": SORTER, "training.lora.rank": 4, "placement.sync_content": "adapter"})
    assert sync_staging_bytes(job, job.load_model()) == 155_648
