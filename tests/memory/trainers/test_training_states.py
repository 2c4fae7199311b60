"""The ZeRO formulas against live DeepSpeed engines: every persistent row exact, on every rank."""

from functools import cache
from typing import Any

import pytest

from rlplan.memory.trainers.optimizers import Optimizer
from rlplan.memory.trainers.zero import States, ZeroSettings, ZeroStates
from rlplan.spec.model import Parameter, model_from_config
from rlplan.spec.models.adapters import list_lora_parameters
from rlplan.vocabulary import MemoryKind
from tests.memory.trainers.live_zero import measure

PLAIN = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 48,
    "vocab_size": 97,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LATENT = {key: value for key, value in PLAIN.items() if key != "head_dim"} | {
    "num_key_value_heads": 4,
    "moe_intermediate_size": 16,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "topk_method": "greedy",
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 16,
    "q_lora_rank": 24,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
}
MODELS: dict[str, dict[str, Any]] = {
    "llama": PLAIN | {"architectures": ["LlamaForCausalLM"]},
    "qwen2": PLAIN | {"architectures": ["Qwen2ForCausalLM"], "tie_word_embeddings": True},
    "qwen3": PLAIN | {"architectures": ["Qwen3ForCausalLM"]},
    "mistral": PLAIN | {"architectures": ["MistralForCausalLM"], "sliding_window": None},
    "gemma": PLAIN | {"architectures": ["GemmaForCausalLM"], "tie_word_embeddings": True},
    "opt": PLAIN | {"architectures": ["OPTForCausalLM"], "ffn_dim": 48, "word_embed_proj_dim": 32},
    "mixtral": PLAIN | {"architectures": ["MixtralForCausalLM"], "num_local_experts": 4, "num_experts_per_tok": 2},
    "deepseek_v2": LATENT | {"architectures": ["DeepseekV2ForCausalLM"]},
}
BUCKET = 3000
ATTENTION_ONLY = ("q_proj.weight", "v_proj.weight")
LORA_RANK = 4
NOTHING_MORE = 512
"""Bytes that an engine holds beside the rows: rotary frequencies, gradient norms, flags, the batch."""

Case = dict[str, Any]
CASES: dict[str, Case] = {
    "stage 1 in bf16 with adapters": {"stage": 1, "dtype": "bf16", "ranks": 1, "model": "qwen3", "lora": True},
    "stage 2 in bf16 with the optimizer offloaded": {"stage": 2, "ranks": 1, "model": "gemma", "offload": True},
    "stage 3 in fp32": {"stage": 3, "dtype": "fp32", "ranks": 1, "model": "opt"},
    "stage 3 in bf16 in sub-groups": {"stage": 3, "ranks": 1, "model": "mixtral", "sub_group": 4000},
    "stage 0 in bf16 on two ranks": {"stage": 0, "ranks": 2, "model": "qwen3"},
    "stage 1 in bf16 with fp32 accumulation": {"stage": 1, "ranks": 2, "model": "llama", "accumulate": 4},
    "stage 2 in fp32 on two ranks": {"stage": 2, "dtype": "fp32", "ranks": 2, "model": "deepseek_v2"},
    "stage 2 in bf16 with most weights frozen": {
        "stage": 2,
        "ranks": 2,
        "model": "gemma",
        "trainable": ATTENTION_ONLY,
    },
    "stage 3 in bf16 on two ranks": {"stage": 3, "ranks": 2, "model": "gemma", "persistence": 100},
    "stage 3 in bf16 with adapters": {"stage": 3, "ranks": 2, "model": "llama", "lora": True, "persistence": 0},
}
SPECIAL: dict[str, Case] = {
    "stage 0 in fp32": {"stage": 0, "dtype": "fp32", "ranks": 1, "model": "llama"},
    "stage 2 in bf16 with bf16 master weights": {"stage": 2, "ranks": 1, "model": "qwen2", "bf16_master": True},
    "stage 1 in bf16 on two ranks": {"stage": 1, "ranks": 2, "model": "mixtral"},
    "stage 2 in bf16 with adapters": {"stage": 2, "ranks": 2, "model": "qwen2", "lora": True},
    "stage 2 in bf16 with fp32 accumulation": {"stage": 2, "ranks": 2, "model": "mistral", "accumulate": 4},
    "stage 3 in bf16 with everything persistent": {"stage": 3, "ranks": 2, "model": "qwen2", "persistence": 100_000},
    "stage 3 in bf16 with fp32 accumulation": {"stage": 3, "ranks": 1, "model": "llama", "accumulate": 4},
    "stage 3 in bf16 with bf16 master weights": {"stage": 3, "ranks": 1, "model": "llama", "bf16_master": True},
    "stage 3 in bf16 with most weights frozen": {
        "stage": 3,
        "ranks": 2,
        "model": "qwen2",
        "persistence": 0,
        "trainable": ATTENTION_ONLY,
    },
}
GRID: dict[str, Case] = {
    f"{model}, stage {stage}, {ranks} ranks, {dtype}, {variant}": {"stage": stage, "ranks": ranks, "model": model}
    | {"dtype": dtype, "persistence": 0, **({variant: True} if variant != "full" else {})}
    for model in MODELS
    for stage in range(4)
    for ranks in (1, 2)
    for dtype, variant in (("bf16", "full"), ("fp32", "full"), ("bf16", "lora"), ("bf16", "offload"))
    if stage >= 2 or variant != "offload"
}
NIGHTLY = SPECIAL | GRID


@cache
def answers(ranks: int, model: str = "") -> dict[str, Any]:
    """Results of the covering cases, or of all nightly ones of a model, from one start of the processes."""
    cases = {name: case for name, case in NIGHTLY.items() if case["model"] == model} if model else CASES
    return measure(ranks, {name: live(case) for name, case in cases.items() if case["ranks"] == ranks})


@pytest.mark.engine
@pytest.mark.parametrize("name", CASES)
def test_every_state_of_a_live_engine_is_predicted_to_the_byte(name: str) -> None:
    check(CASES[name], answers(CASES[name]["ranks"])[name])


@pytest.mark.engine
@pytest.mark.nightly
@pytest.mark.parametrize("name", NIGHTLY)
def test_every_state_of_the_other_live_engines_is_predicted_to_the_byte(name: str) -> None:
    check(NIGHTLY[name], answers(NIGHTLY[name]["ranks"], NIGHTLY[name]["model"])[name])


def check(case: Case, found_by_rank: list[dict[str, dict[str, int]]]) -> None:
    """Compare rows and totals of every rank."""
    for rank, moments in enumerate(found_by_rank):
        predicted = predict(case, rank)
        for run_phase, states in (
            ("built", predicted.after_build()),
            ("accumulated", predicted.after_backward()),
            ("stepped", predicted.after_step()),
        ):
            moment = moments[run_phase]
            expected = dict(states.device)
            if run_phase == "accumulated":
                expected.pop(MemoryKind.OPTIMIZER, None)
                states = States({**expected, **early_moments(case, predicted)}, states.host)
                if case["stage"] == 3:
                    continue  # small tensors are gathered one by one in the first pass
            if case.get("offload"):
                host = sum(size for kind, size in states.host.items() if kind is not MemoryKind.OPTIMIZER)
                host += moment["states"]
                assert 0 <= moment["all"] - states.device_bytes - host <= NOTHING_MORE, (rank, run_phase)
                continue
            assert 0 <= moment["all"] - states.device_bytes <= NOTHING_MORE, (rank, run_phase, moment, states.device)
            if run_phase == "stepped":
                assert moment["states"] == states.device[MemoryKind.OPTIMIZER]
            if case["stage"] in (1, 2) and run_phase == "accumulated" and "zero.averaged_gradients" in moment:
                assert moment["zero.averaged_gradients"] == states.device[MemoryKind.GRADIENTS]


def early_moments(case: dict[str, Any], predicted: ZeroStates) -> dict[MemoryKind, int]:
    """Stage 0 in bf16 has its moments from the start; the others from their first step."""
    has_early = case["stage"] == 0 and is_bf16(case)
    return {MemoryKind.OPTIMIZER: predicted.optimizer_bytes} if has_early else {}


def is_bf16(case: Case) -> bool:
    return case.get("dtype", "bf16") == "bf16"


def live(case: Case) -> dict[str, Any]:
    """The case that live_zero.py builds."""
    answer = {"model": MODELS[case["model"]] | {"model_type": case["model"]}, "config": config(case)}
    if case.get("lora"):
        answer |= {"lora_rank": LORA_RANK, "trainable": ["lora_A.weight", "lora_B.weight"]}
    return answer | ({"trainable": case["trainable"]} if "trainable" in case else {})


def config(case: Case) -> dict[str, Any]:
    """The DeepSpeed config of a case."""
    zero: dict[str, Any] = {"stage": case["stage"], "reduce_bucket_size": BUCKET}
    if "persistence" in case:
        zero["stage3_param_persistence_threshold"] = case["persistence"]
    if "sub_group" in case:
        zero["sub_group_size"] = case["sub_group"]
    if case.get("offload"):
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": False}
    answer: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "zero_force_ds_cpu_optimizer": False,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
        "zero_optimization": zero,
    }
    if is_bf16(case):
        answer["bf16"] = {"enabled": True}
        if case.get("bf16_master"):
            answer["bf16"] |= {"bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}
    if "accumulate" in case:
        answer["data_types"] = {"grad_accum_dtype": "fp32"}
    return answer


def predict(case: dict[str, Any], rank: int) -> ZeroStates:
    """The formulas' view of a case."""
    width = 2 if is_bf16(case) else 4
    low = 2 if case.get("bf16_master") else 4
    settings = ZeroSettings(
        stage=case["stage"],
        num_ranks=case["ranks"],
        weight_bytes=width,
        gradient_bytes=case.get("accumulate", width),
        master_bytes=low,
        moment_bytes=low,
        reduce_bucket_size=BUCKET,
        persistence_threshold=case.get("persistence", 100_000),
        sub_group_size=case.get("sub_group", 1_000_000_000),
        optimizer=Optimizer.ADAMW,
        offloads_optimizer=case.get("offload", False),
    )
    return ZeroStates(settings, *trained_and_frozen(case), rank)


def trained_and_frozen(case: Case) -> tuple[tuple[Parameter, ...], tuple[Parameter, ...]]:
    """Parameters in the module's order."""
    model = model_from_config(MODELS[case["model"]], where="config.json")
    if case.get("lora"):
        return list_lora_parameters(model, LORA_RANK), model.parameters
    suffixes = tuple(case.get("trainable", ("",)))
    trained = tuple(p for p in model.parameters if p.name.endswith(suffixes))
    return trained, tuple(p for p in model.parameters if not p.name.endswith(suffixes))


def test_a_step_of_a_large_bf16_model_needs_six_bytes_for_each_element_of_a_sub_group() -> None:
    settings = ZeroSettings(stage=3, num_ranks=4)
    states = ZeroStates(settings, tuple(Parameter(f"model.layers.{i}.w", (200_000_000,)) for i in range(34)))
    assert states.step_copy_bytes() == 6 * 1_000_000_000


def test_zero_stages_of_the_paper_need_what_the_paper_says() -> None:
    model = tuple(Parameter(f"part {i}", (7_500_000,)) for i in range(1000))
    sizes = [
        ZeroStates(ZeroSettings(stage=stage, num_ranks=64, reduce_bucket_size=1), model).after_backward().device_bytes
        for stage in range(4)
    ]
    assert [round(size / 1e9, 1) for size in sizes] == [120.0, 16.6, 16.6, 1.9]
