"""Weight sync buckets worked by hand, and what every cut must keep."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlplan.memory.weight_sync.packets import ALIGNMENT, plan_buckets, staging_bytes
from rlplan.spec.model import load_model
from tests.factories import EXAMPLES, make_model

# In fp32, rounded up to 64 bytes: embedding 2240; a layer q 384, k and v 192, o 384, q and k norm 64 each, gate, up and
# down 640 each, norms 64 each, together 3328; last norm 64; head 2240.
EMBEDDING, LAYER, NORM = 2240, 3328, 64


@pytest.mark.parametrize(
    ("bucket_bytes", "sizes"),
    [
        (1, [EMBEDDING, LAYER, LAYER, NORM]),
        (4000, [EMBEDDING, LAYER, LAYER + NORM]),
        (EMBEDDING + LAYER, [EMBEDDING + LAYER, LAYER + NORM]),
        (EMBEDDING + LAYER - 1, [EMBEDDING, LAYER, LAYER + NORM]),
        (1 << 26, [EMBEDDING + 2 * LAYER + NORM]),
    ],
)
def test_buckets_are_filled_in_order_and_a_layer_is_never_cut(bucket_bytes: int, sizes: list[int]) -> None:
    buckets = plan_buckets(make_model().parameters, 4, bucket_bytes)
    assert [bucket.num_bytes for bucket in buckets] == sizes
    assert staging_bytes(buckets) == max(sizes)


def test_half_precision_takes_half_but_for_the_rounding() -> None:
    # q 192, k and v 96 -> 128, o 192, norms 64 each, gate, up and down 320: 192+256+192+128+960+128 = 1856
    assert [bucket.num_bytes for bucket in plan_buckets(make_model().parameters, 2, 1)] == [1152, 1856, 1856, 64]


def test_an_untied_head_travels_by_itself() -> None:
    buckets = plan_buckets(make_model(has_tied_embeddings=False).parameters, 4, 1)
    assert [entry.name for entry in buckets[-1].entries] == ["lm_head.weight"]


def test_the_quickstart_s_weights_travel_at_once() -> None:
    model = load_model(EXAMPLES / "models" / "sorter")
    (bucket,) = plan_buckets(model.parameters, 4, 64 << 20)
    # every tensor of the sorter is a multiple of 64 bytes already
    assert bucket.num_bytes == model.num_parameters * 4


@given(st.integers(1, 12_000), st.sampled_from([2, 4]), st.integers(1, 5), st.booleans())
def test_any_cut_carries_every_parameter_once_in_order_and_without_overlap(
    bucket_bytes: int, dtype_bytes: int, num_layers: int, tied: bool
) -> None:
    model = make_model(num_layers=num_layers, has_tied_embeddings=tied)
    buckets = plan_buckets(model.parameters, dtype_bytes, bucket_bytes)
    entries = [entry for bucket in buckets for entry in bucket.entries]
    assert [(entry.name, entry.shape) for entry in entries] == [(p.name, p.shape) for p in model.parameters]
    numel = {parameter.name: parameter.numel for parameter in model.parameters}
    layers_of_buckets = []
    for bucket in buckets:
        end = 0
        for entry in bucket.entries:
            assert entry.offset % ALIGNMENT == 0
            assert entry.offset >= end
            end = entry.offset + numel[entry.name] * dtype_bytes
        assert end <= bucket.num_bytes
        layers_of_buckets.append({entry.name.split(".")[2] for entry in bucket.entries if ".layers." in entry.name})
    for index, layers in enumerate(layers_of_buckets):
        assert not any(layers & others for others in layers_of_buckets[index + 1 :])


@given(st.integers(1, 12_000), st.integers(0, 5000))
def test_a_larger_bucket_never_makes_more_buckets(bucket_bytes: int, more: int) -> None:
    parameters = make_model(num_layers=4).parameters
    assert len(plan_buckets(parameters, 4, bucket_bytes + more)) <= len(plan_buckets(parameters, 4, bucket_bytes))
