"""Runs one sandbox's process: starts it, writes its input, reads its output and ends it, whatever the program does.

The command ends in the runner (runner.py), which says that it is ready and reports last. A nonce proves that the report
comes from the runner: it is sent after all cases, and no program inside can know it before it has ended.

In: a command and a program. Out: a Report.
"""

import contextlib
import os
import secrets
import select
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from rlplan.runtime.processes.machine_speed import scale_seconds, wait_patiently
from rlplan.runtime.sandbox.programs import CaseResult, Program, Report, report_without_results

RUNNER = (Path(__file__).parent / "runner.py").read_text(encoding="utf-8")
"""Source of the runner, which starts inside the sandbox."""
_LOADS = """
import marshal, posix
code = b""
while len(code) < {size}:
    code += posix.read(0, {size} - len(code)) or posix._exit(3)
exec(marshal.loads(code))
"""
START_S = 10.0
"""Seconds for a sandbox, or for the process of one case, to start; scaled by machine speed, like the next two."""
GRACE_S = 0.5
"""Seconds for the runner to report after the program's own limits have passed."""
LEAVE_S, END_S = 0.05, 2.0
"""Seconds for a command to exit by itself, and to exit once its children were killed."""
_READY, _BEGUN = b"ready\n", b"begun\n"
"""Messages of the runner: it is up; the process of the first case is up."""
NOT_BEGUN = "its first case did not start in time"
"""Detail of a timeout that a program can cause only where it can stop its runner."""
_STATUSES = frozenset({"ok", "error", "timeout", "output", "killed", "broken"})
_PIECE = 1 << 16
_LINE = 64
"""Most bytes of the header line of a case's result."""


Watch = Callable[[int], str | None]
"""Called repeatedly with a process id; a returned status ends the process."""


@dataclass(frozen=True, slots=True)
class Runner:
    """The runner, compiled once for one interpreter.

    Compiling the source for each program would take a third of a small program's time; a literal on the command line
    would take a tenth.
    """

    flags: tuple[str, ...]
    """Options of the interpreter; the last one is code that loads `code` from standard input."""

    code: bytes
    """The marshalled code object, sent first on standard input."""


def compile_runner(interpreter: str, before: str = "") -> Runner:
    """Compile the runner for an isolated interpreter without site packages. before: code that runs before the runner.

    Raises: OSError, subprocess.SubprocessError when the interpreter does not start.
    """
    compiles = (
        "import marshal, sys; sys.stdout.buffer.write(marshal.dumps(compile(sys.stdin.read(), 'runner', 'exec')))"
    )
    command, code = [interpreter, "-I", "-S", "-c", compiles], (before + RUNNER).encode()
    done = subprocess.run(command, input=code, capture_output=True, timeout=scale_seconds(START_S), check=True)
    return Runner(("-I", "-S", "-B", "-X", "utf8", "-c", _LOADS.format(size=len(done.stdout))), done.stdout)


def run_command(
    command: Sequence[str],
    code: bytes,
    program: Program,
    *,
    pass_fds: tuple[int, ...] = (),
    stops_early: bool = False,
    watch: Watch | None = None,
    stop: int | None = None,
    owns_folder: bool = True,
) -> Report:
    """Run a program through a command that starts the runner, and send the runner's code first.

    stop: descriptor of a pipe whose hang-up ends the run. owns_folder: whether the runner starts in a folder of its
    own, which it empties between cases. A runner without a verdict is reported as `killed`; the caller knows whether a
    program can have killed it.
    """
    started = time.monotonic()
    nonce = secrets.token_hex(16).encode()
    try:
        # An empty environment and the root folder: neither secrets nor the run folder reach the sandbox's own tools.
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={},
            cwd="/",
            pass_fds=pass_fds,
            start_new_session=True,
        )
    except OSError as error:
        return report_without_results(program, "broken", f"{command[0]} does not start: {error.strerror}")
    start_s = scale_seconds(START_S)
    # An honest runner writes the cases' output and, per case, a header and an error line of at most 300 characters.
    max_output_bytes = program.limits.total_output_bytes + 1024 * (len(program.cases) + 1)
    talk = _Talk(
        process,
        code + _encode_request(program, stops_early, start_s, owns_folder=owns_folder) + nonce,
        max_output_bytes,
    )
    try:
        status = talk.read_until_done(start_s, program.limits.total_s, watch, stop)
    finally:
        _end(process)
    return _make_report(program, status, talk, nonce, time.monotonic() - started)


class _Talk:
    """The three pipes of a sandbox, read up to a limit."""

    def __init__(self, process: "subprocess.Popen[bytes]", unsent: bytes, limit: int) -> None:
        assert process.stdin is not None, "a pipe"
        assert process.stdout is not None, "a pipe"
        assert process.stderr is not None, "a pipe"
        self.process, self.unsent, self.limit = process, memoryview(unsent), limit
        self.output, self.errors = bytearray(), bytearray()
        self.stdin, self.stdout, self.stderr = process.stdin, process.stdout, process.stderr
        for pipe in (self.stdin, self.stdout, self.stderr):
            os.set_blocking(pipe.fileno(), False)

    def read_until_done(self, start_s: float, total_s: float, watch: Watch | None, stop: int | None) -> str:
        """Serve the pipes until the process ends. Returns: `done`, `timeout`, `output`, `broken` or watch's status.

        start_s: limit for the sandbox to start, and again for its first case. total_s: limit from then on.
        `broken` means that the sandbox was closed.
        """
        grace_s = scale_seconds(GRACE_S)
        poll = select.poll()
        if stop is not None:
            poll.register(stop, 0)
        poll.register(self.stdin, select.POLLOUT)
        poll.register(self.stdout, select.POLLIN)
        poll.register(self.stderr, select.POLLIN)
        deadline, is_up, has_begun = time.monotonic() + start_s, False, False
        while True:
            # A watch needs a look every 20 ms (BETWEEN_LOOKS); otherwise nothing happens before the deadline.
            for descriptor, _ in poll.poll(20 if watch else 1000 * max(0.0, deadline - time.monotonic()) + 1):
                if descriptor == stop:
                    return "broken"
                if not self._serve(descriptor):
                    poll.unregister(descriptor)
                    if descriptor == self.stdout.fileno():
                        return "done"
            now = time.monotonic()
            if not is_up and self.output.startswith(_READY):
                is_up, deadline = True, now + start_s + grace_s
            if not has_begun and self.output.startswith(_READY + _BEGUN):
                has_begun, deadline = True, now + total_s + grace_s
            if now > deadline:
                return "timeout"
            if len(self.output) > self.limit:
                return "output"
            if is_up and watch is not None and (status := watch(self.process.pid)):
                return status

    def _serve(self, descriptor: int) -> bool:
        """Serve one pipe; whether it stays open."""
        return self._write() if descriptor == self.stdin.fileno() else self._read(descriptor)

    def _write(self) -> bool:
        try:
            self.unsent = self.unsent[os.write(self.stdin.fileno(), self.unsent[:_PIECE]) :]
        except BlockingIOError:
            return True
        except OSError:
            return False
        return len(self.unsent) > 0

    def _read(self, descriptor: int) -> bool:
        try:
            piece = os.read(descriptor, _PIECE)
        except BlockingIOError:
            return True
        if descriptor == self.stdout.fileno():
            self.output += piece
        elif len(self.errors) < _PIECE:
            self.errors += piece
        return bool(piece)


def _encode_request(program: Program, stops_early: bool, start_s: float, *, owns_folder: bool) -> bytes:
    """The runner's input as Python literals, which need no import inside: the shared request, then the cases."""
    limits = program.limits
    rlimits = {
        "RLIMIT_AS": limits.memory_bytes,
        "RLIMIT_NPROC": limits.num_processes,
        "RLIMIT_FSIZE": limits.file_bytes,
        "RLIMIT_NOFILE": 64,  # closerange(4, 64) in the runner depends on it
        "RLIMIT_CORE": 0,
        "RLIMIT_MEMLOCK": 0,
        "RLIMIT_MSGQUEUE": 0,
    }
    request = {
        "source": program.source,
        "num_cases": len(program.cases),
        "start_s": start_s,
        "case_s": limits.case_s,
        "output_bytes": limits.output_bytes,
        "total_output_bytes": limits.total_output_bytes,
        "rlimits": rlimits,
        "stops_early": stops_early,
        "owns_folder": owns_folder,
    }
    cases = ({"stdin": case.stdin, "call": case.call} for case in program.cases)
    bodies = (ascii(part).encode("ascii") for part in (request, *cases))
    return b"".join(b"%016x" % len(body) + body for body in bodies)


def _end(process: "subprocess.Popen[bytes]") -> None:
    """End the remaining processes, innermost first: each parent then reaps its child, and no zombie stays."""
    for pipe in (process.stdin, process.stdout, process.stderr):
        if pipe is not None:
            pipe.close()
    with contextlib.suppress(subprocess.TimeoutExpired):
        leave_s = LEAVE_S if not _kill_children(process.pid) else END_S
        wait_patiently(process.wait, leave_s, subprocess.TimeoutExpired)
    with contextlib.suppress(OSError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _kill_children(pid: int) -> bool:
    """Kill the children; whether there were any. Killing process 1 of a namespace ends all processes in it."""
    try:
        # bwrap stays outside as the parent of the sandbox's process 1, so its child is the one to kill first.
        children = [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return False
    for child in children:
        with contextlib.suppress(OSError):
            os.kill(child, signal.SIGKILL)
    return bool(children)


def _make_report(program: Program, status: str, talk: _Talk, nonce: bytes, seconds: float) -> Report:
    if status == "broken":
        return report_without_results(program, status, "it was closed", seconds)
    if not talk.output.startswith(_READY):
        last = talk.errors.decode("utf-8", "replace").strip().splitlines()
        return report_without_results(program, "broken", (last[-1] if last else f"no output ({status})")[:300], seconds)
    if status == "timeout" and not talk.output.startswith(_READY + _BEGUN):
        return report_without_results(program, status, NOT_BEGUN, seconds)
    results = _parse_verdict(memoryview(talk.output)[len(_READY + _BEGUN) :], nonce) if status == "done" else None
    if results is None or len(results) > len(program.cases):
        return report_without_results(program, status if status != "done" else "killed", "", seconds)
    if results and results[-1].status == "broken":
        return report_without_results(program, "broken", results[-1].detail, seconds)
    missing = (CaseResult("missing"),) * (len(program.cases) - len(results))
    return Report("done", (*results, *missing), "", seconds)


def _parse_verdict(text: memoryview | bytes, nonce: bytes) -> tuple[CaseResult, ...] | None:
    """The results, if the runner wrote them: nonce, length, results, nonce and nothing else. Copies results only."""
    size, head = len(nonce), len(nonce) + 16
    if len(text) < head + size or text[:size] != nonce or text[-size:] != nonce:
        return None
    end = len(text) - size
    if int(bytes(text[size:head]), 16) != end - head:
        return None
    results, at = [], head
    while at < end:
        line = bytes(text[at : min(end, at + _LINE)]).partition(b"\n")[0]
        status, detail_size, output_size = line.decode("ascii").split(" ")
        detail_at = at + len(line) + 1
        output_at = detail_at + int(detail_size, 16)
        at = output_at + int(output_size, 16)
        assert status in _STATUSES, "the runner is ours"
        detail = bytes(text[detail_at:output_at]).decode("utf-8", "replace")
        results.append(CaseResult(status, bytes(text[output_at:at]), detail))
    return tuple(results)
