"""FLOPs of a pass: hand-worked models, published formulas, published shares of the peak."""

from dataclasses import replace

import pytest

from rlplan.accuracy.files.reading import bundled_points
from rlplan.accuracy.named_models import model_by_name
from rlplan.accuracy.predict import plan_point_job
from rlplan.accuracy.training.throughput import step_job
from rlplan.planner.answers.model_flops import read_peak_flops_per_s
from rlplan.timing.training.flops import (
    Lengths,
    attended_pairs,
    attention_flops,
    head_flops,
    kinds_of_layers,
    layer_parameters,
    linear_flops,
)
from rlplan.vocabulary import Role

FOUNDRY = [point for point in bundled_points() if point.id.startswith("foundry-") and point.kind == "throughput_train"]


def test_a_dense_model_computes_two_flops_a_parameter_of_its_layers():
    model = model_by_name("meta-llama/Llama-2-7b-hf")
    assert layer_parameters(model) == 32 * (4 * 4096**2 + 3 * 4096 * 11008)
    assert linear_flops(model) == 2 * layer_parameters(model)
    assert head_flops(model) == 2 * 4096 * 32000
    assert head_flops(model, Role.REWARD) == 2 * 4096


def test_a_mixture_computes_its_active_experts_and_its_router():
    model = model_by_name("Qwen/Qwen3-30B-A3B")
    attention = 2 * 2048 * 4096 + 2 * 2048 * 512
    assert layer_parameters(model) == 48 * (attention + 128 * 2048 + 8 * 3 * 2048 * 768)


def test_latent_attention_computes_narrow_values():
    model = model_by_name("deepseek-ai/DeepSeek-V3")
    assert attention_flops(model, Lengths(1, 1)) == 61 * 2 * 128 * (192 + 128)


def test_a_window_bounds_what_sliding_layers_compute():
    model = model_by_name("google/gemma-2-2b")
    assert kinds_of_layers(model) == {"sliding": 13, "full": 13}
    long = Lengths(16384, 16384**2)
    pair = 4 * model.q_size
    window = 4096 * 16384 - (4096**2 - 4096) / 2
    assert attention_flops(model, long) == pytest.approx(13 * pair * (attended_pairs(long) + window))


def test_linear_attention_grows_with_the_length_not_with_its_square():
    model = model_by_name("Qwen/Qwen3-Next-80B-A3B-Instruct")
    linear_alone = model.model_copy(update={"attention_kinds": ("linear",) * model.num_layers})
    single, two = (attention_flops(linear_alone, Lengths(s, s * s)) for s in (1000, 2000))
    assert two == pytest.approx(2 * single)


def test_lengths_that_differ_cost_more_attention_than_their_mean():
    model = model_by_name("Qwen/Qwen2.5-7B")
    assert attention_flops(model, Lengths(1000, 2e6)) > 1.9 * attention_flops(model, Lengths(1000, 1e6))


def test_gpt_175b_computes_what_megatrons_formula_says():
    """Narayanan et al. 2021, equation 3: 96 B s l h^2 (1 + s/6h + V/16lh), with recomputation, without a mask."""
    h, layers, s, vocabulary = 12288, 96, 2048, 51200
    model = model_by_name("megatron-paper/gpt-175b")
    formula = 96 * s * layers * h**2 * (1 + s / (6 * h) + vocabulary / (16 * layers * h))
    masked = 8 * s * s * h * layers
    counted = 4 * (linear_flops(model) * s + attention_flops(model, Lengths(s, s * s))) + 3 * head_flops(model) * s
    assert counted == pytest.approx(formula - masked, rel=1e-3)


@pytest.mark.parametrize("point", FOUNDRY, ids=lambda point: point.id)
def test_published_shares_of_the_peak_follow_from_the_flops(point):
    """llm-foundry counts attention without the mask: twice the pairs."""
    plan = plan_point_job(step_job(point))
    model, s = plan.job.load_model(), plan.job.workload.max_seq_len
    unmasked = 2 * attention_flops(model, replace(Lengths(s, s * s), mean=0))
    a_sequence = 3 * ((linear_flops(model) + head_flops(model)) * s + unmasked)
    share = a_sequence / s * point.measured.value / read_peak_flops_per_s(plan)
    assert 100 * share == pytest.approx(point.settings["mfu_pct"], rel=0.03)
