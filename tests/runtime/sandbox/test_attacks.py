"""Attacks on the sandboxes: 144 escapes and 19 resource bombs, all of which fail."""

import contextlib
import dataclasses
import os
import socket
import subprocess
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from rlplan.runtime.processes.machine_speed import scale_seconds
from rlplan.runtime.sandbox import choice
from rlplan.runtime.sandbox.choice import BACKENDS, Bare
from rlplan.runtime.sandbox.programs import Case, Limits, Program, Report, Sandbox
from rlplan.units import MIB
from tests.repository.at_night import rotate_places
from tests.runtime.sandbox.attacks import BOMBS, ESCAPES, SHOWN_BARE, SHOWN_WHERE_ALLOWED, open_each
from tests.waiting import limit_time, orphans_come_here, own_processes, wait_until

LIMITS = Limits(case_s=0.6, total_s=3.0, memory_bytes=256 * MIB)
PATIENT = Limits(case_s=scale_seconds(20.0), total_s=scale_seconds(80.0), memory_bytes=256 * MIB)
ALONE = ("next program", "kills", "runner", "leaves", "runs as root")
"""Words in the names of escapes that affect other processes and run alone; all others are cases of one program."""
ENDS_ITS_RUNNER = {("sandlock", "kills everything that it may")}
"""Where the runner can be reached: no verdict, which is a 0."""
REFUSALS = ("FileNotFoundError", "OSError", "PermissionError", "ProcessLookupError")


@dataclass(frozen=True)
class Outside:
    """Targets outside of the sandbox."""

    secret: str
    library: str
    variable: str
    port: int
    port6: int
    udp: int
    abstract: str
    victim: int
    note: str = f"note-{os.getpid()}"
    """A file name that no other test run on this machine leaves behind."""


@pytest.fixture(scope="module")
def opens() -> Iterator[Callable[[str], Sandbox]]:
    with open_each(1, LIMITS) as opens:
        yield opens


@pytest.fixture(params=BACKENDS)
def sandbox(request: pytest.FixtureRequest, opens: Callable[[str], Sandbox]) -> Sandbox:
    return opens(request.param)


@pytest.fixture
def orphans() -> Iterator[None]:
    """Orphans of a sandbox become children of this process, where the test finds them."""
    with orphans_come_here():
        yield


@pytest.fixture(scope="module")
def targets(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Outside]:
    secret = Path("/var/tmp") / f"rlplan-secret-{os.getpid()}"
    secret.write_text("secret")
    secret.chmod(0o644)
    abstract = f"\0rlplan-{os.getpid()}"
    os.environ["RLPLAN_SECRET"] = "secret"
    victim = subprocess.Popen(["sleep", "600"])
    with contextlib.ExitStack() as stack:
        tcp = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        tcp6 = stack.enter_context(socket.socket(socket.AF_INET6))
        tcp6.bind(("::1", 0)) if socket.has_ipv6 else None
        tcp6.listen()
        udp = stack.enter_context(socket.socket(socket.AF_INET, socket.SOCK_DGRAM))
        udp.bind(("127.0.0.1", 0))
        unix = stack.enter_context(socket.socket(socket.AF_UNIX))
        unix.bind(abstract.encode())
        unix.listen()
        yield Outside(
            secret=str(secret),
            library=choice.__file__,
            variable="RLPLAN_SECRET",
            port=tcp.getsockname()[1],
            port6=tcp6.getsockname()[1],
            udp=udp.getsockname()[1],
            abstract=abstract,
            victim=victim.pid,
        )
    assert victim.poll() is None, "a process of the host was killed"
    victim.kill()
    victim.wait()
    del os.environ["RLPLAN_SECRET"]
    secret.unlink()


def attack(sandbox: Sandbox, source: str, limits: Limits = LIMITS) -> Report:
    return sandbox.run(Program(source, (Case(),), limits))


def fill_source(source: str, targets: Outside) -> str:
    for name, value in asdict(targets).items():
        source = source.replace(f"{{{name}!r}}", repr(value)).replace(f"{{{name}}}", str(value))
    return source


@pytest.fixture(scope="module")
def try_together(
    request: pytest.FixtureRequest, opens: Callable[[str], Sandbox], targets: Outside
) -> Callable[[str], dict[str, Report]]:
    """A function from a sandbox's name to the reports of the selected escapes that need not run alone."""
    asked = [item.callspec.params for item in request.session.items if "::test_nothing_escapes[" in item.nodeid]  # type: ignore[attr-defined]

    def try_all(name: str) -> dict[str, Report]:
        return tried_together(opens(name), [params["name"] for params in asked if params["sandbox"] == name], targets)

    return cache(try_all)


def tried_together(sandbox: Sandbox, names: Iterable[str], targets: Outside) -> dict[str, Report]:
    """Reports of the escapes that need not run alone: one process each, one after the other in one sandbox."""
    names = [name for name in names if not is_alone(name)]
    cases = tuple(Case(fill_source(ESCAPES[name], targets).encode()) for name in names)
    report = sandbox.run(Program("import sys; exec(sys.stdin.read())", cases, PATIENT))
    return {name: dataclasses.replace(report, cases=(case,)) for name, case in zip(names, report.cases, strict=True)}


def is_alone(name: str) -> bool:
    return any(word in name for word in ALONE)


def list_cases() -> list[Any]:
    """All escapes in every sandbox: in each of the two in turn, in the other at night."""
    alone = [name for name in ESCAPES if is_alone(name)]
    others = [name for name in ESCAPES if not is_alone(name)]
    return [*rotate_places([*BACKENDS], others), *rotate_places([*BACKENDS], alone)]


@pytest.mark.parametrize(("sandbox", "name"), list_cases(), indirect=["sandbox"])
def test_nothing_escapes(
    name: str, sandbox: Sandbox, targets: Outside, try_together: Callable[[str], dict[str, Report]]
) -> None:
    together = {} if is_alone(name) else try_together(sandbox.name)
    times = 0 if name in together else 2 if "next program" in name else 1
    for report in [attack(sandbox, fill_source(ESCAPES[name], targets), PATIENT) for _ in range(times)] or [
        together[name]
    ]:
        case = report.cases[0]
        assert b"ESCAPED" not in case.output, report
        if (sandbox.name, name) in ENDS_ITS_RUNNER:
            continue
        assert report.status == "done", report
        assert case.status in ("ok", "error", "killed"), report
        assert case.status != "error" or case.detail.startswith(REFUSALS), "an attack with a fault of its own"


@pytest.fixture(scope="module")
def bare(targets: Outside) -> dict[str, Report]:
    """The same without a sandbox."""
    try:
        return tried_together(Bare(1), (*SHOWN_BARE, *SHOWN_WHERE_ALLOWED), targets)
    finally:
        remove_notes(targets)


def remove_notes(targets: Outside) -> None:
    for folder in ("/tmp", "/dev/shm"):
        Path(folder, targets.note).unlink(missing_ok=True)


def tried_alone(name: str, targets: Outside) -> Report:
    """The report of an escape without a sandbox, with a process to kill."""
    victim = subprocess.Popen(["sleep", "600"])
    program = Program(fill_source(ESCAPES[name], dataclasses.replace(targets, victim=victim.pid)), (Case(),))
    try:
        return [Bare(1).run(program) for _ in range(2 if "next program" in name else 1)][-1]
    finally:
        victim.kill()
        victim.wait()
        remove_notes(targets)


@pytest.mark.parametrize("name", [*SHOWN_BARE, *SHOWN_WHERE_ALLOWED])
def test_without_a_sandbox_the_same_attack_succeeds(name: str, targets: Outside, bare: dict[str, Report]) -> None:
    case = (bare.get(name) or tried_alone(name, targets)).cases[0]
    if name in SHOWN_WHERE_ALLOWED and case.status in ("ok", "error") and not case.output:
        pytest.skip("this host refuses it without a sandbox too")
    assert b"ESCAPED" in case.output, case


@pytest.mark.usefixtures("orphans")
@pytest.mark.parametrize(
    ("sandbox", "name"),
    rotate_places([*BACKENDS], BOMBS),
    indirect=["sandbox"],
)
def test_a_resource_bomb_affects_no_other_program(name: str, sandbox: Sandbox) -> None:
    others = own_processes().keys()
    with limit_time(5.0, beyond_s=LIMITS.total_s):
        report = attack(sandbox, BOMBS[name])
    assert report.status in ("done", "memory", "killed", "timeout"), report
    if report.status == "done" and "daemon" not in name:
        assert report.cases[0].status in ("error", "timeout", "output", "killed"), report
    assert attack(sandbox, "print(1)", PATIENT).cases[0].output == b"1\n", "the next program is not disturbed"
    wait_until(lambda: own_processes().keys() <= others, 3, pause_s=0.05)  # nothing survives its sandbox


def test_there_are_enough_attacks() -> None:
    assert len(ESCAPES) >= 140
    assert len(SHOWN_BARE) + len(SHOWN_WHERE_ALLOWED) > len(ESCAPES) / 2
