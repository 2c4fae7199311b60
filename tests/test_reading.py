"""One guarded way to open files: no pipe, no device, no more bytes than were allowed, lines one at a time."""

import os
import tracemalloc
from pathlib import Path

import pytest

from rlplan.errors import SpecError
from rlplan.reading import MAX_JSON_VALUES, check_values, open_regular, read_bytes, read_lines, read_records, read_text


@pytest.fixture(params=["a pipe", "a device", "a link to a device", "a terminal"])
def endless(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    path = tmp_path / "file"
    if request.param == "a pipe":
        os.mkfifo(path)
    elif request.param == "a link to a device":
        path.symlink_to("/dev/zero")
    else:
        return Path("/dev/zero" if request.param == "a device" else "/dev/ptmx")
    return path


@pytest.mark.timeout(20)
def test_what_may_have_no_end_is_refused_before_a_byte_is_read(endless: Path) -> None:
    for read in (read_bytes, read_text, read_lines):
        with pytest.raises(SpecError, match=r"the job file is a pipe or a device[\s\S]*rule: a regular file"):
            list(read(endless, "the job file", limit=100))


def test_a_file_is_read_up_to_its_limit_and_no_further(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"12345\n" * 10)
    assert read_bytes(path, "it", limit=60) == path.read_bytes()
    assert len(list(read_lines(path, "it", limit=60, max_line=6))) == 10
    for read in (read_bytes, read_text, read_lines):
        with pytest.raises(SpecError, match="it has more than 59 bytes"):
            list(read(path, "it", limit=59))
    with pytest.raises(SpecError, match="line 1 of it has more than 5 bytes"):
        list(read_lines(path, "it", limit=60, max_line=5))


def test_a_sparse_file_of_gigabytes_takes_no_memory(tmp_path: Path) -> None:
    path = tmp_path / "file"
    with path.open("wb") as file:
        file.truncate(1 << 33)
    tracemalloc.start()
    for limit in (1 << 20, 1 << 34):
        with pytest.raises(SpecError, match="has more than"):
            list(read_lines(path, "it", limit=limit, max_line=1 << 20))
    assert tracemalloc.get_traced_memory()[1] < 1 << 23
    tracemalloc.stop()


def test_a_file_that_fails_while_it_is_read_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with (
        pytest.raises(SpecError, match=r"it cannot be read: Input[\s\S]*where: .*file"),
        open_regular(tmp_path / "file", "it"),
    ):
        raise OSError(5, "Input/output error")
    with pytest.raises(SpecError, match="it cannot be read: embedded null"):
        read_text(Path("a\0b"), "it")


def test_records_are_made_line_by_line_and_a_torn_last_one_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b'{"a": 1}\n\n{"a": 2}\n{"a": ')
    assert list(read_records(path, "it", lambda row: row["a"], limit=100)) == [1, 2]
    for damage in (b"5", b"[1]", b'{"b": 1}', b"{", b"\xff", b"[" * 100_000, b"[" + b"{}," * MAX_JSON_VALUES):
        path.write_bytes(b'{"a": 1}\n' + damage + b'\n{"a": 2}\n')
        with pytest.raises(SpecError, match=r"it is damaged: not a record[\s\S]*file, line 2"):
            list(read_records(path, "it", lambda row: row["a"], limit=1 << 25))


def test_json_of_too_many_values_is_refused_before_it_is_parsed() -> None:
    check_values("[" + "1," * (MAX_JSON_VALUES - 1))
    with pytest.raises(ValueError, match="more than 4000000 values"):
        check_values("[" + "1," * MAX_JSON_VALUES)


def test_a_missing_file_is_answered_with_the_nearest_one_of_its_kind(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").touch()
    for name in ("jobb.yaml", "job.yml"):
        with pytest.raises(SpecError, match="is missing") as caught:
            read_text(tmp_path / name, "the job file")
        assert str(tmp_path / "job.yaml") in caught.value.way_out
