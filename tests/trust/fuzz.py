"""Fuzz: hostile files for every reader, each read with 2 s of processor time and 512 MiB; what breaks that is printed.

Run as `python -m tests.trust.fuzz COUNT SEED [READER ...]`, a process of its own. For each reader COUNT files are made
of good ones, by the seed, and a tenth of that for those that take 10 ms a file. A reader gives a value or one
RlplanError that is short; it starts nothing, connects to nothing, and writes nothing outside of its folder.
"""

import json
import os
import random
import resource
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from rlplan.errors import RlplanError
from rlplan.runtime.processes.limits import limit_memory
from tests.trust.mutations import mutate
from tests.trust.readers import Reader, is_inside, readers, table_readers, write

MAX_CPU_S = 2.0
MAX_BYTES = 1 << 29
MAX_MESSAGE = 6_000
FORBIDDEN = ("subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "os.spawn", "os.fork", "socket.connect",
             "pickle.find_class", "ctypes.dlopen")  # fmt: skip
WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT


class TooSlowError(BaseException):
    """It took more than its processor time."""


class Watch:
    """Side effects of a reader. folder: where it may write."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.seen, self.is_on = folder, list[str](), False
        sys.addaudithook(self._hear)

    def _hear(self, event: str, arguments: tuple[Any, ...]) -> None:
        if not self.is_on:
            return
        writes = event == "open" and isinstance(arguments[2], int) and arguments[2] & WRITES
        if event in FORBIDDEN or (writes and not is_inside(arguments[0], self.folder)):
            self.seen.append(f"{event} {arguments[:1]}"[:200])


def try_reader(reader: Reader, data: bytes, folder: Path, watch: Watch) -> str:
    """Faults in a reader's handling of a file; empty where all was well."""
    path = folder / reader.file
    path.unlink()  # what an earlier file was mapped from stays whole
    path.write_bytes(data)
    watch.seen.clear()
    begun, fault = time.process_time(), ""
    signal.setitimer(signal.ITIMER_PROF, 2 * MAX_CPU_S)
    watch.is_on = True
    try:
        reader.read(path)
    except RlplanError as error:
        if not error.what or not error.where or not error.rule or not error.way_out or len(str(error)) > MAX_MESSAGE:
            fault = f"a message of {len(str(error))} characters: {str(error)[:300]}"
    except BaseException as error:  # a panic and a MemoryError are found too
        frame, last = error.__traceback__, ""
        while frame:
            last = f"{Path(frame.tb_frame.f_code.co_filename).name}:{frame.tb_lineno}"
            frame = frame.tb_next
        fault = f"{type(error).__name__} at {last}: {str(error)[:200]}"
    finally:
        watch.is_on = False
        signal.setitimer(signal.ITIMER_PROF, 0)
    if (seconds := time.process_time() - begun) > MAX_CPU_S:
        fault = fault or f"{seconds:.1f} s of processor time"
    return fault or "; ".join(watch.seen)


def fuzz(name: str, reader: Reader, count: int, seed: int, watch: Watch) -> list[dict[str, Any]]:
    """The files of a reader that it did not take well: the number, the fault, the file."""
    chance, faults = random.Random(f"{seed} {name}"), list[dict[str, Any]]()
    with tempfile.TemporaryDirectory(dir=watch.folder) as place:
        folder = Path(place)
        write(folder, reader.beside | {reader.file: reader.seeds[0]})
        for number in range(count):
            data = reader.mend(mutate(chance.choice(reader.seeds), chance))
            if fault := try_reader(reader, data, folder, watch):
                faults.append({"reader": name, "number": number, "fault": fault, "file": repr(data[:2000])})
    return faults


def main() -> None:
    """Print a JSON line for each fault, then one with the counts."""
    count, seed, *names = int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:]
    sys.dont_write_bytecode = True

    def stop(*_: object) -> None:
        raise TooSlowError

    signal.signal(signal.SIGPROF, stop)
    with tempfile.TemporaryDirectory() as place:
        watch, chosen = Watch(Path(place).resolve()), readers(Path(place))
        if any(name in ("data: parquet", "data: arrow") for name in names):
            chosen |= table_readers()
        chosen = {name: reader for name, reader in chosen.items() if not names or name in names}
        for name, reader in chosen.items():  # libraries come in with the good files, which must be read
            for good in reader.seeds:
                write(
                    folder := Path(place) / "good" / name.replace("/", "-"),
                    reader.beside | {reader.file: reader.mend(good)},
                )
                reader.read(folder / reader.file)
        limit_memory(MAX_BYTES)
        faults = []
        for name, reader in chosen.items():
            faults += fuzz(name, reader, count // 10 if reader.is_dear else count, seed, watch)
    for fault in faults:
        print(json.dumps(fault))
    used = resource.getrusage(resource.RUSAGE_SELF)
    done = {"readers": len(chosen), "cpu_s": round(used.ru_utime + used.ru_stime, 1)}
    print(json.dumps(done))


if __name__ == "__main__":
    main()
