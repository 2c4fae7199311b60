"""A plan knows the model and the profile that it was made from."""

import shutil
from pathlib import Path

import pytest

from rlplan.errors import SpecError
from rlplan.planner.plan import read_plan, write_plan
from rlplan.spec.fingerprints import model_fingerprint, profile_fingerprint
from tests.factories import make_job, make_plan, make_profile


@pytest.fixture
def policy(tmp_path: Path) -> Path:
    folder = tmp_path / "policy"
    shutil.copytree(make_job().policy.path, folder)
    return folder


def test_the_same_files_have_the_same_fingerprint_wherever_they_lie(policy: Path) -> None:
    assert model_fingerprint(policy) == model_fingerprint(Path(make_job().policy.path))


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model.safetensors"])
def test_another_revision_of_any_file_has_another_fingerprint(name: str, policy: Path) -> None:
    before = model_fingerprint(policy)
    data = bytearray((policy / name).read_bytes())
    data[-1] ^= 1
    (policy / name).write_bytes(data)
    assert model_fingerprint(policy) != before


def test_a_readme_is_no_part_of_the_model(policy: Path) -> None:
    before = model_fingerprint(policy)
    (policy / "README.md").write_text("another")
    assert model_fingerprint(policy) == before


def test_another_value_in_a_profile_shows() -> None:
    assert profile_fingerprint(make_profile()) == profile_fingerprint(make_profile())
    assert profile_fingerprint(make_profile(max_devices=63)) != profile_fingerprint(make_profile())


def test_a_plan_keeps_its_fingerprints_on_disk(tmp_path: Path) -> None:
    plan = make_plan()
    write_plan(plan, tmp_path / "plan.json")
    assert read_plan(tmp_path / "plan.json").fingerprints == plan.fingerprints


def test_a_model_that_cannot_be_read_is_an_error_of_the_job(policy: Path) -> None:
    (policy / "config.json").unlink()
    (policy / "x.safetensors").symlink_to("nowhere")
    with pytest.raises(SpecError, match="cannot be read"):
        model_fingerprint(policy)
