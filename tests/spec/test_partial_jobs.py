"""Partial jobs: what is asked of GPUs on a command line or in a short file."""

from pathlib import Path
from typing import Any

import pytest

from rlplan.errors import SpecError
from rlplan.spec.files.job_file import job_from, load_job
from rlplan.spec.job import JobSpec
from rlplan.spec.resolved import RULES, settle

ASKED = {"policy": "Qwen/Qwen2.5-7B", "hardware": "8xH100"}


def test_a_command_line_is_a_whole_job() -> None:
    job = job_from({**ASKED, "algorithm": None}, ["workload.max_response_len=4096", "training.zero_stage=3"])
    assert job.algorithm.name == "grpo"
    assert job.workload.max_seq_len == 1024 + 4096
    assert (job.training.zero_stage, job.rollout.tp, job.data) == (3, "auto", None)


@pytest.mark.parametrize(
    ("left_out", "what", "option"), [("hardware", "no GPUs", "--gpus 8xH100"), ("policy", "no model", "--model Qwen/")]
)
def test_a_command_line_that_lacks_a_required_key_is_told_its_option(left_out: str, what: str, option: str) -> None:
    with pytest.raises(SpecError, match=f"{what} (is|are) named") as caught:
        job_from({key: value for key, value in ASKED.items() if key != left_out})
    assert caught.value.way_out.startswith(option)


@pytest.mark.parametrize(
    ("text", "profile", "count"),
    [("8xH100", "h100-sxm", 8), ("2xdgx-h100", "dgx-h100", 16), ("cpu-host", "cpu-host", 1)],
)
def test_short_hardware_stands_for_a_profile_and_a_number(text: str, profile: str, count: int) -> None:
    hardware = job_from({**ASKED, "hardware": text}).hardware
    assert (hardware.profile, hardware.num_devices, hardware.generation) == (profile, count, None)


def test_of_two_groups_the_second_generates() -> None:
    hardware = job_from({**ASKED, "hardware": "8xH100 + 4xL40S"}).hardware
    assert hardware.generation is not None
    assert (hardware.generation.profile, hardware.generation.num_devices, hardware.all_devices) == ("l40s", 4, 12)


@pytest.mark.parametrize(
    ("algorithm", "kl_coef", "lora", "is_held"),
    [
        ("grpo", None, None, True),
        ("grpo", 0.0, None, False),
        ("dapo", None, None, False),
        ("dapo", 0.01, None, True),
        ("grpo", None, {"rank": 8}, False),
    ],
)
def test_a_reference_is_held_where_something_is_compared_with_it(
    algorithm: str, kl_coef: float | None, lora: dict[str, int] | None, is_held: bool
) -> None:
    named: dict[str, Any] = {"name": algorithm} | ({} if kl_coef is None else {"kl_coef": kl_coef})
    job = job_from({**ASKED, "algorithm": named, "training": {"lora": lora}})
    assert ("reference" in job.frozen_roles) is is_held


def test_paths_in_a_file_are_relative_to_it_and_ids_are_folders_beside_it(tmp_path: Path) -> None:
    (tmp_path / "shape.json").write_text("{}")
    (tmp_path / "job.yaml").write_text(
        "policy: shape.json\nalgorithm: ppo\nhardware: 1xh100\nroles: {value: {path: Qwen/Qwen3-8B}}\n"
    )
    job = load_job(tmp_path / "job.yaml")
    assert job.policy.path == str(tmp_path / "shape.json")
    assert job.roles.value.path == str(tmp_path / "models" / "Qwen" / "Qwen3-8B")


@pytest.mark.parametrize("key", RULES)
def test_a_default_that_differs_between_machines_is_said_by_one_rule(key: str) -> None:
    part, _, name = key.partition(".")
    for hardware, kind in (("cpu-host", "cpu"), ("8xH100", "cuda")):
        job = settle(
            job_from({**ASKED, "hardware": hardware, "workload": {"max_prompt_len": 8, "max_response_len": 8}})
        )
        assert getattr(getattr(job, part), name) == RULES[key][kind]  # type: ignore[index]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"algorithm": "grpoo"}, "Did you mean 'grpo'?"),
        ({"workload": {"num_samples_per_prompt": 1}}, "must be at least 2"),
        ({"workload": {"mini_batch_size": 1000}}, "must be a multiple of mini_batch_size = 1000"),
        ({"workload": {"mini_batch_size": 1}}, "1024 optimizer steps"),
        ({"training": {"max_tokens_per_micro_batch": 100}}, "must hold one longest sequence"),
        ({"workload": {"mean_prompt_len": 2000}}, "mean_prompt_len is at most max_prompt_len"),
        ({"workload": {"micro_batch_size_per_gpu": 0}}, "micro_batch_size_per_gpu"),
        ({"rollout": {"tp": 0}}, "tp"),
        ({"rollout": {"kv_cache_memory": "80G"}}, "kv_cache_memory"),
        ({"training": {"zero_stage": 4}}, "zero_stage"),
        ({"training": {"zero_stag": 3}}, "Did you mean 'zero_stage'?"),
        ({"hardware": ""}, "no GPUs are named"),
    ],
)
def test_a_broken_job_is_refused_with_its_rule(change: dict[str, Any], words: str) -> None:
    with pytest.raises(SpecError) as caught:
        job_from({**ASKED, **change})
    assert words in str(caught.value)


def test_a_job_comes_back_from_json_as_it_was() -> None:
    job = job_from(ASKED, ["workload.response_lengths={kind: lognormal, median: 500, sigma: 1}"])
    assert JobSpec.model_validate_json(job.model_dump_json()) == job
