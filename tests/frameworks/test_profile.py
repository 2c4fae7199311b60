"""Profiles of frameworks: a release merges with those before it, is found by its label, says where it was read."""

from dataclasses import fields
from itertools import pairwise

import pytest

from rlplan.errors import SpecError
from rlplan.frameworks.profile import (
    FOLDER,
    NAMES,
    FrameworkRelease,
    ScoredWords,
    Step,
    UnknownFrameworkError,
    find_release,
    list_versions,
    note_unread_release,
    suggest_trainer,
)
from rlplan.planner.search import find_best_plan
from rlplan.spec.files.job_file import job_from
from rlplan.vocabulary import Loss
from tests.docs.documentation import DOCS, read, rows, section, words

RELEASES = [f"{name}@{version}" for name in NAMES for version in list_versions(name)]
PAGE = read(DOCS / "frameworks.md")
JOB = {"policy": "Qwen/Qwen2.5-0.5B", "hardware": "8xH100", "algorithm": "grpo"}


def test_every_profile_of_the_folder_is_known_by_name() -> None:
    assert {path.stem for path in FOLDER.glob("*.yaml")} == set(NAMES)


@pytest.mark.parametrize("label", RELEASES)
def test_every_release_states_what_each_of_its_trainers_holds(label: str) -> None:
    release = find_release(label)
    assert f"{release.name}@{release.version}" == label
    assert set(release.logits) == set(release.backends)
    assert {Loss(logits.train) for logits in release.logits.values()} <= set(Loss)
    assert len(set(release.step.order)) == len(release.step.order)


@pytest.mark.parametrize("label", RELEASES)
def test_every_release_names_where_its_step_and_its_logits_were_read(label: str) -> None:
    assert {"step", "logits"} <= set(find_release(label).sources)


@pytest.mark.parametrize("name", NAMES)
def test_releases_stand_from_the_oldest_to_the_newest(name: str) -> None:
    releases = [find_release(f"{name}@{version}") for version in list_versions(name)]
    assert all(before.date <= after.date for before, after in pairwise(releases))
    assert find_release(name) == releases[-1]


def test_a_release_has_what_those_before_it_stated_and_it_did_not_change() -> None:
    second, last = find_release("verl@0.4"), find_release("verl@0.9")
    assert second.logits["fsdp2"] == find_release("verl@0.2").logits["fsdp2"]
    assert second.logits["megatron"].score_with_entropy == ScoredWords(in_model_type=0, in_fp32=2)
    assert last.logits["megatron"].score_with_entropy == ScoredWords(in_model_type=0, in_fp32=3)
    assert last.step == second.step
    assert {"step", "logits", "sync_bucket"} <= set(last.sources)


@pytest.mark.parametrize(
    ("label", "version"),
    [
        ("verl", "0.9"),
        ("verl@0.5.3", "0.4"),
        ("verl@0.9.9", "0.9"),
        ("verl@0.10", "0.9"),
        ("verl@v0.6.0.post1", "0.6"),
        ("verl@0.6.0rc2", "0.6"),
        ("verl@0.1", "0.2"),
        ("TRL@0.22.2", "0.16"),
        ("NeMo-RL@0.5.1", "0.5"),
        ("OpenRLHF@0.5.5", "0.5"),
        ("OpenRLHF@0.5.6", "0.5.6"),
        ("slime@0.2.4", "0.2"),
    ],
)
def test_a_label_is_the_last_release_that_is_not_newer(label: str, version: str) -> None:
    assert find_release(label).version == version


@pytest.mark.parametrize(
    ("name", "label"), [("rlplan", "rlplan"), ("NeMo-RL", "nemo_rl@0.7"), ("trl@0.17", "trl@0.16")]
)
def test_the_label_of_a_release_finds_it_again(name: str, label: str) -> None:
    release = find_release(name)
    assert release.label == label
    assert find_release(label) == release


@pytest.mark.parametrize(
    ("label", "words", "instead"),
    [
        ("verll", "Did you mean 'verl'?", "verl"),
        ("vlm", "unknown framework 'vlm'", "vllm"),
        ("megatron", "rlplan, verl, trl, openrlhf, slime, nemo_rl", "verl"),
        ("verl@latest", "'latest' is not a version: write verl@0.9, or only verl", "verl"),
        ("trl@1.x", "'1.x' is not a version", "trl"),
    ],
)
def test_an_unknown_label_is_answered_with_the_nearest(label: str, words: str, instead: str) -> None:
    with pytest.raises(UnknownFrameworkError) as refused:
        find_release(label)
    assert words in str(refused.value)
    assert refused.value.instead == instead
    with pytest.raises(SpecError) as refused_job:
        job_from(JOB, [f"framework={label}"])
    assert f"framework={instead}" in refused_job.value.way_out
    assert find_release(instead)


def test_every_statement_of_a_profile_is_a_field_and_has_a_place_on_the_page() -> None:
    explained = [word for row in rows(section(PAGE, "What a profile holds")) for word in words(row[0])]
    facts = {field.name for field in fields(FrameworkRelease)} - {"name", "title", "repository", "version", "date"}
    step = {field.name for field in fields(Step)}
    assert set(explained) == facts | step


@pytest.mark.parametrize("backend", ["deepspeed", "fsdp2", "megatron"])
def test_the_words_that_switch_to_a_trainer_do(backend: str) -> None:
    assert job_from(JOB, suggest_trainer(backend).split()).backend == backend  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("label", "note"),
    [
        ("verl@0.5.3", "planned as verl 0.4, the last release before it that was read"),
        ("trl@0.9", "planned as TRL 0.14, the earliest release that was read"),
        ("verl@0.9.0", ""),
        ("verl", ""),
        ("rlplan", ""),
    ],
)
def test_a_release_that_was_not_read_is_noted(label: str, note: str) -> None:
    assert note_unread_release(label) == (f"framework {label}: {note}" if note else "")


def test_the_plan_notes_a_release_that_was_not_read() -> None:
    plan = find_best_plan(job_from(JOB, ["framework=verl@0.5.3"]), with_others=False)
    assert note_unread_release("verl@0.5.3") in plan.notes
    assert plan.job.framework == "verl@0.5.3"
    assert plan.job.release == find_release("verl@0.4")


def test_the_page_lists_every_framework_with_its_trainers_and_releases() -> None:
    listed = {}
    for title, name, backends, versions in rows(section(PAGE, "Releases")):
        listed[words(name)[0]] = (title, words(backends), versions)
    for name in NAMES:
        title, backends, versions = listed[name]
        release = find_release(name)
        assert title.startswith(release.title)
        assert backends == list(release.backends)
        assert release.is_rlplan or versions.split(", ") == list(list_versions(name))
    assert set(listed) == set(NAMES)
