"""Small configs of the architectures that vLLM runs on a CPU.

Large enough that a weight's bytes outweigh the packer's own; 2,500 words, so that the padding to 2,560 shows.
"""

from typing import Any

ATTENTION = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64}
PLAIN = {
    "hidden_size": 256,
    "num_hidden_layers": 2,
    "intermediate_size": 768,
    "vocab_size": 2500,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
}
DENSE = PLAIN | ATTENTION
TIED = DENSE | {"tie_word_embeddings": True}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 128}
ROUTED = {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1, "moe_intermediate_size": 128}
LATENT = PLAIN | {
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "kv_lora_rank": 128,
    "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 32,
    "v_head_dim": 64,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    "routed_scaling_factor": 1.0,
}
YARN = {
    "rope_type": "yarn",
    "factor": 32.0,
    "original_max_position_embeddings": 8,
    "rope_theta": 150000.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
}


def config(architecture: str, model_type: str, *parts: dict[str, Any], **keys: Any) -> dict[str, Any]:
    """One `config.json`."""
    answer: dict[str, Any] = {"architectures": [architecture], "model_type": model_type}
    for part in parts:
        answer |= part
    return answer | keys


CONFIGS: dict[str, dict[str, Any]] = {
    "llama": config("LlamaForCausalLM", "llama", DENSE),
    "llama with one key head": config("LlamaForCausalLM", "llama", DENSE, num_key_value_heads=1),
    "llama with biases": config("LlamaForCausalLM", "llama", DENSE, attention_bias=True, mlp_bias=True),
    "qwen2": config("Qwen2ForCausalLM", "qwen2", TIED),
    "qwen3": config("Qwen3ForCausalLM", "qwen3", TIED),
    "mistral in a window": config("MistralForCausalLM", "mistral", DENSE, sliding_window=64),
    "gemma": config("GemmaForCausalLM", "gemma", TIED),
    "gemma2": config("Gemma2ForCausalLM", "gemma2", TIED, sliding_window=64, num_hidden_layers=4),
    "gemma3": config("Gemma3ForCausalLM", "gemma3_text", TIED, sliding_window=64, num_hidden_layers=7),
    "cohere": config("CohereForCausalLM", "cohere", TIED, logit_scale=0.0625),
    "granite": config("GraniteForCausalLM", "granite", TIED),
    "phi3": config("Phi3ForCausalLM", "phi3", DENSE, pad_token_id=0, sliding_window=None),
    "opt": config("OPTForCausalLM", "opt", TIED, ffn_dim=768, word_embed_proj_dim=256),
    "gpt2": {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "n_embd": 256,
        "n_layer": 2,
        "n_head": 4,
        "vocab_size": 2500,
        "n_positions": 256,
    },
    "mixtral": config(
        "MixtralForCausalLM", "mixtral", DENSE, num_local_experts=4, num_experts_per_tok=2, sliding_window=None
    ),
    "qwen2 with experts": config(
        "Qwen2MoeForCausalLM", "qwen2_moe", DENSE, EXPERTS, shared_expert_intermediate_size=192
    ),
    "qwen3 with experts": config("Qwen3MoeForCausalLM", "qwen3_moe", DENSE, EXPERTS, norm_topk_prob=True),
    "olmoe": config("OlmoeForCausalLM", "olmoe", DENSE, num_experts=4, num_experts_per_tok=2),
    "deepseek-v2": config(
        "DeepseekV2ForCausalLM", "deepseek_v2", LATENT, ROUTED, q_lora_rank=None, topk_method="greedy"
    ),
    "deepseek-v3": config(
        "DeepseekV3ForCausalLM",
        "deepseek_v3",
        LATENT,
        ROUTED,
        q_lora_rank=96,
        topk_method="noaux_tc",
        scoring_func="sigmoid",
    ),
    "gpt-oss": config(
        "GptOssForCausalLM",
        "gpt_oss",
        DENSE,
        num_hidden_layers=4,
        num_local_experts=4,
        num_experts_per_tok=2,
        sliding_window=64,
        rope_parameters=YARN,
    ),
}
"""Architectures that vLLM has modules of its own for."""

BORROWED: dict[str, dict[str, Any]] = {
    "olmo2": config("Olmo2ForCausalLM", "olmo2", DENSE),
    "starcoder2": config("Starcoder2ForCausalLM", "starcoder2", DENSE, sliding_window=None),
    "gpt-neox": config("GPTNeoXForCausalLM", "gpt_neox", PLAIN, num_attention_heads=4),
}
"""Architectures that vLLM 0.32.0 runs through transformers' modules: their rotary tables are not vLLM's."""

LINEAR_ATTENTION: dict[str, dict[str, Any]] = {
    "qwen3-next": config(
        "Qwen3NextForCausalLM",
        "qwen3_next",
        DENSE,
        EXPERTS,
        num_hidden_layers=4,
        shared_expert_intermediate_size=192,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=32,
        linear_value_head_dim=32,
        linear_conv_kernel_dim=4,
    ),
}
"""Their caches are pages of a state beside pages of tokens, which is not modelled here."""
