"""The closed formulas of activations, logits and step peak against traces of the real Hugging Face modules."""

from functools import cache
from statistics import median
from typing import Any

import pytest

from rlplan.memory.block import Block, Experts, Latent, Norm
from rlplan.memory.logits import Loss
from rlplan.memory.step_peak import Held, Recompute, Work, forward_end_bytes, step_peak
from rlplan.vocabulary import MemoryKind

TOKENS, LAYERS, ELEMENT = 4096, 4, 2
LARGE_VOCABULARY, SMALL_VOCABULARY = 32_000, 4_000
"""With the large one the logits are the peak, with the small one the layers are."""
PLAIN = {
    "hidden_size": 1024,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "intermediate_size": 4096,
    "num_hidden_layers": LAYERS,
    "tie_word_embeddings": False,
}
MIXTURE = {"num_local_experts": 8, "num_experts_per_tok": 2}
GPT2 = {"n_embd": 1024, "n_head": 16, "n_positions": 8192, "n_layer": LAYERS} | dict.fromkeys(
    ("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0
)
DEEPSEEK = PLAIN | {
    "num_key_value_heads": 16,
    "moe_intermediate_size": 512,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 0,
    "kv_lora_rank": 128,
    "q_lora_rank": 256,
    "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 32,
    "v_head_dim": 64,
}
DEEPSEEK.pop("head_dim")


def block(**changes: Any) -> Block:
    widths = {"hidden": 1024, "num_heads": 16, "num_kv_heads": 4, "head_dim": 64, "intermediate": 4096}
    return Block(**(widths | changes))


ARCHITECTURES: dict[str, tuple[dict[str, Any], Block]] = {
    "llama": (PLAIN, block()),
    "mistral": (PLAIN | {"sliding_window": None}, block()),
    "qwen2": (PLAIN, block()),
    "qwen3": (PLAIN, block(qk_norm="heads")),
    "gemma2": (PLAIN, block(norm=Norm.RMS_FP32, num_norms=4)),
    "gemma3_text": (PLAIN, block(norm=Norm.RMS_FP32, num_norms=4, qk_norm="heads")),
    "olmo2": (PLAIN, block(norm=Norm.RMS_FP32, norms_feed_linears=0, qk_norm="full")),
    "mixtral": (PLAIN | MIXTURE, block(experts=Experts(8, 2, 4096))),
    "qwen3_moe": (
        PLAIN | {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 512},
        block(qk_norm="heads", experts=Experts(8, 2, 512)),
    ),
    "gpt_oss": (PLAIN | MIXTURE, block(norm=Norm.RMS_FP32, experts=Experts(8, 2, 4096, saved_widths=7))),
    "gpt2": (GPT2, block(num_kv_heads=16, norm=Norm.LAYER, mlp_saved_widths=5, has_rotary=False)),
    "deepseek_v3": (
        DEEPSEEK,
        block(
            num_kv_heads=16,
            experts=Experts(8, 2, 512, shared_width=512, has_fp32_router=True),
            latent=Latent(256, 128, 96, 64),
        ),
    ),
}
RECOMPUTE = {"none": Recompute.NONE, "selective": Recompute.ALTERNATE, "full": Recompute.FULL}
LOSSES = (Loss.PLAIN, Loss.CHUNKED, Loss.IN_PLACE)
SHORT = [("none", Loss.IN_PLACE), ("selective", Loss.CHUNKED), ("full", Loss.PLAIN)]
GRID = [(policy, loss) for policy in RECOMPUTE for loss in LOSSES]


@cache
def errors(name: str, policy: str, loss: Loss, vocabulary: int) -> tuple[float, float]:
    """Relative errors of the peak and of what waits at the end of the forward pass."""
    from rlplan.runtime.tracing import trace_peak

    config, shape = ARCHITECTURES[name]
    config = config | {"model_type": name, "vocab_size": vocabulary}
    traced = trace_peak(config, TOKENS, recompute=policy, loss=loss.value)
    work = Work(
        shape,
        LAYERS,
        vocabulary,
        TOKENS,
        TOKENS,
        ELEMENT,
        RECOMPUTE[policy],
        loss,
        softcaps_logits=name == "gemma2",
    )
    table, is_tied = ELEMENT * vocabulary * shape.hidden, name == "gpt2"
    held = Held(
        {MemoryKind.WEIGHTS: traced.parameters},
        gradients=traced.parameters,
        head_gradient=table,
        table_gradient=0 if is_tied else table,
        layer_gradient=(traced.parameters - table * (1 if is_tied else 2)) // LAYERS,
    )
    peak = sum(step_peak(held, work).values())
    return peak / traced.num_bytes - 1, forward_end_bytes(work) / traced.end_of_forward - 1


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_peaks_of_every_family_agree_with_traces(name: str) -> None:
    for policy, loss in SHORT:
        peak, waiting = errors(name, policy, loss, SMALL_VOCABULARY)
        assert abs(peak) <= 0.08, (policy, loss, peak)
        assert abs(waiting) <= 0.01, (policy, loss, waiting)


@pytest.mark.nightly
@pytest.mark.parametrize("vocabulary", [SMALL_VOCABULARY, LARGE_VOCABULARY])
def test_the_whole_grid_agrees_with_traces(vocabulary: int) -> None:
    found = [errors(name, policy, loss, vocabulary) for name in ARCHITECTURES for policy, loss in GRID]
    peaks, waiting = [abs(pair[0]) for pair in found], [abs(pair[1]) for pair in found]
    print(
        f"{len(found)} traces: peak median {median(peaks):.2%}, max {max(peaks):.2%}; "
        f"forward end median {median(waiting):.2%}, max {max(waiting):.2%}"
    )
    assert median(peaks) <= 0.03
    assert max(peaks) <= 0.08
    assert max(waiting) <= 0.01
