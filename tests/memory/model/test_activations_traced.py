"""The closed formulas of activations, logits and step peak against traces of the real Hugging Face modules."""

from dataclasses import replace
from functools import cache
from statistics import median
from typing import Any

import pytest

from rlplan.memory.model.block_families import list_blocks
from rlplan.memory.trainers.micro_batch import score_peak_bytes
from rlplan.memory.trainers.shape import MicroBatchShape, Recompute
from rlplan.memory.trainers.step_peak import RankState, find_largest, take_snapshots
from rlplan.spec.model import ModelSpec, model_from_config
from rlplan.vocabulary import Loss, MemoryKind
from tests.memory.model.passes import forward_end_bytes
from tests.repository.at_night import mark_nightly

TOKENS, LAYERS, ELEMENT = 4096, 4, 2
LARGE_VOCABULARY, SMALL_VOCABULARY = 32_000, 4_000
"""Vocabulary sizes: the large one puts the peak at the logits, the small one in the layers."""
PLAIN = {
    "hidden_size": 1024,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "intermediate_size": 4096,
    "num_hidden_layers": LAYERS,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": False,
}
WINDOW = {"sliding_window": 1024}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 512, "decoder_sparse_step": 1}
LOCAL_EXPERTS = {"num_local_experts": 8, "num_experts_per_tok": 2}
NO_DROPOUT = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
GPT2 = {"n_embd": 1024, "n_head": 16, "n_positions": 8192, "n_layer": LAYERS} | NO_DROPOUT
OPT = {key: PLAIN[key] for key in ("hidden_size", "num_attention_heads", "num_hidden_layers")} | {
    "ffn_dim": 4096,
    "word_embed_proj_dim": 1024,
    "max_position_embeddings": 8192,
}
DEEPSEEK = {key: value for key, value in PLAIN.items() if key != "head_dim"} | {
    "num_key_value_heads": 16,
    "moe_intermediate_size": 512,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 2,
    "kv_lora_rank": 128,
    "q_lora_rank": 256,
    "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 32,
    "v_head_dim": 64,
}
QWEN3_NEXT = EXPERTS | {
    "shared_expert_intermediate_size": 512,
    "layer_types": ["linear_attention"] * 2 + ["full_attention"] * 2,
    "linear_num_key_heads": 8,
    "linear_num_value_heads": 16,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
    "linear_conv_kernel_dim": 4,
}

ARCHITECTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", {}),
    "mistral": ("MistralForCausalLM", WINDOW),
    "qwen2": ("Qwen2ForCausalLM", {}),
    "qwen3": ("Qwen3ForCausalLM", {}),
    "gemma2": ("Gemma2ForCausalLM", WINDOW),
    "gemma3_text": ("Gemma3ForCausalLM", WINDOW),
    "olmo2": ("Olmo2ForCausalLM", {}),
    "mixtral": ("MixtralForCausalLM", LOCAL_EXPERTS),
    "qwen3_moe": ("Qwen3MoeForCausalLM", EXPERTS),
    "gpt_oss": ("GptOssForCausalLM", LOCAL_EXPERTS | WINDOW),
    "gpt2": ("GPT2LMHeadModel", GPT2),
    "opt": ("OPTForCausalLM", OPT),
    "deepseek_v3": ("DeepseekV3ForCausalLM", DEEPSEEK),
    "qwen3_next": ("Qwen3NextForCausalLM", QWEN3_NEXT),
}
WITHOUT_PLAIN = ("gpt2", "opt", "deepseek_v3")
RECOMPUTE = {"none": Recompute.NONE, "selective": Recompute.ALTERNATE, "full": Recompute.FULL}
LOSSES = (Loss.PLAIN, Loss.CHUNKED, Loss.IN_PLACE, Loss.BY_ROWS)
OWN_BLOCKS = ("llama", "gemma2", "olmo2", "gpt_oss", "gpt2", "deepseek_v3", "qwen3_next")
"""One family of those whose blocks are equal."""
BY_DAY = ("gemma2", "gpt_oss", "qwen3_next")
"""Saved tensors of each layer are tested for every family in test_block_families.py."""
SHORT = [("none", Loss.BY_ROWS), ("selective", Loss.CHUNKED), ("full", Loss.PLAIN)]
GRID = [(policy, loss) for policy in RECOMPUTE for loss in LOSSES]


def build_config(name: str, vocabulary: int) -> dict[str, Any]:
    architecture, more = ARCHITECTURES[name]
    shape = {} if name in WITHOUT_PLAIN else PLAIN
    return shape | more | {"model_type": name, "architectures": [architecture], "vocab_size": vocabulary}


def build_shape(model: ModelSpec, policy: str, loss: Loss) -> MicroBatchShape:
    first, *more = list_blocks(model)
    return MicroBatchShape(
        block=first.block,
        num_layers=first.num,
        more=tuple(more),
        vocab_size=model.vocab_size,
        num_tokens=TOKENS,
        num_head_tokens=TOKENS,
        element_bytes=ELEMENT,
        recompute=RECOMPUTE[policy],
        loss=loss,
        softcaps_logits=model.architecture == "Gemma2ForCausalLM",
    )


def build_rank_state(model: ModelSpec, parameters: int) -> RankState:
    """Parameters and their gradients, nothing else."""
    table = ELEMENT * model.vocab_size * model.hidden_size
    return RankState(
        {MemoryKind.WEIGHTS: parameters},
        gradients=parameters,
        head_gradient=table,
        table_gradient=table,
        is_tied=model.has_tied_embeddings,
        layer_gradient=(parameters - table * (1 if model.has_tied_embeddings else 2)) // LAYERS,
    )


@cache
def errors(name: str, policy: str, loss: Loss, vocabulary: int) -> tuple[float, float]:
    """Relative errors of the peak and of what waits at the end of the forward pass."""
    from rlplan.runtime.measure.tracing import trace_peak

    config = build_config(name, vocabulary)
    model = model_from_config(config, where="config.json")
    traced = trace_peak(config, TOKENS, recompute=policy, loss=loss.value)
    shape = build_shape(model, policy, loss)
    peak = sum(find_largest(take_snapshots(build_rank_state(model, traced.parameters), shape).values()).values())
    return peak / traced.num_bytes - 1, forward_end_bytes(shape) / traced.end_of_forward - 1


@pytest.mark.parametrize(
    ("name", "policy", "loss"),
    [
        pytest.param(name, *SHORT[number % len(SHORT)], marks=() if name in BY_DAY else pytest.mark.nightly)
        for number, name in enumerate(OWN_BLOCKS)
    ],
)
def test_peaks_of_every_kind_of_block_agree_with_traces(name: str, policy: str, loss: Loss) -> None:
    """One way each, in turn; the whole grid of all families is seen at night."""
    peak, waiting = errors(name, policy, loss, SMALL_VOCABULARY)
    assert abs(peak) <= 0.08, peak
    assert abs(waiting) <= 0.01, waiting


@pytest.mark.nightly
@pytest.mark.parametrize("vocabulary", [SMALL_VOCABULARY, LARGE_VOCABULARY])
def test_the_whole_grid_agrees_with_traces(vocabulary: int) -> None:
    all_errors = [errors(name, policy, loss, vocabulary) for name in ARCHITECTURES for policy, loss in GRID]
    peaks, waiting = [abs(pair[0]) for pair in all_errors], [abs(pair[1]) for pair in all_errors]
    print(
        f"{len(all_errors)} traces: peak median {median(peaks):.2%}, max {max(peaks):.2%}; "
        f"forward end median {median(waiting):.2%}, max {max(waiting):.2%}"
    )
    assert median(peaks) <= 0.03
    assert max(peaks) <= 0.08
    assert max(waiting) <= 0.01


@cache
def score_error(name: str, vocabulary: int, loss: Loss) -> float:
    """Relative error of a pass without gradient, beside the weights."""
    from rlplan.runtime.measure.tracing import trace_peak

    config = build_config(name, vocabulary)
    traced = trace_peak(config, TOKENS, loss=loss.value, has_gradient=False)
    predicted = score_peak_bytes(build_shape(model_from_config(config, where="config.json"), "none", loss))
    return predicted / traced.rest - 1


@pytest.mark.parametrize(
    ("name", "policy"), [("qwen3", "none"), pytest.param("gemma2", "full", marks=pytest.mark.nightly)]
)
def test_a_value_model_agrees_with_traces(name: str, policy: str) -> None:
    """Its head is one row, so that the table's gradient comes from the embedding alone."""
    from rlplan.runtime.measure.tracing import trace_peak

    config = build_config(name, LARGE_VOCABULARY) | {"tie_word_embeddings": True}
    model = model_from_config(config, where="config.json")
    traced = trace_peak(config, TOKENS, recompute=policy, loss="none")
    scored = trace_peak(config, TOKENS, loss="none", has_gradient=False)
    rank_state = replace(build_rank_state(model, traced.parameters), head_gradient=0, is_tied=False)
    shape = build_shape(model, policy, Loss.NONE)
    assert sum(find_largest(take_snapshots(rank_state, shape).values()).values()) == pytest.approx(
        traced.num_bytes, rel=0.08
    )
    assert score_peak_bytes(shape) == pytest.approx(scored.rest, rel=0.08)


@pytest.mark.parametrize(
    ("name", "loss"), mark_nightly([("qwen3", Loss.IN_PLACE), ("olmo2", Loss.PLAIN), ("gpt_oss", Loss.CHUNKED)], but=1)
)
def test_passes_without_gradient_agree_with_traces(name: str, loss: Loss) -> None:
    assert abs(score_error(name, SMALL_VOCABULARY, loss)) <= 0.08


@pytest.mark.nightly
@pytest.mark.parametrize("vocabulary", [SMALL_VOCABULARY, LARGE_VOCABULARY])
def test_every_pass_without_gradient_agrees_with_traces(vocabulary: int) -> None:
    """Attention is counted as what it would save, which is more than is in flight in gated and linear attention."""
    all_errors = [score_error(name, vocabulary, loss) for name in ARCHITECTURES for loss in LOSSES]
    low, high = min(all_errors), max(all_errors)
    print(f"{len(all_errors)} traces: median {median(map(abs, all_errors)):.2%}, from {low:.2%} to {high:.2%}")
    assert median(map(abs, all_errors)) <= 0.03
    assert min(all_errors) >= -0.08
    assert max(all_errors) <= 0.15
