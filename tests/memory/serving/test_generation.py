"""The engine beside its weights: KV blocks, activations and the sampler, worked by hand."""

import json
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from rlplan.memory.serving.generation import (
    build_host_pool,
    compiled_kernel_bytes,
    count_batch_sizes,
    engine_activation_bytes,
    kv_bytes_per_token,
    mapped_checkpoint_bytes,
    sampler_bytes,
)
from rlplan.memory.serving.kv import CachePool
from rlplan.spec.model import ModelSpec, load_model
from rlplan.spec.models.catalogue import find_model
from rlplan.units import MIB
from rlplan.vocabulary import Dtype
from tests.factories import EXAMPLES, make_job, make_model, make_plan, make_profile


def build_pool(model: ModelSpec, dtype: str, block_size: int) -> CachePool:
    return build_host_pool(model, make_job(rollout={"dtype": dtype, "block_size": block_size}).rollout)


def test_a_token_takes_a_key_and_a_value_in_every_layer() -> None:
    assert kv_bytes_per_token(make_model(), 4) == 2 * 2 * 6 * 4 == 96
    assert kv_bytes_per_token(make_model(), 2) == 48


def test_kv_bytes_of_a_published_model() -> None:
    # Llama 3 8B: 32 layers, 8 KV heads of 128, bf16: 128 KiB a token, as vLLM's documentation and papers have it
    llama = make_model(
        architecture="LlamaForCausalLM", num_layers=32, num_heads=32, num_kv_heads=8, head_dim=128, has_qk_norm=False
    )
    assert kv_bytes_per_token(llama, 2) == 131_072


def test_blocks_are_whole_and_rounded_down() -> None:
    pool = build_pool(make_model(), "float32", 32)
    assert pool.bytes_per_block == 3072
    assert [pool.num_blocks(size) for size in (10_000, 3071, 3072)] == [3, 0, 1]


def test_the_quickstart_s_cache_is_32_mib_to_the_byte() -> None:
    # 2 * 4 layers * 64 * 4 bytes = 2048 a token, 64 KiB a block of 32: 512 blocks
    pool = build_pool(load_model(EXAMPLES / "models" / "sorter"), "float32", 32)
    assert (pool.num_blocks(32 * MIB), 512 * pool.bytes_per_block) == (512, 32 * MIB)


def test_activations_and_sampler_are_what_is_worked_by_hand() -> None:
    # 5 tokens: 5*4*(4*20 + 3*8) = 2080, and two more of the residual 2*5*8*4 = 320
    assert engine_activation_bytes(make_model(), 5) == 2400
    # four fp32 tensors of 3 sequences x 70 words
    assert sampler_bytes(70, 3) == 4 * 3 * 70 * 4


def test_batches_shrink_from_all_sequences_at_once() -> None:
    assert count_batch_sizes(make_job()) == 3 * 12, "a run of three steps"
    assert count_batch_sizes(make_job(**{"workload.num_steps": 100})) == 5 * 12
    samples = {"workload.evaluation_temperature": 1.0, "workload.num_evaluation_samples": 2}
    assert count_batch_sizes(make_job(**{"workload.num_steps": 100}, **samples)) == 2 * 5 * 12
    long = {"workload.max_response_len": 200, "workload.num_heldout_prompts": 8}
    assert count_batch_sizes(make_job(**long)) == 16  # rollouts of a step
    ahead = {"placement.placement": "disaggregated", "placement.max_staleness": 2}
    assert count_batch_sizes(make_job(**long, **ahead)) == 3 * 16
    assert count_batch_sizes(make_job(**long, **ahead, **{"rollout.max_num_seqs": 20})) == 20


def test_a_kernel_is_compiled_for_each_shape_and_batch_size_up_to_a_thousand() -> None:
    packing = make_profile().weight_packing  # 10,000 bytes a kernel
    assert compiled_kernel_bytes(make_model(), packing, 3) == 5 * 3 * 10_000
    assert compiled_kernel_bytes(make_model(), packing, 300) == 1024 * 10_000


@given(st.integers(0, 10**9), st.sampled_from([16, 32, 64, 128]), st.sampled_from(["bfloat16", "float32"]))
def test_a_cache_never_exceeds_the_memory_given_and_wastes_less_than_a_block(
    memory: int, block_size: int, dtype: str
) -> None:
    pool = build_pool(make_model(), dtype, block_size)
    used = pool.num_blocks(memory) * pool.bytes_per_block
    assert 0 <= memory - used < block_size * kv_bytes_per_token(make_model(), Dtype(dtype).num_bytes)


def test_full_and_sliding_layers_share_blocks_in_groups() -> None:
    # a page of 32 tokens: 2 * 2*3 elements of 2 bytes a token, 768 bytes
    def block(*kinds: str) -> int:
        model = make_model(num_layers=len(kinds), attention_kinds=kinds, window=8)
        return build_pool(model, "bfloat16", 32).bytes_per_block

    assert block("sliding", "sliding", "sliding") == 3 * 768
    assert block("sliding", "sliding", "sliding", "full") == 768
    assert block(*["sliding"] * 4, *["full"] * 3) == 4 * 768


def test_a_page_beside_recurrent_layers_covers_a_state() -> None:
    # Qwen3-Next: a token takes 2*2*256*2 = 2,048 bytes of a full layer; a state (32*128*128 + 3*8192)*2 = 1,097,728,
    # for which 17 pages of 32 tokens are needed; 12 full and 36 linear layers make groups of 12
    model = find_model("Qwen/Qwen3-Next-80B-A3B-Instruct")
    assert build_pool(model, "bfloat16", 32).bytes_per_block == 12 * 17 * 32 * 2048


def test_of_a_checkpoint_the_largest_file_is_mapped_and_drawn_weights_are_one_of_fp32(tmp_path: Path) -> None:
    model = make_model()
    assert mapped_checkpoint_bytes(None, model, is_drawn=False) == 4 * model.num_parameters
    assert mapped_checkpoint_bytes(tmp_path, model, is_drawn=False) == 4 * model.num_parameters, "no file is there"
    names = {"a": "model-1.safetensors", "b": "model-2.safetensors"}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    for name, size in zip(names.values(), (100, 300), strict=True):
        (tmp_path / name).write_bytes(bytes(size))
    assert mapped_checkpoint_bytes(tmp_path, model, is_drawn=False) == 300
    (tmp_path / "model.safetensors").write_bytes(bytes(250))
    assert mapped_checkpoint_bytes(tmp_path, model, is_drawn=False) == 250
    assert mapped_checkpoint_bytes(tmp_path, model, is_drawn=True) == 4 * model.num_parameters


def test_an_engine_starts_with_its_weights_beside_the_file_s_pages() -> None:
    # 62 M drawn at random, engine in bf16: 118.2 MiB of weights and 236.5 MiB of pages. Measured: 371 MiB beside the
    # libraries, of which 16 are slack
    plan = make_plan(
        policy={"path": str(EXAMPLES / "models" / "decoder-62m"), "init": "random"},
        training={"dtype": "bfloat16"},
        rollout={"dtype": "bfloat16", "kv_cache_memory": "64MiB"},
    )
    start = [row for row in plan.ledger.find_rows("rollout_engine/0") if row.action_id == "start_engine"]
    sizes = {row.kind.value: row.peak_bytes for row in start}
    parameters = plan.job.load_model().num_parameters
    assert (sizes["weights"], sizes["packed_weights"]) == (2 * parameters, 4 * parameters)
    assert sizes.get("kv_cache", 0) == 0
