"""Memory of weight resharding under FSDP2 and Megatron: bytes worked by hand."""

import pytest

from rlplan.memory.roles.process import sync_staging
from rlplan.memory.weight_sync.packets import bridge_bucket_bytes, gathered_part_bytes
from rlplan.spec.models.catalogue import find_model

V3 = find_model("deepseek-ai/DeepSeek-V3")
MIXTURE = find_model("Qwen/Qwen3-235B-A22B")
DENSE = find_model("Qwen/Qwen2.5-0.5B")
BUCKET = 512 << 20


def test_megatron_s_bucket_is_the_largest_tensor_and_no_layer_of_experts() -> None:
    assert bridge_bucket_bytes(V3, "megatron", 2, BUCKET) == 2 * 129280 * 7168  # the vocabulary's table, 1.7 GiB
    assert bridge_bucket_bytes(MIXTURE, "megatron", 2, BUCKET) == 2 * 151936 * 4096
    assert (
        sync_staging(V3, 2, BUCKET, "deepspeed") > 20 << 30
    )  # a layer of 256 experts, which rlplan's runtime sends whole


def test_a_bucket_that_holds_every_tensor_is_as_large_as_is_asked_for() -> None:
    assert bridge_bucket_bytes(V3, "megatron", 2, 4 << 30) == 4 << 30
    assert bridge_bucket_bytes(DENSE, "megatron", 2, 4 << 30) == 2 * DENSE.num_parameters  # or as the model


def test_each_expert_parallel_rank_gives_one_matrix_at_a_time() -> None:
    matrix = 2 * 2048 * 7168  # gate and up of one expert
    assert gathered_part_bytes(V3, "megatron", 2, ep=8) == 2 * 129280 * 7168  # eight matrices are less than a table
    assert gathered_part_bytes(V3, "megatron", 2, ep=64) == 2 * 64 * matrix


def test_fsdp_s_experts_are_one_stack_that_is_gathered_whole() -> None:
    assert bridge_bucket_bytes(MIXTURE, "fsdp2", 2, BUCKET) == 2 * 128 * 2 * 1536 * 4096
    assert gathered_part_bytes(MIXTURE, "fsdp2", 4) == 4 * 128 * 2 * 1536 * 4096


@pytest.mark.parametrize("backend", ["megatron", "fsdp2"])
def test_a_larger_bucket_never_stages_less(backend: str) -> None:
    sizes = [bridge_bucket_bytes(DENSE, backend, 2, size << 20) for size in (1, 128, 256, 512, 4096)]  # type: ignore[arg-type]
    assert sizes == sorted(sizes)
