"""The engine's formulas against live vLLM engines, row by row, on every rank.

Exact: each parameter, what stays of them after packing, buffers, blocks and bytes of the KV cache. The pack: 5 %.
"""

from collections import Counter
from functools import cache
from math import prod
from typing import Any

import pytest

from rlplan.memory.serving.generation import (
    engine_parameter_bytes,
    fused_linear_shapes,
    packed_weight_bytes,
    unpacked_remainder_bytes,
)
from rlplan.memory.serving.kv import build_cache_pool
from rlplan.memory.serving.weights import list_engine_tensors, rotary_table_bytes, stored_bytes
from rlplan.spec.hardware.catalogue import get_profile
from rlplan.spec.model import ModelSpec, model_from_config
from rlplan.spec.models.parts import LINEAR, NONE
from rlplan.units import MIB
from tests.memory.serving.engine_cases import BORROWED, CONFIGS, LINEAR_ATTENTION
from tests.memory.serving.live_vllm import measure

KV_BYTES = 4 * MIB
PACK_TOLERANCE = 0.05
NOTHING_MORE_PER_LAYER = 16
"""Bytes of a layer's tensors that are neither parameters nor buffers."""

LATENT_BLOCK = 16
"""The only block size of vLLM's latent attention on a CPU without tiles."""

VLLM_NAMES = {
    "block_sparse_moe.": "mlp.",
    "routed_experts.w13_weight": "gate_up_proj",
    "routed_experts.w13_bias": "gate_up_proj_bias",
    "routed_experts.w2_weight": "down_proj",
    "routed_experts.w2_bias": "down_proj_bias",
    ".attn.qkv_proj": ".self_attn.qkv_proj",
    ".attn.o_proj": ".self_attn.o_proj",
    ".attn.sinks": ".self_attn.sinks",
    "model.embedding.": "model.embed_tokens.",
}
"""Where vLLM spells a module otherwise than transformers."""

TP = 2
COVERING: dict[str, tuple[str, int]] = {
    "llama with one key head": ("bf16", 64),
    "gemma3": ("fp32", 32),
    "mixtral": ("bf16", 32),
    "deepseek-v3": ("bf16", LATENT_BLOCK),
}
"""Cases on two ranks. Every whole run tests an engine of one rank, the nightly tests all models."""


def case(name: str, dtype: str, block_size: int) -> dict[str, Any]:
    """The argument of `live_vllm.measure`."""
    config = (CONFIGS | BORROWED | LINEAR_ATTENTION)[name]
    is_latent = "kv_lora_rank" in config
    return {
        "config": config,
        "dtype": dtype,
        "block_size": LATENT_BLOCK if is_latent else block_size,
        "kv_bytes": KV_BYTES,
    }


Rows = tuple[dict[str, Any], list[dict[str, Any]], set[tuple[int, int]]]


@cache
def covering_rows() -> dict[str, Rows]:
    """See `run`."""
    return run({name: case(name, *settings) for name, settings in COVERING.items()}, TP)


def run(cases: dict[str, dict[str, Any]], tp: int) -> dict[str, Rows]:
    """Each case with the bytes of every rank, and the shapes that its process had packed before."""
    answers = measure(list(cases.values()), tp)
    seen: dict[str, set[tuple[int, int]]] = {"fp32": set(), "bf16": set()}
    results: dict[str, Rows] = {}
    for number, (name, settings) in enumerate(cases.items()):
        before = seen[settings["dtype"]]
        results[name] = (settings, [rank[number] for rank in answers], set(before))
        before.update(fused_linear_shapes(model_from_config(settings["config"], where=name), tp))
    return results


@pytest.mark.engine
@pytest.mark.parametrize("name", COVERING)
def test_every_row_of_a_live_engine_is_predicted(name: str) -> None:
    settings, ranks, packed_before = covering_rows()[name]
    for rank in ranks:
        check(settings, rank, TP, packed_before)


@pytest.mark.engine
@pytest.mark.nightly
@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("block_size", [32, 64])
def test_every_row_of_every_small_architecture_is_predicted(tp: int, dtype: str, block_size: int) -> None:
    cases = {name: case(name, dtype, block_size) for name in CONFIGS}
    for settings, ranks, packed_before in run(cases, tp).values():
        for rank in ranks:
            check(settings, rank, tp, packed_before)


@pytest.mark.engine
@pytest.mark.nightly
@pytest.mark.parametrize("tp", [1, 2])
def test_the_parameters_of_borrowed_modules_and_of_linear_attention_are_predicted(tp: int) -> None:
    cases = {name: case(name, "bf16", 32) for name in BORROWED | LINEAR_ATTENTION}
    for name, (settings, ranks, _) in run(cases, tp).items():
        model = model_from_config(settings["config"], where="config.json")
        for rank in ranks:
            live = sum(prod(shape) * size for _, shape, size in rank["parameters"])
            assert live == engine_parameter_bytes(model, 2, tp), name
            if name in BORROWED:
                assert rank["kv_cache"] == predict_cache(model, 2, 32, tp)[1], name


def predict_cache(model: ModelSpec, element_bytes: int, block_size: int, tp: int) -> tuple[int, int]:
    """(blocks, bytes) of the KV cache of one rank, as `build_host_pool` has them."""
    pool = build_cache_pool(model, tp=tp, element_bytes=element_bytes, state_bytes=element_bytes, block_size=block_size)
    blocks = pool.num_blocks(KV_BYTES)
    return blocks, blocks * pool.bytes_per_block


def engine_buffers(model: ModelSpec, element_bytes: int) -> dict[str, int]:
    """Bytes of the buffers beside the parameters, the same on every rank, by name.

    Counts: `rotary_table_bytes`; four fp32 scales for each attention layer; Gemma's scale of the embeddings.
    Source: vLLM 0.32.0, attention/attention.py (`set_default_quant_scales`), models/gemma.py (`normalizer`).
    """
    attention_layers = sum(model.attention_kind(layer) not in (LINEAR, NONE) for layer in range(model.num_layers))
    return {
        "cos_sin_cache": rotary_table_bytes(model, element_bytes),
        "scale": attention_layers * 4 * 4,
        "normalizer": element_bytes if model.architecture.startswith("Gemma") else 0,
    }


def check(settings: dict[str, Any], rank: dict[str, Any], tp: int, packed_before: set[tuple[int, int]]) -> None:
    """Compare the rows of one rank."""
    model = model_from_config(settings["config"], where="config.json")
    element_bytes = {"fp32": 4, "bf16": 2}[settings["dtype"]]
    live = {ours(name): prod(shape) * size for name, shape, size in rank["parameters"]}
    assert live == {tensor.name: stored_bytes([tensor], element_bytes) for tensor in list_engine_tensors(model, tp)}
    assert sum(live.values()) == engine_parameter_bytes(model, element_bytes, tp)
    buffers = Counter[str]()
    for name, size in rank["buffers"]:
        buffers["scale" if name.endswith("_scale") else name.rpartition(".")[2]] += size
    assert buffers == Counter(engine_buffers(model, element_bytes))
    assert rank["block_size"] == settings["block_size"]
    assert (rank["num_blocks"], rank["kv_cache"]) == predict_cache(model, element_bytes, rank["block_size"], tp)
    assert rank["unnamed"] <= model.num_layers * NOTHING_MORE_PER_LAYER
    if rank["has_tiles"] and (settings["dtype"] == "bf16" or model.latent_attention):
        return  # a CPU with tiles packs small bf16 weights and latent attention otherwise
    if settings["dtype"] == "bf16" and not rank["packs_bf16"]:
        assert rank["kept"] == sum(live.values())
        return
    assert rank["kept"] == unpacked_remainder_bytes(model, element_bytes, tp)
    assert rank["packed"] == pytest.approx(pack(model, element_bytes, tp, packed_before), rel=PACK_TOLERANCE)


def pack(model: ModelSpec, element_bytes: int, tp: int, packed_before: set[tuple[int, int]]) -> int:
    """The predicted pack, without the code of shapes that the same process had compiled for earlier cases."""
    packing = get_profile("cpu-host", where="test").weight_packing
    compiled = len(set(fused_linear_shapes(model, tp)) & packed_before) * packing.bytes_per_shape.value
    return packed_weight_bytes(model, element_bytes, packing, tp) - compiled


def ours(name: str) -> str:
    """Transformers' name of a parameter, from vLLM's."""
    for theirs, other in VLLM_NAMES.items():
        name = name.replace(theirs, other)
    return name
