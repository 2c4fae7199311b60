"""No key of a layout is ignored on a CPU host: each changes the plan or the bundle, is refused, or has a reason here.

The keys are read from the spec, so that a new one fails here until somebody has said which it is.
"""

from typing import Any

import pytest

from rlplan.emit.execution import execution_spec
from rlplan.errors import RlplanError
from rlplan.planner.search import find_plan
from rlplan.spec.parts.placement import HardwareSpec, PlacementSpec
from rlplan.spec.parts.roles import ScoringSpec
from rlplan.spec.parts.rollout import RolloutSpec
from rlplan.spec.parts.training import TrainingSpec
from tests.factories import make_job

PARTS = {
    "training": TrainingSpec,
    "rollout": RolloutSpec,
    "scoring": ScoringSpec,
    "placement": PlacementSpec,
    "hardware": HardwareSpec,
}
ALL_KEYS = ["framework", *(f"{part}.{key}" for part, spec in PARTS.items() for key in spec.model_fields)]

APART = {"placement.placement": "disaggregated"}
COLOCATED = {"placement.placement": "colocated"}
ASYNC = APART | {"placement.max_staleness": 1}
CHANGES: dict[str, tuple[Any, dict[str, Any]]] = {
    "training.dtype": ("bfloat16", {}),
    "training.zero_stage": (3, {}),
    "training.max_tokens_per_micro_batch": (4000, {}),
    "training.gradient_checkpointing": (True, {}),
    "training.optimizer": ("adamw_8bit", {}),
    "training.offloads_optimizer": (True, {}),
    "training.ulysses": (2, {}),
    "training.tp": (2, {}),
    "training.reduce_bucket_size": (2000, {}),
    "training.persistence_threshold": (5, {"training.zero_stage": 3}),
    "training.lora": ({"rank": 4}, {}),
    "rollout.dtype": ("bfloat16", {}),
    "rollout.num_engines": (2, {}),
    "rollout.tp": (2, {}),
    "rollout.speculative_tokens": (2, {}),
    "rollout.kv_cache_memory": ("96MiB", {}),
    "rollout.max_num_seqs": (4, {}),
    "rollout.max_num_batched_tokens": (64, {"rollout.max_num_seqs": 4}),
    "rollout.block_size": (128, {}),
    "scoring.policy_log_probs": ("always", {}),
    "placement.placement": ("colocated", {}),
    "placement.num_generation_devices": (2, APART | {"hardware.num_devices": 4}),
    "placement.num_scoring_devices": (1, APART | {"hardware.num_devices": 4, "algorithm.kl_coef": 0.1}),
    "placement.max_staleness": (1, APART),
    "placement.spreads_scoring": (True, {"algorithm.kl_coef": 0.1}),
    "placement.offload": ("disk", COLOCATED),
    "placement.offload_roles": ("frozen", COLOCATED | {"placement.offload": "disk", "algorithm.kl_coef": 0.1}),
    "placement.transport": ("gloo", {}),
    "placement.sync_senders": ("each", {}),
    "placement.sync_content": ("delta", {}),
    "placement.sync_bucket": ("1MiB", {}),
    "placement.sync_verification": ("every", {}),
    "hardware.num_devices": (4, {}),
    "hardware.num_hosts": (2, APART),
    "hardware.memory": ("4GiB", {}),
    "hardware.keeps_heap": (True, {}),
}
"""A value that changes the plan, and the job in which it does."""

REFUSED: dict[str, tuple[Any, dict[str, Any]]] = {
    "framework": ("verl@0.9", {}),
    "training.backend": ("fsdp2", {}),
    "training.pp": (2, {}),
    "training.cp": (2, {}),
    "training.ep": (2, {}),
    "training.etp": (2, {}),
    "training.fsdp_size": (2, {}),
    "training.logits": ("chunked", {}),
    "training.offloads_parameters": (True, {"training.zero_stage": 3}),
    "training.offload_device": ("nvme", {"training.offloads_optimizer": True}),
    "training.offloads_activations": (True, {}),
    "training.master_dtype": ("bfloat16", {}),
    "training.moment_dtype": ("bfloat16", {}),
    "training.reduce_dtype": ("float32", {}),
    "training.recomputed": ("selective", {}),
    "training.virtual_stages": (2, {}),
    "training.predicts_ahead": (1, {}),
    "training.kernels": ({"is_compiled": True}, {}),
    "rollout.engine": ("sglang", {}),
    "rollout.engine_version": ("0.9.0", {}),
    "rollout.non_torch_memory": ("1GiB", {}),
    "rollout.shares_process": (True, {}),
    "rollout.gpu_memory_utilization": (0.5, {}),
    "rollout.pp": (2, {}),
    "rollout.cp": (2, {}),
    "rollout.attention_dp": (2, {}),
    "rollout.quantization": ("fp8", {}),
    "rollout.acceptance_rate": (0.5, {"rollout.speculative_tokens": 2}),
    "rollout.kv_dtype": ("fp8", {}),
    "rollout.has_cuda_graphs": (True, {}),
    "rollout.has_expert_parallel": (True, {}),
    "rollout.sleep_level": (1, COLOCATED),
    "scoring.has_entropy": (True, {}),
    "scoring.policy": ({"micro_batch_size_per_gpu": 2}, {}),
    "scoring.reference": ({"max_tokens_per_micro_batch": 400}, {"algorithm.kl_coef": 0.1}),
    "scoring.value": ({"micro_batch_size_per_gpu": 2}, {"algorithm.name": "ppo"}),
    "scoring.reward": ({"micro_batch_size_per_gpu": 2}, {}),
    "scoring.teacher": ({"micro_batch_size_per_gpu": 2}, {}),
    "hardware.profile": ("no-such-host", {}),
    "hardware.generation": ({"profile": "H100", "num_devices": 2}, {}),
    "hardware.host_memory": ("4GiB", {}),
    "hardware.power_limit": (300, {}),
    "hardware.price_per_gpu_hour": (2.0, {}),
}
"""A value that a CPU host cannot have."""

READ_BY_THE_RUN = {
    "rollout.stop": "the engine's requests",
    "rollout.environment": "the rollouts",
    "rollout.base_path": "the engine's weights; tests/planner/checks/test_engine_base.py",
    "rollout.replays_experts": "engine and trainer, for models with experts; tests/runtime/models",
    "rollout.shares_base": "the engine's weights; tests/memory/serving/test_shared_base.py",
    "placement.partial_rollouts": "the collector, where generation runs ahead",
    "placement.max_buffered_groups": "the collector",
    "placement.max_groups_in_memory": "the collector",
    "hardware.rendezvous_port": "the ranks, when they meet",
}
"""Keys that no layout depends on, and who reads each."""

WITHOUT_EFFECT = {
    "training.sequence_parallel": "AutoTP's ranks share no rows: docs/job.md says whose it is",
}


def test_each_layout_key_of_the_spec_is_said_to_work_or_to_be_refused_on_a_cpu_host() -> None:
    known = [*CHANGES, *REFUSED, *READ_BY_THE_RUN, *WITHOUT_EFFECT]
    assert sorted(known) == sorted(ALL_KEYS)


def make_plan(keys: dict[str, Any]) -> str:
    """A plan without its job: choice, schedule, bytes, seconds, and the settings of DeepSpeed and vLLM."""
    plan = find_plan(make_job(**keys))
    execution = execution_spec(plan)
    settings = (execution.deepspeed, execution.vllm)
    return repr((plan.choice, plan.schedule, plan.ledger, plan.timing, plan.fit, settings))


@pytest.mark.parametrize("key", CHANGES)
def test_a_key_that_works_changes_the_plan(key: str) -> None:
    value, beside = CHANGES[key]
    assert make_plan(beside | {key: value}) != make_plan(beside)


@pytest.mark.parametrize("key", REFUSED)
def test_a_key_that_a_cpu_host_cannot_have_is_refused_by_name_with_a_way_out(key: str) -> None:
    value, beside = REFUSED[key]
    with pytest.raises(RlplanError) as refused:
        make_plan(beside | {key: value})
    assert key.rpartition(".")[2].split("_")[0] in str(refused.value)
    assert refused.value.way_out
