"""Prompt sets: data sets that are mixed or held out by name, and what is refused of them."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from rlplan.errors import SpecError
from rlplan.runtime.checkpoints.identity import describe_identity
from rlplan.runtime.data.prompt_sets import load_prompts, split_held_out
from rlplan.runtime.rollout.requests import RequestMaker
from rlplan.spec.files.job_file import load_job
from rlplan.spec.resolved import ResolvedJob, resolve_on_cpu
from tests.factories import EXAMPLES, make_job, write_job


def write_rows(path: Path, *prompts: str) -> str:
    rows = [{"id": str(number), "prompt": prompt, "answer": "1"} for number, prompt in enumerate(prompts)]
    path.write_text("\n".join(map(json.dumps, rows)))
    return str(path)


def test_the_example_prompts_are_tokenized_for_the_policy() -> None:
    prompts = load_prompts(make_job())
    assert len(prompts.train) == 2000
    assert len(prompts.heldout) == 256
    assert {len(prompt.tokens) for prompt in prompts.train} == {6}


def test_a_prompt_over_the_limit_is_named(tmp_path: Path) -> None:
    file = write_rows(tmp_path / "train.jsonl", *["Sort: 12"] * 3, "Sort: 123456789")
    with pytest.raises(SpecError, match="prompt '3' has 10 tokens, the limit is 8"):
        load_prompts(make_job(**{"data.prompts": file}))


def test_all_prompts_over_the_limit_are_listed_with_their_rows(tmp_path: Path) -> None:
    long = "Sort: 123456789"
    file = write_rows(tmp_path / "train.jsonl", "Sort: 12", long, "Sort: 13", long, *[long] * 20)
    with pytest.raises(SpecError, match=r"22 of 24 rows cannot be used: row 2: .*; row 4: .*; and 12 more\n") as caught:
        load_prompts(make_job(**{"data.prompts": file}))
    assert len(caught.value.what) < 1000


def test_a_huge_prompt_is_refused_before_it_is_tokenized(tmp_path: Path) -> None:
    file = write_rows(tmp_path / "train.jsonl", *["Sort: 12"] * 3, "Sort: " + "1" * 20_000_000)
    with pytest.raises(SpecError, match="row 4: prompt '3' has 20000006 characters, more than 8 tokens can hold"):
        load_prompts(make_job(**{"data.prompts": file}))


def test_long_answers_of_pairs_are_listed_with_their_rows(tmp_path: Path) -> None:
    pair = {"prompt": "Sort: 12", "chosen": "1" * 50, "rejected": "2"}
    other = {"prompt": "Sort: 12", "chosen": "1", "rejected": "2" * 20_000_000}
    path = tmp_path / "train.jsonl"
    path.write_text("\n".join(map(json.dumps, [{**pair, "chosen": "1"}, pair, other])))
    job = resolve_on_cpu(
        load_job(EXAMPLES / "algorithms" / "dpo.yaml", [f"data.prompts={path}", "workload.max_response_len=16"])
    )
    with pytest.raises(SpecError, match=r"2 of 3 rows .* row 2: chosen of 'row-2' has 51 tokens.* row 3: rejected of"):
        load_prompts(job)


def test_the_columns_that_every_row_has_are_known_where_a_function_may_ask_for_them(tmp_path: Path) -> None:
    train, heldout = tmp_path / "train.jsonl", tmp_path / "heldout.jsonl"
    rows = [{"prompt": f"Sort: {n}", "answer": "1", "level": n, **({"hint": "x"} if n > 1 else {})} for n in range(4)]
    train.write_text("\n".join(map(json.dumps, rows)))
    heldout.write_text(json.dumps({"prompt": "Sort: 77", "answer": "77", "level": 1, "more": 1}))
    files = {"data.prompts": str(train), "data.heldout": str(heldout)}
    job = make_job(rewards=[{"kind": "function", "path": "rewards.py:f"}], **files)
    assert load_prompts(job).columns == {"answer", "level"}


def test_too_few_prompts_for_a_step_are_refused(tmp_path: Path) -> None:
    file = write_rows(tmp_path / "train.jsonl", "Sort: 12", "Sort: 13")
    with pytest.raises(SpecError, match="2 training prompts, 4 per step"):
        load_prompts(make_job(**{"data.prompts": file}))


def test_a_held_out_prompt_that_is_trained_on_is_refused(tmp_path: Path) -> None:
    train = write_rows(tmp_path / "train.jsonl", *(f"Sort: {number}" for number in range(10, 20)))
    heldout = write_rows(tmp_path / "heldout.jsonl", "Sort: 99", "Sort: 12")
    with pytest.raises(SpecError, match="1 held-out prompts are also training prompts, such as 'Sort: 12'"):
        load_prompts(make_job(**{"data.prompts": train, "data.heldout": heldout}))


def sorting(path: Path, first: int, count: int, **columns: Any) -> str:
    """A file of so many prompts to sort digits, from one number on."""
    rows = [
        {"id": f"{n}", "prompt": f"Sort: {n}", "answer": "".join(sorted(str(n)))} | columns
        for n in range(first, first + count)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def make_mixed_job(folder: Path, hard: dict[str, Any] | None = None, **data: Any) -> ResolvedJob:
    return make_job(
        data={
            "prompts": [
                {"path": sorting(folder / "easy.jsonl", 10000, 6, level=1), "weight": 3.0},
                {"path": sorting(folder / "hard.jsonl", 20000, 4, **(hard or {"level": 2})), "name": "second"},
            ],
            "heldout": {
                "near": sorting(folder / "near.jsonl", 30000, 3),
                "far": sorting(folder / "far.jsonl", 40000, 5),
            },
            **data,
        }
    )


def test_data_sets_are_mixed_by_weight_under_their_names(tmp_path: Path) -> None:
    job = make_mixed_job(tmp_path)
    sets = load_prompts(job)
    maker = RequestMaker(job, sets)
    assert Counter(maker.prompt(number).source for number in range(10)) == {"easy": 8, "second": 2}
    assert {prompt.id for prompt in sets.train if prompt.source == "second"} == {f"second/2000{i}" for i in range(4)}
    assert [prompt.source for prompt in sets.heldout] == ["near"] * 3 + ["far"] * 5


def test_unequal_columns_are_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="mixed data sets have different columns: easy has level; second has grade"):
        load_prompts(make_mixed_job(tmp_path, {"grade": 2}))


def test_a_curriculum_needs_a_number_in_every_row(tmp_path: Path) -> None:
    job = make_mixed_job(tmp_path, difficulty_column="level")
    maker = RequestMaker(job, load_prompts(job))
    assert [maker.prompt(n).source for n in range(10)].count("second") == 2
    with pytest.raises(SpecError, match="grade of 'easy/10000' is missing"):
        load_prompts(make_mixed_job(tmp_path, difficulty_column="grade"))
    with pytest.raises(SpecError, match="level of 'second/20000' is 'x'"):
        load_prompts(make_mixed_job(tmp_path, {"level": "x"}, difficulty_column="level"))


def test_a_weight_of_no_prompt_is_refused(tmp_path: Path) -> None:
    job = make_mixed_job(tmp_path)
    assert job.data is not None
    sources = [job.data.sources[0], job.data.sources[1].model_copy(update={"weight": 1e-6})]
    with pytest.raises(SpecError, match="second has a weight of 1e-06, which gives it 0 of 10 prompts"):
        load_prompts(job.model_copy(update={"data": job.data.model_copy(update={"prompts": tuple(sources)})}))


def test_names_must_differ_and_something_must_be_there(tmp_path: Path) -> None:
    path = sorting(tmp_path / "easy.jsonl", 10000, 6)
    for data, message in (
        ({"prompts": [{"path": path}, {"path": path}]}, "these are easy, easy: set `name`"),
        ({"prompts": []}, "at least one data set"),
        ({"heldout": {}}, "data.heldout: at least one data set"),
    ):
        with pytest.raises(SpecError, match=message):
            make_job(data={"prompts": path, "heldout": path} | data)


def test_paths_of_a_mixture_are_relative_to_the_job_and_must_exist(tmp_path: Path) -> None:
    sorting(tmp_path / "easy.jsonl", 10000, 6)
    sorting(tmp_path / "near.jsonl", 30000, 3)
    data = {"prompts": [{"path": "easy.jsonl"}], "heldout": {"near": "near.jsonl"}}
    job = load_job(write_job(tmp_path, data=data))
    assert job.data is not None
    assert job.data.files == (
        ("data.prompts", str(tmp_path / "easy.jsonl")),
        ("data.heldout", str(tmp_path / "near.jsonl")),
    )
    with pytest.raises(SpecError, match=r"data\.heldout"):
        load_job(write_job(tmp_path, data={**data, "heldout": {"near": "nowhere.jsonl"}}))


def test_a_run_goes_on_only_with_the_same_mixture(tmp_path: Path) -> None:
    job = make_mixed_job(tmp_path)
    assert job.data is not None
    other = job.data.model_copy(update={"prompts": job.data.sources[:1]})
    calmer = job.data.model_copy(update={"shuffles": False})
    of_each = [
        describe_identity(resolve_on_cpu(job.model_copy(update={"data": data}))) for data in (job.data, other, calmer)
    ]
    assert of_each[0]["data.prompts"] != of_each[1]["data.prompts"]
    assert of_each[0] != of_each[2]


def test_without_held_out_prompts_a_tenth_is_held_back_whatever_their_order(tmp_path: Path) -> None:
    texts = [f"Sort: {number}" for number in range(10, 90)]
    first, other = (
        write_rows(tmp_path / f"{n}.jsonl", *order) for n, order in enumerate((texts + texts[:9], texts[::-1]))
    )
    sets = [load_prompts(make_job(**{"data.prompts": file, "data.heldout": None})) for file in (first, other)]
    heldout = [{prompt.text for prompt in each.heldout} for each in sets]
    assert heldout[0] == heldout[1]
    assert len(sets[0].heldout) == len(heldout[0]) == 8
    assert not heldout[0] & {prompt.text for prompt in sets[0].train}
    assert heldout[0] | {prompt.text for prompt in sets[0].train} == set(texts)
    assert sets[0].log_lines[1] == "8 of these prompts are held out, as data.heldout names none"
    assert len(split_held_out(sets[0].train, max_heldout=3, seed=1)[1]) == 3


def test_too_few_prompts_are_said_with_those_that_are_held_out(tmp_path: Path) -> None:
    file = write_rows(tmp_path / "train.jsonl", *(f"Sort: {number}" for number in range(10, 42)))
    job = make_job(**{"data.prompts": file, "data.heldout": None, "workload.num_prompts_per_step": 32})
    with pytest.raises(SpecError, match="29 training prompts besides 3 held-out ones, 32 per step"):
        load_prompts(job)


def test_pairs_of_answers_need_held_out_prompts_of_their_own() -> None:
    job = resolve_on_cpu(load_job(EXAMPLES / "algorithms" / "dpo.yaml", ["data.heldout=null"]))
    with pytest.raises(SpecError, match="dpo trains on pairs") as caught:
        load_prompts(job)
    assert "data.heldout=FILE" in caught.value.way_out
