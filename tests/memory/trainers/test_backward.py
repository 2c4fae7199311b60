"""The peak inside the passes: traced by hand on one layer, and monotone.

One layer of the factories' model: h=8, q=12, v=6, I=20, V=70; embedding 560 elements, layer 790, last norm 8.
"""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlplan.memory.model.activations import head_saved_bytes, layer_saved_bytes
from rlplan.memory.model.logits import logits_bytes
from rlplan.memory.trainers.backward import MicroBatch, forward_backward_peak
from rlplan.memory.trainers.training import TrainedRank
from rlplan.memory.trainers.zero import ZeroSettings, ZeroStates
from rlplan.spec.model import ModelSpec
from rlplan.vocabulary import MemoryKind
from tests.factories import make_model

BUCKET = 25_000_000


def rank_of(model: ModelSpec, num_ranks: int, bucket: int) -> TrainedRank:
    settings = ZeroSettings(stage=2, num_ranks=num_ranks, weight_bytes=4, gradient_bytes=4, reduce_bucket_size=bucket)
    return TrainedRank(model, ZeroStates(settings, model.parameters))


def peak(micro: MicroBatch, *, num_ranks: int = 1, bucket: int = BUCKET, **model: object) -> dict[str, int]:
    zero = rank_of(make_model(**{"num_layers": 1} | model), num_ranks, bucket)
    return {kind.value: size for kind, size in forward_backward_peak(zero, micro).items() if size}


def test_with_few_tokens_the_peak_is_the_last_reduction() -> None:
    # 2 tokens, 1 response. Saved 2*848 + 272 = 1968; logits 280; exponentials 280.
    # end of the forward pass:          1968 + 280 + 280                                 =  2528
    # the head's gradient waits (560*4): 1968 + 280 + 2240                               =  4488
    # the last norm, then down, up, gate arrive: 1696 + 448 + (640 + 2240) + bucket 4*504 = 7040 at the gate
    # q arrives last:                   1696 + 448 - 768 + (384 + 2240) + bucket 4*798   =  7192
    # the embedding's own gradient:     3*2240 + bucket 3192                             =  9912
    # everything in the bucket and a flat copy of it: 2 * 4*(8 + 790 + 560)              = 10864
    assert peak(MicroBatch(2, 1, count=1)) == {"comm_buffers": 10_864}


def test_accumulated_gradients_stand_beside_when_there_are_several_micro_batches() -> None:
    # the same, and 560 + 790 + 8 elements of the micro-batches before
    assert peak(MicroBatch(2, 1, count=2)) == {"comm_buffers": 10_864, "gradients": 1358 * 4}


def test_with_many_tokens_the_peak_is_the_end_of_the_forward_pass() -> None:
    # 100 tokens, 50 responses: saved 84,800 + (3*800 + 400 + 600)*4 = 98,400; logits 14,000; exponentials 14,000
    assert peak(MicroBatch(100, 50, count=1)) == {"activations": 98_400, "logits": 28_000}


def test_with_long_prompts_the_peak_is_inside_the_mlp_of_the_top_layer() -> None:
    # 100 tokens, 1 response: saved 84,800 and in flight 22,400; 2240 wait; the gate's gradient 640, bucket 4*504
    # against the end of the forward pass: 84,800 + (2400 + 8 + 600)*4 + 280 + 280 = 97,392
    assert peak(MicroBatch(100, 1, count=1)) == {"activations": 107_200, "gradients": 2880, "comm_buffers": 2016}


def test_an_untied_head_does_not_wait_for_the_embedding() -> None:
    tied = peak(MicroBatch(100, 1, count=1))
    untied = peak(MicroBatch(100, 1, count=1), has_tied_embeddings=False)
    # its 560 elements are in the bucket from the start, and no table waits
    assert untied == {"activations": 107_200, "gradients": 640, "comm_buffers": 2016 + 2240}
    assert sum(untied.values()) == sum(tied.values())


def test_a_large_tied_table_exists_three_times_when_its_two_gradients_meet() -> None:
    # V=700: a table of 5600 elements, which bypasses a bucket of 1000; 4*798 of the bucket are touched by then.
    # Later: the table in flight and its flat copy, the layer's 798 elements accumulated and the bucket, 51,184 in all
    held = peak(MicroBatch(2, 1, count=1), bucket=1000, vocab_size=700)
    assert held == {"gradients": 3 * 22_400, "comm_buffers": 3192}


def test_a_small_bucket_is_reduced_as_it_fills() -> None:
    # 100 elements: gate, up, down and the table bypass the bucket; of the rest at most 4*100 bytes are ever touched
    held = peak(MicroBatch(100, 1, count=1), bucket=100)
    assert held["comm_buffers"] <= 4 * (100 + 160)
    assert held["activations"] == 107_200


def test_every_rank_of_two_holds_at_most_what_a_single_one_does() -> None:
    one, two = (sum(peak(MicroBatch(2, 1, count=1), num_ranks=ranks).values()) for ranks in (1, 2))
    assert two <= one


@pytest.mark.parametrize("bucket", [1000, BUCKET])
@given(st.integers(1, 400), st.integers(1, 4), st.booleans())
def test_more_tokens_never_need_less(bucket: int, num_tokens: int, num_layers: int, tied: bool) -> None:
    shape = {"num_layers": num_layers, "has_tied_embeddings": tied}
    sizes = [
        sum(peak(MicroBatch(tokens, responses, count=2), bucket=bucket, **shape).values())
        for tokens, responses in ((num_tokens, 1), (num_tokens + 1, 1), (num_tokens + 1, num_tokens))
    ]
    assert sizes == sorted(sizes)


@given(st.integers(1, 200), st.integers(1, 6))
def test_more_layers_never_need_less(num_tokens: int, num_layers: int) -> None:
    micro = MicroBatch(num_tokens, num_tokens, count=1)
    fewer, more = (sum(peak(micro, num_layers=count).values()) for count in (num_layers, num_layers + 1))
    assert fewer <= more


@given(st.integers(1, 300), st.integers(1, 3), st.integers(1, 3))
def test_the_peak_is_never_below_the_end_of_the_forward_pass(num_tokens: int, num_layers: int, count: int) -> None:
    model = make_model(num_layers=num_layers)
    forward = num_layers * layer_saved_bytes(model, num_tokens) + head_saved_bytes(model, num_tokens, num_tokens)
    zero = rank_of(model, 1, BUCKET)
    found = forward_backward_peak(zero, MicroBatch(num_tokens, num_tokens, count))
    assert sum(found.values()) >= forward + logits_bytes(num_tokens, model.vocab_size)
    assert set(found) == {MemoryKind.ACTIVATIONS, MemoryKind.LOGITS, MemoryKind.GRADIENTS, MemoryKind.COMM_BUFFERS}
