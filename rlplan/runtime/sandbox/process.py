"""One sandbox's process: started, fed, read and ended, whatever it does.

In: a command and a program. Out: a Report. The command ends in the runner (runner.py), which speaks first, reports
last, and proves that it is the runner with a nonce that no program inside can know before it has ended.
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

from rlplan.runtime.processes.machine_speed import patiently, scaled
from rlplan.runtime.sandbox.programs import CaseResult, Program, Report, report_without_results

RUNNER = (Path(__file__).parent / "runner.py").read_text(encoding="utf-8")
"""The text of what runs inside."""
_LOADS = """
import marshal, posix
code = b""
while len(code) < {size}:
    code += posix.read(0, {size} - len(code)) or posix._exit(3)
exec(marshal.loads(code))
"""
START_S = 10.0
"""A sandbox, or the process of one of its cases, that is not up by then is broken; scaled, as are the next two."""
GRACE_S = 0.5
"""Beyond a program's own limits, for the runner to report."""
LEAVE_S, END_S = 0.05, 2.0
"""How long a command may take to end by itself; with its children killed."""
_READY, _BEGUN = b"ready\n", b"begun\n"
"""What the runner says when it is up, and when the process of the first case is."""
NOT_BEGUN = "its first case was not up in time"
"""The detail of a timeout of which no program is guilty, unless it can stop its runner."""
_STATUSES = frozenset({"ok", "error", "timeout", "output", "killed", "broken"})
_PIECE = 1 << 16
_LINE = 64
"""Bytes that the head of a case's result has at most."""


Watch = Callable[[int], str | None]
"""Asked with a process id again and again; a status ends it."""


@dataclass(frozen=True, slots=True)
class Runner:
    """The runner as code of one interpreter: what is given to it as flags, and what it then reads first.

    Compiling the text each time would be a third of a small program's time, and taking the code apart as a literal on
    the command line a tenth.
    """

    flags: tuple[str, ...]
    code: bytes


def compile_runner(interpreter: str, before: str = "") -> Runner:
    """The runner for an interpreter: isolated, without site packages, writing nothing. before: code that runs first.

    Raises: OSError, subprocess.SubprocessError when the interpreter does not answer.
    """
    compiles = (
        "import marshal, sys; sys.stdout.buffer.write(marshal.dumps(compile(sys.stdin.read(), 'runner', 'exec')))"
    )
    command, code = [interpreter, "-I", "-S", "-c", compiles], (before + RUNNER).encode()
    done = subprocess.run(command, input=code, capture_output=True, timeout=scaled(START_S), check=True)
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
) -> Report:
    """Run a program by a command that starts the runner, whose code goes in first.

    stop: a pipe's descriptor; its hanging up ends it. A runner
    that ends without a verdict is `killed`: the caller knows whether a program may have done that.
    """
    started = time.monotonic()
    nonce = secrets.token_hex(16).encode()
    try:
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
    start_s = scaled(START_S)
    most = program.limits.total_output_bytes + 1024 * (len(program.cases) + 1)  # that an honest runner says
    talk = _Talk(process, code + _encode_request(program, stops_early, start_s) + nonce, most)
    try:
        status = talk.read_until_done(start_s, program.limits.total_s, watch, stop)
    finally:
        _end(process)
    return _make_report(program, status, talk, nonce, time.monotonic() - started)


class _Talk:
    """The three pipes of a sandbox; reads no more than a limit."""

    def __init__(self, process: "subprocess.Popen[bytes]", to_say: bytes, limit: int) -> None:
        assert process.stdin is not None, "a pipe"
        assert process.stdout is not None, "a pipe"
        assert process.stderr is not None, "a pipe"
        self.process, self.to_say, self.limit = process, memoryview(to_say), limit
        self.heard, self.complaints = bytearray(), bytearray()
        self.stdin, self.stdout, self.stderr = process.stdin, process.stdout, process.stderr
        for pipe in (self.stdin, self.stdout, self.stderr):
            os.set_blocking(pipe.fileno(), False)

    def read_until_done(self, start_s: float, total_s: float, watch: Watch | None, stop: int | None) -> str:
        """Until it says no more (`done`), or `timeout`, `output`, `broken` (stopped from here), or what `watch` says.

        start_s: for the sandbox, and then its first case, to come up. total_s: for the program, once that is up.
        """
        grace_s = scaled(GRACE_S)
        poll = select.poll()
        if stop is not None:
            poll.register(stop, 0)
        poll.register(self.stdin, select.POLLOUT)
        poll.register(self.stdout, select.POLLIN)
        poll.register(self.stderr, select.POLLIN)
        deadline, is_up, has_begun = time.monotonic() + start_s, False, False
        while True:
            for descriptor, _ in poll.poll(20 if watch else 1000 * max(0.0, deadline - time.monotonic()) + 1):
                if descriptor == stop:
                    return "broken"
                if not self._serve(descriptor):
                    poll.unregister(descriptor)
                    if descriptor == self.stdout.fileno():
                        return "done"
            now = time.monotonic()
            if not is_up and self.heard.startswith(_READY):
                is_up, deadline = True, now + start_s + grace_s
            if not has_begun and self.heard.startswith(_READY + _BEGUN):
                has_begun, deadline = True, now + total_s + grace_s
            if now > deadline:
                return "timeout"
            if len(self.heard) > self.limit:
                return "output"
            if is_up and watch is not None and (status := watch(self.process.pid)):
                return status

    def _serve(self, descriptor: int) -> bool:
        """Whether a pipe goes on."""
        return self._say() if descriptor == self.stdin.fileno() else self._hear(descriptor)

    def _say(self) -> bool:
        try:
            self.to_say = self.to_say[os.write(self.stdin.fileno(), self.to_say[:_PIECE]) :]
        except BlockingIOError:
            return True
        except OSError:
            return False
        return len(self.to_say) > 0

    def _hear(self, descriptor: int) -> bool:
        try:
            piece = os.read(descriptor, _PIECE)
        except BlockingIOError:
            return True
        if descriptor == self.stdout.fileno():
            self.heard += piece
        elif len(self.complaints) < _PIECE:
            self.complaints += piece
        return bool(piece)


def _encode_request(program: Program, stops_early: bool, start_s: float) -> bytes:
    """What the runner reads, in Python's own notation, which needs no import inside: first what all cases share."""
    limits = program.limits
    rlimits = {
        "RLIMIT_AS": limits.memory_bytes,
        "RLIMIT_NPROC": limits.num_processes,
        "RLIMIT_FSIZE": limits.file_bytes,
        "RLIMIT_NOFILE": 64,
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
    }
    cases = ({"stdin": case.stdin, "call": case.call} for case in program.cases)
    bodies = (ascii(part).encode("ascii") for part in (request, *cases))
    return b"".join(b"%016x" % len(body) + body for body in bodies)


def _end(process: "subprocess.Popen[bytes]") -> None:
    """End what is left, innermost first, so that everybody is waited for by its own parent: no zombie stays."""
    for pipe in (process.stdin, process.stdout, process.stderr):
        if pipe is not None:
            pipe.close()
    with contextlib.suppress(subprocess.TimeoutExpired):
        leave_s = LEAVE_S if not _kill_children(process.pid) else END_S
        patiently(process.wait, leave_s, subprocess.TimeoutExpired)
    with contextlib.suppress(OSError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _kill_children(pid: int) -> bool:
    """Whether there were any; the first of a process namespace takes everybody in it along."""
    try:
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
    if not talk.heard.startswith(_READY):
        last = talk.complaints.decode("utf-8", "replace").strip().splitlines()
        return report_without_results(program, "broken", (last[-1] if last else f"it said nothing ({status})")[:300], seconds)
    if status == "timeout" and not talk.heard.startswith(_READY + _BEGUN):
        return report_without_results(program, status, NOT_BEGUN, seconds)
    results = _parse_verdict(memoryview(talk.heard)[len(_READY + _BEGUN) :], nonce) if status == "done" else None
    if results is None or len(results) > len(program.cases):
        return report_without_results(program, status if status != "done" else "killed", "", seconds)
    if results and results[-1].status == "broken":
        return report_without_results(program, "broken", results[-1].detail, seconds)
    missing = (CaseResult("missing"),) * (len(program.cases) - len(results))
    return Report("done", (*results, *missing), "", seconds)


def _parse_verdict(text: memoryview | bytes, nonce: bytes) -> tuple[CaseResult, ...] | None:
    """The results, if the runner said them: nonce, length, results, nonce, and nothing else. Copies none but these."""
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
