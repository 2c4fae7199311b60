"""Verdicts do not depend on the sandbox: the same programs have the same results in each of them, case by case."""

from collections.abc import Callable, Iterator

import pytest

from rlplan.runtime.rewards.code_tests import Pair
from rlplan.runtime.sandbox.choice import BACKENDS
from rlplan.runtime.sandbox.programs import Case, CaseResult, Limits, Program, Sandbox
from rlplan.units import MIB
from tests.runtime.sandbox.attacks import open_each

LOOKS_FIRST = "import os; print(sorted(os.listdir('.')))\n"
PROGRAMS = {
    "files are gone": (LOOKS_FIRST + "open('a', 'w').write('a'); print(open('a').read())", ["[]\na\n"] * 3),
    "temporary files are in its folder": (
        "import os, tempfile; print(os.getcwd() == tempfile.gettempdir() == os.path.expanduser('~'))",
        ["True\n"] * 2,
    ),
    "closed folders are gone": (
        LOOKS_FIRST + "os.makedirs('a/b/c'); os.chmod('a/b', 0); os.chmod('a', 0)",
        ["[]\n"] * 2,
    ),
    "nested folders are gone": (LOOKS_FIRST + "for _ in range(1000): os.mkdir('d'); os.chdir('d')", ["[]\n"] * 2),
    "links and pipes are gone": (LOOKS_FIRST + "os.symlink('/usr', 'a'); os.mkfifo('b')", ["[]\n"] * 2),
    "other folders cannot be written": (
        """
for place in ('/', '/usr', '/dev', '/dev/shm', '/var/tmp', '/home', '/run/lock'):
    try:
        open(place + '/a', 'w')
        print(place)
    except OSError:
        pass
""",
        [""],
    ),
    "nothing is shared": (
        """
import ctypes
c = ctypes.CDLL(None)
print(c.shmget(7, 99, 0o1600), c.semget(7, 1, 0o1600), c.msgget(7, 0o1600), c.memfd_create(b'a', 0))
""",
        ["-1 -1 -1 -1\n"] * 2,
    ),
    "its variables": ("import os; print(sorted(os.environ))", ["['HOME', 'LANG', 'PWD', 'TMPDIR']\n"]),
    "its encoding": ("import sys; print('\u00e9', sys.getfilesystemencoding())", ["\u00e9 utf-8\n"]),
    "a socket": ("import socket; socket.socket(socket.AF_UNIX).bind('a'); print('bound')", ["bound\n"] * 2),
    "an error": ("import os; print('a'); raise SystemExit(3)", ["error"]),
    "an exit": ("import os; print('a', flush=True); os._exit(0)", ["a\n"]),
    "a signal": ("import os; os.kill(os.getpid(), 9)", ["killed"]),
    "a file that is too large": ("open('a', 'wb').write(bytes(17 << 20))", ["error"]),
    "a temporary file": (
        "import tempfile; f = tempfile.NamedTemporaryFile('w+'); f.write('a'); f.seek(0); print(f.read())",
        ["a\n"],
    ),
}
"""Programs, with the output of each case, or its status."""


@pytest.fixture(scope="module")
def open_by_name() -> Iterator[Callable[[str], Sandbox]]:
    with open_each(1, Limits(memory_bytes=256 * MIB)) as opened:
        yield opened


@pytest.mark.parametrize("backend", [*BACKENDS])
def test_a_program_has_the_same_results_in_every_sandbox(backend: str, open_by_name: Callable[[str], Sandbox]) -> None:
    sandbox = open_by_name(backend)
    results = {}
    for name, (source, outputs) in PROGRAMS.items():
        report = sandbox.run(Program(source, (Case(),) * len(outputs), Limits(memory_bytes=256 * MIB)))
        results[name] = [case.output.decode() if case.status == "ok" else case.status for case in report.cases]
    assert results == {name: outputs for name, (_, outputs) in PROGRAMS.items()}


@pytest.mark.parametrize("backend", [*BACKENDS])
def test_files_of_all_cases_together_are_bounded(backend: str, open_by_name: Callable[[str], Sandbox]) -> None:
    source = "for n in range(200): open(str(n), 'wb').write(bytes(1 << 20))\nimport time; time.sleep(0.3); print('all')"
    report = open_by_name(backend).run(Program(source, (Case(),), Limits(memory_bytes=256 * MIB)))
    assert report.cases[0].status != "ok"


@pytest.mark.parametrize(
    ("printed", "right", "holds"),
    [
        ("a\n", "a", True),
        ("a \t\r\nb\n\n \n", "a\nb", True),
        ("a\x0bb", "a\nb", False),
        ("a\x0cb", "a\nb", False),
        ("a\x1cb", "a\nb", False),
        ("a\x85b", "a\nb", False),
        ("a\u2028b", "a\nb", False),
        ("a\rb", "a\nb", False),
        ("a\u00a0", "a", False),
        ("a\x0c", "a", False),
        (" a", "a", False),
        ("a\n\nb", "a\nb", False),
        ("\na", "a", False),
    ],
)
def test_white_space_is_compared_by_one_rule(printed: str, right: str, holds: bool) -> None:
    assert Pair(Case(), right, prints=True).holds((CaseResult("ok", printed.encode()),)) is holds
