"""RewardProcess: a process that computes one reward, asked with a deadline, and replaced when it does not keep it.

In: a request about one response, or about a batch. Out: numbers, or a RewardFailure. A hang costs its timeout; then the
process group is killed.
"""

import contextlib
import json
import os
import signal
import subprocess
from collections.abc import Collection, Sequence
from typing import Any

from rlplan.errors import SpecError
from rlplan.runtime.processes.line_process import Deadline, GarbledError, LineProcess, NoAnswerError, ended
from rlplan.runtime.processes.machine_speed import scaled
from rlplan.runtime.processes.safe_path import module_command
from rlplan.runtime.rewards.child import MAX_ANSWER, MAX_VALUE
from rlplan.runtime.rewards.verdict import ExhaustedError, RewardFailure, check_number

START_S = 60.0
"""For a process to import what it needs; scaled."""
ANSWERS = {"value", "values", "failure", "ready", "unable", "ended", "begun"}


class RewardProcess:
    """One process at a time; used by one thread. setting: what child.py reads first. label: the reward's name."""

    def __init__(self, label: str, setting: dict[str, Any], timeout_s: float) -> None:
        self.label, self.setting, self.timeout_s = label, setting, timeout_s
        self._process: LineProcess | None = None
        self._is_ready, self._fork, self._takes_batches = False, 0, False

    def start(self, columns: Collection[str] | None = None) -> None:
        """Start it, unless it runs. columns: that every row has, for a function that asks for some; None: not known.

        Raises: SpecError when it cannot do its work at all.
        """
        self.setting = {**self.setting, "columns": None if columns is None else sorted(columns)}
        try:
            self._ensure_ready()
        except NoAnswerError as error:
            raise SpecError(
                f"the reward {self.label} cannot be computed: {_explain(error)}",
                where=f"rewards: {self.label}",
                rule="a reward's process starts; its function has the parameters of TRL's or of verl's and asks for no "
                "column that a row lacks",
                way_out="mend the function or the rows, or install what it imports",
            ) from None

    def ask(self, request: dict[str, Any]) -> tuple[float, str]:
        """(reward, note of what is no failure).

        Raises: RewardFailure; ExhaustedError where the response alone was at work (child.py: `begun`).
        """
        try:
            answer = self._exchange(request, self.timeout_s)
        except NoAnswerError as error:
            raise RewardFailure(_explain(error)) from None
        if "failure" in answer:
            raise RewardFailure(str(answer["failure"]))
        return check_number(float.fromhex(str(answer["value"]))), str(answer.get("note", ""))

    @property
    def takes_batches(self) -> bool:
        """Whether it is a function that is called once with all responses of a batch. Raises: RewardFailure."""
        try:
            self._ensure_ready()
        except NoAnswerError as error:
            raise RewardFailure(_explain(error)) from None
        return self._takes_batches

    def ask_batch(
        self, responses: Sequence[dict[str, Any]], progress: tuple[int, int] = (0, 0), longest_s: float = 0.0
    ) -> list[float | RewardFailure | None]:
        """What a function says of each response: a number, why it gave none, or None where it judges that one not.

        progress: steps done, and in all. longest_s: the most seconds for a batch; less where its responses have less
        together. Raises: RewardFailure where there is no answer at all.
        """
        timeout_s = max(self.timeout_s, min(longest_s, self.timeout_s * len(responses)))
        try:
            answer = self._exchange({"responses": list(responses), "progress": progress}, timeout_s, len(responses))
        except NoAnswerError as error:
            raise RewardFailure(_explain(error)) from None
        if "failure" in answer:
            raise RewardFailure(str(answer["failure"]))
        return [None if value is None else _read_number(value) for value in answer["values"]]

    def _exchange(self, request: dict[str, Any], timeout_s: float, num_values: int = 0) -> dict[str, Any]:
        process, is_alone, has_begun = self._ensure_ready(), False, False
        process.max_bytes = 3 * MAX_ANSWER + MAX_VALUE * num_values
        deadline = Deadline(timeout_s)
        try:
            process.say(json.dumps(request), deadline)
            is_alone = True  # in what it does now: the pipes are in order
            answer = _receive(process, deadline)
            if has_begun := "begun" in answer:
                answer = _receive(process, deadline)
            if "ended" in answer:
                has_begun = has_begun and int(answer["ended"]) != -signal.SIGKILL  # that comes from the host
                raise NoAnswerError(ended(int(answer["ended"])))
            if process.unread:
                raise GarbledError("it said more than an answer")
        except NoAnswerError as error:
            self._replace(by_a_fork=is_alone and not isinstance(error, GarbledError))
            if has_begun and ("ended" in answer or deadline.is_over):
                raise ExhaustedError("killed" if "ended" in answer else "timeout") from None
            raise
        return answer

    def _launch(self) -> LineProcess:
        self._process = LineProcess(
            module_command("rlplan.runtime.rewards.child"),
            subprocess.DEVNULL,
            3 * MAX_ANSWER,
            {**os.environ, "OMP_NUM_THREADS": "1"},
        )
        self._process.say(json.dumps(self.setting), _make_start_deadline())
        return self._process

    def _ensure_ready(self) -> LineProcess:
        """The process that can be asked. Raises: NoAnswerError when there is none."""
        if self._is_ready and self._process is not None:
            return self._process
        deadline = _make_start_deadline()
        try:
            process = self._process or self._launch()
            answer = _receive(process, deadline)
            while "ready" not in answer and "unable" not in answer:  # last words of the one before
                answer = _receive(process, deadline)
            if "unable" in answer:
                raise NoAnswerError(str(answer["unable"]))
        except NoAnswerError:
            self.close()
            raise
        self._is_ready, self._fork = True, int(answer["ready"])
        self._takes_batches = bool(answer.get("takes_batches"))
        return process

    def _replace(self, *, by_a_fork: bool) -> None:
        """End the one that failed, and begin the next at once: it gets ready while others are asked.

        by_a_fork: it may be a copy of the process that it was a copy of.
        """
        if by_a_fork and self._fork:
            self._is_ready = False
            with contextlib.suppress(OSError):
                os.kill(self._fork, signal.SIGKILL)
            return
        self.close()
        with contextlib.suppress(NoAnswerError):
            self._launch()

    def close(self) -> None:
        """End it with everything that it started in its group."""
        process, self._process = self._process, None
        self._is_ready, self._fork = False, 0
        if process is not None:
            process.close()


def _receive(process: LineProcess, deadline: Deadline) -> dict[str, Any]:
    answer = process.hear(deadline)
    if not ANSWERS & set(answer):
        raise GarbledError("an answer of another kind")
    return answer


def _read_number(value: dict[str, Any]) -> float | RewardFailure:
    if "failure" in value:
        return RewardFailure(str(value["failure"]))
    try:
        return check_number(float.fromhex(str(value["value"])))
    except RewardFailure as failure:
        return failure


def _explain(error: NoAnswerError) -> str:
    return "it wrote into the run's own pipe" if isinstance(error, GarbledError) else str(error)


def _make_start_deadline() -> Deadline:
    return Deadline(scaled(START_S), " before it was ready")
