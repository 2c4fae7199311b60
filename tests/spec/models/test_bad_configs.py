"""Broken configs of every kind of family: one SpecError each, with file, key path, value and rule, quickly."""

import copy
import json
import os
import time
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rlplan.errors import SpecError
from rlplan.spec.model import read_model
from rlplan.spec.models.catalogue import load_catalogue

WRONG_NUMBERS = {
    "missing": ...,
    "null": None,
    "zero": 0,
    "negative": -1,
    "huge": 10**18,
    "float": 8.5,
    "text": "8",
    "true": True,
    "list": [8],
    "object": {"value": 8},
    "infinite": float("inf"),
    "digits": 10**400,
}
KEYS = {
    "openai-community/gpt2": ("n_embd", "n_layer", "n_head", "n_positions", "vocab_size"),
    "facebook/opt-125m": ("hidden_size", "ffn_dim", "num_hidden_layers", "max_position_embeddings"),
    "mosaicml/mpt-7b": ("d_model", "n_layers", "n_heads", "max_seq_len"),
    "mistralai/Mixtral-8x7B-v0.1": ("num_local_experts", "num_experts_per_tok", "intermediate_size"),
    "Qwen/Qwen3-30B-A3B": ("num_experts", "moe_intermediate_size", "num_experts_per_tok"),
    "deepseek-ai/DeepSeek-V3": ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"),
    "deepseek-ai/DeepSeek-V3.2": ("index_n_heads", "index_head_dim", "n_routed_experts"),
    "Qwen/Qwen3-Next-80B-A3B-Instruct": ("linear_num_key_heads", "linear_value_head_dim", "linear_conv_kernel_dim"),
    "google/gemma-3-4b-it": ("text_config.hidden_size", "text_config.intermediate_size", "vision_config.patch_size"),
    "Qwen/Qwen2.5-VL-7B-Instruct": ("vision_config.depth", "vision_config.out_hidden_size"),
    "google/gemma-4-26B-A4B": ("text_config.moe_intermediate_size", "vision_config.position_embedding_size"),
}
NUMBER_CASES = [(name, key, kind) for name, keys in KEYS.items() for key in keys for kind in WRONG_NUMBERS]

OTHER_CASES: dict[str, tuple[str, dict[str, Any], str]] = {
    "renamed": ("Qwen/Qwen2.5-7B", {"hidden_size": ..., "hiden_size": 3584}, "hidden_size"),
    "indivisible heads": ("Qwen/Qwen2.5-7B", {"num_attention_heads": 27}, "num_attention_heads"),
    "indivisible kv heads": ("Qwen/Qwen2.5-7B", {"num_key_value_heads": 3}, "num_key_value_heads"),
    "more kv heads than heads": ("Qwen/Qwen2.5-7B", {"num_key_value_heads": 56}, "num_key_value_heads"),
    "window text": ("mistralai/Mistral-7B-v0.1", {"sliding_window": "4096"}, "sliding_window"),
    "window negative": ("mistralai/Mistral-7B-v0.1", {"sliding_window": -1}, "sliding_window"),
    "window null where layers slide": ("openai/gpt-oss-20b", {"sliding_window": None}, "sliding_window"),
    "layer types short": ("openai/gpt-oss-20b", {"layer_types": ["full_attention"]}, "layer_types"),
    "layer types unknown": ("openai/gpt-oss-20b", {"layer_types": ["magic"] * 24}, "layer_types"),
    "layer types foreign": ("openai/gpt-oss-20b", {"layer_types": ["linear_attention"] * 24}, "layer_types"),
    "layer types numbers": ("openai/gpt-oss-20b", {"layer_types": [1] * 24}, "layer_types"),
    "layer types nested": ("openai/gpt-oss-20b", {"layer_types": [["full_attention"]] * 24}, "layer_types"),
    "layer types object": ("openai/gpt-oss-20b", {"layer_types": {}}, "layer_types"),
    "pattern zero": ("google/gemma-3-4b-it", {"text_config.sliding_window_pattern": 0}, "sliding_window_pattern"),
    "more active than experts": ("Qwen/Qwen3-30B-A3B", {"num_experts_per_tok": 129}, "num_experts_per_tok"),
    "shared negative": ("deepseek-ai/DeepSeek-V3", {"n_shared_experts": -1}, "n_shared_experts"),
    "shared text": ("deepseek-ai/DeepSeek-V3", {"n_shared_experts": "one"}, "n_shared_experts"),
    "dense layers beyond": ("deepseek-ai/DeepSeek-V3", {"first_k_dense_replace": 62}, "first_k_dense_replace"),
    "dense layers negative": ("deepseek-ai/DeepSeek-V3", {"first_k_dense_replace": -1}, "first_k_dense_replace"),
    "layer frequency": ("deepseek-ai/DeepSeek-V3", {"moe_layer_freq": 2}, "moe_layer_freq"),
    "mlp types short": ("deepseek-ai/DeepSeek-V3.2", {"mlp_layer_types": ["sparse"]}, "mlp_layer_types"),
    "indexers unknown": ("zai-org/GLM-5.2", {"indexer_types": ["half"] * 78}, "indexer_types"),
    "indexers missing": ("zai-org/GLM-5.2", {"indexer_types": ..., "index_topk_freq": 4}, "indexer_types"),
    "sparse step zero": ("Qwen/Qwen3-30B-A3B", {"decoder_sparse_step": 0}, "decoder_sparse_step"),
    "dense layers text": ("Qwen/Qwen3-30B-A3B", {"mlp_only_layers": "none"}, "mlp_only_layers"),
    "dense layers float": ("Qwen/Qwen3-30B-A3B", {"mlp_only_layers": [1.0]}, "mlp_only_layers"),
    "interval zero": ("Qwen/Qwen3-Next-80B-A3B-Instruct", {"full_attention_interval": 0}, "full_attention_interval"),
    "text config list": ("google/gemma-3-4b-it", {"text_config": []}, "text_config"),
    "vision config missing": ("google/gemma-3-4b-it", {"vision_config": ...}, "vision_config"),
    "vision config text": ("google/gemma-3-4b-it", {"vision_config": "big"}, "vision_config"),
    "vision head": ("google/gemma-3-4b-it", {"vision_config.vision_use_head": True}, "vision_use_head"),
    "mergers text": ("Qwen/Qwen3-VL-2B-Instruct", {"vision_config.deepstack_visual_indexes": "5"}, "deepstack"),
    "bias text": ("meta-llama/Llama-3.1-8B", {"attention_bias": "no"}, "attention_bias"),
    "bias null": ("meta-llama/Llama-3.1-8B", {"mlp_bias": None}, "mlp_bias"),
    "tied number": ("meta-llama/Llama-3.1-8B", {"tie_word_embeddings": 1}, "tie_word_embeddings"),
    "post norm": ("facebook/opt-125m", {"do_layer_norm_before": False}, "do_layer_norm_before"),
    "narrow embedding": ("facebook/opt-125m", {"word_embed_proj_dim": 512}, "word_embed_proj_dim"),
    "biased mpt": ("mosaicml/mpt-7b", {"no_bias": False}, "no_bias"),
    "mpt attention": ("mosaicml/mpt-7b", {"attn_config": {"attn_type": "multiquery_attention"}}, "attn_type"),
    "mpt attention list": ("mosaicml/mpt-7b", {"attn_config": []}, "attn_config"),
    "per-layer embeddings": (
        "google/gemma-4-26B-A4B",
        {"text_config.hidden_size_per_layer_input": -1},
        "hidden_size_per_layer_input",
    ),
    "shared caches": ("google/gemma-4-26B-A4B", {"text_config.num_kv_shared_layers": 30}, "num_kv_shared_layers"),
    "layer overrides": ("Qwen/Qwen2.5-7B", {"per_layer_config": {"3": {"head_dim": 64}}}, "per_layer_config"),
    "uneven full layers": (
        "google/gemma-4-26B-A4B",
        {"text_config.per_layer_config": {"5": {"head_dim": 512}, "11": {"head_dim": 256}}},
        "per_layer_config",
    ),
    "full layer text": (
        "google/gemma-4-26B-A4B",
        {"text_config.per_layer_config": {"5": {"head_dim": "wide"}}},
        "head_dim",
    ),
    "full layer list": ("google/gemma-4-26B-A4B", {"text_config.per_layer_config": [512]}, "per_layer_config"),
    "quantization list": ("Qwen/Qwen2.5-7B", {"quantization_config": [4]}, "quantization_config"),
    "quantization number": ("Qwen/Qwen2.5-7B", {"quantization_config": {"quant_method": 4}}, "quant_method"),
    "quantization long": ("Qwen/Qwen2.5-7B", {"quantization_config": {"quant_method": "x" * 999}}, "quant_method"),
    "no architecture": ("Qwen/Qwen2.5-7B", {"architectures": ...}, "architectures"),
    "architecture text": ("Qwen/Qwen2.5-7B", {"architectures": "Qwen2ForCausalLM"}, "architectures"),
    "architecture deep": ("Qwen/Qwen2.5-7B", {"architectures": [[[["Qwen2ForCausalLM"]]]]}, "architectures"),
    "architecture unknown": ("Qwen/Qwen2.5-7B", {"architectures": ["MambaForCausalLM"]}, "architectures"),
    "architecture hostile": (
        "Qwen/Qwen2.5-7B",
        {"architectures": ["__import__('os').system('true')"]},
        "architectures",
    ),
    "architecture long": ("Qwen/Qwen2.5-7B", {"architectures": ["Q" * 500_000]}, "architectures"),
    "expert layer beyond": (
        "meta-llama/Llama-4-Scout-17B-16E-Instruct",
        {"text_config.moe_layers": [48]},
        "moe_layers",
    ),
    "rope layers short": (
        "meta-llama/Llama-4-Scout-17B-16E-Instruct",
        {"text_config.no_rope_layers": [1, 0]},
        "no_rope_layers",
    ),
}


def break_config(name: str, changes: dict[str, Any]) -> dict[str, Any]:
    config = copy.deepcopy(load_catalogue()[name].config)
    for path, value in changes.items():
        *parents, key = path.split(".")
        level = config
        for parent in parents:
            level = level[parent]
        level[key] = value
        if value is ...:
            del level[key]
    return config


def refusal(path: Path, limit_s: float = 1.0) -> SpecError:
    started = time.process_time()
    with pytest.raises(SpecError) as caught:
        read_model(path)
    assert time.process_time() - started < limit_s
    error = caught.value
    assert error.exit_code == 2
    assert all((error.what, error.where, error.rule, error.way_out))
    assert str(path) in error.where
    assert len(str(error)) < 700
    return error


@pytest.mark.parametrize(("name", "key", "kind"), NUMBER_CASES, ids=lambda value: value)
def test_a_wrong_number_is_refused_with_its_key_path(tmp_path: Path, name: str, key: str, kind: str) -> None:
    value = WRONG_NUMBERS[kind]
    path = tmp_path / "config.json"
    path.write_text(json.dumps(break_config(name, {key: value})))
    error = refusal(path)
    word = key.rpartition(".")[2]
    assert kind == "digits" or word in error.where
    assert kind == "digits" or word in error.what


@pytest.mark.parametrize(("name", "changes", "word"), OTHER_CASES.values(), ids=OTHER_CASES)
def test_what_does_not_fit_together_is_refused(tmp_path: Path, name: str, changes: dict[str, Any], word: str) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(break_config(name, changes)))
    assert word in refusal(path).where


FILES = {
    "empty": b"",
    "open": b'{"architectures": [',
    "nan": b'{"hidden_size": NaN}',
    "minus infinity": b'{"hidden_size": -Infinity}',
    "twice": b'{"architectures": ["LlamaForCausalLM"], "hidden_size": 8, "hidden_size": 16}',
    "twice below": b'{"architectures": ["Gemma3ForConditionalGeneration"], "text_config": {"a": 1, "a": 2}}',
    "two values": b"{} {}",
    "comment": b"{} // no",
    "pickle": b"\x80\x04\x95\x10\x00\x00\x00\x00\x00\x00\x00\x8c\x05posix\x94\x8c\x06system\x94\x93\x94.",
    "yaml": b"!!python/object/apply:os.system ['true']",
    "utf-16": '{"a": 1}'.encode("utf-16"),
    "digits": b'{"hidden_size": ' + b"9" * 5000 + b"}",
    "exponent": b'{"architectures": ["LlamaForCausalLM"], "hidden_size": 1e999}',
    "5,000 objects": b'{"a":' * 5000 + b"1" + b"}" * 5000,
    "5,000 in architectures": b'{"architectures":' + b"[" * 5000 + b"]" * 5000 + b"}",
    "500,000 lists": b"[" * 500_000,
    "list": b"[]",
    "null": b"null",
    "text": b'"LlamaForCausalLM"',
    "3 MB": b" " * (3 << 20) + b"{}",
}


@pytest.mark.parametrize("content", FILES.values(), ids=FILES)
def test_a_file_that_is_no_config_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(content)
    refusal(path)


def test_a_file_of_500_mb_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(b"{")
    os.truncate(path, 500 << 20)
    tracemalloc.start()
    try:
        refusal(path)
        assert tracemalloc.get_traced_memory()[1] < 64 << 20
    finally:
        tracemalloc.stop()


def test_the_largest_config_that_is_read_stays_small_in_memory(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    # The slowest shape per byte: many small values.
    path.write_text('{"a": [' + "0," * 1_000_000 + "0]}")
    tracemalloc.start()
    try:
        started = time.process_time()
        json.loads(path.read_text())
        refusal(path, limit_s=3 * (time.process_time() - started))  # hardly longer than taking it apart
        assert tracemalloc.get_traced_memory()[1] < 256 << 20
    finally:
        tracemalloc.stop()


def hostile() -> Iterator[dict[str, Any]]:
    for key in ("auto_map", "trust_remote_code", "custom_pipelines", "_attn_implementation", "__class__", "__reduce__"):
        yield {key: {"AutoConfig": "evil.Config", "AutoModel": "evil--repo.Model"}}
    yield {"model_type": "../../evil", "_name_or_path": "https://example.invalid/evil"}
    yield {"torch_dtype": "__import__('os')", "hidden_act": "os.system"}


@pytest.mark.parametrize("extra", list(hostile()), ids=lambda extra: next(iter(extra)))
def test_what_a_config_asks_to_run_is_data(tmp_path: Path, extra: dict[str, Any]) -> None:
    touched = tmp_path / "touched"
    (tmp_path / "evil.py").write_text(f"import pathlib; pathlib.Path({str(touched)!r}).touch()")
    (tmp_path / "config.json").write_text(json.dumps(break_config("Qwen/Qwen2.5-7B", extra)))
    assert read_model(tmp_path).num_parameters == 7_615_616_512
    assert not touched.exists()


def test_an_unknown_architecture_is_told_the_nearest_and_the_way_out(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(break_config("Qwen/Qwen2.5-7B", {"architectures": ["Qwen4ForCausalLM"]})))
    error = refusal(path)
    assert "Qwen3ForCausalLM" in error.rule
    assert "rlplan estimate --trace" in error.way_out


def test_there_are_at_least_two_hundred_broken_configs() -> None:
    assert len(NUMBER_CASES) + len(OTHER_CASES) + len(FILES) >= 200
