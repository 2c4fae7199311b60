"""The peak inside the passes: traced by hand on one layer, and monotone.

One layer of the factories' model: h=8, q=12, v=6, I=20, V=70; embedding 560 elements, layer 790, last norm 8.
"""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlplan.memory.machine.machine import CPU, CUDA, Machine
from rlplan.memory.model.block_families import LayerCut, cut_layers
from rlplan.memory.model.logits import rows_on_cpu
from rlplan.memory.trainers.micro_batch import Place
from rlplan.memory.trainers.shape import MicroBatchShape
from rlplan.memory.trainers.sharding import build_zero_state
from rlplan.memory.trainers.step_peak import (
    MemorySnapshot,
    RankState,
    find_passes_peak,
    find_update_peak,
    take_snapshots,
)
from rlplan.memory.trainers.zero import ZeroSettings, ZeroStates
from rlplan.spec.model import ModelSpec
from rlplan.vocabulary import Loss, MemoryKind
from tests.factories import make_model
from tests.memory.model.passes import forward_end_bytes

BUCKET = 25_000_000
STATES = (MemoryKind.WEIGHTS, MemoryKind.MASTER_WEIGHTS, MemoryKind.OPTIMIZER)


def build_state(
    model: ModelSpec, num_ranks: int, bucket: int, stage: int = 2, machine: Machine = CPU, count: int = 1
) -> RankState:
    settings = ZeroSettings(stage, num_ranks, weight_bytes=4, gradient_bytes=4, reduce_bucket_size=bucket)
    states = ZeroStates(settings, model.parameters)
    return replace(build_zero_state(states, machine, reduces_in_step=True), accumulates=count > 1)


def build_shape(model: ModelSpec, num_tokens: int, num_responses: int) -> MicroBatchShape:
    (layers,) = cut_layers(model, None, LayerCut())
    return MicroBatchShape(
        layers.block,
        layers.num,
        model.vocab_size,
        num_tokens,
        num_responses,
        element_bytes=4,
        loss=Loss.BY_ROWS,
        rows_at_once=rows_on_cpu(4),
        selects_rows=True,
    )


def passing(largest: MemorySnapshot) -> dict[str, int]:
    return {kind.value: size for kind, size in largest.items() if kind not in STATES}


def peak(
    num_tokens: int, num_responses: int, count: int = 1, *, num_ranks: int = 1, bucket: int = BUCKET, **changes: object
) -> dict[str, int]:
    """Bytes beside weights, master weights and optimizer at the largest moment of the passes."""
    model = make_model(**{"num_layers": 1} | changes)
    rank_state = build_state(model, num_ranks, bucket, count=count)
    return passing(find_passes_peak(take_snapshots(rank_state, build_shape(model, num_tokens, num_responses))))


def test_with_few_tokens_the_peak_is_the_last_reduction() -> None:
    # 2 tokens, 1 response. Saved 2*848 + 280 = 1976; logits 280; exponentials 280; a normalizer 4.
    # end of the forward pass:          1976 + 280 + 280 + 4                             =  2540
    # the head's gradient waits (560*4): 1976 + 280 + 4 + 32 + 2240                      =  4532
    # the last norm, then down, up, gate arrive: 1696 + 448 + (640 + 2240) + bucket 4*504 = 7040 at the gate
    # q arrives last:                   1696 + 448 - 768 + (384 + 2240) + bucket 4*798   =  7192
    # the embedding's own gradient:     3*2240 + bucket 3192 + 64                        =  9976
    # everything in the bucket and a flat copy of it: 2 * 4*(8 + 790 + 560), beside the gradient of the embedding's
    # output, 2*8*4                                                                      = 10928
    assert peak(2, 1) == {"comm_buffers": 10_864, "activations": 64}


def test_accumulated_gradients_stand_beside_when_there_are_several_micro_batches() -> None:
    # the same, and 560 + 790 + 8 elements of the micro-batches before
    assert peak(2, 1, count=2) == {"comm_buffers": 10_864, "gradients": 1358 * 4, "activations": 64}


def test_with_many_responses_the_peak_is_where_the_head_s_gradient_comes() -> None:
    # 100 tokens, 50 responses: saved 84,800 + (3*800 + 100 + 400 + 600)*4 = 98,800; logits 14,000; normalizers 200;
    # the gradient of the rows that the head read 50*8*4; its own 560*4. The end of the forward pass has 8*70*4 bytes of
    # exponentials for the last two: 115,240
    assert peak(100, 50) == {"activations": 98_800, "logits": 15_800, "gradients": 2240}


def test_with_long_prompts_the_peak_is_inside_the_mlp_of_the_top_layer() -> None:
    # 100 tokens, 1 response: saved 84,800 and in flight 22,400; 2240 wait; the gate's gradient 640, bucket 4*504
    # against the end of the forward pass: 84,800 + (2400 + 100 + 8 + 600)*4 + 280 + 280 + 4 = 97,796
    assert peak(100, 1) == {"activations": 107_200, "gradients": 2880, "comm_buffers": 2016}


def test_an_untied_head_does_not_wait_for_the_embedding() -> None:
    tied = peak(100, 1)
    untied = peak(100, 1, has_tied_embeddings=False)
    # its 560 elements are in the bucket from the start, and no table waits
    assert untied == {"activations": 107_200, "gradients": 640, "comm_buffers": 2016 + 2240}
    assert sum(untied.values()) == sum(tied.values())


def test_a_large_tied_table_exists_three_times_when_its_two_gradients_meet() -> None:
    # V=700: a table of 5600 elements, which bypasses a bucket of 1000; 4*798 of the bucket are touched by then.
    # Later: the table in flight and its flat copy, the layer's 798 elements accumulated and the bucket, 51,184 in all
    largest = peak(2, 1, bucket=1000, vocab_size=700)
    assert largest == {"gradients": 3 * 22_400, "comm_buffers": 3192, "activations": 64}


def test_a_small_bucket_is_reduced_as_it_fills() -> None:
    # 100 elements: gate, up, down and the table bypass the bucket; of the rest at most 4*100 bytes are ever touched
    largest = peak(100, 1, bucket=100)
    assert largest["comm_buffers"] <= 4 * (100 + 160)
    assert largest["activations"] == 107_200


def test_every_rank_of_two_holds_at_most_what_a_single_one_does() -> None:
    single, double = (sum(peak(2, 1, num_ranks=ranks).values()) for ranks in (1, 2))
    assert double <= single


@pytest.mark.parametrize("bucket", [1000, BUCKET])
@given(st.integers(1, 400), st.integers(1, 4), st.booleans())
def test_more_tokens_never_need_less(bucket: int, num_tokens: int, num_layers: int, tied: bool) -> None:
    shape = {"num_layers": num_layers, "has_tied_embeddings": tied}
    sizes = [
        sum(peak(tokens, responses, count=2, bucket=bucket, **shape).values())
        for tokens, responses in ((num_tokens, 1), (num_tokens + 1, 1), (num_tokens + 1, num_tokens))
    ]
    assert sizes == sorted(sizes)


@given(st.integers(1, 200), st.integers(1, 6))
def test_more_layers_never_need_less(num_tokens: int, num_layers: int) -> None:
    fewer, more = (sum(peak(num_tokens, num_tokens, num_layers=num).values()) for num in (num_layers, num_layers + 1))
    assert fewer <= more


@given(st.integers(1, 300), st.integers(1, 3), st.integers(1, 3))
def test_the_peak_is_never_below_the_end_of_the_forward_pass(num_tokens: int, num_layers: int, count: int) -> None:
    snapshot = peak(num_tokens, num_tokens, count, num_layers=num_layers)
    assert sum(snapshot.values()) >= forward_end_bytes(
        build_shape(make_model(num_layers=num_layers), num_tokens, num_tokens)
    )


@pytest.mark.parametrize("machine", [CPU, CUDA])
def test_the_flat_copy_of_stage_1_comes_in_the_step_and_its_bucket_is_there_before_on_a_gpu(machine: Machine) -> None:
    model = make_model(num_layers=1, has_tied_embeddings=False)
    snapshot = take_snapshots(build_state(model, 2, 1000, stage=1, machine=machine), build_shape(model, 2, 1))
    bucket, whole = 4 * 1000, 4 * model.num_parameters
    assert passing(find_passes_peak(snapshot)).get("comm_buffers", 0) == (0 if machine is CPU else bucket)
    assert passing(snapshot[Place.REDUCE]) == {"gradients": whole, "comm_buffers": bucket}


def test_the_step_of_stage_1_lets_go_of_other_ranks_gradients_before_it_copies_its_own() -> None:
    model = make_model(num_layers=1)
    snapshot = find_update_peak(build_state(model, 4, 10, stage=1, machine=CUDA), build_shape(model, 2, 1))
    assert sum(passing(snapshot).values()) == 4 * model.num_parameters + 4 * 10


def test_stage_3_gathers_a_tensor_through_a_second_copy_on_a_cpu_alone() -> None:
    model = make_model(num_layers=1, vocab_size=100_000)
    settings = ZeroSettings(3, 2, weight_bytes=4, gradient_bytes=4, max_reuse_distance=0, prefetch_bucket_size=0)
    states = ZeroStates(settings, model.parameters)
    on_cpu, on_gpu = (
        max(m.buffers for m in build_zero_state(states, machine).moments(1) if m.place is Place.LOSS)
        for machine in (CPU, CUDA)
    )
    assert (on_cpu, on_gpu) == (2 * 4 * 800_000, 4 * 800_000)
