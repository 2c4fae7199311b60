"""Bundles for GPUs: configurations of DeepSpeed, vLLM and Ray, read by their own parsers as far as a CPU allows."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from rlplan.dataflow.choice import TrainerChoice
from rlplan.dataflow.schedule import Action
from rlplan.emit.bundle import read_bundle, write_bundle
from rlplan.emit.execution import ExecutionSpec, execution_spec
from rlplan.memory.roles.states import build_zero_settings
from rlplan.planner.executable import require_executable
from rlplan.planner.plan import Plan
from rlplan.planner.search import find_best_plan
from rlplan.spec.files.job_file import load_job
from rlplan.spec.resolved import SettledTraining
from rlplan.vocabulary import ActionKind
from tests.factories import EXAMPLES

NAMES = ("grpo-7b-8xh100", "ppo-70b-64xh100", "grpo-lora-8b-1xrtx4090", "dpo-8b-8xa100")


def make_gpu_plan(name: str, *overrides: str) -> Plan:
    return require_executable(find_best_plan(load_job(EXAMPLES / f"{name}.yaml", overrides)))


@pytest.fixture(scope="module", params=NAMES)
def plan(request: pytest.FixtureRequest) -> Plan:
    return make_gpu_plan(request.param)


@pytest.fixture
def bundle(plan: Plan, tmp_path: Path) -> ExecutionSpec:
    write_bundle(plan, tmp_path)
    return read_bundle(tmp_path)


def test_what_is_read_is_what_was_planned(plan: Plan, bundle: ExecutionSpec) -> None:
    assert bundle == execution_spec(plan)


def test_deepspeed_reads_its_configs_and_counts_what_the_forecast_counts(bundle: ExecutionSpec) -> None:
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    for role, config in bundle.deepspeed.items():
        zero = DeepSpeedZeroConfig(**config["zero_optimization"])
        job, layout = bundle.job, bundle.schedule.find_layout("policy_trainer")
        if role == "policy" and layout.zero_stage:
            choice = TrainerChoice(layout.zero_stage, False, False, False, 1)
            training = SettledTraining(reduce_bucket_size=job.training.reduce_bucket_size)
            counted = build_zero_settings(training, choice, len(layout.devices))
            assert zero.reduce_bucket_size == zero.allgather_bucket_size == counted.reduce_bucket_size
            assert zero.overlap_comm == counted.overlaps
            if zero.stage == 3:
                assert zero.prefetch_bucket_size == counted.prefetch_bucket_size
                assert zero.max_reuse_distance == counted.max_reuse_distance
                assert zero.param_persistence_threshold == counted.persistence_threshold
                assert zero.sub_group_size == counted.sub_group_size
            whole = config["train_micro_batch_size_per_gpu"] * config["gradient_accumulation_steps"]
            assert config["train_batch_size"] == whole * layout.num_shards
        assert zero.stage == layout.zero_stage
        assert json.loads(json.dumps(config)) == config


@pytest.mark.engine
def test_vllm_reads_its_arguments(bundle: ExecutionSpec) -> None:
    from vllm.config import WeightTransferConfig
    from vllm.engine.arg_utils import EngineArgs

    if not bundle.job.has_rollouts:
        assert not bundle.vllm
        return
    arguments = dict(bundle.vllm["policy"])
    arguments["weight_transfer_config"] = WeightTransferConfig(**arguments["weight_transfer_config"])
    read = EngineArgs(model=bundle.job.policy.path, **arguments)
    assert read.tensor_parallel_size == bundle.job.rollout.tp
    assert read.kv_cache_memory_bytes == bundle.job.rollout.kv_cache_memory
    assert read.enforce_eager is False
    assert read.compilation_config.pass_config.fuse_allreduce_rms is False


def test_every_gpu_is_a_bundle_whose_processes_take_all_of_it_and_no_more(bundle: ExecutionSpec) -> None:
    ray = bundle.ray
    taken: Counter[int] = Counter()
    for worker in ray.workers:
        assert worker.device == f"cuda:{worker.bundle}"
        assert worker.num_gpus == worker.num_cpus > 0
        taken[worker.bundle] += round(worker.num_gpus * 10_000)
    assert set(taken) == set(range(bundle.job.hardware.num_devices))
    assert all(9_900 <= part <= 10_000 for part in taken.values())
    hardware = bundle.job.hardware
    assert [len(island) for island in ray.islands] == [hardware.devices_per_host] * hardware.num_hosts


def test_an_engine_takes_the_model_runner_that_tests_have_met(bundle: ExecutionSpec) -> None:
    engines = [worker for worker in bundle.ray.workers if worker.worker == "rollout_engine"]
    assert bool(engines) == bundle.job.has_rollouts
    assert {worker.environment["VLLM_USE_V2_MODEL_RUNNER"] for worker in engines} <= {"0"}


@pytest.mark.engine
def test_the_model_runner_that_tests_have_met_is_the_first_one(bundle: ExecutionSpec) -> None:
    from vllm.triton_utils import HAS_TRITON

    assert not HAS_TRITON, "without Triton vLLM takes its first runner, which is what the bundle pins"


def test_a_process_sees_its_own_gpu_whatever_its_host_has_set(bundle: ExecutionSpec) -> None:
    switch = "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"
    assert {worker.environment[switch] for worker in bundle.ray.workers} == {"0"}


def test_an_engine_s_ranks_lie_on_one_host(bundle: ExecutionSpec) -> None:
    ranks = [worker.bundle for worker in bundle.ray.workers if worker.worker == "rollout_engine"]
    tp = bundle.job.rollout.tp
    for first in range(0, len(ranks), tp):
        assert len({bundle.job.hardware.find_host(device) for device in ranks[first : first + tp]}) == 1


def test_an_engine_sleeps_before_others_compute_and_wakes_weights_first(tmp_path: Path) -> None:
    plan = make_gpu_plan(
        "grpo-7b-8xh100",
        "placement.placement=colocated",
        "placement.offload=host",
        "placement.offload_roles=all",
        "training.tp=1",
    )
    arguments = execution_spec(plan).vllm["policy"]
    assert (arguments["enable_sleep_mode"], arguments["gpu_memory_utilization"]) == (True, 0.01)
    chain = [action for action in plan.schedule.step if action.processes]
    awake = _positions(chain, ActionKind.SLEEP_ENGINE, ActionKind.WAKE_WEIGHTS, ActionKind.WAKE_KV_CACHE)
    sleeps, weights, cache = awake
    trains = _positions(chain, ActionKind.TRAIN_FORWARD_BACKWARD, ActionKind.SYNC_WEIGHTS, ActionKind.GENERATE)
    assert trains[2] < sleeps < trains[0] < weights < trains[1] < cache
    offloaded = [index for index, action in enumerate(chain) if action.id == "offload_role/policy"]
    assert weights < offloaded[0] < cache, "training states and KV cache never meet"


def _positions(chain: list[Action], *kinds: ActionKind) -> tuple[int, ...]:
    order = [action.kind for action in chain]
    return tuple(order.index(kind) for kind in kinds)


@pytest.mark.parametrize(
    ("overrides", "key", "value"),
    [
        (("rollout.kv_dtype=fp8",), "kv_cache_dtype", "fp8"),
        (("rollout.has_cuda_graphs=false",), "enforce_eager", True),
        (("placement.placement=hybrid",), "enable_sleep_mode", False),
    ],
)
def test_vllm_is_told_what_was_chosen(overrides: tuple[str, ...], key: str, value: Any) -> None:
    assert execution_spec(make_gpu_plan("grpo-7b-8xh100", *overrides)).vllm["policy"][key] == value


def test_what_is_offloaded_stands_in_the_config() -> None:
    chosen = ("training.zero_stage=3", "training.offloads_optimizer=true", "training.offloads_parameters=true")
    plan = make_gpu_plan("grpo-7b-8xh100", *chosen, "placement.placement=hybrid")
    config = execution_spec(plan).deepspeed["policy"]
    assert config["zero_optimization"]["offload_optimizer"] == {"device": "cpu", "pin_memory": True}
    assert config["zero_optimization"]["offload_param"] == {"device": "cpu", "pin_memory": True}
    assert "torch_adam" not in config["optimizer"]["params"]
