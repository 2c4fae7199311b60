"""Engines whose attention is data-parallel in the words of other stacks, both ways."""

from pathlib import Path
from typing import Any

import pytest

from rlplan.errors import SpecError
from rlplan.foreign.convert import convert
from rlplan.foreign.export.backwards import export_plan
from rlplan.foreign.export.folders import write_export
from rlplan.foreign.settings import Settings
from rlplan.foreign.source import read_source
from rlplan.foreign.table import load_table
from tests.foreign.export.plans import ASKED, make_plan

MIXTURE = "Qwen/Qwen3-30B-A3B"
SHARED = ("rollout.tp=2", "rollout.attention_dp=4", "rollout.max_num_seqs=256", "rollout.max_num_batched_tokens=32768")
ROLLOUT = "actor_rollout_ref.rollout."
VLLM = "policy.generation.vllm_"
SAID: dict[str, tuple[tuple[str, ...], dict[str, Any]]] = {
    "verl": (
        ASKED["verl"],
        {
            f"{ROLLOUT}data_parallel_size": 4,
            f"{ROLLOUT}expert_parallel_size": 8,
            f"{ROLLOUT}max_num_seqs": 64,
            # tp 2 and 8192 tokens a rank are verl's defaults
        },
    ),
    "nemo_rl": (
        ASKED["nemo_rl"],
        {
            f"{VLLM}cfg.tensor_parallel_size": 2,
            f"{VLLM}cfg.expert_parallel_size": 8,
            f"{VLLM}kwargs.max_num_seqs": 64,
            f"{VLLM}kwargs.max_num_batched_tokens": 8192,
        },
    ),
    "slime": (
        ("rollout.max_num_batched_tokens=8192", *ASKED["slime"]),
        {
            "rollout_num_gpus_per_engine": 8,
            "sglang_enable_dp_attention": True,
            "sglang_dp_size": 4,
            "sglang_ep_size": 8,
        },
    ),
    "vllm": (
        ("framework=verl", "training.backend=megatron", *ASKED["vllm"]),
        {
            "tensor_parallel_size": 2,
            "data_parallel_size": 4,
            "enable_expert_parallel": True,
            "max_num_seqs": 64,
            # 8192 tokens a rank are vLLM's default on an H100
        },
    ),
}


@pytest.mark.parametrize("stack", SAID)
def test_a_stack_that_has_it_is_told_in_its_words(stack: str, tmp_path: Path) -> None:
    asked, wanted = SAID[stack]
    plan = make_plan(*asked, *(word for word in SHARED if stack != "slime" or "batched" not in word), model=MIXTURE)
    assert (plan.choice.engine.ranks, plan.choice.engines) == (8, 1)
    written = export_plan(plan, stack).settings
    assert {key: written.get(key) for key in wanted} == wanted
    write_export(plan, stack, tmp_path)


@pytest.mark.parametrize("stack", SAID)
def test_what_was_told_is_read_as_the_same_engine(stack: str) -> None:
    table = load_table(stack)
    settings = Settings(table, "test", {}, dict(table.defaults)).replace_values(
        {**SAID[stack][1], **({"algorithm.adv_estimator": "grpo"} if stack == "verl" else {})}
    )
    taken = {entry.ours: entry.value for entry in convert(settings, "8xH100", MIXTURE).taken}
    assert (taken["rollout.tp"], taken["rollout.attention_dp"], taken["rollout.has_expert_parallel"]) == (2, 4, True)
    assert taken["rollout.max_num_seqs"] == 256
    assert taken["rollout.max_num_batched_tokens"] == (8192 if stack == "slime" else 32768)


@pytest.mark.parametrize("stack", ["openrlhf", "trl"])
def test_a_plan_for_a_stack_that_lacks_it_says_so(stack: str) -> None:
    with pytest.raises(SpecError) as caught:
        make_plan(*ASKED[stack], "rollout.tp=1", "rollout.attention_dp=8", model=MIXTURE)
    assert caught.value.where.startswith("rollout.attention_dp")
    assert "rollout.attention_dp=1" in caught.value.way_out


def read_vllm(folder: Path, command: str) -> dict[str, Any]:
    (folder / "serve.sh").write_text(f"vllm serve {command} --max-model-len 4096\n")
    imported = convert(read_source(folder / "serve.sh", None), "8xH100", None)
    return {entry.ours: entry.value for entry in imported.taken}


def test_ranks_of_a_server_without_expert_parallelism_are_engines_of_their_own(tmp_path: Path) -> None:
    dense = read_vllm(tmp_path, "Qwen/Qwen2.5-7B --data-parallel-size 8")
    assert (dense["rollout.num_engines"], dense["rollout.attention_dp"], dense["rollout.max_num_seqs"]) == (8, 1, 1024)


def test_defaults_of_a_server_are_of_each_of_its_ranks(tmp_path: Path) -> None:
    loaded = read_vllm(tmp_path, f"{MIXTURE} -dp 8 --enable-expert-parallel")
    assert "rollout.num_engines" not in loaded
    limits = loaded["rollout.max_num_seqs"], loaded["rollout.max_num_batched_tokens"]
    assert (loaded["rollout.tp"], loaded["rollout.attention_dp"], *limits) == (1, 8, 8 * 1024, 8 * 8192)


def slime(**settings: Any) -> dict[str, Any]:
    table = load_table("slime")
    loaded = Settings(table, "test", {}, dict(table.defaults)).replace_values(
        {"colocate": True, "rollout_num_gpus_per_engine": 64, **settings}
    )
    return {entry.ours: entry.value for entry in convert(loaded, "128xH100", MIXTURE).taken}


def test_an_engine_of_slime_has_its_gpus_whatever_its_attention_is() -> None:
    plain = slime(sglang_ep_size=64)
    shared = slime(sglang_ep_size=64, sglang_enable_dp_attention=True, sglang_dp_size=8)
    keys = ("rollout.tp", "rollout.attention_dp", "rollout.has_expert_parallel")
    assert [[word[key] for key in keys] for word in (plain, shared)] == [[64, 1, True], [8, 8, True]]
    assert slime(sglang_enable_dp_attention=True, sglang_dp_size=8)["rollout.has_expert_parallel"] is True
    with pytest.raises(SpecError, match="sizes that divide"):
        slime(sglang_enable_dp_attention=True, sglang_dp_size=6)


def test_nemo_rl_asks_for_experts_over_a_multiple_of_tp() -> None:
    table = load_table("nemo_rl")
    wrong = {f"{VLLM}cfg.tensor_parallel_size": 8, f"{VLLM}cfg.expert_parallel_size": 12}
    with pytest.raises(SpecError, match="sizes that divide"):
        convert(Settings(table, "test", {}, dict(table.defaults)).replace_values(wrong), "8xH100", MIXTURE)
