"""What is wrong with the data or the host is said before anything starts."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from rlplan.emit.execution import execution_spec
from rlplan.errors import HostError, SpecError
from rlplan.runtime.data.held_back import held_back
from rlplan.runtime.driver import preflight
from rlplan.runtime.host.doctor import examine, missing_packages
from rlplan.spec.files.job_file import load_job
from rlplan.spec.resolved import on_a_cpu_host
from tests.factories import EXAMPLES, make_job, make_plan


def write_rows(path: Path, *prompts: str) -> str:
    rows = [{"id": str(number), "prompt": prompt, "answer": "1"} for number, prompt in enumerate(prompts)]
    path.write_text("\n".join(map(json.dumps, rows)))
    return str(path)


def test_the_example_prompts_are_tokenized_for_the_policy() -> None:
    prompts = preflight.load_prompts(make_job())
    assert len(prompts.train) == 2000
    assert len(prompts.heldout) == 256
    assert {len(prompt.tokens) for prompt in prompts.train} == {6}


def test_without_held_out_prompts_a_tenth_is_held_back_whatever_their_order(tmp_path: Path) -> None:
    texts = [f"Sort: {number}" for number in range(10, 90)]
    one, other = (
        write_rows(tmp_path / f"{n}.jsonl", *order) for n, order in enumerate((texts + texts[:9], texts[::-1]))
    )
    sets = [preflight.load_prompts(make_job(**{"data.prompts": file, "data.heldout": None})) for file in (one, other)]
    held = [{prompt.text for prompt in each.heldout} for each in sets]
    assert held[0] == held[1]
    assert len(sets[0].heldout) == len(held[0]) == 8
    assert not held[0] & {prompt.text for prompt in sets[0].train}
    assert held[0] | {prompt.text for prompt in sets[0].train} == set(texts)
    assert sets[0].said[1] == "8 of its prompts are held out, as data.heldout names none"
    assert len(held_back(sets[0].train, most=3, seed=1)[1]) == 3


def test_too_few_prompts_are_said_with_those_that_are_held_out(tmp_path: Path) -> None:
    file = write_rows(tmp_path / "train.jsonl", *(f"Sort: {number}" for number in range(10, 42)))
    job = make_job(**{"data.prompts": file, "data.heldout": None, "workload.num_prompts_per_step": 32})
    with pytest.raises(SpecError, match="29 prompts beside 3 that are held out, 32 a step"):
        preflight.load_prompts(job)


def test_pairs_of_answers_need_held_out_prompts_of_their_own() -> None:
    job = on_a_cpu_host(load_job(EXAMPLES / "algorithms" / "dpo.yaml", ["data.heldout=null"]))
    with pytest.raises(SpecError, match="dpo trains on pairs") as caught:
        preflight.load_prompts(job)
    assert "data.heldout=FILE" in caught.value.way_out


def test_a_logger_that_is_not_installed_is_said_before_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = make_plan(**{"metrics.sinks": ["tensorboard", "wandb"]})
    monkeypatch.setattr(preflight.importlib.util, "find_spec", lambda name: None if name == "wandb" else object())
    with pytest.raises(HostError, match=r"package is missing: wandb") as caught:
        preflight.check_host(execution_spec(plan), plan.ledger)
    assert "rlplan[wandb]" in caught.value.way_out


def test_a_prompt_over_the_limit_is_named(tmp_path: Path) -> None:
    file = write_rows(tmp_path / "train.jsonl", *["Sort: 12"] * 3, "Sort: 123456789")
    with pytest.raises(SpecError, match="prompt '3' has 10 tokens, the limit is 8"):
        preflight.load_prompts(make_job(**{"data.prompts": file}))


def test_all_prompts_over_the_limit_are_listed_with_their_rows(tmp_path: Path) -> None:
    long = "Sort: 123456789"
    file = write_rows(tmp_path / "train.jsonl", "Sort: 12", long, "Sort: 13", long, *[long] * 20)
    with pytest.raises(SpecError, match=r"22 of 24 rows cannot be used: row 2: .*; row 4: .*; and 12 more\n") as caught:
        preflight.load_prompts(make_job(**{"data.prompts": file}))
    assert len(caught.value.what) < 1000


def test_a_huge_prompt_is_refused_before_it_is_tokenized(tmp_path: Path) -> None:
    file = write_rows(tmp_path / "train.jsonl", *["Sort: 12"] * 3, "Sort: " + "1" * 20_000_000)
    with pytest.raises(SpecError, match="row 4: prompt '3' has 20000006 characters, more than 8 tokens can hold"):
        preflight.load_prompts(make_job(**{"data.prompts": file}))


def test_long_answers_of_pairs_are_listed_with_their_rows(tmp_path: Path) -> None:
    pair = {"prompt": "Sort: 12", "chosen": "1" * 50, "rejected": "2"}
    other = {"prompt": "Sort: 12", "chosen": "1", "rejected": "2" * 20_000_000}
    path = tmp_path / "train.jsonl"
    path.write_text("\n".join(map(json.dumps, [{**pair, "chosen": "1"}, pair, other])))
    job = on_a_cpu_host(
        load_job(EXAMPLES / "algorithms" / "dpo.yaml", [f"data.prompts={path}", "workload.max_response_len=16"])
    )
    with pytest.raises(SpecError, match=r"2 of 3 rows .* row 2: chosen of 'row-2' has 51 tokens.* row 3: rejected of"):
        preflight.load_prompts(job)


def test_the_columns_that_every_row_has_are_known_where_a_function_may_ask_for_them(tmp_path: Path) -> None:
    train, heldout = tmp_path / "train.jsonl", tmp_path / "heldout.jsonl"
    rows = [{"prompt": f"Sort: {n}", "answer": "1", "level": n, **({"hint": "x"} if n > 1 else {})} for n in range(4)]
    train.write_text("\n".join(map(json.dumps, rows)))
    heldout.write_text(json.dumps({"prompt": "Sort: 77", "answer": "77", "level": 1, "more": 1}))
    files = {"data.prompts": str(train), "data.heldout": str(heldout)}
    job = make_job(rewards=[{"kind": "function", "path": "rewards.py:f"}], **files)
    assert preflight.load_prompts(job).columns == {"answer", "level"}


def test_too_few_prompts_for_a_step_are_refused(tmp_path: Path) -> None:
    file = write_rows(tmp_path / "train.jsonl", "Sort: 12", "Sort: 13")
    with pytest.raises(SpecError, match="2 prompts, 4 a step"):
        preflight.load_prompts(make_job(**{"data.prompts": file}))


def test_a_held_out_prompt_that_is_trained_on_is_refused(tmp_path: Path) -> None:
    train = write_rows(tmp_path / "train.jsonl", *(f"Sort: {number}" for number in range(10, 20)))
    heldout = write_rows(tmp_path / "heldout.jsonl", "Sort: 99", "Sort: 12")
    with pytest.raises(SpecError, match="1 held-out prompts are also training prompts, such as 'Sort: 12'"):
        preflight.load_prompts(make_job(**{"data.prompts": train, "data.heldout": heldout}))


def test_a_policy_without_a_tokenizer_or_weights_is_refused(tmp_path: Path) -> None:
    source = Path(make_job().policy.path)
    (tmp_path / "config.json").write_bytes((source / "config.json").read_bytes())
    plan = make_plan(**{"policy.path": str(tmp_path)})
    with pytest.raises(SpecError, match="no tokenizer"):
        preflight.load_prompts(plan.job)
    with pytest.raises(SpecError, match="no weights"):
        preflight.check_host(execution_spec(plan), plan.ledger)


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
