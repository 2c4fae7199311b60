"""AgentProcesses: the gateway's side of the process that starts agents (agent_starter.py).

In: rollouts to start, by name. Out: how each agent ended. If the starter dies, its agents die with it and have failed;
the next one gets a new starter.
"""

import asyncio
import json
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from rlplan.runtime.gateway.agent_session import Outcome
from rlplan.runtime.processes.machine_speed import scale_seconds
from rlplan.runtime.processes.safe_path import make_module_command
from rlplan.spec.parts.environment import EnvironmentSpec

MAX_LINE_BYTES = 1 << 26
MAX_DEATHS = 8
"""Deaths of the starter after which no agent is started any more."""
CLOSE_S = 5.0
"""Seconds for the starter to end its agents; scaled by machine speed."""


class AgentProcesses:
    """See the module docstring. ended: called with a rollout's name and its outcome, once."""

    def __init__(self, spec: EnvironmentSpec, ended: Callable[[str, Outcome], None]) -> None:
        self.setting = json.dumps({"agent": spec.agent})
        self.ended = ended
        self._running: set[str] = set()
        self._num_deaths, self._fault = 0, ""
        self._process: asyncio.subprocess.Process | None = None
        self._reading: asyncio.Task[None] | None = None

    async def open(self) -> None:
        """Start the starter."""
        pipe = asyncio.subprocess.PIPE
        command = make_module_command("rlplan.runtime.gateway.agent_starter", self.setting)
        self._process = await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe, limit=MAX_LINE_BYTES)
        self._reading = asyncio.create_task(self._read(self._process))

    def start(self, name: str, variables: dict[str, str], row: dict[str, Any]) -> None:
        """Start an agent. variables: added to its environment. row: the prompt's row."""
        if self._fault:
            asyncio.get_running_loop().call_soon(self.ended, name, Outcome(failure=self._fault))
            return
        self._running.add(name)
        self._write({"start": name, "variables": variables, "row": row})

    def kill(self, name: str) -> None:
        """Kill an agent and its process group."""
        self._write({"kill": name})

    async def close(self) -> None:
        """End all agents and the starter."""
        process, self._process = self._process, None
        if process is None:
            return
        assert process.stdin is not None, "a pipe"
        process.stdin.close()
        try:
            async with asyncio.timeout(scale_seconds(CLOSE_S)):
                await process.wait()
        except TimeoutError:
            process.kill()
            await process.wait()

    def _write(self, order: dict[str, Any]) -> None:
        if self._process is not None and self._process.stdin is not None:
            self._process.stdin.write(json.dumps(order).encode() + b"\n")

    async def _read(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdout is not None, "a pipe"
        with suppress(ValueError):  # a line beyond the limit
            while line := await process.stdout.readline():
                answer = json.loads(line)
                self._fault = answer.get("hello", {}).get("error", "")
                if (name := answer.pop("ended", None)) is not None:
                    self._running.discard(name)
                    self.ended(name, Outcome(**answer))
        if process is not self._process:
            return
        lost, self._running = self._running, set()
        self._num_deaths += 1
        if self._num_deaths > MAX_DEATHS:
            self._fault = self._fault or f"the process that starts agents has died {self._num_deaths} times"
        if not self._fault:
            await self.open()
        for name in lost:
            self.ended(name, Outcome(failure=self._fault or "the process that starts agents has died"))
