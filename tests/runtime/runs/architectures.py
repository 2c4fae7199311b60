"""Small models of many architectures, by the switches that set each apart, and a job that trains one of them.

Mixtral's experts are large enough to be seen in a peak. Windows are shorter than a sequence, experts fewer than there
are, and every multiplier and cap is another than one.
"""

import json
import shutil
from pathlib import Path
from typing import Any

from tests.factories import EXAMPLES, write_job

SIZES = {
    "hidden_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "intermediate_size": 96,
    "vocab_size": 64,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "eos_token_id": 1,
    "bos_token_id": 2,
}
WINDOW = {"sliding_window": 8}
FULL_AND_SLIDING = WINDOW | {"layer_types": ["sliding_attention", "full_attention"]}
SHARED_EXPERTS = {
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
}
BIASED_ROUTER = SHARED_EXPERTS | {"topk_method": "noaux_tc", "scoring_func": "sigmoid"}
LATENT = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "head_dim": 64,
    "qk_nope_head_dim": 32,
    "v_head_dim": 32,
}
"""512 and 64 are the only widths that vLLM's latent attention has on a CPU."""
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}

DENSE: dict[str, dict[str, Any]] = {
    "LlamaForCausalLM": {"mlp_bias": True, "attention_bias": True},
    "MistralForCausalLM": WINDOW,
    "Ministral3ForCausalLM": WINDOW,
    "Qwen2ForCausalLM": {},
    "Qwen3ForCausalLM": {},
    "GemmaForCausalLM": {},
    "Gemma2ForCausalLM": FULL_AND_SLIDING | {"final_logit_softcapping": 3.0, "attn_logit_softcapping": 2.0},
    "Gemma3ForCausalLM": FULL_AND_SLIDING,
    "Phi3ForCausalLM": WINDOW,
    "OlmoForCausalLM": {"clip_qkv": None},
    "Olmo2ForCausalLM": {},
    "Olmo3ForCausalLM": FULL_AND_SLIDING,
    "GlmForCausalLM": {},
    "Glm4ForCausalLM": {},
    "CohereForCausalLM": {"logit_scale": 0.25},
    "Starcoder2ForCausalLM": WINDOW,
    "SmolLM3ForCausalLM": {},
    "GraniteForCausalLM": {"logits_scaling": 4.0, "embedding_multiplier": 2.0, "residual_multiplier": 0.5},
    "SeedOssForCausalLM": {},
    "Ernie4_5ForCausalLM": {},
    "ArceeForCausalLM": {},
}
MIXTURES: dict[str, dict[str, Any]] = {
    "MixtralForCausalLM": WINDOW | {"num_local_experts": 16, "intermediate_size": 512},
    "OlmoeForCausalLM": EXPERTS,
    "Qwen2MoeForCausalLM": EXPERTS | {"shared_expert_intermediate_size": 64},
    "Qwen3MoeForCausalLM": EXPERTS | {"norm_topk_prob": True},
    "GraniteMoeForCausalLM": {"num_local_experts": 4, "logits_scaling": 4.0},
    "Glm4MoeForCausalLM": BIASED_ROUTER | {"use_qk_norm": True},
    "Glm4MoeLiteForCausalLM": LATENT | BIASED_ROUTER | {"q_lora_rank": 48},
    "DeepseekV2ForCausalLM": LATENT | SHARED_EXPERTS | {"q_lora_rank": None, "topk_method": "greedy"},
    "DeepseekV3ForCausalLM": LATENT | BIASED_ROUTER | {"q_lora_rank": 48, "n_group": 2},
}
REFUSED: dict[str, dict[str, Any]] = {
    "StableLmForCausalLM": {},
    "Cohere2ForCausalLM": FULL_AND_SLIDING | {"logit_scale": 0.25},
    "GptOssForCausalLM": FULL_AND_SLIDING | {"num_local_experts": 4, "num_experts_per_tok": 2},
}
"""vLLM 0.32's loader of gpt-oss writes into its parameters itself (gpt_oss.py, `_load_weights_other`), which while an
engine reloads weights hold nothing: experts and sinks stay those of the start. The differences of the others are not
explained."""

ARCHITECTURES = DENSE | MIXTURES

_M_ROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 6, 6]}}
_TOWER = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1, "num_attention_heads": 2}
_QWEN_TOWER = _TOWER | {"depth": 1, "num_heads": 2, "out_hidden_size": 128, "deepstack_visual_indexes": [0]}
WITH_TOWERS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "Qwen2_5_VLForConditionalGeneration": (_M_ROPE, _QWEN_TOWER),
    "Qwen3VLForConditionalGeneration": (_M_ROPE, _QWEN_TOWER),
    "Gemma3ForConditionalGeneration": (FULL_AND_SLIDING, _TOWER | {"image_size": 28, "patch_size": 14}),
    "Mistral3ForConditionalGeneration": (
        WINDOW | {"model_type": "mistral"},
        _TOWER | {"model_type": "pixtral", "head_dim": 32, "image_size": 28, "patch_size": 14},
    ),
}
"""Vision-language models: what sets the language part apart, and a small tower."""


def write_with_tower(architecture: str, folder: Path) -> Any:
    """A small vision-language model with random weights in a folder; the module."""
    import torch
    import transformers

    text, tower = WITH_TOWERS[architecture]
    kind = getattr(transformers, architecture)
    torch.manual_seed(1)
    config = kind.config_class(text_config=SIZES | text, vision_config=tower)
    model = kind._from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.08)
    model.save_pretrained(folder)
    return model.eval()


def make_config(architecture: str) -> dict[str, Any]:
    """A small model's whole config, as transformers writes it."""
    import transformers

    kind = getattr(transformers, architecture)
    config: dict[str, Any] = kind.config_class(**SIZES | (ARCHITECTURES | REFUSED)[architecture]).to_dict()
    return config | {"architectures": [architecture]}


def make_job(architecture: str, folder: Path, **overrides: Any) -> Path:
    """A job file: three GRPO steps of such a model, on one device; of a vision-language model from its weights."""
    return write_job(folder, **make_choices(architecture, folder / "model"), **overrides)


def make_choices(architecture: str, model: Path) -> dict[str, Any]:
    """Overrides for `make_job`; writes the model into a new folder."""
    model.mkdir(parents=True)
    for file in (EXAMPLES / "models" / "sorter").glob("token*"):
        shutil.copyfile(file, model / file.name)
    if architecture in WITH_TOWERS:
        write_with_tower(architecture, model)
    else:
        (model / "config.json").write_text(json.dumps(make_config(architecture)))
    return {
        "policy": {"path": str(model), "init": "checkpoint" if architecture in WITH_TOWERS else "random"},
        "hardware": {"num_devices": 1},
        "algorithm": {"kl_coef": 0, "learning_rate": 1e-3},
        "workload": {"num_steps": 3, "evaluate_every": 3, "num_heldout_prompts": 16},
        "rollout": {"kv_cache_memory": "16MiB", "max_num_seqs": 16},
        "rewards": [{"kind": "format_checker", "pattern": "(?s).*[0-3].*"}],  # about half of what random weights say
    }
