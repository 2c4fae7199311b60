"""The runner: the first process inside a sandbox, which runs a program's cases one by one and reports their results.

It has the standard library only; the interpreter gets it as text. It reads a request from standard input, says that it
is ready, forks a child for each case, and reports. Children inherit neither its input nor its output, and their folder
is empty where it is the sandbox's own. Each case is read when the earlier ones are done, so no case sees the input of a
later one. The nonce that makes a report valid comes last on the input. It is read when all children are done, so no
child's memory ever held it.

A child says that it is up before it loads the program, and cannot take that back. A case whose child did not come up
is therefore `broken`, unless the program's earlier cases can have caused it.

Annotations with brackets or bars are quoted: the interpreter may be as old as Python 3.9, and `typing` takes 5 ms.
"""

import posix as os  # importing `os` itself takes a millisecond
import resource
import select
import sys
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    import signal as _signal
    from collections.abc import Callable, Iterator
    from typing import Any, NoReturn, TypedDict

    class Request(TypedDict):
        """Settings shared by all cases; written by `_encode_request` of process.py."""

        source: str
        num_cases: int
        start_s: float
        case_s: float
        output_bytes: int
        total_output_bytes: int
        rlimits: dict[str, int]
        stops_early: bool
        owns_folder: bool
        """Whether the folder at the start is the sandbox's own, and empty at first."""

    class Case(TypedDict):
        """One case."""

        stdin: bytes
        """Standard input of the program."""

        call: str | None
        """Expression whose value is returned; None runs the program for its output."""

else:
    import _signal  # importing `signal` takes 5 ms, most of them for `enum`

SIGINT, SIGKILL, SIGXCPU, ENOMEM = 2, 9, 24, 12
_UP = b"u"
"""First byte that a child writes to the report pipe."""


def _read_exactly(size: int) -> bytes:
    data = b""
    while len(data) < size:
        piece = os.read(0, size - len(data))
        if not piece:
            os._exit(3)
        data += piece
    return data


def _read_part() -> bytes:
    """The next part of the input, which is preceded by its length."""
    return _read_exactly(int(_read_exactly(16), 16))


def _write_all(descriptor: int, data: bytes) -> None:
    while data:
        data = data[os.write(descriptor, data) :]


def _encode(value: object, depth: int = 0) -> bytes:
    if value is None or value is True or value is False:
        return {None: b"n", True: b"t", False: b"f"}[value]
    if depth > 90:
        raise ValueError("the value is nested too deep")
    if isinstance(value, int):
        return b"i" + hex(int.__index__(value)).encode() + b";"
    if isinstance(value, float):
        return b"d" + float.hex(value).encode() + b";"
    if isinstance(value, complex):
        parts = complex.__complex__(value)
        return b"c" + f"{float.hex(parts.real)},{float.hex(parts.imag)};".encode()
    if isinstance(value, str):
        data = str.encode(value, "utf-8", "surrogatepass")
        return b"s%d:" % len(data) + data
    if isinstance(value, (bytes, bytearray)):
        return b"b%d:" % len(value) + bytes(value)
    # The built-in type's own iterator: a subclass in the program could replace __iter__ and run code here.
    kinds: tuple[tuple[type, bytes, Callable[[Any], Iterator[object]]], ...] = (
        (list, b"l", list.__iter__),
        (tuple, b"u", tuple.__iter__),
        (set, b"e", set.__iter__),
        (frozenset, b"e", frozenset.__iter__),
    )
    for kind, mark, iterate in kinds:
        if isinstance(value, kind):
            items = list(iterate(value))
            return mark + b"%d;" % len(items) + b"".join(_encode(item, depth + 1) for item in items)
    if isinstance(value, dict):
        pairs = [part for pair in dict.items(value) for part in pair]
        return b"m%d;" % (len(pairs) // 2) + b"".join(_encode(part, depth + 1) for part in pairs)
    raise TypeError(f"a {type(value).__name__} cannot be returned")


def _set_up(request: "Request", pipes: "tuple[int, int, int]") -> None:
    """Prepare a child before it loads the program."""
    stdin, out, report = pipes
    os.setsid()  # its own process group, which `_kill` ends as a whole
    os.dup2(stdin, 0)
    os.dup2(out, 1)
    os.dup2(os.open("/dev/null", os.O_WRONLY), 2)
    os.dup2(report, 3)
    os.closerange(4, 64)  # the runner's own pipes; RLIMIT_NOFILE is 64
    _signal.signal(SIGINT, _signal.default_int_handler)
    cpu = max(1, int(request["case_s"] + 0.999))  # RLIMIT_CPU takes whole seconds
    resource.setrlimit(resource.RLIMIT_CPU, (cpu, cpu))
    sys.stdin = open(0, encoding="utf-8", errors="replace", closefd=False)  # noqa: SIM115
    sys.stdout = open(1, "w", encoding="utf-8", errors="replace", closefd=False)  # noqa: SIM115


def _run_child(request: "Request", case: "Case", pipes: "tuple[int, int, int]") -> "NoReturn":
    """Run one case. Exit codes: 0 success, 1 an error that is written to the report pipe."""
    try:
        _set_up(request, pipes)
        _write_all(3, _UP)
    except BaseException:
        os._exit(1)
    try:
        module = type(sys)("__main__" if case["call"] is None else "solution")
        sys.modules[module.__name__], space = module, module.__dict__
        space["exit"] = space["quit"] = sys.exit
        exec(compile(request["source"], "solution.py", "exec"), space)
        if case["call"] is not None:
            value = _encode(eval(compile(case["call"], "test", "eval"), space))
            sys.stdout.flush()
            _write_all(3, b"v" + value)
        sys.stdout.flush()
    except SystemExit as error:
        sys.stdout.flush()
        if case["call"] is not None or error.code not in (None, 0):
            _write_all(3, b"xSystemExit: %s" % str(error.code)[:200].encode("utf-8", "replace"))
            os._exit(1)
    except BaseException as error:
        _write_all(3, b"x" + f"{type(error).__name__}: {str(error)[:300]}".encode("utf-8", "replace"))
        os._exit(1)
    os._exit(0)


def _kill(pid: int) -> None:
    for target in (os.killpg, os.kill):  # a child that has not called setsid yet has no group of its own
        try:  # noqa: SIM105  # importing contextlib takes time
            target(pid, SIGKILL)
        except OSError:
            pass


class _Watched:
    """A running child: its input is written, its output read, and it is ended at a limit."""

    def __init__(self, pid: int, data: bytes, pipes: "tuple[int, int, int]", limit: int) -> None:
        self.pid, self.data, self.limit = pid, data, limit
        self.feed, self.out, self.report = pipes
        self.end = os.pidfd_open(pid)
        self.received = {self.out: b"", self.report: b""}
        self.status, self.has_ended, self.feeds, self.is_up = "ok", False, True, False
        self.poll = select.poll()
        for descriptor in (*pipes, self.end):
            os.set_blocking(descriptor, False)
            self.poll.register(descriptor, select.POLLOUT if descriptor == self.feed else select.POLLIN)

    def watch(self, start_s: float, case_s: float, begin: "Callable[[], None]") -> None:
        """Serve the child until it ends or exceeds a limit. Its time starts when it is up; `begin` is called then."""
        deadline, has_begun = time.monotonic() + start_s, False
        while self.status == "ok" and not self.has_ended:
            left = deadline - time.monotonic()
            for descriptor, _ in self.poll.poll(max(0, min(1000, 1000 * left)) + 1):
                self._serve(descriptor)
            if self.is_up and not has_begun:
                has_begun, deadline = True, time.monotonic() + case_s
                begin()
            elif not self.has_ended and left < 0:
                self.status = "timeout"

    def _serve(self, descriptor: int) -> None:
        if descriptor == self.feed:
            self._feed()
        elif descriptor == self.end:
            self.has_ended = True
        elif not self._take(descriptor):
            self.poll.unregister(descriptor)
        elif len(self.received[descriptor]) > self.limit:
            self.status = "output"

    def _feed(self) -> None:
        try:
            self.data = self.data[os.write(self.feed, self.data[:65536]) :] if self.data else b""
        except BlockingIOError:
            return
        except OSError:
            self.data = b""
        if not self.data:
            self.poll.unregister(self.feed)
            os.close(self.feed)
            self.feeds = False

    def _take(self, descriptor: int) -> bool:
        try:
            piece = os.read(descriptor, 65536)
        except OSError:
            return False
        is_open = bool(piece)
        if descriptor == self.report and not self.is_up and is_open:
            self.is_up, piece = True, piece[len(_UP) :]
        self.received[descriptor] += piece
        return is_open

    def close(self) -> "tuple[str, bytes, bytes]":
        """End the child. Returns: (status, printed, reported)."""
        _kill(self.pid)
        code = os.waitpid(self.pid, 0)[1]
        for descriptor in (self.out, self.report):  # output that it wrote before it ended
            while len(self.received[descriptor]) <= self.limit and self._take(descriptor):
                pass
            os.close(descriptor)
        for descriptor in (self.feed, self.end) if self.feeds else (self.end,):
            os.close(descriptor)
        printed, reported = self.received[self.out], self.received[self.report]
        status = "output" if self.status == "ok" and max(len(printed), len(reported)) > self.limit else self.status
        if status == "ok" and os.WIFSIGNALED(code):
            status = "timeout" if os.WTERMSIG(code) == SIGXCPU else "killed"
        if status == "ok" and os.WEXITSTATUS(code):
            return "error", printed, reported if reported[:1] == b"x" else b"xexit code %d" % os.WEXITSTATUS(code)
        return status, printed, reported


def _end_others() -> None:
    """End the processes that a case left running; only as process 1 of a namespace, where all are our children."""
    if os.getpid() != 1:
        return
    try:
        os.kill(-1, SIGKILL)
        while True:
            os.waitpid(-1, 0)
    except OSError:
        pass


def _empty_folder(folder: bytes, mode: int) -> bool:
    """Empty a folder for the next case; return whether it worked.

    Nested folders are flattened first, because the program chose their depth.
    """
    number = time.monotonic_ns()
    try:
        if os.stat(folder).st_mode != mode:  # the program may have made it read-only
            os.chmod(folder, mode & 0o7777)
        while names := os.listdir(folder):
            for name in names:
                try:
                    os.unlink(folder + b"/" + name)
                    continue
                except OSError:  # a folder
                    os.chmod(folder + b"/" + name, 0o700)
                for inner in os.listdir(folder + b"/" + name):
                    source, number = folder + b"/" + name + b"/" + inner, number + 1
                    if os.lstat(source).st_mode & 0o170000 == 0o040000:  # a folder moves only when it can be written
                        os.chmod(source, 0o700)
                    os.rename(source, folder + b"/.%d" % number)
                os.rmdir(folder + b"/" + name)
    except OSError:
        return False
    return True


def _judge_failed_start(has_run: bool, error: "int | None") -> str:
    """The status of a case whose child did not come up: `killed` if earlier cases can have caused it, else `broken`.

    Earlier cases can cause anything where their processes may still run, and a lack of memory through files they left.
    """
    return "killed" if has_run and (os.getpid() != 1 or error == ENOMEM) else "broken"


def _run_case(
    request: "Request", case: "Case", limit: int, has_run: bool, begin: "Callable[[], None]"
) -> "tuple[str, bytes, bytes]":
    """Run one case. has_run: whether an earlier case has run. begin: called when this one is up."""
    ends: list[int] = []
    try:
        for _ in range(3):
            ends += os.pipe()
        pid = os.fork()
    except OSError as error:
        for descriptor in ends:
            os.close(descriptor)
        return _judge_failed_start(has_run, error.errno), b"", str(error).encode()
    stdin_read, stdin_write, out_read, out_write, report_read, report_write = ends
    if pid == 0:
        _run_child(request, case, (stdin_read, out_write, report_write))
    for descriptor in (stdin_read, out_write, report_write):
        os.close(descriptor)
    child = _Watched(pid, case["stdin"], (stdin_write, out_read, report_read), limit)
    child.watch(request["start_s"], request["case_s"], begin)
    status, printed, reported = child.close()
    if not child.is_up:
        return _judge_failed_start(has_run, 0), b"", b"the process of a case did not come up: " + status.encode()
    if status == "error":
        return status, b"", reported[1:]
    if status != "ok":
        return status, b"", b""
    if case["call"] is None:
        return status, printed, b""
    return (
        (status, reported[1:], b"") if reported[:1] == b"v" else ("killed", b"", b"it ended before it returned a value")
    )


def main() -> None:
    # A program can send its process 1 only signals that process 1 handles, and Python handles SIGINT by default.
    _signal.signal(SIGINT, _signal.SIG_IGN)
    request: Request = eval(_read_part())
    for name, value in request["rlimits"].items():
        number = getattr(resource, name)
        hard = resource.getrlimit(number)[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(number, (value, value))
    _write_all(1, b"ready\n")
    results: list[tuple[str, bytes, bytes]] = []
    left, unsaid = request["total_output_bytes"], [b"begun\n"]

    def begin() -> None:
        while unsaid:
            _write_all(1, unsaid.pop())

    folder, mode = os.getcwdb(), os.stat(".").st_mode
    for index in range(request["num_cases"]):
        results.append(
            _run_case(request, eval(_read_part()), min(left, request["output_bytes"]), len(results) > 0, begin)
        )
        begin()  # called even if no child came up, so that the driver waits for the report
        left -= sum(map(len, results[-1][1:]))
        _end_others()
        is_last = index + 1 == request["num_cases"]
        if not is_last and request["owns_folder"] and not _empty_folder(folder, mode):
            results[-1] = "killed", b"", b"the files that it left cannot be removed"
        if results[-1][0] == "broken" or (results[-1][0] != "ok" and request["stops_early"]):
            for _ in range(index + 1, request["num_cases"]):
                _read_part()
            break
    nonce = _read_exactly(32)
    body = b"".join(
        b"%s %x %x\n" % (status.encode(), len(detail), len(output)) + detail + output
        for status, output, detail in results
    )
    _write_all(1, nonce + b"%016x" % len(body) + body + nonce)
    os._exit(0)


main()
