"""Every family against live Hugging Face modules on the meta device: names, shapes and order of parameters, buffers,
and which weights belong to linear layers.

Oracle: engine. The library's default configs, cut to a few layers, with the switches that change tensors.
"""

import json
from typing import Any

import pytest
import torch

from rlplan.spec.model import FAMILIES, NO_CLASSIFIER, ModelSpec, model_from_config
from rlplan.spec.models.adapters import list_linear_layers
from rlplan.spec.models.families.family import load_group

ALIASES = {
    "MPTForCausalLM": "MptForCausalLM",
    "PhiMoEForCausalLM": "PhimoeForCausalLM",
    "KimiK25ForConditionalGeneration": "Kimi_K25ForConditionalGeneration",
    "MiMoForCausalLM": "Qwen2ForCausalLM",
}
"""Names that checkpoints carry for a class that the library calls otherwise. MiMo is Qwen2 with further heads for
multi-token prediction (its modeling_mimo.py derives from Qwen2's)."""

FEW = {"num_hidden_layers": 4}
NEW_FALCON = FEW | {"new_decoder_architecture": True, "num_kv_heads": 71}
SIGLIP = {"vision_config": {"vision_use_head": False, "num_hidden_layers": 2}}
GEMMA4 = {"text_config": FEW | {"hidden_size_per_layer_input": 0}, "vision_config": {"num_hidden_layers": 2}}
SMALL_GEMMA4 = {
    "text_config": FEW
    | {"num_kv_shared_layers": 2, "layer_types": ["sliding_attention", "full_attention"] * 2}
    | {"use_double_wide_mlp": True, "sliding_window": 512},
    "vision_config": {"num_hidden_layers": 2},
    "audio_config": {"num_hidden_layers": 2},
}
GRANITE = FEW | {"layer_types": ["linear_attention", "full_attention"] * 2}
HYBRID = {"layers_block_type": ["linear_attention", "moe", "full_attention", "mlp"], "num_hidden_layers": 4}
CASES: list[tuple[str, dict[str, Any]]] = [
    ("LlamaForCausalLM", FEW | {"attention_bias": True, "mlp_bias": True}),
    ("MistralForCausalLM", FEW),
    ("Ministral3ForCausalLM", FEW),
    ("Qwen2ForCausalLM", FEW),
    ("Qwen3ForCausalLM", FEW | {"attention_bias": True}),
    ("GemmaForCausalLM", FEW),
    ("Gemma2ForCausalLM", FEW),
    ("Gemma3ForCausalLM", FEW),
    ("Phi3ForCausalLM", FEW | {"num_key_value_heads": 8}),
    ("OlmoForCausalLM", FEW),
    ("Olmo2ForCausalLM", FEW | {"num_key_value_heads": 8}),
    ("Olmo3ForCausalLM", FEW),
    ("GlmForCausalLM", FEW),
    ("Glm4ForCausalLM", FEW),
    ("CohereForCausalLM", FEW | {"use_qk_norm": True, "num_key_value_heads": 8}),
    ("Cohere2ForCausalLM", FEW),
    ("Starcoder2ForCausalLM", FEW),
    ("Starcoder2ForCausalLM", FEW | {"use_bias": False}),
    ("StableLmForCausalLM", FEW | {"use_qkv_bias": True}),
    ("SmolLM3ForCausalLM", FEW),
    ("GraniteForCausalLM", FEW),
    ("SeedOssForCausalLM", FEW | {"attention_out_bias": True}),
    ("Ernie4_5ForCausalLM", FEW | {"use_bias": True}),
    ("ArceeForCausalLM", FEW),
    ("OPTForCausalLM", FEW),
    ("GPT2LMHeadModel", {"n_layer": 2}),
    ("GPTJForCausalLM", {"n_layer": 2}),
    ("GPTNeoXForCausalLM", FEW),
    ("GPTNeoXForCausalLM", FEW | {"attention_bias": False}),
    ("FalconForCausalLM", FEW),
    ("FalconForCausalLM", NEW_FALCON),
    ("FalconForCausalLM", NEW_FALCON | {"num_ln_in_parallel_attn": 1, "bias": True}),
    ("FalconForCausalLM", FEW | {"multi_query": False, "parallel_attn": False, "bias": True}),
    ("BloomForCausalLM", {"n_layer": 2}),
    ("MptForCausalLM", {"n_layers": 2}),
    ("PhiForCausalLM", FEW),
    ("MixtralForCausalLM", FEW),
    ("OlmoeForCausalLM", FEW | {"attention_bias": True}),
    ("MiniMaxM2ForCausalLM", FEW),
    ("PhimoeForCausalLM", FEW | {"lm_head_bias": True, "attention_bias": True}),
    ("GraniteMoeForCausalLM", FEW),
    ("GptOssForCausalLM", FEW),
    ("Qwen2MoeForCausalLM", FEW | {"mlp_only_layers": [1]}),
    ("Qwen2MoeForCausalLM", FEW | {"qkv_bias": False}),
    ("Qwen3MoeForCausalLM", FEW | {"decoder_sparse_step": 2}),
    ("Qwen3NextForCausalLM", FEW),
    ("Qwen3_5ForCausalLM", FEW),
    ("Qwen3_5MoeForCausalLM", FEW),
    ("Glm4MoeForCausalLM", FEW | {"use_qk_norm": True, "attention_bias": True, "num_attention_heads": 32}),
    ("Glm4MoeLiteForCausalLM", FEW),
    ("DeepseekV2ForCausalLM", FEW | {"num_experts_per_tok": 6, "q_lora_rank": None, "first_k_dense_replace": 1}),
    ("DeepseekV2ForCausalLM", FEW | {"num_experts_per_tok": 6, "attention_bias": True}),
    ("DeepseekV3ForCausalLM", FEW | {"attention_bias": True}),
    ("DeepseekV32ForCausalLM", FEW),
    ("GlmMoeDsaForCausalLM", FEW | {"indexer_types": ["full", "shared", "full", "shared"]}),
    ("Ernie4_5_MoeForCausalLM", FEW),
    ("Llama4ForCausalLM", FEW),
    ("Llama4ForCausalLM", FEW | {"interleave_moe_layer_step": 2}),
    ("Llama4ForConditionalGeneration", {"text_config": FEW, "vision_config": {"num_hidden_layers": 2}}),
    ("HunYuanDenseV1ForCausalLM", FEW | {"head_dim": 128, "num_key_value_heads": 8, "attention_bias": True}),
    ("GraniteMoeHybridForCausalLM", GRANITE | {"num_key_value_heads": 8, "attention_bias": True}),
    ("GraniteMoeHybridForCausalLM", GRANITE | {"num_local_experts": 0, "mamba_conv_bias": False}),
    ("FalconH1ForCausalLM", FEW),
    (
        "FalconH1ForCausalLM",
        FEW | dict.fromkeys(("mamba_rms_norm", "projectors_bias", "attention_bias", "mlp_bias"), True),
    ),
    ("Lfm2ForCausalLM", FEW | {"full_attn_idxs": [1, 3]}),
    ("Lfm2ForCausalLM", FEW | {"full_attn_idxs": [0], "block_auto_adjust_ff_dim": False, "conv_bias": True}),
    ("KimiLinearForCausalLM", {"num_hidden_layers": 5}),
    ("KimiLinearForCausalLM", {"num_hidden_layers": 5, "q_lora_rank": 768, "n_shared_experts": 2}),
    ("NemotronHForCausalLM", HYBRID),
    ("NemotronHForCausalLM", HYBRID | {"moe_latent_size": 256, "use_conv_bias": False}),
    ("Qwen2_5_VLForConditionalGeneration", {"text_config": FEW, "vision_config": {"depth": 2}}),
    ("Qwen3VLForConditionalGeneration", {"text_config": FEW, "vision_config": {"depth": 2}}),
    ("Qwen3VLMoeForConditionalGeneration", {"text_config": FEW, "vision_config": {"depth": 2}}),
    ("Qwen3_5ForConditionalGeneration", {"text_config": FEW, "vision_config": {"depth": 2}}),
    ("Qwen3_5MoeForConditionalGeneration", {"text_config": FEW, "vision_config": {"depth": 2}}),
    ("Gemma3ForConditionalGeneration", {"text_config": FEW} | SIGLIP),
    ("Mistral3ForConditionalGeneration", {"text_config": FEW, "vision_config": {"model_type": "pixtral"}}),
    ("Gemma4ForConditionalGeneration", GEMMA4),
    ("Gemma4ForConditionalGeneration", SMALL_GEMMA4),
    (
        "Kimi_K25ForConditionalGeneration",
        {"text_config": FEW | {"model_type": "deepseek_v3"}, "vision_config": {"num_hidden_layers": 2}},
    ),
]


def live_and_read(architecture: str, overrides: dict[str, Any]) -> tuple[torch.nn.Module, ModelSpec]:
    import transformers

    kind = getattr(transformers, architecture)
    config = kind.config_class(**overrides)
    with torch.device("meta"):
        module = kind(config)
    data = json.loads(json.dumps(config.to_dict() | {"architectures": [architecture]}))
    return module, model_from_config(data, where="config.json")


@pytest.mark.parametrize(("architecture", "overrides"), CASES, ids=[f"{n}-{i}" for i, (n, _) in enumerate(CASES)])
def test_a_family_lists_the_tensors_of_the_live_module(architecture: str, overrides: dict[str, Any]) -> None:
    from transformers.pytorch_utils import Conv1D

    module, model = live_and_read(architecture, overrides)
    expected = [(name, tuple(parameter.shape)) for name, parameter in module.named_parameters()]
    actual = [(parameter.name, parameter.shape) for parameter in model.parameters]
    if architecture.startswith(("Gemma4", "Kimi")):  # the projection stands behind the language model, here before it
        expected, actual = sorted(expected), sorted(actual)
    assert actual == expected

    stored = module.state_dict().keys()
    buffers = {name: tuple(buffer.shape) for name, buffer in module.named_buffers() if name in stored}
    found_buffers = {tensor.name: tensor.shape for tensor in model.tensors if tensor.is_buffer}
    assert {name: shape or (1,) for name, shape in buffers.items()} == found_buffers

    head = module.get_output_embeddings()
    linear = [
        f"{name}.weight"
        for name, part in module.named_modules()
        if isinstance(part, torch.nn.Linear | Conv1D) and part is not head
    ]
    assert sorted(layer.name for layer in list_linear_layers(model)) == sorted(linear)


def test_every_family_is_checked() -> None:
    assert {architecture for architecture, _ in CASES} | ALIASES.keys() == FAMILIES.keys()
    assert all(FAMILIES[alias] is FAMILIES[name] for alias, name in ALIASES.items())


def test_families_without_a_classifier_are_those_that_transformers_has_none_of() -> None:
    from transformers.models.auto.modeling_auto import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES as MAPPING

    known = {name for names in MAPPING.values() for name in ((names,) if isinstance(names, str) else names)}
    names = [
        name
        for group in ("dense", "mixtures", "hybrids")
        for entry in load_group(group)
        for name in entry["architectures"]
    ]
    lacking = {name for name in names if name.replace("CausalLM", "SequenceClassification") not in known}
    assert lacking == NO_CLASSIFIER
