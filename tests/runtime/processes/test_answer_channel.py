"""The child's side of a LineProcess: foreign code can neither read requests nor print into the answers."""

import json
import subprocess
import sys

import pytest

CHILD = """
import os, subprocess, sys
from rlplan.runtime.processes.answer_channel import AnswerChannel

channel = AnswerChannel({arguments})
print("printed", flush=True)
subprocess.run(["echo", "from a program"])
channel.send({{"read": sys.stdin.read()}})
for line in channel.requests:
    channel.send({{"heard": line.decode().strip()}})
channel.send({{"long": "x" * 100}}, 12)
"""


@pytest.mark.parametrize(("arguments", "errors"), [("", "printed\nfrom a program\n"), ("discards_prints=True", "")])
def test_foreign_code_neither_reads_requests_nor_prints_into_the_answers(arguments: str, errors: str) -> None:
    command = [sys.executable, "-c", CHILD.format(arguments=arguments)]
    done = subprocess.run(command, input="first\nsecond\n", capture_output=True, text=True, check=True)
    *answers, cut = done.stdout.splitlines()
    assert [json.loads(line) for line in answers] == [{"read": ""}, {"heard": "first"}, {"heard": "second"}]
    assert cut == '{"long": "xx'
    assert done.stderr == errors
