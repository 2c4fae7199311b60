"""Helpers of the documentation's tests: pages as data, the keys of a job, and the plans of the examples.

In: Markdown files, pydantic models. Out: sections, table rows, key paths, plans.
"""

import os
import re
import subprocess
import sys
import time
from functools import cache
from pathlib import Path
from typing import get_args

from pydantic.fields import FieldInfo

from rlplan.planner.plan import Plan
from rlplan.planner.search import find_plan
from rlplan.runtime.processes.machine_speed import scale_seconds
from rlplan.spec.base import Spec
from rlplan.spec.files.job_file import load_job
from rlplan.spec.job import JobSpec
from tests.hub_server import serve_hub

ROOT = Path(__file__).resolve().parents[2]
DOCS, EXAMPLES = ROOT / "docs", ROOT / "examples"


@cache
def read(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def remove_code_blocks(text: str) -> str:
    return re.sub(r"(?ms)^ *```.*?^ *```", "", text)


def section(text: str, heading: str) -> str:
    """The text under a heading, up to the next heading of its level or above."""
    match = re.search(rf"(?m)^(#+) {re.escape(heading)}$", text)
    assert match, f"no heading '{heading}'"
    rest = text[match.end() :]
    after = re.search(rf"(?m)^#{{1,{len(match.group(1))}}} ", rest)
    return rest[: after.start()] if after else rest


def rows(text: str) -> list[list[str]]:
    """Cells of every table row in a text, without headers."""
    cells = []
    for block in re.findall(r"(?m)(?:^ *\|.*\n?)+", text):
        lines = [line.strip().removeprefix("|").removesuffix("|") for line in block.strip().splitlines()]
        cells += [[cell.strip() for cell in line.split("|")] for line in lines[2:]]
    return cells


def words(cell: str) -> list[str]:
    """The words in backticks."""
    return re.findall(r"`([^`]+)`", cell)


def anchors(text: str) -> set[str]:
    """The anchors that GitHub makes of a page's headings."""
    headings = re.findall(r"(?m)^#+ (.+)$", remove_code_blocks(text))
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def list_keys(kind: type[Spec], prefix: str = "") -> dict[str, FieldInfo]:
    """Every key path of a model that holds a value, except the list of rewards."""
    keys: dict[str, FieldInfo] = {}
    for name, field in kind.model_fields.items():
        inner = field.annotation
        named = [argument for argument in get_args(inner) if isinstance(argument, type) and issubclass(argument, Spec)]
        if named and name != "response_lengths":  # a part that may be absent
            keys |= list_keys(named[0], f"{prefix}{name}.")
        elif isinstance(inner, type) and issubclass(inner, Spec):
            keys |= list_keys(inner, f"{prefix}{name}.")
        elif name != "rewards":
            keys[prefix + name] = field
    return keys


ALL_KEYS = set(list_keys(JobSpec))


@cache
def plan_example(job: str) -> Plan:
    """The plan of an example job, made by the code as it is."""
    return find_plan(load_job(EXAMPLES / f"{job}.yaml"))


def run_commands(text: str, folder: Path, within_s: float) -> None:
    """Runs the `sh` blocks of a text, and looks for each line of the `text` block that follows. Spaces count once."""
    blocks = re.findall(r"```(sh|text)\n(.*?)```", text, re.DOTALL)
    commands, answers = ([block for kind, block in blocks if kind == wanted] for wanted in ("sh", "text"))
    assert len(commands) == len(answers) > 0
    began = time.monotonic()
    with serve_hub() as hub:
        environment = {
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}/usr/bin{os.pathsep}/bin",
            "HOME": str(folder),
            "HF_ENDPOINT": hub.address,
        }
        for command, answer in zip(commands, answers, strict=True):
            done = subprocess.run(
                ["bash", "-ec", command],
                cwd=folder,
                env=environment,
                capture_output=True,
                text=True,
                timeout=scale_seconds(within_s),
                check=False,
            )
            printed = done.stdout + done.stderr
            assert [line for line in answer.splitlines() if fold_spaces(line) not in fold_spaces(printed)] == [], (
                printed
            )
    assert time.monotonic() - began < scale_seconds(within_s)


def fold_spaces(text: str) -> str:
    return " ".join(text.split())
