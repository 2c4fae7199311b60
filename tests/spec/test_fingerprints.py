"""A plan knows the model and the profile that it was made from."""

import json
import shutil
from pathlib import Path

import pytest

from rlplan.errors import SpecError
from rlplan.planner.plan import read_plan, write_plan
from rlplan.spec.fingerprints import model_fingerprint, profile_fingerprint
from rlplan.spec.model_files import identifying_files
from tests.factories import make_job, make_plan, make_profile
from tests.spec.test_model_files import names_in_transformers


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


@pytest.mark.parametrize(
    "name",
    ["README.md", "notes.txt", "training_args.json", "trainer_state.json", "all_results.json", "optimizer.safetensors"],
)
def test_what_lies_beside_a_model_is_no_part_of_it(name: str, policy: Path) -> None:
    before = model_fingerprint(policy)
    (policy / name).write_text("another")
    assert model_fingerprint(policy) == before


@pytest.mark.parametrize(
    "name", ["generation_config.json", "chat_template.jinja", "additional_chat_templates/tool_use.jinja", "merges.txt"]
)
def test_every_file_that_a_model_or_its_texts_are_read_from_counts(name: str, policy: Path) -> None:
    before = model_fingerprint(policy)
    (policy / name).parent.mkdir(exist_ok=True)
    (policy / name).write_text("another")
    assert model_fingerprint(policy) != before


def test_parts_of_the_weights_count_by_the_index_that_names_them(policy: Path) -> None:
    (policy / "model.safetensors").rename(policy / "first.safetensors")
    index = {"weight_map": {"a": "first.safetensors", "b": "second.safetensors"}}
    (policy / "model.safetensors.index.json").write_text(json.dumps(index))
    before = model_fingerprint(policy)
    (policy / "second.safetensors").write_bytes(b"another part")
    assert model_fingerprint(policy) != before


def test_every_file_that_transformers_reads_a_tokenizer_from_counts(tmp_path: Path) -> None:
    """The source of the installed transformers decides. Processors of images do not change a model of texts."""
    for name in names_in_transformers():
        (tmp_path / name).touch()
    left_out = names_in_transformers() - {path.name for path in identifying_files(tmp_path)}
    assert {name for name in left_out if not name.startswith(("model.", "pytorch_model.", "adapter_"))} == {
        "audio_tokenizer_config.json",
        "modelcard.json",
        "preprocessor_config.json",
        "processor_config.json",
        "video_preprocessor_config.json",
    }


def test_a_file_of_any_size_is_read(policy: Path) -> None:
    with (policy / "tokenizer.json").open("r+b") as file:
        file.truncate((64 << 20) + 1)
    assert model_fingerprint(policy).startswith("v2:")


def test_another_value_in_a_profile_shows() -> None:
    assert profile_fingerprint(make_profile()) == profile_fingerprint(make_profile())
    assert profile_fingerprint(make_profile(max_devices=63)) != profile_fingerprint(make_profile())


def test_a_plan_keeps_its_fingerprints_on_disk(tmp_path: Path) -> None:
    plan = make_plan()
    write_plan(plan, tmp_path / "plan.json")
    assert read_plan(tmp_path / "plan.json").fingerprints == plan.fingerprints


def test_a_model_that_cannot_be_read_is_an_error_of_the_job(policy: Path) -> None:
    (policy / "config.json").unlink()
    (policy / "model.safetensors").unlink()
    (policy / "model.safetensors").symlink_to("nowhere")
    with pytest.raises(SpecError, match="cannot be read"):
        model_fingerprint(policy)
