"""AgentRollouts: rollouts of agents on engines that only generate single turns, behind the interface of a Fleet.

The gateway's process does everything but generate: this side passes its turns to the engines, and the engines' answers
back.

In: requests for whole rollouts. Out: finished requests.
"""

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from rlplan.errors import RunError
from rlplan.runtime.environments.conversations import ANSWER_S, MultiTurnRollouts
from rlplan.runtime.measure.memory_meter import Measurement
from rlplan.runtime.processes.line_process import Deadline, LateError, LineProcess, NoAnswerError, make_start_deadline
from rlplan.runtime.processes.safe_path import make_module_command
from rlplan.runtime.rollout.experience import Completion, Prompt, RolloutRequest
from rlplan.runtime.rollout.fleet import Fleet
from rlplan.spec.resolved import ResolvedJob

MAX_LINE_BYTES = 1 << 28
_REQUEST, _COMPLETION = TypeAdapter(RolloutRequest), TypeAdapter(Completion)


class AgentRollouts(MultiTurnRollouts):
    """See the module docstring. log: file for the output of the gateway and the agents."""

    def __init__(self, fleet: Fleet, job: ResolvedJob, prompt_of: Callable[[str], Prompt], log: Path) -> None:
        super().__init__(fleet, prompt_of)
        self.timeout_s, self.log = job.limits.action_timeout_s, log
        setting = {
            "spec": job.rollout.environment.model_dump(mode="json"),
            "policy": job.policy.path,
            "max_len": job.workload.max_seq_len,
        }
        command = make_module_command("rlplan.runtime.gateway.gateway", json.dumps(setting))
        with log.open("ab") as output:
            self.process = LineProcess(command, output, MAX_LINE_BYTES)
        self._pids: list[int] = []
        self._num_in_engines = 0
        try:
            while not self._pids:
                self._receive(make_start_deadline())
        except BaseException:
            self.close()
            raise

    @property
    def pids(self) -> list[int]:
        """Ids of the gateway and of the process that renders chats; agents are the user's."""
        return self._pids

    def close(self) -> None:
        self.process.close()

    def _begin(self, request: RolloutRequest, sample: int) -> None:
        begun = {"request": asdict(request), "sample": sample, "prompt": asdict(self.prompt_of(request.id))}
        self._tell({"begin": [begun]})

    def _advance_all(self, max_wait_s: float, timeout_s: float) -> list[Measurement]:
        # While engines generate, they are waited for; otherwise only agents can bring anything new.
        self._receive(Deadline(0.0 if self._num_in_engines or self._unsent else max_wait_s))
        self._send(timeout_s)
        if not self._num_in_engines:
            return []
        finished, measurements = self.fleet.collect(min(max_wait_s, ANSWER_S), 1, timeout_s)
        self._num_in_engines -= len(finished)
        if finished:
            self._tell({"turns": [[turn.id, asdict(turn.completions[0])] for turn in finished]})
        return measurements

    def _receive(self, deadline: Deadline) -> None:
        """Take the gateway's events; wait for them until the deadline."""
        try:
            events = self.process.receive(deadline)["events"]
        except LateError:
            return
        except NoAnswerError as error:
            raise self._make_error(error) from None
        for event in events:
            if "turn" in event:
                self._unsent.append(_REQUEST.validate_python(event["turn"]))
                self._num_in_engines += 1
            elif "ended" in event:
                name, sample, completion = event["ended"]
                self._end_sample(name, sample, _COMPLETION.validate_python(completion))
            else:
                self._pids = event["pids"]

    def _tell(self, message: dict[str, Any]) -> None:
        try:
            self.process.send(json.dumps(message), Deadline(self.timeout_s))
        except NoAnswerError as error:
            raise self._make_error(error) from None

    def _make_error(self, error: NoAnswerError) -> RunError:
        return RunError(
            f"the gateway for agents does not answer: {error}",
            where=str(self.log),
            rule="the gateway runs until the run ends",
            way_out="read the end of that log; resume the run",
        )
