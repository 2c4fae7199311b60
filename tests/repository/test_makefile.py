"""The two halves of `make test`. Only the interpreter is another: it writes down how it was called."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from rlplan.runtime.processes.machine_speed import scale_seconds

ROOT = Path(__file__).resolve().parents[2]
PYTHON = """#!/bin/sh
case "$*" in
  "-c "*) echo starts; exit ;;
  *"not engine"*) half=fast code={fast} ;;
  *) half=engines code={engines} ;;
esac
echo "$half $*" >> {calls}
echo "  $((code + 1)) counted in $half" >> "$RLPLAN_TEST_RESULTS"
exit $code
"""


def make_test(folder: Path, fast: int, engines: int) -> tuple[int, list[str], str]:
    """(exit code, calls of the interpreter, what was printed) of `make test` whose halves end with these codes."""
    calls, python = folder / "calls", folder / "venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(PYTHON.format(fast=fast, engines=engines, calls=calls))
    python.chmod(0o755)
    ready = ("setup", "system-packages", "lint")
    command = ["make", *(word for name in ready for word in ("-o", name)), "test", f"VENV={folder / 'venv'}", "ARGS=-x"]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=scale_seconds(60), check=False
    )
    return done.returncode, calls.read_text().splitlines(), done.stdout


@pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")
@pytest.mark.parametrize(("fast", "engines"), [(0, 0), (1, 0), (0, 1), (2, 3)])
def test_both_halves_of_make_test_run_and_are_told_at_the_end_whichever_fails(
    tmp_path: Path, fast: int, engines: int
) -> None:
    code, calls, printed = make_test(tmp_path, fast, engines)
    files = (path for path in ROOT.glob("tests/**/test_*.py") if "pytest.mark.engine" in path.read_text())
    assert calls[0] == "fast -m pytest -m not engine and not nightly -n 3 --dist loadfile --no-loadscope-reorder -x"
    start = "engines -m pytest -m engine and not nightly -n 2 --dist loadfile --no-loadscope-reorder"
    begun, *arguments, end = calls[1].removeprefix(start).split(" ")
    assert (begun, end, sorted(arguments)) == ("", "-x", sorted(str(path.relative_to(ROOT)) for path in files))
    assert (code != 0) == bool(fast or engines)
    expected = ["test: tests that start no engine", f"  {fast + 1} counted in fast"]
    expected += [f"  exit code {fast}"] * bool(fast)
    expected += ["test: tests that start engines", f"  {engines + 1} counted in engines"]
    expected += [f"  exit code {engines}"] * bool(engines)
    assert printed.splitlines() == expected


def test_what_is_told_at_the_end_names_the_tests_that_failed(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(
        "import pytest\n"
        "@pytest.fixture\ndef broken(): raise ValueError\n"
        "def test_well(): pass\ndef test_wrong(): assert False\ndef test_without_its_fixture(broken): pass\n"
    )
    results = tmp_path / "results"
    environment = os.environ | {"RLPLAN_TEST_RESULTS": str(results), "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "pytest", "-c", os.devnull, f"--rootdir={tmp_path}", "-p", "tests.conftest"]
    done = subprocess.run(
        [*command, str(tmp_path)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=scale_seconds(60),
        check=False,
    )
    assert done.returncode == 1, done.stdout + done.stderr
    assert results.read_text().splitlines() == [
        "  failed: test_it.py::test_wrong",
        "  failed: test_it.py::test_without_its_fixture",
        "  1 failed, 1 passed, 1 error",
    ]
