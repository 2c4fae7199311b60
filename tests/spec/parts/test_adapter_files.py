"""Adapters that a job names: what their files say, and which the runtime does not have."""

import json
from pathlib import Path
from typing import Any

import pytest

from rlplan.errors import NoFeasiblePlanError, SpecError
from rlplan.planner.search import find_best_plan
from rlplan.spec.parts.adapter_files import CONFIG_FILE, check_tensors, read_adapter
from rlplan.vocabulary import MemoryKind, Role
from tests.factories import make_adapter, make_job, make_plan

LORA = {"rank": 4, "alpha": 8.0}


def set_kl(kl_coef: float = 0.01, **lora: Any) -> dict[str, Any]:
    return {"training.lora": LORA | lora, "algorithm.kl_coef": kl_coef}


def change(folder: Path, **keys: Any) -> None:
    file = folder / CONFIG_FILE
    file.write_text(json.dumps(json.loads(file.read_text()) | keys))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_adapter(tmp_path / "adapter", rank=4, alpha=8.0)


def test_a_policy_that_starts_from_an_adapter_has_it_as_its_reference_too(folder: Path) -> None:
    job = make_job(**set_kl(path=str(folder)))
    assert {role: adapter.path for role, adapter in job.frozen_adapters.items()} == {Role.REFERENCE: str(folder)}
    assert job.find_holder(Role.REFERENCE) is Role.POLICY


def test_none_is_the_base_alone_and_without_a_kl_nothing_is_held(folder: Path) -> None:
    path = str(folder)
    assert not make_job(**set_kl(path=path), **{"roles.reference.adapter": "none"}).frozen_adapters
    assert not make_job(**set_kl(0.0, path=path)).frozen_adapters


def test_a_teacher_s_adapter_is_held_by_the_policy(folder: Path) -> None:
    job = make_job(**{**set_kl(), "roles.teacher.adapter": str(folder)})
    assert Role.TEACHER in job.scored_roles
    assert job.find_holder(Role.TEACHER) is Role.POLICY
    assert not job.frozen_roles


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_a_role_s_adapter_adds_its_own_elements_to_each_rank_and_nothing_else(folder: Path, stage: int) -> None:
    alone, beside = (
        make_plan(**set_kl(), **{"training.zero_stage": stage, "roles.reference.adapter": adapter})
        for adapter in ("none", str(folder))
    )
    job = beside.job
    num_bytes = 4 * sum(tensor.numel for tensor in job.frozen_adapter_parameters(job.load_model()))
    for kind in (MemoryKind.WEIGHTS, MemoryKind.OPTIMIZER, MemoryKind.GRADIENTS, MemoryKind.MASTER_WEIGHTS):
        before, after = (
            sum(r.resident_bytes for r in plan.ledger.find_rows("policy_trainer/0") if is_steady_step(r, kind))
            for plan in (alone, beside)
        )
        grown = 0 if kind is not MemoryKind.WEIGHTS else num_bytes // (2 if stage == 3 else 1)
        assert grown <= after - before <= grown + (num_bytes if stage == 3 and grown else 0)


def is_steady_step(row: Any, kind: MemoryKind) -> bool:
    return (row.run_phase, row.action_id, row.kind) == ("steady", "optimizer_step", kind)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "DoRA": ({"use_dora": True}, "use_dora is True"),
    "another scale": ({"use_rslora": True}, "use_rslora is True"),
    "trained biases": ({"bias": "all"}, "bias is 'all'"),
    "whole modules": ({"modules_to_save": ["lm_head"]}, "modules_to_save is"),
    "ranks by layer": ({"rank_pattern": {"q_proj": 2}}, "rank_pattern is"),
    "a pattern of layers": ({"target_modules": ".*q_proj"}, "target_modules is"),
    "no LoRA": ({"peft_type": "IA3"}, "peft_type is 'IA3'"),
    "a rank that is none": ({"r": True}, "r is True"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_another_kind_of_adapter_is_refused_by_its_key(folder: Path, name: str) -> None:
    keys, expected = REFUSED[name]
    change(folder, **keys)
    with pytest.raises(SpecError, match=expected) as error:
        read_adapter(folder, where="roles.teacher.adapter")
    assert "roles.teacher.adapter" in error.value.where


ANOTHER: dict[str, tuple[dict[str, Any], str]] = {
    "rank": ({"rank": 8}, "training.lora.rank=8"),
    "alpha": ({"alpha": 4.0}, "training.lora.alpha=4"),
    "layers": ({"targets": ("q_proj",)}, r"training.lora.target_modules=\[q_proj\]"),
}


@pytest.mark.parametrize("key", ANOTHER)
def test_the_adapter_that_training_starts_from_is_the_one_that_is_trained(tmp_path: Path, key: str) -> None:
    drawn, way_out = ANOTHER[key]
    other = make_adapter(tmp_path / "other", **({"rank": 4, "alpha": 8.0} | drawn))
    with pytest.raises(SpecError, match=key if key != "layers" else "other layers") as error:
        make_job(**{"training.lora": {**LORA, "path": str(other)}}).load_model()
    assert way_out.replace("\\", "") in error.value.way_out


def test_a_file_with_other_tensors_than_it_says_is_refused(folder: Path) -> None:
    model = make_job().load_model()
    change(folder, r=8)
    with pytest.raises(SpecError, match="is needed"):
        check_tensors(read_adapter(folder, where="here"), model, where="here")
    change(folder, r=4, target_modules=["q_proj"])
    with pytest.raises(SpecError, match="belongs to no layer"):
        check_tensors(read_adapter(folder, where="here"), model, where="here")


def test_roles_adapters_need_a_frozen_base_and_no_model_of_their_own(folder: Path) -> None:
    with pytest.raises(SpecError, match=r"roles.reference.adapter.*training.lora"):
        make_job(**{"algorithm.kl_coef": 0.01, "roles.reference.adapter": str(folder)})
    with pytest.raises(SpecError, match="drop one"):
        make_job(**set_kl(), **{"roles.reference": {"path": str(folder), "adapter": str(folder)}})


def test_a_colocated_engine_on_a_cpu_host_begins_without_an_adapter(folder: Path) -> None:
    with pytest.raises(NoFeasiblePlanError, match=r"training.lora.path: a colocated engine"):
        find_best_plan(make_job(**{"training.lora": {**LORA, "path": str(folder)}, "placement.placement": "colocated"}))
