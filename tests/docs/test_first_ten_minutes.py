"""The four people of docs/first-ten-minutes.md get the answers that the page shows, within a minute each."""

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rlplan.runtime.processes.machine_speed import scaled
from tests.docs.documentation import DOCS, read
from tests.hub_server import serve_hub

WITHIN_S = 60.0
"""From the first command to the answer, all of a person's commands together."""
PAGE = read(DOCS / "first-ten-minutes.md")
PEOPLE = dict(re.findall(r"^## (.+?)\n(.*?)(?=^## |\Z)", PAGE, re.MULTILINE | re.DOTALL))


def test_there_are_four_people() -> None:
    assert len(PEOPLE) == 4


@pytest.mark.parametrize("person", PEOPLE)
def test_each_of_them_has_the_answer_within_a_minute(person: str, tmp_path: Path) -> None:
    blocks = re.findall(r"```(sh|text)\n(.*?)```", PEOPLE[person], re.DOTALL)
    commands, answers = ([text for kind, text in blocks if kind == one] for one in ("sh", "text"))
    assert len(commands) == len(answers) > 0
    began = time.monotonic()
    with serve_hub() as hub:
        environment = {
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}/usr/bin{os.pathsep}/bin",
            "HOME": str(tmp_path),
            "HF_ENDPOINT": hub.address,
        }
        for command, answer in zip(commands, answers, strict=True):
            done = subprocess.run(
                ["bash", "-c", command],
                cwd=tmp_path,
                env=environment,
                capture_output=True,
                text=True,
                timeout=scaled(WITHIN_S),
                check=False,
            )
            said = done.stdout + done.stderr
            assert [line for line in answer.splitlines() if line not in said] == [], said
    assert time.monotonic() - began < scaled(WITHIN_S)
