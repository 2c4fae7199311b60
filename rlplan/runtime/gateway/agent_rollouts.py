"""AgentRollouts: rollouts of agents on engines that only generate single turns, behind the interface of a Fleet.

The gateway's process answers agents and records their conversations; the starter's process runs the agents. This side
passes turns to the engines and back.

In: requests for whole rollouts. Out: finished requests.
"""

import json
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from rlplan.errors import RunError
from rlplan.runtime.environments.conversations import ANSWER_S, MultiTurnRollouts, make_row
from rlplan.runtime.measure.memory_meter import Measurement
from rlplan.runtime.processes.line_process import Deadline, LateError, LineProcess, NoAnswerError, make_start_deadline
from rlplan.runtime.processes.machine_speed import scale_seconds
from rlplan.runtime.processes.safe_path import make_module_command
from rlplan.runtime.rollout.experience import Completion, Prompt, RolloutRequest
from rlplan.runtime.rollout.fleet import Fleet
from rlplan.spec.resolved import ResolvedJob

MAX_LINE_BYTES = 1 << 28
CLOSE_S = 5.0
"""Seconds for the starter to end all agents; scaled by machine speed."""
_REQUEST, _COMPLETION = TypeAdapter(RolloutRequest), TypeAdapter(Completion)


class AgentRollouts(MultiTurnRollouts):
    """See the module docstring. log: file for the output of the gateway and the agents."""

    def __init__(self, fleet: Fleet, job: ResolvedJob, prompt_of: Callable[[str], Prompt], log: Path) -> None:
        super().__init__(fleet, prompt_of)
        self.spec, self.timeout_s, self.log = job.rollout.environment, job.limits.action_timeout_s, log
        self._waiting: deque[tuple[RolloutRequest, int]] = deque()
        self._num_running = self._num_in_engines = 0
        setting = {"policy": job.policy.path, "max_len": job.workload.max_seq_len}
        setting["spec"] = self.spec.model_dump(mode="json")
        self._processes: list[LineProcess] = []
        try:
            self.gateway, self.pids_of_gateway = self._open("gateway", setting)
            self.starter, _ = self._open("agent_starter", self.spec.agent)
        except BaseException:
            self.close()
            raise

    @property
    def pids(self) -> list[int]:
        """Ids of the gateway and of the process that renders chats; agents are the user's."""
        return list(self.pids_of_gateway)

    def close(self) -> None:
        with suppress(NoAnswerError, AttributeError):  # the starter may have died, or never have started
            self.starter.send("{}", deadline := Deadline(scale_seconds(CLOSE_S)))
            while True:  # until the starter has killed what agents left behind and has ended
                self.starter.receive(deadline)
        for process in self._processes:
            process.close()

    def _open(self, module: str, setting: Any) -> tuple[LineProcess, Any]:
        """A process of this package, and its first message."""
        command = make_module_command(f"rlplan.runtime.gateway.{module}", json.dumps(setting))
        with self.log.open("ab") as output:
            process = LineProcess(command, output, MAX_LINE_BYTES)
        self._processes.append(process)
        return process, self._receive(process, make_start_deadline())

    def _begin(self, request: RolloutRequest, sample: int) -> None:
        self._waiting.append((request, sample))

    def _advance_all(self, max_wait_s: float, timeout_s: float) -> list[Measurement]:
        begun = []
        while self._waiting and self._num_running < self.spec.num_agents:
            request, sample = self._waiting.popleft()
            begun.append([asdict(request), sample])
            self._num_running += 1
        ended = self._receive(self.starter, Deadline(0.0)) or []
        if begun or ended:
            self._tell(self.gateway, {"begin": begun, "ended": ended})
        # While engines generate, `collect` below waits for them. Otherwise only the gateway can have news.
        wait_s = 0.0 if self._num_in_engines or self._unsent else min(max_wait_s, ANSWER_S)
        for event in self._receive(self.gateway, Deadline(wait_s)) or ():
            self._handle(**event)
        self._send(timeout_s)
        if not self._num_in_engines:
            return []
        finished, measurements = self.fleet.collect(min(max_wait_s, ANSWER_S), 1, timeout_s)
        self._num_in_engines -= len(finished)
        if finished:
            self._tell(self.gateway, {"turns": [[turn.id, asdict(turn.completions[0])] for turn in finished]})
        return measurements

    def _handle(self, kind: str, name: str, content: Any = None) -> None:
        """Handle an event of the gateway about a rollout or a turn."""
        if kind == "turn":
            self._unsent.append(_REQUEST.validate_python(content))
            self._num_in_engines += 1
        elif kind == "finished":
            self._num_running -= 1
            request_id, _, sample = name.rpartition("#")
            self._end_sample(request_id, int(sample), _COMPLETION.validate_python(content))
        else:  # start or kill
            row = make_row(self.prompt_of(name.rpartition("#")[0])) if kind == "start" else None
            self._tell(self.starter, {kind: name, "variables": content, "row": row})

    def _receive(self, process: LineProcess, deadline: Deadline) -> Any:
        """The next message of a process; None if there is none until the deadline. Raises: RunError at its end."""
        try:
            return process.receive(deadline)["lines"]
        except LateError:
            return None
        except NoAnswerError as error:
            raise self._make_error(error) from None

    def _tell(self, process: LineProcess, message: dict[str, Any]) -> None:
        try:
            process.send(json.dumps(message), Deadline(self.timeout_s))
        except NoAnswerError as error:
            raise self._make_error(error) from None

    def _make_error(self, error: NoAnswerError) -> RunError:
        return RunError(
            f"the gateway for agents does not answer: {error}",
            where=str(self.log),
            rule="the processes that answer and start agents run until the run ends",
            way_out="read the end of that log; resume the run",
        )
