"""The Dockerfiles, read and not built: what they copy is there, and they install from the locks alone."""

import re
from pathlib import Path

import pytest

from tests.factories import ROOT

FILES = {"Dockerfile": "make setup ", "Dockerfile.gpu": "make setup-gpu"}
INSTRUCTIONS = {"FROM", "ARG", "RUN", "WORKDIR", "COPY", "ENV", "ENTRYPOINT", "CMD"}


def instructions(name: str) -> list[tuple[str, str]]:
    lines = [line for line in (ROOT / name).read_text().splitlines() if line and not line.startswith("#")]
    words = "\n".join(lines).replace("\\\n", " ").splitlines()
    return [(line.split(" ", 1)[0], line.split(" ", 1)[1]) for line in words]


@pytest.mark.parametrize("name", FILES)
def test_each_line_is_an_instruction_and_the_base_is_pinned_by_digest(name: str) -> None:
    lines = instructions(name)
    assert {word for word, _ in lines} <= INSTRUCTIONS
    assert lines[0][0] == "FROM"
    assert re.fullmatch(r"[\w./-]+:[\w.-]*\d[\w.-]*@sha256:[0-9a-f]{64}", lines[0][1])


@pytest.mark.parametrize("name", FILES)
def test_what_is_copied_is_there_and_is_all_that_an_installation_needs(name: str) -> None:
    copied = [source for word, rest in instructions(name) if word == "COPY" for source in rest.split()[:-1]]
    assert [source for source in copied if not (ROOT / source).exists()] == []
    assert {"requirements", "pyproject.toml", "Makefile", "README.md", "LICENSE", "rlplan", "cli"} <= set(copied)
    assert {"hardware_profiles", "examples"} <= set(copied)


@pytest.mark.parametrize(("name", "command"), FILES.items())
def test_packages_come_from_the_locks_alone(name: str, command: str) -> None:
    runs = [rest for word, rest in instructions(name) if word == "RUN"]
    assert runs[-1].startswith(command)
    assert not any("pip install" in run for run in runs)
    assert all("rm -rf /var/lib/apt/lists" in run for run in runs if "apt-get" in run)


def test_nothing_of_a_checkout_s_own_environments_is_copied() -> None:
    ignored = Path(ROOT / ".dockerignore").read_text().split()
    assert {".git", ".venv", ".venv-gpu", "runs"} <= set(ignored)
