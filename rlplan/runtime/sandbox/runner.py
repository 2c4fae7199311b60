"""Runs inside the sandbox, alone with the standard library: it is given to the interpreter as text.

It reads a request from its standard input, says that it is ready, starts the program anew for each case in a child of
its own, and reports. Children inherit neither its input nor its output. A case is read when those before it are done:
none is given the input of a later one. The nonce that makes a report valid is the last thing on the input, and is read
when all children are done: no memory that a child ever had holds it.

A case whose child did not come up is `broken` where the program cannot be to blame: a child says that it has come up
before it looks at the program, and what has been said cannot be taken back.

Annotations with brackets or bars are quoted: the interpreter may be as old as Python 3.9, and `typing` takes 5 ms.
"""

import posix as os  # `os` itself takes a millisecond
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
        """What all cases share: see `_request` of process.py, which writes it."""

        source: str
        num_cases: int
        start_s: float
        case_s: float
        output_bytes: int
        total_output_bytes: int
        rlimits: dict[str, int]
        stops_early: bool

    class Case(TypedDict):
        """One case."""

        stdin: bytes
        """What the program reads."""

        call: str | None
        """The expression whose value is given back; None runs the program for its output."""

else:
    import _signal  # `signal` takes 5 ms, most of them for `enum`

SIGINT, SIGKILL, SIGXCPU, ENOMEM = 2, 9, 24, 12
_LOOK_MS = 5
"""Between two looks at a child that no descriptor tells of."""
_UP = b"u"
"""The first that a child says on the report pipe."""


def _read_exactly(size: int) -> bytes:
    data = b""
    while len(data) < size:
        piece = os.read(0, size - len(data))
        if not piece:
            os._exit(3)
        data += piece
    return data


def _read_part() -> bytes:
    """A part of the input, as it is: its length stands before it."""
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
    # Each kind's own iterator, which a class of the program's cannot replace; it takes values of its kind alone.
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
    raise TypeError(f"a {type(value).__name__} cannot be given back")


def _set_up(request: "Request", pipes: "tuple[int, int, int]") -> None:
    """All that a child does before it looks at the program."""
    stdin, out, report = pipes
    os.setsid()
    os.dup2(stdin, 0)
    os.dup2(out, 1)
    os.dup2(os.open("/dev/null", os.O_WRONLY), 2)
    os.dup2(report, 3)
    os.closerange(4, 64)
    _signal.signal(SIGINT, _signal.default_int_handler)
    cpu = max(1, int(request["case_s"] + 0.999))
    resource.setrlimit(resource.RLIMIT_CPU, (cpu, cpu))
    sys.stdin = open(0, encoding="utf-8", errors="replace", closefd=False)  # noqa: SIM115
    sys.stdout = open(1, "w", encoding="utf-8", errors="replace", closefd=False)  # noqa: SIM115


def _run_child(request: "Request", case: "Case", pipes: "tuple[int, int, int]") -> "NoReturn":
    """One case. Exit codes: 0 well, 1 an error that is said on the report pipe."""
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
    for target in (os.killpg, os.kill):
        try:  # noqa: SIM105  # contextlib would have to be imported
            target(pid, SIGKILL)
        except OSError:
            pass


class _Watched:
    """A child at work: fed, read, and ended at a limit."""

    def __init__(self, pid: int, data: bytes, pipes: "tuple[int, int, int]", limit: int) -> None:
        self.pid, self.data, self.limit = pid, data, limit
        self.feed, self.out, self.report = pipes
        try:
            self.end = os.pidfd_open(pid)
        except OSError:  # gVisor has none of these: the child is then looked at
            self.end = -1
        self.got = {self.out: b"", self.report: b""}
        self.status, self.has_ended, self.feeds, self.is_up = "ok", False, True, False
        self.poll = select.poll()
        for descriptor in self._list_descriptors(*pipes):
            os.set_blocking(descriptor, False)
            self.poll.register(descriptor, select.POLLOUT if descriptor == self.feed else select.POLLIN)

    def watch(self, start_s: float, case_s: float, begin: "Callable[[], None]") -> None:
        """Until it has ended, or has said or taken too much. Its time begins once it is up, and `begin` is called."""
        deadline, has_begun = time.monotonic() + start_s, False
        while self.status == "ok" and not self.has_ended:
            left = deadline - time.monotonic()
            for descriptor, _ in self.poll.poll(max(0, min(1000 if self.end >= 0 else _LOOK_MS, 1000 * left)) + 1):
                self._serve(descriptor)
            if self.end < 0 and os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT):
                self.has_ended = True
            if self.is_up and not has_begun:
                has_begun, deadline = True, time.monotonic() + case_s
                begin()
            elif not self.has_ended and left < 0:
                self.status = "timeout"

    def _list_descriptors(self, *pipes: int) -> "tuple[int, ...]":
        return pipes if self.end < 0 else (*pipes, self.end)

    def _serve(self, descriptor: int) -> None:
        if descriptor == self.feed:
            self._feed()
        elif descriptor == self.end:
            self.has_ended = True
        elif not self._take(descriptor):
            self.poll.unregister(descriptor)
        elif len(self.got[descriptor]) > self.limit:
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
        self.got[descriptor] += piece
        return is_open

    def close(self) -> "tuple[str, bytes, bytes]":
        """End it. Gives (status, printed, reported)."""
        _kill(self.pid)
        code = os.waitpid(self.pid, 0)[1]
        for descriptor in (self.out, self.report):  # what it wrote before it ended
            while len(self.got[descriptor]) <= self.limit and self._take(descriptor):
                pass
            os.close(descriptor)
        for descriptor in self._list_descriptors(self.feed) if self.feeds else self._list_descriptors():
            os.close(descriptor)
        printed, said = self.got[self.out], self.got[self.report]
        status = "output" if self.status == "ok" and max(len(printed), len(said)) > self.limit else self.status
        if status == "ok" and os.WIFSIGNALED(code):
            status = "timeout" if os.WTERMSIG(code) == SIGXCPU else "killed"
        if status == "ok" and os.WEXITSTATUS(code):
            return "error", printed, said if said[:1] == b"x" else b"xexit code %d" % os.WEXITSTATUS(code)
        return status, printed, said


def _end_others() -> None:
    """What a case has left running ends with it. Only as the first process of a namespace, where all are our own."""
    if os.getpid() != 1:
        return
    try:
        os.kill(-1, SIGKILL)
        while True:
            os.waitpid(-1, 0)
    except OSError:
        pass


def _judge_failed_start(has_run: bool, error: "int | None") -> str:
    """The status of a case whose child did not come up. What the program's earlier cases may have brought about stays
    its own doing: anything where they may still run, a want of memory where their files are left.
    """
    return "killed" if has_run and (os.getpid() != 1 or error == ENOMEM) else "broken"


def _run_case(
    request: "Request", case: "Case", limit: int, has_run: bool, begin: "Callable[[], None]"
) -> "tuple[str, bytes, bytes]":
    """has_run: whether the program has, in an earlier case. begin: called when the case is up."""
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
    status, printed, said = child.close()
    if not child.is_up:
        return _judge_failed_start(has_run, 0), b"", b"the process of a case did not come up: " + status.encode()
    if status == "error":
        return status, b"", said[1:]
    if status != "ok":
        return status, b"", b""
    if case["call"] is None:
        return status, printed, b""
    return (status, said[1:], b"") if said[:1] == b"v" else ("killed", b"", b"it ended before it gave anything back")


def main() -> None:
    _signal.signal(SIGINT, _signal.SIG_IGN)  # the one signal that the interpreter would let through to a first process
    request: Request = eval(_read_part())
    for name, value in request["rlimits"].items():
        number = getattr(resource, name)
        hard = resource.getrlimit(number)[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        try:
            resource.setrlimit(number, (value, value))
        except ValueError:
            if name != "RLIMIT_MSGQUEUE":  # gVisor cannot set it, and has no such queues
                raise
    _write_all(1, b"ready\n")
    results: list[tuple[str, bytes, bytes]] = []
    left, unsaid = request["total_output_bytes"], [b"begun\n"]

    def begin() -> None:
        while unsaid:
            _write_all(1, unsaid.pop())

    for index in range(request["num_cases"]):
        results.append(_run_case(request, eval(_read_part()), min(left, request["output_bytes"]), len(results) > 0, begin))
        begin()  # also where nothing came up: then the report says so
        left -= sum(map(len, results[-1][1:]))
        _end_others()
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
