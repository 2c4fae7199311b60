"""Data as other people's packages write it, and tasks as they make them."""

import json
import subprocess
import sys
from pathlib import Path
from runpy import run_path

import pytest

from rlplan.runtime.data.layouts import Columns
from rlplan.runtime.data.loading import RowNeeds, load_rows
from rlplan.runtime.processes.machine_speed import scale_seconds
from tests.factories import EXAMPLES
from tests.repository.at_night import mark_nightly

GYM_TASKS = EXAMPLES / "rewards" / "gym_tasks.py"
SORTER = EXAMPLES / "models" / "sorter"
ROWS = [{"prompt": f"Sort: {n}", "answer": str(n)} for n in range(5)]


@pytest.mark.parametrize(
    "kind",
    mark_nightly(["folder", "splits", "parquet", "jsonl", "shuffled", "shards"], but=("jsonl", "shuffled")),
)
def test_data_sets_are_read_as_their_own_package_writes_them(tmp_path: Path, kind: str) -> None:
    import datasets
    import pyarrow as pa

    # a fingerprint given by hand: taking one pickles the table, which not every pair of pyarrow and dill can do
    table, path = datasets.Dataset(pa.Table.from_pylist(ROWS), fingerprint="rows"), tmp_path / f"data.{kind}"
    wanted = [row["prompt"] for row in ROWS]
    if kind == "splits":
        datasets.DatasetDict({"test": table.select([0], new_fingerprint="first"), "train": table}).save_to_disk(
            str(path)
        )
    elif kind == "parquet":
        table.to_parquet(str(path))
    elif kind == "jsonl":
        table.to_json(str(path))
    elif kind == "shuffled":
        mixed = table.shuffle(seed=1, new_fingerprint="mixed")
        mixed.save_to_disk(str(path))
        wanted = list(mixed["prompt"])
    else:
        table.save_to_disk(str(path), num_shards=3 if kind == "shards" else 1)
    loaded = load_rows(path, Columns(), SORTER, RowNeeds(answers=True))
    assert [row.prompt for row in loaded.rows] == wanted
    assert [row.answer for row in loaded.rows] == [str(prompt).removeprefix("Sort: ") for prompt in wanted]


def test_data_sets_of_neighbouring_seeds_share_no_task() -> None:
    rows = run_path(str(GYM_TASKS))["rows"]
    first, second = ({row["prompt"] for row in rows("chain_sum", 50, seed)} for seed in (0, 1))
    assert len(first & second) < 5  # "1 + 5" is drawn by chance


def test_tasks_of_reasoning_gym_are_rows_and_are_judged_by_it(tmp_path: Path) -> None:
    score, out = run_path(str(GYM_TASKS))["score"], tmp_path / "tasks.jsonl"
    command = [sys.executable, str(GYM_TASKS), "chain_sum", "--size", "5", "-o", str(out)]
    subprocess.run(command, check=True, timeout=scale_seconds(120))
    loaded = load_rows(out, Columns(), SORTER, RowNeeds(answers=True))
    assert len(loaded.rows) == 5
    for row in loaded.rows:
        others = json.loads(row.others)
        assert (
            score(others["data_source"], f"<answer>{row.answer}</answer>", str(row.answer), others["extra_info"]) == 1
        )
        assert score(others["data_source"], "<answer>no</answer>", str(row.answer), others["extra_info"]) < 1
