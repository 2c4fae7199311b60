"""Hostile scripts and configurations: each is answered within 2 s of processor time, and none is executed."""

import resource
from collections.abc import Callable
from pathlib import Path

import pytest

from rlplan.containment import BUG, READING, Budget, read_contained
from rlplan.errors import SpecError
from rlplan.foreign.logs.read import read_log
from rlplan.foreign.source import read_source
from rlplan.foreign.tracebacks.read import read_out_of_memory
from tests.repository.at_night import mark_nightly
from tests.trust.fuzz import MAX_BYTES, MAX_CPU_S, MAX_MESSAGE
from tests.trust.hostile_data import DATA
from tests.trust.hostile_files import LOGS, list_scripts
from tests.trust.readers import Reader, readers, write

SCRIPTS = {name: (file, data) for name, file, data in list_scripts()}
USUAL = (
    "python: range below zero", "python: round to few digits", "python: doubled tuple", "python: doubled bytes",
    "python: format of bytes", "python: text of a large list in a loop", "python: one long call chain",
    "python: an argument of long hexadecimals", "shell: replaced by itself", "shell: a doubled array",
    "shell: cut at the end", "shell: a variable two thousand times", "shell: a recursive function",
    "shell: an index of many digits", "yaml: aliases of aliases", "toml: a long number of TOML", "notebook: deep",
)  # fmt: skip
"""One of each kind; the others are read by night."""
DATA_BY_DAY = (
    "profile: as many keys as are read",
    "rows: many values",
    "tokens: as many tokens as fit",
    "ends: a deep token",
)
"""The costliest of each reader; the others are read by night."""


def test_the_budget_is_within_what_a_file_may_take() -> None:
    assert READING.cpu_s < MAX_CPU_S
    assert READING.memory_bytes <= 400 << 20  # 512 MiB with the interpreter and its modules


def read_hostile_file(folder: Path, name: str) -> tuple[str, float]:
    """(the message, processor seconds)."""
    file, data = SCRIPTS[name]
    (folder / file).write_bytes(data)
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    message = ""
    try:
        read_source(folder / file, None)
    except SpecError as error:
        message = str(error)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert [path.name for path in folder.iterdir()] == [file]
    assert not Path("sprung").exists()
    return message, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


@pytest.mark.parametrize("name", USUAL)
def test_a_hostile_script_is_answered_before_its_budget_ends(tmp_path: Path, name: str) -> None:
    message, cpu_s = read_hostile_file(tmp_path, name)
    assert cpu_s < MAX_CPU_S
    assert BUG not in message
    assert "of processor time and" not in message or "nested too deep" in message


@pytest.mark.nightly
@pytest.mark.parametrize("name", [name for name in SCRIPTS if name not in USUAL])
def test_every_hostile_script_is_answered_within_2_s(tmp_path: Path, name: str) -> None:
    """The budget is the only limit for a few: their parsers take the time before rlplan has anything to count."""
    message, cpu_s = read_hostile_file(tmp_path, name)
    assert cpu_s < MAX_CPU_S
    assert BUG not in message


@pytest.fixture(scope="module")
def readers_by_name(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Reader]:
    return readers(tmp_path_factory.mktemp("readers"))


@pytest.mark.parametrize("name", mark_nightly(DATA, but=DATA_BY_DAY))
def test_every_reader_of_hostile_data_stays_within_2_s_and_512_mib(
    name: str, readers_by_name: dict[str, Reader], tmp_path: Path
) -> None:
    """The child enforces what readers in rlplan's own process have to keep by themselves."""
    reader, file, data = DATA[name]
    path = tmp_path / file
    write(tmp_path, readers_by_name[reader].beside | {file: data})
    budget = Budget(cpu_s=MAX_CPU_S, memory_bytes=MAX_BYTES)

    def read(path: Path) -> None:
        read_contained(lambda: readers_by_name[reader].read(path) and None, path, budget=budget)

    message = find_message(read, path)
    assert "cannot be read: reading it takes" not in message
    assert BUG not in message
    assert len(message) < MAX_MESSAGE


@pytest.mark.parametrize("name", LOGS)
def test_hostile_logs_are_read_in_time_that_grows_with_their_size(tmp_path: Path, name: str) -> None:
    log = tmp_path / "run.log"
    log.write_text(LOGS[name])
    assert "cannot be read" not in find_message(read_log, log)
    assert "cannot be read" not in find_message(read_out_of_memory, log)


def find_message(read: Callable[[Path], object], log: Path) -> str:
    try:
        read(log)
    except SpecError as error:
        return error.what
    return ""


def test_a_log_of_commas_and_one_of_a_very_long_field_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("step,a\n" + "1" * 200_000 + ",2\n")
    with pytest.raises(SpecError, match="it is no CSV: field larger than field limit"):
        read_log(tmp_path / "a.csv")
    (tmp_path / "b.jsonl").write_text('{"' + "time" * 50_000 + '": 1}\n')
    with pytest.raises(SpecError) as refusal:
        read_log(tmp_path / "b.jsonl")
    assert len(str(refusal.value)) < 3_000
