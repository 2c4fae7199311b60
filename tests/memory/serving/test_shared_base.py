"""The memory that trainer and engine share: its bytes worked by hand, and counted once on a device."""

from typing import Any

from rlplan.memory.model.engine_base import build_shared_layout, find_unshareable_part, shared_base_bytes
from rlplan.memory.serving.generation import engine_parameter_bytes, packed_weight_bytes, unpacked_remainder_bytes
from rlplan.planner.plan import Plan
from rlplan.planner.search import find_best_plan
from rlplan.spec.files.job_file import job_from
from rlplan.spec.model import ModelSpec, model_from_config
from rlplan.vocabulary import MemoryKind
from tests.factories import make_plan
from tests.memory.serving.engine_cases import CONFIGS

SHARED = {
    "training.lora": {"rank": 4},
    "placement.placement": "hybrid",
    "placement.sync_content": "adapter",
    "rollout.num_engines": 1,
}


def small() -> ModelSpec:
    """Two layers, 100 words, tied: 4 query heads and 2 key heads of 32, 3 of 5 widths not whole cache lines."""
    config = CONFIGS["qwen3"] | {
        "hidden_size": 20,
        "intermediate_size": 24,
        "head_dim": 32,
        "vocab_size": 100,
        "num_hidden_layers": 1,
    }
    return model_from_config(config, where="config.json")


def test_the_bytes_of_a_small_model_are_those_worked_by_hand() -> None:
    by_name = {tensor.name: tensor for tensor in build_shared_layout(small(), 2)}
    by_hand = {
        "model.embed_tokens.weight": 128 * 20 * 2,  # 100 words are padded to 128
        "model.layers.0.self_attn.qkv_proj.weight": (128 + 64 + 64) * 20 * 2,
        "model.layers.0.self_attn.o_proj.weight": 20 * 128 * 2,
        "model.layers.0.self_attn.q_norm.weight": 32 * 2,
        "model.layers.0.self_attn.k_norm.weight": 32 * 2,
        "model.layers.0.mlp.gate_up_proj.weight": 2 * 24 * 20 * 2,
        "model.layers.0.mlp.down_proj.weight": 20 * 24 * 2,
        "model.layers.0.input_layernorm.weight": 20 * 2,  # and 24 bytes to the next cache line
        "model.layers.0.post_attention_layernorm.weight": 20 * 2,
        "model.norm.weight": 20 * 2,
    }
    assert {name: tensor.num_bytes for name, tensor in by_name.items()} == by_hand
    assert all(tensor.start % 64 == 0 for tensor in by_name.values())
    assert shared_base_bytes(small(), 2) == sum(by_hand.values()) + 3 * 24
    fused = by_name["model.layers.0.self_attn.qkv_proj.weight"]
    assert [(member.name.split(".")[-2], member.shape[0]) for member in fused.members] == [
        ("q_proj", 128),
        ("k_proj", 64),
        ("v_proj", 64),
    ]


def test_models_whose_weights_vllm_keeps_otherwise_are_named() -> None:
    reasons = {name: find_unshareable_part(model_from_config(config, where=name)) for name, config in CONFIGS.items()}
    assert {name: what for name, what in reasons.items() if what} == {
        "gpt2": "transposed projections",
        **dict.fromkeys(("mixtral", "qwen2 with experts", "qwen3 with experts", "olmoe", "gpt-oss"), "experts"),
        **dict.fromkeys(("deepseek-v2", "deepseek-v3"), "experts"),
    }


def find_peaks(plan: Plan, worker: str) -> dict[MemoryKind, int]:
    """Bytes by kind of a worker's first process after a steady step's evaluation."""
    rows = [row for row in plan.ledger.find_rows(f"{worker}/0") if row.run_phase == "steady"]
    last = rows[-1].action_id
    return {row.kind: row.resident_bytes for row in rows if row.action_id == last}


def test_an_engine_s_weights_are_counted_once_on_a_cpu_host() -> None:
    apart, shared = make_plan(**SHARED), make_plan(**SHARED, **{"rollout.shares_base": True})
    model, packing = apart.job.load_model(), apart.job.load_profile().weight_packing
    own = unpacked_remainder_bytes(model, 4) + packed_weight_bytes(model, 4, packing)
    before, now = find_peaks(apart, "rollout_engine"), find_peaks(shared, "rollout_engine")
    assert before[MemoryKind.WEIGHTS] + before[MemoryKind.PACKED_WEIGHTS] == own
    assert {kind: now.get(kind, 0) for kind in (MemoryKind.WEIGHTS, MemoryKind.PACKED_WEIGHTS)} == {
        MemoryKind.WEIGHTS: 0,
        MemoryKind.PACKED_WEIGHTS: 0,
    }
    padding = shared_base_bytes(model, 4) - 4 * model.num_parameters
    trained = (
        find_peaks(shared, "policy_trainer")[MemoryKind.WEIGHTS]
        - find_peaks(apart, "policy_trainer")[MemoryKind.WEIGHTS]
    )
    assert trained == padding


def test_an_engine_s_weights_are_counted_once_on_a_gpu() -> None:
    def search_plan(*, shares_base: bool) -> Plan:
        asked: dict[str, Any] = {
            "policy": "Qwen/Qwen2.5-1.5B",
            "hardware": "1xH100",
            "workload": {"num_prompts_per_step": 8, "num_samples_per_prompt": 4, "max_response_len": 256},
            "training": {"lora": {"rank": 16}, "zero_stage": 2},
            "placement": {"placement": "hybrid", "sync_content": "adapter"},
            "rollout": {"shares_base": shares_base, "kv_cache_memory": "8GiB"},
        }
        return find_best_plan(job_from(asked), with_others=False)

    apart, shared = search_plan(shares_base=False), search_plan(shares_base=True)
    model = apart.job.load_model()
    freed = (
        find_peaks(apart, "rollout_engine")[MemoryKind.WEIGHTS]
        - find_peaks(shared, "rollout_engine")[MemoryKind.WEIGHTS]
    )
    base = shared_base_bytes(model, 2)
    assert freed == engine_parameter_bytes(model, 2) - (base - 2 * model.num_parameters)
    assert freed == 2 * model.num_parameters, "151,936 words and all widths are whole cache lines"
    start = [row for row in shared.ledger.find_rows("rollout_engine/0") if row.action_id == "start_engine"]
    assert sum(row.peak_bytes for row in start) > 2 * model.num_parameters, "its own are there until they are compared"
