"""Errors in the data or on the host are reported before anything starts."""

import json
import shlex
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from rlplan.emit.execution import execution_spec
from rlplan.errors import HostError, SpecError
from rlplan.runtime.data.prompt_sets import load_prompts
from rlplan.runtime.driver import preflight
from rlplan.runtime.host.doctor import examine, missing_packages
from tests.factories import make_job, make_plan
from tests.memory.model.packed_base import packed_base


def test_a_logger_that_is_not_installed_is_said_before_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = make_plan(**{"metrics.sinks": ["tensorboard", "wandb"]})
    monkeypatch.setattr(preflight.importlib.util, "find_spec", lambda name: None if name == "wandb" else object())
    with pytest.raises(HostError, match=r"package is missing: wandb") as caught:
        preflight.check_host(execution_spec(plan), plan.ledger)
    assert "rlplan[wandb]" in caught.value.way_out


def test_a_policy_without_a_tokenizer_or_weights_is_refused(tmp_path: Path) -> None:
    source = Path(make_job().policy.path)
    (tmp_path / "config.json").write_bytes((source / "config.json").read_bytes())
    plan = make_plan(**{"policy.path": str(tmp_path)})
    with pytest.raises(SpecError, match="no tokenizer"):
        load_prompts(plan.job)
    with pytest.raises(SpecError, match="no weights"):
        preflight.check_host(execution_spec(plan), plan.ledger)


def test_an_engine_s_base_without_weights_is_refused_by_its_key(tmp_path: Path) -> None:
    base = packed_base(tmp_path / "base")
    asked = {"training.lora": {"rank": 4}, "placement.sync_content": "adapter", "rollout.dtype": "bfloat16"}
    plan = make_plan(**asked, **{"rollout.base_path": str(base)})
    (base / "model.safetensors").unlink()
    with pytest.raises(SpecError, match="the engines' base has no weights") as caught:
        preflight.check_host(execution_spec(plan), plan.ledger)
    assert "remove rollout.base_path" in str(caught.value)
    shutil.rmtree(base)
    with pytest.raises(SpecError, match=r"rollout\.base_path"):
        preflight.check_plan(plan)


@pytest.mark.parametrize("name", ["pytorch_model-00001-of-00001.bin", "../model.safetensors", "model.pt"])
def test_a_policy_in_parts_that_would_be_unpickled_is_refused(tmp_path: Path, name: str) -> None:
    """Libraries go by the ending of what an index names."""
    policy = tmp_path / "policy"
    shutil.copytree(make_job().policy.path, policy)
    plan = make_plan(**{"policy.path": str(policy)})
    (policy / "model.safetensors").rename(policy / "pytorch_model-00001-of-00001.bin")
    (policy / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"model.norm.weight": name}}))
    with pytest.raises(SpecError, match="a safetensors file in the same folder"):
        preflight.check_host(execution_spec(plan), plan.ledger)
    (policy / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"x": "gone.safetensors"}}))
    with pytest.raises(SpecError, match="the policy has no weights"):
        preflight.check_host(execution_spec(plan), plan.ledger)


@pytest.mark.parametrize("place", ["policy", "exports/step-4"])
def test_a_policy_of_an_earlier_run_that_lost_its_chat_template_is_refused(tmp_path: Path, place: str) -> None:
    """A policy of rlplan up to 2026-11: trained on chats, and the next stage trained on plain texts."""
    base, run = tmp_path / "base", tmp_path / "run"
    for folder in (base, run / place):
        shutil.copytree(make_job().policy.path, folder)
    (base / "chat_template.jinja").write_text("{{ messages[0].content }}")
    (run / "plan.json").write_text(json.dumps({"schema_version": 1, "job": {"policy": {"path": "../base"}}}))
    plan = make_plan(**{"policy.path": str(run / place)})
    with pytest.raises(SpecError, match="the model has lost 1 of the 1 chat templates") as caught:
        preflight.check_host(execution_spec(plan), plan.ledger)
    subprocess.run(shlex.split(caught.value.way_out), check=True)
    preflight.check_host(execution_spec(plan), plan.ledger)


def test_a_plan_that_does_not_fit_into_free_memory_is_refused_with_both_numbers() -> None:
    plan = make_plan()
    rows = tuple(replace(row, resident_bytes=1 << 50, peak_bytes=1 << 50) for row in plan.ledger.rows)
    with pytest.raises(HostError, match=r"TiB of memory, \d+\.?\d* GiB is free"):
        preflight.check_host(execution_spec(plan), replace(plan.ledger, rows=rows))


def test_free_memory_is_that_of_the_control_group_where_it_is_less(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "max").write_text("5000000\n")
    (tmp_path / "current").write_text("2000000\n")
    monkeypatch.setattr(preflight, "CGROUP_FILES", ((str(tmp_path / "max"), str(tmp_path / "current")),))
    assert preflight.measure_free_memory() == 3_000_000
    (tmp_path / "max").write_text("max\n")
    assert preflight.measure_free_memory() > 1 << 30


def test_the_doctor_finds_nothing_missing_where_the_tests_run() -> None:
    assert missing_packages() == []
    assert [finding.subject for finding in examine() if finding.state == "missing"] == []


def test_a_plan_for_another_model_revision_is_refused(tmp_path: Path) -> None:
    policy = tmp_path / "policy"
    shutil.copytree(make_job().policy.path, policy)
    plan = make_plan(**{"policy.path": str(policy)})
    preflight.check_plan(plan)
    weights = bytearray((policy / "model.safetensors").read_bytes())
    weights[-2:] = b"\x12\x34"
    (policy / "model.safetensors").write_bytes(weights)
    with pytest.raises(SpecError, match="another revision of the model"):
        preflight.check_plan(plan)


def test_a_plan_whose_model_lies_elsewhere_says_so(tmp_path: Path) -> None:
    policy = tmp_path / "policy"
    shutil.copytree(make_job().policy.path, policy)
    plan = make_plan(**{"policy.path": str(policy)})
    policy.rename(tmp_path / "moved")
    with pytest.raises(SpecError, match=r"the policy's folder .*policy does not exist"):
        preflight.check_plan(plan)


def test_a_model_of_the_hub_that_is_not_there_comes_with_the_command_that_fetches_it(tmp_path: Path) -> None:
    plan, folder = make_plan(), str(tmp_path / "models" / "Qwen" / "Qwen2.5-7B")
    policy = plan.job.policy.model_copy(update={"path": folder})
    moved = plan.model_copy(update={"job": plan.job.model_copy(update={"policy": policy})})
    with pytest.raises(SpecError, match=r"the policy's folder .* does not exist") as caught:
        preflight.check_plan(moved)
    assert f"hf download Qwen/Qwen2.5-7B --local-dir {folder}" in str(caught.value)
    assert "policy.path=FOLDER" in str(caught.value)


def test_a_plan_for_another_machine_is_refused() -> None:
    plan = make_plan()
    assert plan.fingerprints
    other = plan.fingerprints.model_copy(update={"profile": "0" * 16})
    with pytest.raises(SpecError, match="other values of the hardware profile 'cpu-host'"):
        preflight.check_plan(plan.model_copy(update={"fingerprints": other}))
