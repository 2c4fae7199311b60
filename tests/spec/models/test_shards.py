"""Parameters on each rank, value heads and adapters: worked by hand, and properties that hold for every model."""

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlplan.errors import SpecError
from rlplan.spec.model import Component, Layout, ModelSpec
from rlplan.spec.models.adapters import list_lora_parameters, list_value_parameters
from rlplan.spec.models.catalogue import find_model, load_catalogue
from rlplan.spec.models.shards import count_head_layers, list_stage_tensors, split_layers, split_training_stages
from tests.factories import make_model


def stage_parameters(model: ModelSpec, layout: Layout) -> tuple[int, ...]:
    return tuple(sum(tensor.numel for tensor in list_stage_tensors(model, layout, stage)) for stage in range(layout.pp))


def count_held(model: ModelSpec, **layout: int) -> int:
    return sum(stage_parameters(model, Layout(**layout)))


def test_a_rank_of_a_small_model_holds_what_is_worked_by_hand() -> None:
    # h=8, q=12, kv=6 (2 heads of 3), I=20, V=70, tied. tp=2: table 35*8=280; a layer: q 6*8, k and v 3*8, o 8*6,
    # norms of 3 whole, MLP 3*10*8, norms 8+8: 48+24+24+48+6+240+16 = 406; last norm 8.
    assert count_held(make_model(), tp=2) == 280 + 2 * 406 + 8
    # tp=4: one key head of 3 on each rank (2 heads, held twice): q 3*8, k and v 3*8 as before, o 8*3, MLP 3*5*8.
    assert count_held(make_model(), tp=4) == 18 * 8 + 2 * (24 + 24 + 24 + 24 + 6 + 120 + 16) + 8
    # 70 rows padded to 128, over two ranks.
    assert count_held(make_model(), tp=2, vocab_multiple=64) == 64 * 8 + 2 * 406 + 8


def test_stages_hold_their_layers_and_a_tied_table_at_both_ends() -> None:
    tied, untied = make_model(), make_model(has_tied_embeddings=False)
    assert stage_parameters(tied, Layout(pp=2)) == (560 + 790, 790 + 8 + 560)
    assert stage_parameters(untied, Layout(pp=2)) == (560 + 790, 790 + 8 + 560)
    assert stage_parameters(tied, Layout(pp=1)) == (tied.num_parameters,)
    assert list_stage_tensors(tied, Layout(pp=2), 1)[-1].name == "lm_head.weight"


@given(st.integers(1, 200), st.integers(1, 64))
def test_stages_take_every_layer_once(num_layers: int, pp: int) -> None:
    if pp > num_layers:
        with pytest.raises(SpecError, match="every stage has a layer"):
            split_layers(num_layers, pp)
        return
    stages = split_layers(num_layers, pp)
    assert [layer for stage in stages for layer in stage] == list(range(num_layers))
    assert max(map(len, stages)) - min(map(len, stages)) <= 1


@given(st.sampled_from(sorted(load_catalogue())), st.integers(1, 32))
def test_no_split_that_megatron_can_say_is_faster_and_no_stage_is_larger_than_in_even_parts(name: str, pp: int) -> None:
    model = find_model(name)
    if not 1 < pp <= model.num_layers:
        return
    stages, even = split_training_stages(model, pp), split_layers(model.num_layers, pp)
    assert [layer for stage in stages for layer in stage] == list(range(model.num_layers))
    most = max(map(len, even))
    assert max(map(len, stages)) <= most
    slowest = max(*map(len, stages[:-1]), len(stages[-1]) + count_head_layers(model))
    splits = [((model.num_layers - last) // (pp - 1), last) for last in range(1, most + 1)]
    sayable = [(others, last) for others, last in splits if others * (pp - 1) + last == model.num_layers]
    for others, last in sayable:
        if 1 <= others <= most:
            assert len(set(map(len, stages[:-1]))) == 1
            assert slowest <= max(others, last + count_head_layers(model))


def test_the_head_of_a_mixture_is_worth_several_layers() -> None:
    active = 2048 * (32 * 128 * 2 + 4 * 128 * 2 + 128 + 8 * 3 * 768)  # projections, router, eight experts
    mixture = find_model("Qwen/Qwen3-30B-A3B")
    assert count_head_layers(mixture) == pytest.approx(151936 * 2048 / active, rel=1e-4)
    assert len(split_training_stages(mixture, 4)[-1]) == 12  # no other stage may grow: twelve layers each


def test_latent_projections_norms_and_routers_are_replicated_and_experts_are_not() -> None:
    model = find_model("deepseek-ai/DeepSeek-V3")
    rank = {tensor.name: tensor.shape for tensor in list_stage_tensors(model, Layout(tp=8), 0)}
    layer = "model.layers.3."
    assert rank[layer + "self_attn.q_a_proj.weight"] == (1536, 7168)
    assert rank[layer + "self_attn.kv_a_proj_with_mqa.weight"] == (576, 7168)
    assert rank[layer + "self_attn.q_b_proj.weight"] == (16 * 192, 1536)
    assert rank[layer + "self_attn.o_proj.weight"] == (7168, 16 * 128)
    assert rank[layer + "mlp.gate.weight"] == (256, 7168)
    assert rank[layer + "mlp.experts.gate_up_proj"] == (256, 2 * 256, 7168)
    rank = {tensor.name: tensor.shape for tensor in list_stage_tensors(model, Layout(tp=8, ep=64), 0)}
    assert rank[layer + "mlp.experts.gate_up_proj"] == (4, 2 * 2048, 7168)


@pytest.mark.parametrize("name", [n for n, e in load_catalogue().items() if e.like is None])
def test_sharing_never_loses_parameters_and_never_holds_more_than_all(name: str) -> None:
    model = find_model(name)
    for tp in (2, 4, 8):
        with contextlib.suppress(SpecError):
            per_rank = count_held(model, tp=tp)
            assert per_rank <= model.num_parameters <= per_rank * tp


@pytest.mark.parametrize(
    ("layout", "word"), [({"tp": 3}, "num_heads 28 does not divide over tp 3"), ({"pp": 29}, "pp 29 is more than")]
)
def test_what_does_not_divide_is_refused(layout: dict[str, int], word: str) -> None:
    with pytest.raises(SpecError, match=word):
        stage_parameters(find_model("Qwen/Qwen2.5-7B"), Layout(**layout))


def test_experts_that_do_not_divide_are_refused() -> None:
    with pytest.raises(SpecError, match=r"experts\.num_experts 128 does not divide over ep 3"):
        stage_parameters(find_model("Qwen/Qwen3-30B-A3B"), Layout(ep=3))


def test_a_value_model_loses_its_head_and_gains_a_row() -> None:
    untied, tied = find_model("meta-llama/Llama-3.1-8B"), find_model("Qwen/Qwen2.5-0.5B")
    total = sum(parameter.numel for parameter in list_value_parameters(untied))
    assert total == untied.num_parameters - 128_256 * 4096 + 4096
    assert sum(parameter.numel for parameter in list_value_parameters(tied)) == tied.num_parameters + 896
    assert list_value_parameters(tied)[-1].shape == (1, 896)


@pytest.mark.parametrize(
    ("name", "rank", "targets", "count"),
    [
        ("meta-llama/Llama-3.2-3B", 32, ["q_proj", "v_proj"], 9_175_040),
        # 32 layers * 8 * ((4096+4096)*2 + (4096+1024)*2 + (4096+14336)*3)
        ("meta-llama/Llama-3.1-8B", 8, "all-linear", 32 * 8 * (16_384 + 10_240 + 55_296)),
        ("meta-llama/Llama-3.1-8B", 8, "q_proj", 32 * 8 * 8192),
        # 12 layers * 4 * ((768+2304) + (768+768) + 2*(768+3072))
        ("openai-community/gpt2", 4, "all-linear", 12 * 4 * (3072 + 1536 + 7680)),
    ],
)
def test_adapters_have_rank_times_in_plus_out(name: str, rank: int, targets: str | list[str], count: int) -> None:
    adapters = list_lora_parameters(find_model(name), rank, targets)
    assert sum(adapter.numel for adapter in adapters) == count
    assert {adapter.component for adapter in adapters} <= {Component.ATTENTION, Component.MLP}


@pytest.mark.parametrize("targets", [["q_prj"], "k", ["q_proj", "lm_head"], ["embed_tokens"]])
def test_a_target_that_is_no_linear_layer_is_refused(targets: str | list[str]) -> None:
    with pytest.raises(SpecError, match="is not a linear layer of Qwen2ForCausalLM"):
        list_lora_parameters(find_model("Qwen/Qwen2.5-0.5B"), 8, targets)


@pytest.mark.parametrize("rank", [0, -1, 10**9])
def test_a_rank_is_positive_and_no_larger_than_the_model(rank: int) -> None:
    with pytest.raises(SpecError, match=f"rank is {rank}"):
        list_lora_parameters(find_model("Qwen/Qwen2.5-0.5B"), rank)
