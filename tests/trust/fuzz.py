"""Fuzz: hostile files for every reader, each read with 2 s of processor time and 512 MiB; what breaks that is printed.

Run as `python -m tests.trust.fuzz COUNT SEED [READER ...]`, a process of its own. For each reader COUNT files are made
of good ones, by the seed, and read by one worker, a fork that is used again for each file. A reader gives a value or
one RlplanError that is short; it starts nothing, connects to nothing, and writes nothing outside of its folder. A
worker that dies or hangs is a fault of the file it read; the next worker goes on behind that file.
"""

import json
import os
import random
import resource
import signal
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlplan import containment
from rlplan.containment import BUG, limit_memory
from rlplan.errors import RlplanError
from tests.trust.mutations import mutate
from tests.trust.readers import Reader, is_inside, readers, table_readers, write

MAX_CPU_S = 2.0
MAX_BYTES = 1 << 29
MAX_MESSAGE = 6_000
MAX_WAIT_S = 60.0
"""Seconds after which a worker that still reads the same file hangs."""
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
        parts = (error.what, error.where, error.rule, error.way_out)
        if BUG in error.what or not all(parts) or len(str(error)) > MAX_MESSAGE:
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


@dataclass
class Worker:
    """The process that reads a reader's files, which are numbered."""

    name: str
    folder: Path
    """Its folder, and beside it the number of the file that it reads and the faults that it found."""
    pid: int = 0
    number: int = 0
    since: float = 0.0

    @property
    def progress(self) -> Path:
        return self.folder.with_name(f"{self.folder.name}.number")

    @property
    def faults(self) -> Path:
        return self.folder.with_name(f"{self.folder.name}.faults")

    def start(self, reader: Reader, count: int, seed: int, watch: Watch) -> None:
        """Fork a worker for the files that are left."""
        self.since = time.monotonic()
        self.pid = os.fork()
        if self.pid:
            return
        try:
            limit_memory(MAX_BYTES)
            self._read_all(reader, count, seed, watch)
            os._exit(0)
        finally:
            os._exit(1)

    def _read_all(self, reader: Reader, count: int, seed: int, watch: Watch) -> None:
        chance = random.Random(f"{seed} {self.name}")
        write(self.folder, reader.beside | {reader.file: reader.seeds[0]})
        with self.faults.open("a") as faults:
            for number in range(count):
                data = reader.mend(mutate(chance.choice(reader.seeds), chance))
                if number < self.number:
                    continue
                self.progress.write_text(str(number))
                if fault := try_reader(reader, data, self.folder, watch):
                    print(self.describe(number, fault, data), file=faults, flush=True)

    def describe(self, number: int, fault: str, data: bytes) -> str:
        """A fault as a line of JSON."""
        return json.dumps({"reader": self.name, "number": number, "fault": fault, "file": repr(data[:2000])})

    def ends(self, reader: Reader) -> bool:
        """Whether all files are read. After a death or a hang, the number of the next file is set."""
        ended, status = os.waitpid(self.pid, os.WNOHANG)
        number = int((self.progress.read_text() if self.progress.exists() else "") or self.number)
        if not ended:
            if number != self.number:
                self.number, self.since = number, time.monotonic()
            if time.monotonic() - self.since < MAX_WAIT_S:
                return False
            os.kill(self.pid, signal.SIGKILL)
            _, status = os.waitpid(self.pid, 0)
        self.pid = 0
        if status == 0:
            return True
        data = (self.folder / reader.file).read_bytes()
        with self.faults.open("a") as faults:
            fault = f"its process ended with {os.waitstatus_to_exitcode(status)}"
            print(self.describe(number, fault, data), file=faults)
        self.number = number + 1
        return False


def fuzz(chosen: dict[str, Reader], count: int, seed: int, watch: Watch) -> list[str]:
    """The faults of all readers, as lines of JSON. As many workers as processors run at once."""
    workers = [Worker(name, watch.folder / f"reader{at}") for at, name in enumerate(chosen)]
    left = list(workers)
    while left:
        for worker in left[: os.cpu_count() or 1]:
            if worker.pid and worker.ends(chosen[worker.name]):
                left.remove(worker)
            elif not worker.pid:
                worker.start(chosen[worker.name], count, seed, watch)
        time.sleep(0.01)
    return [line for worker in workers for line in worker.faults.read_text().splitlines()]


def main() -> None:
    """Print a JSON line for each fault, then one with the counts."""
    count, seed, *names = int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:]
    sys.dont_write_bytecode = True
    containment._is_contained = True  # readers need no process of their own in a worker

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
        for fault in fuzz(chosen, count, seed, watch):
            print(fault)
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = {"readers": len(chosen), "cpu_s": round(used.ru_utime + used.ru_stime, 1)}
    print(json.dumps(done))


if __name__ == "__main__":
    main()
