"""Agents as programs of their own: how they start, what of them is a rollout, how they end, and many at once."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from rlplan.errors import SpecError
from rlplan.runtime.environments.pool import describe_environment
from rlplan.runtime.measure.memory_meter import Measurement
from rlplan.runtime.rollout.experience import FinishedRequest
from rlplan.spec.parts.environment import EnvironmentSpec
from tests.docs.documentation import ROOT
from tests.runtime.environments.chat_policy import Script, ids
from tests.runtime.gateway.scripted import SAID, make_request, open_rollouts
from tests.waiting import orphans_come_here, own_processes, wait_until

FUNCTION = """
from openai import OpenAI
client = OpenAI()  # the variables are those of the rollout when this file is loaded

def run(prompt, answer):
    reply = client.chat.completions.create(model="policy", messages=prompt)
    assert answer == "42"
    return {"answer": reply.choices[0].message.content + "!", "reward": 0.5}
"""
COMMAND = """
import json, os, sys, urllib.request

row = json.load(sys.stdin)

def post(path, content):
    headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
    url = os.environ["OPENAI_BASE_URL"] + path
    return json.load(urllib.request.urlopen(urllib.request.Request(url, json.dumps(content).encode(), headers)))

reply = post("/chat/completions", {"model": os.environ["OPENAI_MODEL"], "messages": row["prompt"]})
post("/reward", {"reward": 1})
print(reply["choices"][0]["message"]["content"], row["answer"])
"""


def test_a_function_runs_once_per_rollout_with_a_client_of_its_own(tmp_path: Path) -> None:
    with open_rollouts(tmp_path, Script(SAID), FUNCTION) as rollouts:
        (finished,), _ = rollouts.generate([make_request(num_samples=3)], 60.0)
    for completion in finished.completions:
        assert (completion.answer, completion.reward, completion.failure) == ("ab!", 0.5, "")
        assert (completion.tokens, completion.num_turns, completion.branches) == (SAID, 1, ())


def test_a_command_reads_its_row_and_prints_its_answer(tmp_path: Path) -> None:
    (tmp_path / "agent.py").write_text(COMMAND)
    with open_rollouts(tmp_path, Script(SAID), ("python", str(tmp_path / "agent.py"))) as rollouts:
        (finished,), _ = rollouts.generate([make_request()], 60.0)
    (completion,) = finished.completions
    assert (completion.answer, completion.reward, completion.tokens) == ("ab 42", 1.0, SAID)


UNRELIABLE = """
import os, subprocess, sys, time
from http.client import HTTPConnection

def run(prompt, place):
    if place == 0:
        raise ValueError("no")
    if place == 1:
        os._exit(3)
    if place == 2:
        HTTPConnection(os.environ["OPENAI_BASE_URL"].split("/")[2]).request(
            "POST", "/v1/completions", '{"model": "policy", "prompt": "a"}',
            {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]},
        )
        time.sleep(600)
    if place == 3:
        return {"score": 1}
    if place == 4:  # leaves programs behind, in its group and outside of it
        for is_alone in (False, True):
            subprocess.Popen(["sleep", "601"], start_new_session=is_alone)
    return "never called"
"""


def test_agents_that_fail_hang_or_leave_something_behind_end_their_rollouts_and_nothing_is_left(tmp_path: Path) -> None:
    there = own_processes()
    with orphans_come_here(), open_rollouts(tmp_path, Script(SAID), UNRELIABLE, timeout_s=2.0) as rollouts:
        places = {f"generate/1/{place}": place for place in range(6)}
        rollouts.prompt_of = lambda name: make_prompt(places[name])
        finished, _ = rollouts.generate([make_request(place) for place in range(6)], 60.0)
        children = own_processes()
    failures = [each.completions[0].failure for each in finished]
    assert failures[0] == "ValueError: no"
    assert failures[1] == "its process ended with exit code 3"
    assert failures[2] == "timeout: the agent neither called the policy nor ended within 2 s"
    assert failures[3].startswith("the agent returned {'score': 1}")
    assert failures[4:] == ["the agent never called the policy"] * 2
    assert children.keys() - there.keys()
    wait_until(lambda: not own_processes().keys() - there.keys(), 20)


def test_a_gateway_that_is_killed_ends_the_run_with_a_reason(tmp_path: Path) -> None:
    there = own_processes()
    from rlplan.errors import RunError

    with open_rollouts(tmp_path, Script(SAID), "def run(prompt):\n    import time; time.sleep(600)\n") as rollouts:
        rollouts.submit([make_request()], 60.0)
        rollouts.collect(0.1, 1, 60.0)
        os.kill(rollouts.pids[0], signal.SIGKILL)
        with pytest.raises(RunError, match="gateway for agents does not answer: its process ended by signal 9"):
            rollouts.generate([make_request(1)], 60.0)
    wait_until(lambda: not own_processes().keys() - there.keys(), 20)


def test_an_agent_that_cannot_be_loaded_is_refused_before_a_run(tmp_path: Path) -> None:
    (tmp_path / "agent.py").write_text("import nothing_like_that")
    (tmp_path / "other.py").write_text("def play(): ...")
    for name, words in (("agent", "ModuleNotFoundError"), ("other", "there is no function 'run'")):
        with pytest.raises(SpecError, match=f"the agent cannot be used: {words}"):
            describe_environment(EnvironmentSpec(agent=f"{tmp_path / name}.py:run"))
    assert describe_environment(EnvironmentSpec(agent=("true",))).schemas == ()


class Barrier(Script):
    """Engines that answer no first turn before all rollouts have asked for one."""

    def __init__(self, num_rollouts: int) -> None:
        super().__init__(SAID)
        self.num_rollouts, self.most_waiting = num_rollouts, 0

    def collect(
        self, max_wait_s: float, at_least: int, timeout_s: float
    ) -> tuple[list[FinishedRequest], list[Measurement]]:
        self.most_waiting = max(self.most_waiting, len(self._waiting))
        if self.most_waiting < self.num_rollouts:
            time.sleep(max_wait_s)
            return [], []
        return super().collect(max_wait_s, at_least, timeout_s)


CONVERSATION = """
import json, os
from http.client import HTTPConnection
from urllib.parse import urlsplit

def run(prompt):
    connection = HTTPConnection(urlsplit(os.environ["OPENAI_BASE_URL"]).netloc)
    headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
    messages = list(prompt)
    for turn in range(3):
        content = json.dumps({"model": "policy", "messages": messages})
        connection.request("POST", "/v1/chat/completions", content, headers)
        answer = json.loads(connection.getresponse().read())
        messages += [answer["choices"][0]["message"], {"role": "user", "content": "c"}]
    return str(len(messages))
"""


def test_200_agents_at_once_lose_nothing_and_memory_stays_flat(tmp_path: Path) -> None:
    num_rollouts = 200
    engines = Barrier(num_rollouts)
    sizes = []
    with open_rollouts(tmp_path, engines, CONVERSATION, num_agents=num_rollouts, timeout_s=600.0) as rollouts:
        for wave in range(3):  # 2,000 take about 7 MB each: test_gateway.py has them without processes
            engines.most_waiting = 0
            requests = [make_request(10_000 * wave + place, num_samples=8) for place in range(num_rollouts // 8)]
            finished, _ = rollouts.generate(requests, 1200.0)
            completions = [completion for each in finished for completion in each.completions]
            observed = ids("<user>", "c", "<end>", "<assistant>")
            assert {completion.failure for completion in completions} == {""}
            assert {completion.tokens for completion in completions} == {(*SAID, *observed, *SAID, *observed, *SAID)}
            assert {completion.answer for completion in completions} == {"7"}
            assert len(completions) == engines.most_waiting == num_rollouts
            sizes.append(_resident_bytes(rollouts.pids[0]))
    assert len(engines.asked) == 3 * 3 * num_rollouts
    assert sizes[2] <= 1.1 * sizes[1]


def _resident_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def make_prompt(place: int) -> Any:
    from dataclasses import replace

    from tests.runtime.environments.chat_policy import chat_prompt

    return replace(chat_prompt(), columns=json.dumps({"place": place}))


DRIVER = """
import sys
from pathlib import Path
from tests.runtime.environments.chat_policy import Script
from tests.runtime.gateway.scripted import SAID, make_request, open_rollouts

AGENT = '''
import subprocess, time
def run(prompt):
    subprocess.Popen(["sleep", "602"], start_new_session=True)
    open("FOLDER/begun", "w").close()
    time.sleep(600)
'''
with open_rollouts(Path(sys.argv[1]), Script(SAID), AGENT.replace("FOLDER", sys.argv[1])) as rollouts:
    rollouts.generate([make_request()], 600.0)
"""


def test_nothing_is_left_of_a_driver_that_was_killed(tmp_path: Path) -> None:
    there = own_processes()
    with orphans_come_here():
        driver = subprocess.Popen([sys.executable, "-c", DRIVER, str(tmp_path)], cwd=ROOT)
        wait_until(lambda: (tmp_path / "begun").exists(), 60)
        assert (
            len(own_processes().keys() - there.keys()) >= 5
        )  # driver, gateway, chats, starter, agent and what it left
        driver.kill()
        driver.wait()
        wait_until(lambda: not own_processes().keys() - there.keys(), 30)
