"""What is wrong with the data or the host is said before anything starts."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from rlplan.emit.execution import execution_spec
from rlplan.errors import HostError, SpecError
from rlplan.runtime import preflight
from rlplan.runtime.doctor import examine, missing_packages
from tests.factories import make_job, make_plan


def write_rows(path: Path, *prompts: str) -> str:
    rows = [{"id": str(number), "prompt": prompt, "answer": "1"} for number, prompt in enumerate(prompts)]
    path.write_text("\n".join(map(json.dumps, rows)))
    return str(path)


def test_the_example_prompts_are_tokenized_for_the_policy() -> None:
    prompts = preflight.load_prompts(make_job())
    assert len(prompts.train) == 2000
    assert len(prompts.heldout) == 256
    assert {len(prompt.tokens) for prompt in prompts.train} == {6}


def test_a_prompt_over_the_limit_is_named(tmp_path: Path) -> None:
    file = write_rows(tmp_path / "train.jsonl", *["Sort: 12"] * 3, "Sort: 123456789")
    with pytest.raises(SpecError, match="prompt '3' has 10 tokens, the limit is 8"):
        preflight.load_prompts(make_job(**{"workload.prompts": file}))


def test_too_few_prompts_for_a_step_are_refused(tmp_path: Path) -> None:
    file = write_rows(tmp_path / "train.jsonl", "Sort: 12", "Sort: 13")
    with pytest.raises(SpecError, match="2 prompts, 4 a step"):
        preflight.load_prompts(make_job(**{"workload.prompts": file}))


def test_a_held_out_prompt_that_is_trained_on_is_refused(tmp_path: Path) -> None:
    train = write_rows(tmp_path / "train.jsonl", *(f"Sort: {number}" for number in range(10, 20)))
    heldout = write_rows(tmp_path / "heldout.jsonl", "Sort: 99", "Sort: 12")
    with pytest.raises(SpecError, match="1 held-out prompts are also training prompts, such as 'Sort: 12'"):
        preflight.load_prompts(make_job(**{"workload.prompts": train, "workload.heldout_prompts": heldout}))


def test_a_policy_without_a_tokenizer_or_weights_is_refused(tmp_path: Path) -> None:
    source = Path(make_job().policy.path)
    (tmp_path / "config.json").write_bytes((source / "config.json").read_bytes())
    plan = make_plan(**{"policy.path": str(tmp_path)})
    with pytest.raises(SpecError, match="no tokenizer"):
        preflight.load_prompts(plan.job)
    with pytest.raises(SpecError, match="no weights"):
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
    assert preflight.free_memory() == 3_000_000
    (tmp_path / "max").write_text("max\n")
    assert preflight.free_memory() > 1 << 30


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


def test_a_plan_for_another_machine_is_refused() -> None:
    plan = make_plan()
    assert plan.fingerprints
    other = plan.fingerprints.model_copy(update={"profile": "0" * 16})
    with pytest.raises(SpecError, match="other values of the hardware profile 'cpu-host'"):
        preflight.check_plan(plan.model_copy(update={"fingerprints": other}))
