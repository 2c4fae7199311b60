"""The ZeRO formulas against live DeepSpeed engines: every persistent row exact, on every rank."""

from typing import Any

import pytest

from rlplan.memory.optimizers import Optimizer
from rlplan.memory.zero import States, ZeroSettings, ZeroStates
from rlplan.spec.model import Parameter
from rlplan.vocabulary import MemoryKind
from tests.memory.live_zero import measure

MODEL = {
    "model_type": "qwen2",
    "hidden_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 40,
    "vocab_size": 97,
    "tie_word_embeddings": False,
}
BUCKET = 3000
ATTENTION_ONLY = ("q_proj.weight", "v_proj.weight")
NOTHING_MORE = 512
"""Bytes that an engine holds beside the rows: rotary frequencies, gradient norms, flags, the batch."""


def parameters() -> tuple[Parameter, ...]:
    """The tiny Qwen2's parameters in the order of the module."""
    h, q, k, wide, vocabulary = 24, 24, 12, 40, 97
    layer = [
        ("self_attn.q_proj.weight", (q, h)),
        ("self_attn.q_proj.bias", (q,)),
        ("self_attn.k_proj.weight", (k, h)),
        ("self_attn.k_proj.bias", (k,)),
        ("self_attn.v_proj.weight", (k, h)),
        ("self_attn.v_proj.bias", (k,)),
        ("self_attn.o_proj.weight", (h, q)),
        ("mlp.gate_proj.weight", (wide, h)),
        ("mlp.up_proj.weight", (wide, h)),
        ("mlp.down_proj.weight", (h, wide)),
        ("input_layernorm.weight", (h,)),
        ("post_attention_layernorm.weight", (h,)),
    ]
    blocks = [Parameter(f"model.layers.{i}.{name}", shape) for i in range(2) for name, shape in layer]
    return (
        Parameter("model.embed_tokens.weight", (vocabulary, h)),
        *blocks,
        Parameter("model.norm.weight", (h,)),
        Parameter("lm_head.weight", (vocabulary, h)),
    )


CASES: dict[str, dict[str, Any]] = {
    "stage 0 in fp32 on one rank": {"stage": 0, "dtype": "fp32", "ranks": 1},
    "stage 0 in bf16 on two ranks": {"stage": 0, "dtype": "bf16", "ranks": 2},
    "stage 1 in bf16 on two ranks": {"stage": 1, "dtype": "bf16", "ranks": 2},
    "stage 1 in bf16 with fp32 accumulation": {"stage": 1, "dtype": "bf16", "ranks": 2, "accumulate": 4},
    "stage 2 in fp32 on two ranks": {"stage": 2, "dtype": "fp32", "ranks": 2},
    "stage 2 in bf16 with fp32 accumulation": {"stage": 2, "dtype": "bf16", "ranks": 2, "accumulate": 4},
    "stage 2 in bf16 with bf16 master weights": {"stage": 2, "dtype": "bf16", "ranks": 1, "bf16_master": True},
    "stage 2 in bf16 with most weights frozen": {"stage": 2, "dtype": "bf16", "ranks": 2, "trainable": ATTENTION_ONLY},
    "stage 2 in bf16 with the optimizer offloaded": {"stage": 2, "dtype": "bf16", "ranks": 1, "offload": True},
    "stage 3 in fp32 on one rank": {"stage": 3, "dtype": "fp32", "ranks": 1},
    "stage 3 in bf16 on two ranks": {"stage": 3, "dtype": "bf16", "ranks": 2, "persistence": 100},
}
NIGHTLY: dict[str, dict[str, Any]] = {
    "stage 1 in fp32 on two ranks": {"stage": 1, "dtype": "fp32", "ranks": 2},
    "stage 2 in bf16 on two ranks": {"stage": 2, "dtype": "bf16", "ranks": 2},
    "stage 3 in fp32 on two ranks": {"stage": 3, "dtype": "fp32", "ranks": 2, "persistence": 0},
    "stage 3 in bf16 with everything persistent": {"stage": 3, "dtype": "bf16", "ranks": 2, "persistence": 100_000},
    "stage 3 in bf16 with fp32 accumulation": {"stage": 3, "dtype": "bf16", "ranks": 1, "accumulate": 4},
    "stage 3 in bf16 in sub-groups": {"stage": 3, "dtype": "bf16", "ranks": 1, "sub_group": 4000},
    "stage 3 in bf16 with bf16 master weights": {"stage": 3, "dtype": "bf16", "ranks": 1, "bf16_master": True},
    "stage 3 in bf16 with most weights frozen": {
        "stage": 3,
        "dtype": "bf16",
        "ranks": 2,
        "persistence": 0,
        "trainable": ATTENTION_ONLY,
    },
    "stage 3 in bf16 with the optimizer offloaded": {"stage": 3, "dtype": "bf16", "ranks": 1, "offload": True},
}


@pytest.mark.engine
@pytest.mark.parametrize("name", CASES)
def test_every_state_of_a_live_engine_is_predicted_to_the_byte(name: str) -> None:
    check(CASES[name])


@pytest.mark.engine
@pytest.mark.nightly
@pytest.mark.parametrize("name", NIGHTLY)
def test_every_state_of_the_other_live_engines_is_predicted_to_the_byte(name: str) -> None:
    check(NIGHTLY[name])


def check(case: dict[str, Any]) -> None:
    """Start the engine and compare rows and totals of every rank."""
    answers = measure({"num_ranks": case["ranks"], "model": MODEL, "config": config(case), **picked(case)})
    for rank, moments in enumerate(answers):
        predicted = predict(case, rank)
        for moment, states in (
            ("built", predicted.after_build()),
            ("accumulated", predicted.after_backward()),
            ("stepped", predicted.after_step()),
        ):
            found = moments[moment]
            expected = dict(states.device)
            if moment == "accumulated":
                expected.pop(MemoryKind.OPTIMIZER, None)
                states = States({**expected, **early_moments(case, predicted)}, states.host)
                if case["stage"] == 3:
                    continue  # small tensors are gathered one by one in the first pass
            if case.get("offload"):
                host = sum(size for kind, size in states.host.items() if kind is not MemoryKind.OPTIMIZER)
                host += found["states"]
                assert 0 <= found["all"] - states.device_bytes - host <= NOTHING_MORE, (rank, moment)
                continue
            assert 0 <= found["all"] - states.device_bytes <= NOTHING_MORE, (rank, moment, found, states.device)
            if moment == "stepped":
                assert found["states"] == states.device[MemoryKind.OPTIMIZER]
            if case["stage"] in (1, 2) and moment == "accumulated" and "zero.averaged_gradients" in found:
                assert found["zero.averaged_gradients"] == states.device[MemoryKind.GRADIENTS]


def early_moments(case: dict[str, Any], predicted: ZeroStates) -> dict[MemoryKind, int]:
    """Stage 0 in bf16 has its moments from the start; the others from their first step."""
    has_early = case["stage"] == 0 and case["dtype"] == "bf16"
    return {MemoryKind.OPTIMIZER: predicted.optimizer_bytes()} if has_early else {}


def picked(case: dict[str, Any]) -> dict[str, Any]:
    return {"trainable": case["trainable"]} if "trainable" in case else {}


def config(case: dict[str, Any]) -> dict[str, Any]:
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
    if case["dtype"] == "bf16":
        answer["bf16"] = {"enabled": True}
        if case.get("bf16_master"):
            answer["bf16"] |= {"bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}
    if "accumulate" in case:
        answer["data_types"] = {"grad_accum_dtype": "fp32"}
    return answer


def predict(case: dict[str, Any], rank: int) -> ZeroStates:
    """The formulas' view of a case."""
    width = 2 if case["dtype"] == "bf16" else 4
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
    suffixes = tuple(case.get("trainable", ("",)))
    trainable = tuple(p for p in parameters() if p.name.endswith(suffixes))
    frozen = tuple(p for p in parameters() if not p.name.endswith(suffixes))
    return ZeroStates(settings, trainable, frozen, rank)


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
