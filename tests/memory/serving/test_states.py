"""States of linear layers on a rank against vLLM's own shapes (oracle: engine)."""

from math import prod

import pytest

from rlplan.memory.serving.kv import LayerCache, build_cache_pool, kv_elements_per_token, list_layer_caches
from rlplan.spec.models.catalogue import find_model


def list_vllm_shapes(name: str, tp: int) -> tuple[tuple[int, ...], ...]:
    """Shapes of the states of one linear layer, by the function that vLLM's module of the family calls."""
    from vllm.model_executor.layers.mamba.mamba_utils import MambaStateShapeCalculator

    spec, hidden = find_model(name).linear_attention, find_model(name).hidden_size
    assert spec is not None
    if "LFM2" in name:
        return MambaStateShapeCalculator.short_conv_state_shape(tp, hidden, spec.conv_kernel)
    if "Kimi" in name:
        return MambaStateShapeCalculator.kda_state_shape(tp, spec.num_value_heads, spec.value_head_dim)
    if spec.is_mamba:
        return MambaStateShapeCalculator.mamba2_state_shape(
            tp_world_size=tp,
            intermediate_size=spec.num_value_heads * spec.value_head_dim,
            n_groups=spec.num_key_heads,
            num_heads=spec.num_value_heads,
            head_dim=spec.value_head_dim,
            state_size=spec.key_head_dim,
            conv_kernel=spec.conv_kernel,
        )
    return MambaStateShapeCalculator.gated_delta_net_state_shape(
        tp, spec.num_key_heads, spec.num_value_heads, spec.key_head_dim, spec.value_head_dim, spec.conv_kernel
    )


def find_state(name: str, tp: int) -> LayerCache:
    """The state of the first linear layer."""
    return next(cache for cache in list_layer_caches(find_model(name), tp) if cache.kind == "linear")


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize(
    "name",
    [
        "Qwen/Qwen3.5-9B",
        "moonshotai/Kimi-Linear-48B-A3B-Instruct",
        "LiquidAI/LFM2-1.2B",
        "ibm-granite/granite-4.0-h-tiny",
        "tiiuae/Falcon-H1-7B-Instruct",
        "nvidia/NVIDIA-Nemotron-Nano-9B-v2",
        "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16",
    ],
)
def test_a_rank_keeps_the_state_that_vllm_allocates(name: str, tp: int) -> None:
    state = find_state(name, tp)
    assert state.recurrent_elements + state.conv_elements == sum(map(prod, list_vllm_shapes(name, tp)))


def test_every_rank_has_a_copy_of_mamba_s_only_group() -> None:
    assert find_state("ibm-granite/granite-4.0-h-tiny", 4).conv_elements == 3 * (3072 // 4 + 2 * 128)


def test_a_layer_with_both_caches_tokens_and_a_state() -> None:
    falcon = find_model("tiiuae/Falcon-H1-7B-Instruct")
    assert kv_elements_per_token(falcon) == {"full": 44 * 2 * 2 * 128, "linear": 0}
    assert [cache.kind for cache in list_layer_caches(falcon, layers=range(2))] == ["full", "linear"] * 2
    assert [(group.kind, group.num_layers) for group in build_cache_pool(falcon).groups] == [
        ("full", 44),
        ("linear", 44),
    ]
