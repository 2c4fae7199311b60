"""Configurations of each engine: DeepSpeed's JSON, vLLM's arguments and the Ray placement, against the job."""

from typing import Any

import pytest

from rlplan.emit.deepspeed import deepspeed_config
from rlplan.emit.execution import execution_spec
from rlplan.emit.ray import RayPlacement, ray_placement
from rlplan.emit.vllm import engine_arguments
from rlplan.units import MIB
from tests.emit.known_keys import known_keys, unknown_keys
from tests.factories import make_job, make_plan


def build_deepspeed(**overrides: Any) -> dict[str, Any]:
    plan = make_plan(**overrides)
    return deepspeed_config(plan.job, plan.schedule)


@pytest.mark.parametrize(
    ("overrides", "micro", "accumulation", "total"),
    [
        ({}, 4, 2, 16),  # 16 rollouts on 2 ranks: 8 each, in 2 micro-batches of 4
        ({"workload.micro_batch_size_per_gpu": 100}, 8, 1, 16),
        ({"workload.micro_batch_size_per_gpu": 3}, 3, 3, 18),  # the last one smaller: managed by the runtime
        ({"hardware.num_devices": 1}, 4, 4, 16),
        ({"workload.mini_batch_size": 4, "placement.placement": "hybrid"}, 2, 1, 4),
    ],
)
def test_deepspeed_s_batch_sizes_follow_from_the_ladder(
    overrides: dict[str, Any], micro: int, accumulation: int, total: int
) -> None:
    config = build_deepspeed(**overrides)
    assert config["train_micro_batch_size_per_gpu"] == micro
    assert config["gradient_accumulation_steps"] == accumulation
    assert config["train_batch_size"] == total
    assert config["managed_gradient_accumulation"] is False


def test_deepspeed_gets_the_optimizer_of_the_job() -> None:
    algorithm = {"learning_rate": 2e-4, "weight_decay": 0.1, "adam_beta1": 0.8, "adam_beta2": 0.95}
    training = {"reduce_bucket_size": 5000, "zero_stage": 2}
    config = build_deepspeed(algorithm=algorithm | {"gradient_clipping": 0.5}, training=training)
    assert config["optimizer"]["type"] == "AdamW"
    assert config["optimizer"]["params"] == {
        "lr": 2e-4,
        "betas": [0.8, 0.95],
        "eps": 1e-8,
        "weight_decay": 0.1,
        "torch_adam": True,
        "fused": True,
    }
    assert config["gradient_clipping"] == 0.5
    zero = config["zero_optimization"]
    assert (zero["stage"], zero["reduce_bucket_size"], zero["overlap_comm"]) == (2, 5000, False)


def test_vllm_gets_the_cache_the_lengths_and_the_seed_of_the_job() -> None:
    job = make_job(
        seed=5,
        rollout={"kv_cache_memory": "3MiB", "max_num_seqs": 9, "max_num_batched_tokens": 99, "block_size": 16},
    )
    arguments = engine_arguments(job)
    assert arguments["kv_cache_memory_bytes"] == 3 * MIB
    assert (arguments["max_model_len"], arguments["max_num_seqs"], arguments["max_num_batched_tokens"]) == (20, 9, 99)
    assert (arguments["seed"], arguments["block_size"], arguments["dtype"]) == (5, 16, "float32")
    assert arguments["logprobs_mode"] == "processed_logprobs"
    assert "model" not in arguments


def test_prompts_are_not_cut_on_a_cpu() -> None:
    assert engine_arguments(make_job())["enable_chunked_prefill"] is False


def build_placement(**overrides: Any) -> RayPlacement:
    return ray_placement(make_plan(**overrides))


def test_each_device_is_a_bundle_with_a_slot_for_each_of_its_processes() -> None:
    ray = build_placement()
    assert [(worker.process, worker.bundle) for worker in ray.workers] == [
        ("policy_trainer/0", 0),
        ("policy_trainer/1", 1),
        ("rollout_engine/0", 1),
        ("scorer/reference/0", 0),
    ]
    assert ray.bundles == ({"CPU": 2.0}, {"CPU": 2.0})


@pytest.mark.parametrize("overrides", [{}, {"placement": {"placement": "disaggregated"}, "hardware.num_devices": 3}])
def test_no_bundle_is_asked_for_more_than_it_has(overrides: dict[str, Any]) -> None:
    ray = build_placement(**overrides)
    for index, bundle in enumerate(ray.bundles):
        assert bundle["CPU"] == sum(worker.num_cpus for worker in ray.workers if worker.bundle == index) > 0


def test_every_worker_of_the_schedule_is_placed_once() -> None:
    plan = make_plan()
    assert [(worker.process, worker.device) for worker in ray_placement(plan).workers] == list(plan.schedule.processes)


def test_workers_stay_offline_and_give_memory_back() -> None:
    for worker in build_placement().workers:
        environment = worker.environment
        assert environment["HF_HUB_OFFLINE"] == "1"
        assert environment["MALLOC_MMAP_THRESHOLD_"] == "131072"
        assert environment["OMP_NUM_THREADS"] == str(worker.num_threads)


def test_a_process_that_works_alone_may_use_every_thread_of_its_group() -> None:
    threads = {worker.process: worker.num_threads for worker in build_placement().workers}
    assert threads == {"policy_trainer/0": 1, "policy_trainer/1": 1, "rollout_engine/0": 2, "scorer/reference/0": 2}


def test_every_emitted_key_is_known_to_the_pinned_engines() -> None:
    assert unknown_keys(execution_spec(make_plan())) == set()
    known = known_keys()
    assert set(known) == {"deepspeed", "vllm"}
    assert known["deepspeed"]["version"].startswith("deepspeed ")
    assert known["vllm"]["version"].startswith("vllm ")
    assert len(known["vllm"]["engine_arguments"]) > 100


def test_a_heap_that_is_kept_is_not_trimmed_by_freeing() -> None:
    (kept, *_) = build_placement(**{"hardware.keeps_heap": True}).workers
    assert kept.environment["MALLOC_MMAP_THRESHOLD_"] == str(32 * 2**20)
    assert int(kept.environment["MALLOC_TRIM_THRESHOLD_"]) > 2**32


@pytest.mark.parametrize("overrides", [{}, {"placement.placement": "colocated"}, {"rollout.tp": 2}], ids=str)
def test_the_engine_is_told_to_load_safetensors_and_no_code(overrides: dict[str, Any]) -> None:
    arguments = engine_arguments(make_job(**overrides))
    assert arguments["trust_remote_code"] is False
    assert arguments["load_format"] == "safetensors"
