"""The really installed CUDA builds of vLLM and DeepSpeed take what we emit and have what we use. No GPU is needed.

Run by `make nightly PART=gpu-contract`, in the environment for GPUs alone; so this file is not named as tests are.
"""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rlplan.emit.execution import ExecutionSpec, execution_spec
from rlplan.planner.executable import require_executable
from rlplan.planner.search import find_best_plan
from rlplan.spec.files.job_file import load_job
from tests.factories import EXAMPLES
from tests.gpu_contract.fake_cuda import load_driver, take_platform
from tests.runtime.host.engine_api import accepted_signatures, recorded_api, signature_of

STAND_IN = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "hidden_size": 1024,
    "intermediate_size": 2048,
    "num_hidden_layers": 2,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "vocab_size": 1024,
    "max_position_embeddings": 131072,
    "torch_dtype": "bfloat16",
}
"""A small stand-in for the example's model: the engine's arguments do not depend on the model's size."""
ONE_JOB = [path for path in EXAMPLES.rglob("*.yaml") if "\nstages:" not in path.read_text("utf-8")]
JOBS = sorted(path for path in ONE_JOB if load_job(path).device_kind == "cuda")
VARIANTS = (
    ("placement.placement=hybrid",),
    ("placement.placement=colocated", "placement.offload=host", "placement.offload_roles=all", "training.tp=1"),
    ("placement.placement=disaggregated",),
    ("rollout.kv_dtype=fp8", "rollout.quantization=fp8"),
    ("rollout.quantization=mxfp4", "training.lora={rank: 16}", "placement.sync_content=adapter"),
    ("training.zero_stage=3", "training.offloads_optimizer=true", "placement.placement=hybrid"),
)
SORTING = EXAMPLES / "data" / "sort_digits"
WITH_DATA = (
    f"data.prompts={SORTING / 'train.jsonl'}",
    f"data.heldout={SORTING / 'heldout.jsonl'}",
    "rewards=[{kind: answer_matcher}]",
)
"""Data for jobs that are only planned."""
RUN_BY_US = [path for path in JOBS if load_job(path).release.is_rlplan]
"""Jobs that leave the framework open, too, are run by rlplan's own runtime here, which the fixture makes sure of."""
CASES = [(path, () if load_job(path).data else WITH_DATA) for path in RUN_BY_US]
CASES += [(EXAMPLES / "grpo-7b-8xh100.yaml", variant) for variant in VARIANTS]
NUM_CASES = 14
"""Eight examples and six variants of one: a number of its own, so that a filter that drops some is noticed."""


@pytest.fixture(scope="session", autouse=True)
def a_machine_with_a_driver(tmp_path_factory: pytest.TempPathFactory) -> None:
    os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_LOGGING_LEVEL="WARNING")
    load_driver(tmp_path_factory.mktemp("driver"))
    take_platform()


@pytest.fixture(scope="session")
def stand_in_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("model")
    (folder / "config.json").write_text(json.dumps(STAND_IN))
    return str(folder)


def name_case(case: tuple[Path, tuple[str, ...]]) -> str:
    path, overrides = case
    where = f"{path.parent.name}-{path.stem}"
    return where if overrides is WITH_DATA else "-".join((where, *overrides))


@pytest.fixture(scope="module", params=CASES, ids=name_case)
def emitted_spec(request: pytest.FixtureRequest) -> ExecutionSpec:
    path, overrides = request.param
    plan = require_executable(find_best_plan(load_job(path, overrides)))
    assert plan.job.backend == "deepspeed", "the job's `auto` is another framework: it is none of this contract"
    return execution_spec(plan)


@pytest.fixture
def engine_environment(emitted_spec: ExecutionSpec, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Environment variables of the first rank of an engine."""
    if not emitted_spec.vllm:
        pytest.skip("nothing is generated: there is no engine")
    worker = next(worker for worker in emitted_spec.ray.workers if worker.worker == "rollout_engine")
    ranks = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": str(emitted_spec.job.rollout.tp)}
    for name, value in {**worker.environment, **ranks, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29555"}.items():
        monkeypatch.setenv(name, value)
    return


@pytest.mark.parametrize("name", sorted(recorded_api()))
def test_what_the_runtime_uses_is_there_as_recorded(name: str) -> None:
    assert signature_of(name) in accepted_signatures(name)


def test_our_engine_of_weight_transfers_lacks_no_method() -> None:
    from rlplan.runtime.weight_sync.vllm_extension import PolicyTransferEngine

    assert PolicyTransferEngine.__abstractmethods__ == frozenset()


@pytest.mark.usefixtures("engine_environment")
def test_vllm_configures_an_engine_as_the_bundle_says(emitted_spec: ExecutionSpec, stand_in_model: str) -> None:
    from vllm.config import WeightTransferConfig
    from vllm.engine.arg_utils import EngineArgs

    arguments: dict[str, Any] = dict(emitted_spec.vllm["policy"])
    arguments["weight_transfer_config"] = WeightTransferConfig(**arguments["weight_transfer_config"])
    config = EngineArgs(model=stand_in_model, **arguments).create_engine_config()
    assert config.use_v2_model_runner is False
    assert config.parallel_config.disable_custom_all_reduce is True
    assert config.compilation_config.pass_config.fuse_allreduce_rms is False
    assert config.parallel_config.distributed_executor_backend == arguments["distributed_executor_backend"]
    assert config.cache_config.block_size == arguments["block_size"]
    assert config.scheduler_config.async_scheduling is False


def test_deepspeed_reads_every_config(emitted_spec: ExecutionSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    from deepspeed import comm
    from deepspeed.runtime.config import DeepSpeedConfig

    monkeypatch.setattr(comm, "get_rank", lambda: 0)  # it asks how many ranks there are only where they have met
    for role, config in emitted_spec.deepspeed.items():
        layout = next(
            candidate
            for candidate in emitted_spec.schedule.layouts
            if candidate.role == role and candidate.worker != "rollout_engine"
        )
        ranks = SimpleNamespace(get_data_parallel_world_size=lambda layout=layout: layout.num_shards)
        read = DeepSpeedConfig(dict(config), mpu=ranks)
        assert read.zero_config.stage == layout.zero_stage


def test_deepspeed_compiles_its_adam_for_the_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The build has its own folder: torch waits forever for a build that was cut off and left its lock."""
    from deepspeed.ops.op_builder import CPUAdamBuilder

    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    assert CPUAdamBuilder().load() is not None


def test_ray_shows_a_process_its_own_gpu_whatever_the_host_has_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES", "1")
    plan = require_executable(find_best_plan(load_job(EXAMPLES / "grpo-7b-8xh100.yaml")))
    environment = execution_spec(plan).ray.workers[0].environment
    import ray

    ray.init(
        "local", num_cpus=2, num_gpus=2, include_dashboard=False, object_store_memory=80 << 20, log_to_driver=False
    )
    try:
        see = ray.remote(num_gpus=0.5)(lambda: os.environ.get("CUDA_VISIBLE_DEVICES"))
        seen = ray.get([see.options(runtime_env={"env_vars": environment}).remote() for _ in range(2)], timeout=120)
    finally:
        ray.shutdown()
    assert set(seen) <= {"0", "1"}


def test_every_example_on_gpus_is_asked_but_for_those_that_other_frameworks_train() -> None:
    left_out = {path.stem for path in JOBS} - {path.stem for path, _ in CASES}
    assert left_out == {"grpo-671b-1024xh200"}
    assert {name_case(case) for case in CASES if case[1] not in VARIANTS} == {
        *("examples-dpo-8b-8xa100", "examples-grpo-7b-8xh100", "examples-grpo-lora-8b-1xrtx4090"),
        *(
            "examples-ppo-70b-64xh100",
            "exercises-grpo-7b",
            "exercises-grpo-70b",
            "exercises-ppo-7b",
            "exercises-ppo-70b",
        ),
    }
    assert len(CASES) == NUM_CASES
