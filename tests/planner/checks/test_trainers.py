"""Settings that cannot run are refused before anything is predicted: with where, rule and way out, and exit code 2."""

import pytest

from rlplan.errors import SpecError
from rlplan.planner.checks.gpus import check_job
from rlplan.planner.gpu.axes import list_parallel_axes
from rlplan.planner.search import find_best_plan
from rlplan.planner.setting import read_setting
from rlplan.vocabulary import Placement
from tests.factories import gpu_job

DENSE, MIXTURE = "Qwen/Qwen2.5-7B", "Qwen/Qwen3-30B-A3B"
TWO_KINDS = "8xH100 + 8xL40S"


def check(model: str, gpus: str, *overrides: str, algorithm: str = "grpo") -> None:
    spec = gpu_job({"policy": model, "hardware": gpus, "algorithm": algorithm}, overrides)
    check_job(spec, read_setting(spec))


def test_a_placement_of_an_algorithm_that_generates_nothing_is_refused() -> None:
    check(DENSE, "8xH100", algorithm="dpo")
    with pytest.raises(SpecError, match="generates nothing"):
        check(DENSE, "8xH100", "placement.placement=disaggregated", algorithm="dpo")


MEGATRON, FSDP2 = "training.backend=megatron", "training.backend=fsdp2"
UNSHARED = (MEGATRON, "training.sequence_parallel=false")
REFUSED: list[tuple[str, str, tuple[str, ...], str, str]] = [
    (DENSE, "8xH100", ("training.pp=2",), "training.pp", "does not support"),
    (DENSE, "8xH100", ("training.cp=2",), "training.cp", "does not support"),
    (DENSE, "8xH100", ("training.ulysses=2", MEGATRON), "training.ulysses", "does not support"),
    (DENSE, "8xH100", ("training.pp=2", FSDP2), "training.pp", "does not support"),
    (DENSE, "8xH100", ("training.tp=3",), "training.tp", "4 key heads"),
    (DENSE, "8xH100", ("training.tp=3", MEGATRON), "training.tp", "does not divide"),
    (DENSE, "8xH100", ("training.tp=16", MEGATRON), "training.tp", "one micro-batch needs 16 GPUs"),
    (DENSE, "8xH100", ("training.tp=7",), "training.tp", "4 key heads"),
    ("Qwen/Qwen2.5-3B", "8xH100", ("training.tp=4",), "training.tp", "2 key heads"),
    (MIXTURE, "8xH100", ("training.tp=2",), "training.tp", "AutoTP does not cut"),
    (DENSE, "8xH100", ("training.tp=2", "training.lora={rank: 8}"), "training.tp", "training.lora"),
    (DENSE, "8xH100", ("training.tp=2", "training.ulysses=2"), "training.tp", "training.ulysses 2"),
    (DENSE, "8xH100", ("training.tp=2", "training.zero_stage=3"), "training.tp", "zero_stage 3"),
    (DENSE, "8xH100", ("training.tp=2", "training.offloads_optimizer=true"), "training.tp", "offloads_optimizer"),
    (DENSE, "8xH100", ("training.zero_stage=1", "training.offloads_optimizer=true"), "offloads_optimizer", "stage 1"),
    ("microsoft/phi-4", "8xH100", ("training.ulysses=4",), "training.ulysses", "10 key heads"),
    (DENSE, "64xH100", ("training.pp=64", MEGATRON), "training.pp", "28 layers"),
    (DENSE, "8xH100", ("training.ep=2", MEGATRON), "training.ep", "has no experts"),
    (MIXTURE, "8xH100", ("training.ep=3", MEGATRON), "training.ep", "128 experts"),
    (MIXTURE, "8xH100", (*UNSHARED, "training.tp=2"), "training.sequence_parallel", "the model has experts"),
    (MIXTURE, "8xH100", ("training.ep=8", "training.pp=2", MEGATRON), "training.ep", "2 pipeline stages"),
    (DENSE, "8xH100", ("training.zero_stage=3", MEGATRON), "training.zero_stage", "the trainer is Megatron-Core"),
    (DENSE, "8xH100", ("training.zero_stage=2", FSDP2), "training.zero_stage", "the trainer is FSDP2"),
    (DENSE, "8xH100", ("training.fsdp_size=2", MEGATRON), "training.fsdp_size", "the trainer is Megatron-Core"),
    (DENSE, "8xH100", ("training.optimizer=muon", MEGATRON), "training.optimizer", "muon"),
    (DENSE, "8xH100", ("training.offload_device=nvme", FSDP2), "training.offload_device", "nvme"),
    (DENSE, "8xH100", ("training.offloads_parameters=true", MEGATRON), "training.offloads_parameters", ""),
    (DENSE, "8xH100", ("training.offloads_optimizer=true", FSDP2), "training.offloads_optimizer", "differ"),
    (DENSE, TWO_KINDS, ("placement.placement=colocated",), "placement.placement", "two groups"),
    (DENSE, TWO_KINDS, ("placement.num_generation_devices=4",), "num_generation_devices", "8 GPUs generate"),
    (DENSE, "8xH100", ("placement.num_scoring_devices=1", "placement.placement=hybrid"), "num_scoring", "hybrid"),
    (DENSE, "8xH100", ("placement.num_scoring_devices=1", "algorithm.kl_coef=0"), "num_scoring", "no frozen role"),
    (DENSE, "8xH100", ("placement.max_staleness=1", "placement.placement=colocated"), "max_staleness", "colocated"),
    (DENSE, "8xH100", ("placement.sync_content=delta", "placement.placement=colocated"), "sync_content", "delta"),
    (DENSE, "8xH100", ("placement.transport=nccl", "placement.placement=hybrid"), "transport", "nccl"),
    (DENSE, TWO_KINDS, ("placement.transport=cuda_ipc",), "transport", "cuda_ipc"),
    (DENSE, "8xH100", ("placement.sync_content=adapter",), "sync_content", "without training.lora"),
    (DENSE, "8xH100", ("rollout.has_expert_parallel=true",), "rollout.has_expert_parallel", "no experts"),
    (MIXTURE, "16xH100", ("rollout.has_expert_parallel=true", "rollout.tp=3"), "rollout.tp", "does not divide"),
    (DENSE, "8xV100", ("training.dtype=float16", "rollout.dtype=float16", "rollout.quantization=fp8"), "quant", "fp8"),
    (DENSE, "8xH100 + 8xL40S + 8xA100", (), "hardware", "3 groups"),
    (DENSE, "8xH100 + 0xL40S", (), "hardware", "names no GPUs"),
    (DENSE, "-8xH100", (), "hardware", "names no GPUs"),
]  # fmt: skip


@pytest.mark.parametrize(("model", "gpus", "overrides", "where", "words"), REFUSED)
def test_what_cannot_run_is_refused_with_where_rule_and_way_out(
    model: str, gpus: str, overrides: tuple[str, ...], where: str, words: str
) -> None:
    with pytest.raises(SpecError) as caught:
        check(model, gpus, *overrides)
    error = caught.value
    assert error.exit_code == 2
    assert where in error.where
    assert words in error.what
    assert error.rule
    assert error.way_out


@pytest.mark.parametrize(
    ("gpus", "overrides"),
    [
        (TWO_KINDS, ("placement.max_staleness=1",)),
        ("1xH100 + 1xH100", ()),
        ("8xH100", ("placement.placement=disaggregated", "placement.max_staleness=2", "placement.transport=nccl")),
        ("8xH100", ("training.tp=2",)),
        ("8xH100", ("framework=nemo_rl", "training.tp=2", "training.cp=2", FSDP2)),
        ("8xH100", ("training.tp=2", "training.pp=2", "training.lora={rank: 8}", MEGATRON)),
        ("8xH100", ("training.offloads_optimizer=true", "training.offloads_parameters=true", FSDP2)),
        ("8xH100", ("training.lora={rank: 8}", "placement.sync_content=adapter")),
        ("2xdgx-h100", ()),
    ],
)
def test_what_can_run_is_not_refused(gpus: str, overrides: tuple[str, ...]) -> None:
    check(DENSE, gpus, *overrides)


def test_preferences_need_no_second_group_of_gpus() -> None:
    with pytest.raises(SpecError, match="generates nothing"):
        check(DENSE, TWO_KINDS, algorithm="dpo")
    with pytest.raises(SpecError, match="generates nothing"):
        check(DENSE, "8xH100", "placement.max_staleness=1", algorithm="dpo")


def test_two_kinds_of_gpus_have_their_own_capacities_and_hosts() -> None:
    answer = find_best_plan(
        gpu_job({"policy": "Qwen/Qwen2.5-0.5B", "hardware": "2xH100 + 2xL40S", "algorithm": "grpo"})
    )
    step, ledger, setting = answer.choice.arrangement, answer.ledger, read_setting(answer.job)
    assert step.placement is Placement.DISAGGREGATED
    assert (step.num_training + step.num_scoring, step.num_generation) == (2, 2)
    training, generation = (next(iter(g.devices)) for g in answer.schedule.groups if g.name != "scoring")
    assert ledger.get_device_capacity(training) == setting.pools[0].capacity
    assert ledger.get_device_capacity(generation) == setting.pools[1].capacity
    assert all(
        ledger.device_peak(device, "high").num_bytes <= ledger.get_device_capacity(device) for device in ledger.devices
    )
    assert len(ledger.hosts) >= 2
    assert setting.get_cluster("generation").gpu.name == "l40s"
    assert setting.get_cluster("training").gpu.name == setting.get_cluster("scoring").gpu.name == "h100-sxm"


def test_the_smaller_kind_binds_where_it_is_too_small() -> None:
    spec = gpu_job(
        {"policy": "Qwen/Qwen2.5-14B", "hardware": "8xH200 + 1xrtx-4090", "algorithm": "grpo"},
        ("rollout.tp=1", "placement.num_generation_devices=1"),
    )
    answer = find_best_plan(spec)
    assert answer.shortage is not None
    assert answer.shortage.of == "a rtx-4090"
    assert answer.shortage.available_bytes == read_setting(answer.job).pools[1].capacity
    assert answer.binding.scope in next(group.devices for group in answer.schedule.groups if group.name == "generation")


def test_experts_without_sequence_parallelism_are_offered_no_tensor_parallel_ranks() -> None:
    def list_stages(*overrides: str) -> set[int]:
        job = gpu_job({"policy": MIXTURE, "hardware": "8xH100", "algorithm": "grpo"}, list(overrides))
        return {axes.tp for axes in list_parallel_axes(job, [read_setting(job).policy], 8)}

    assert list_stages(*UNSHARED) == {1}
    assert list_stages(MEGATRON) == {1, 2, 4, 8}
