"""Which stack a file is of, and what it says, whatever its syntax."""

from pathlib import Path

import pytest

from rlplan.errors import SpecError
from rlplan.foreign.settings import typed
from rlplan.foreign.source import read_source
from tests.foreign.scripts import verl_script


def test_a_script_is_known_by_the_command_that_it_runs(tmp_path: Path) -> None:
    settings = read_source(verl_script(tmp_path), None)
    assert settings.table.title == "verl"
    assert settings.value("data.train_batch_size") == 64
    assert settings.place("data.train_batch_size") == "train.sh:6"


def test_a_yaml_file_is_known_by_its_keys_and_its_references_are_followed(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(
        "actor_rollout_ref:\n  rollout:\n    n: 4\n    max_num_seqs: ${oc.select:actor_rollout_ref.rollout.n,1}\n"
        "data:\n  train_batch_size: ${actor_rollout_ref.rollout.max_num_seqs}\n"
    )
    settings = read_source(path, None)
    assert settings.value("data.train_batch_size") == 4
    assert settings.place("data.train_batch_size") == "job.yaml: data.train_batch_size"


def test_references_in_a_circle_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text("actor_rollout_ref:\n  a: ${actor_rollout_ref.b}\n  b: ${actor_rollout_ref.a}\n")
    with pytest.raises(SpecError, match="which only running would tell"):
        read_source(path, None).value("actor_rollout_ref.a")


def test_variables_and_keys_can_be_set_from_outside(tmp_path: Path) -> None:
    script = verl_script(tmp_path, {"data.train_batch_size": None}, before="BATCH=${BATCH:-32}")
    script.write_text(script.read_text().replace('"$@"', "data.train_batch_size=$BATCH"))
    assert read_source(script, None).value("data.train_batch_size") == 32
    assert read_source(script, None, ["BATCH=128"]).value("data.train_batch_size") == 128
    assert read_source(script, None, ["data.train_batch_size=96"]).value("data.train_batch_size") == 96


def test_the_command_may_lie_behind_a_launcher(tmp_path: Path) -> None:
    path = tmp_path / "x.sh"
    path.write_text(
        "ray job submit --address=http://x:8265 -- python3 -m verl.trainer.main_ppo +data.train_batch_size=8\n"
    )
    assert read_source(path, None).value("data.train_batch_size") == 8


def test_of_two_commands_the_first_is_read_with_a_note(tmp_path: Path) -> None:
    path = tmp_path / "x.sh"
    path.write_text("".join(f"python -m verl.trainer.main_ppo data.train_batch_size={size}\n" for size in (8, 16)))
    settings = read_source(path, None)
    assert settings.value("data.train_batch_size") == 8
    assert settings.notes == ("2 commands start verl; the one at x.sh:1 is read",)


@pytest.mark.parametrize(
    ("name", "text", "what"),
    [
        ("x.sh", "echo hello\n", "no command of this script starts"),
        ("x.sh", "", "no command of this script starts"),
        ("x.yaml", "a: 1\n", "none of its keys"),
        ("x.yaml", "- 1\n", "not a mapping"),
        ("x.yaml", "a: [\n", "not YAML"),
        ("x.json", '{"a": ', "not YAML"),
        ("missing.sh", None, "is missing"),
    ],
)
def test_a_file_of_no_use_is_one_message_with_four_parts(
    name: str, text: str | None, what: str, tmp_path: Path
) -> None:
    path = tmp_path / name
    if text is not None:
        path.write_text(text)
    with pytest.raises(SpecError, match=r"^\S") as caught:
        read_source(path, None)
    error = caught.value
    assert what in error.what
    assert error.where
    assert error.rule
    assert error.way_out


def test_an_unknown_source_is_refused_with_what_was_meant(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="Did you mean 'verl'"):
        read_source(verl_script(tmp_path), "verll")


@pytest.mark.parametrize(
    ("word", "value"),
    [
        ("true", True),
        ("False", False),
        ("None", None),
        ("1e-6", 1e-6),
        ("-1", -1),
        ("1_000", "1_000"),
        ("[a,b]", "[a,b]"),
    ],
)
def test_words_are_typed_as_upstream_types_them(word: str, value: object) -> None:
    assert typed(word) == value
    assert type(typed(word)) is type(value)
