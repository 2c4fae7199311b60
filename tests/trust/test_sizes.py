"""Inputs that are far too large, too deep or too many are refused early: seconds and bytes are bounded."""

import json
import time
from pathlib import Path

import pytest

from rlplan.accuracy.files.reading import MAX_POINTS, read_points
from rlplan.errors import SpecError
from rlplan.reading import MAX_JSON_VALUES
from rlplan.report.run_folder import read_run_folder
from rlplan.runtime.data.layouts import Columns
from rlplan.runtime.data.loading import RowNeeds, load_rows
from rlplan.spec.base import read_json
from rlplan.spec.files.job_file import load_job
from tests.cli.conftest import Call, rlplan
from tests.factories import EXAMPLES, QUICKSTART
from tests.report.factory import make_run
from tests.repository.at_night import mark_nightly

__all__ = ["rlplan"]

MAX_CPU_S = 2.5
"""CPU limit of this process: 2 s, and what a busy machine adds to them."""


@pytest.mark.parametrize("form", mark_nightly(["block", "flow"], but=1))
def test_sixty_thousand_unknown_keys_are_one_message_in_two_seconds(tmp_path: Path, form: str) -> None:
    keys = [f"key_{number}: 1" for number in range(60_000)]
    path = tmp_path / "job.yaml"
    path.write_text("\n".join(keys) if form == "block" else f"{{{', '.join(keys)}}}")
    begun = time.process_time()
    with pytest.raises(SpecError, match="more than 21000 keys and values"):
        load_job(path)
    assert time.process_time() - begun < MAX_CPU_S


def test_a_job_may_hold_a_long_histogram(tmp_path: Path) -> None:
    edges, counts = list(range(9_000)), [1] * 8_999
    histogram = json.dumps({"kind": "histogram", "edges": edges, "counts": counts})
    job = load_job(QUICKSTART, [f"workload.response_lengths={histogram}"])
    assert job.workload.response_lengths is not None


def test_more_points_than_anybody_measures_are_refused_in_two_seconds(tmp_path: Path) -> None:
    point = {"kind": "kv_per_token", "measured": {"value": 1.0, "unit": "GiB/GPU"}}
    (tmp_path / "p.json").write_text(json.dumps([point | {"id": f"p{number}"} for number in range(20_000)]))
    begun = time.process_time()
    with pytest.raises(SpecError, match=f"20000 points[\\s\\S]*at most {MAX_POINTS}"):
        read_points(tmp_path / "p.json")
    assert time.process_time() - begun < MAX_CPU_S


@pytest.mark.parametrize("levels", mark_nightly([33, 3_000, 100_000], but=(33, 100_000)))
def test_an_override_of_many_levels_is_a_usage_error(rlplan: Call, levels: int) -> None:
    for override in (".".join(["a"] * levels) + "=1", "name=" + "[" * levels):
        answer = rlplan("plan", QUICKSTART, override)
        assert answer.exit_code == 2, answer.err[:400]
        assert len(answer.err) < 1000


def test_a_small_table_that_unpacks_to_gigabytes_is_refused(tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet

    path = tmp_path / "rows.parquet"
    prompts = pa.DictionaryArray.from_arrays(pa.array([0] * 8_000), pa.array(["x" * 1_000_000]))
    pa.parquet.write_table(pa.table({"prompt": prompts}), path, compression="zstd")
    assert path.stat().st_size < 200_000
    with pytest.raises(SpecError, match=r"its rows take more than 100 times|too much memory|malloc|realloc"):
        load_rows(path, Columns(), EXAMPLES / "models" / "sorter", RowNeeds())


def test_json_of_too_many_values_is_refused_by_every_reader_of_it(tmp_path: Path) -> None:
    text = "[" + "{}," * MAX_JSON_VALUES + "{}]"
    for name in ("p.json", "rows.json"):
        (tmp_path / name).write_text(text)
    for read in (
        lambda: read_json(tmp_path / "p.json", "it", limit=1 << 30),
        lambda: read_points(tmp_path / "p.json"),
        lambda: load_rows(tmp_path / "rows.json", Columns(), tmp_path, RowNeeds()),
    ):
        with pytest.raises(SpecError, match="more than 4000000 values"):
            read()


@pytest.mark.parametrize("name", ["metrics.jsonl", "timings.jsonl", "trace.jsonl"])
def test_an_endless_file_of_a_run_is_refused_before_it_is_read(tmp_path: Path, name: str) -> None:
    run = make_run(tmp_path / "run")
    (run / name).unlink()
    (run / name).symlink_to("/dev/zero")
    with pytest.raises(SpecError, match="is a pipe or a device"):
        read_run_folder(run)
