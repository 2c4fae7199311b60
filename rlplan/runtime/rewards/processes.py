"""RewardProcess: a child process that computes one reward; it is killed and replaced when it misses a deadline.

In: a request about one response or a batch. Out: numbers, or a RewardFailure.
"""

import contextlib
import json
import os
import signal
import subprocess
from collections.abc import Collection, Sequence
from typing import Any

from rlplan.errors import SpecError
from rlplan.runtime.processes.line_process import (
    Deadline,
    GarbledError,
    LateError,
    LineProcess,
    NoAnswerError,
    describe_exit,
    make_start_deadline,
)
from rlplan.runtime.processes.safe_path import make_module_command
from rlplan.runtime.rewards.child import MAX_ANSWER, MAX_VALUE
from rlplan.runtime.rewards.verdict import ExhaustedError, RewardFailure, check_number

ANSWER_KEYS = {"value", "values", "failure", "ready", "unable", "ended", "begun"}
"""Keys of valid answers (child.py)."""


class RewardProcess:
    """One reward's process, used by one thread. setting: first line that child.py reads. label: the reward's name."""

    def __init__(self, label: str, setting: dict[str, Any], timeout_s: float) -> None:
        self.label, self.setting, self.timeout_s = label, setting, timeout_s
        self._process: LineProcess | None = None
        self._is_ready, self._fork, self._takes_batches = False, 0, False
        self._metrics: list[tuple[str, float, int]] = []

    def start(self, columns: Collection[str] | None = None) -> None:
        """Start the process unless it runs. columns: columns that every row has; None if unknown.

        Raises: SpecError when the reward cannot be computed at all.
        """
        self.setting = {**self.setting, "columns": None if columns is None else sorted(columns)}
        try:
            self._ensure_ready()
        except NoAnswerError as error:
            raise SpecError(
                f"the reward {self.label} cannot be computed: {_explain(error)}",
                where=f"rewards: {self.label}",
                rule="a reward's process must start; its function has TRL's or verl's signature and uses only columns "
                "that every row has",
                way_out="fix the function or the rows, or install the packages that it imports",
            ) from None

    def ask(self, request: dict[str, Any]) -> tuple[float, str]:
        """(reward, note).

        Raises: RewardFailure; ExhaustedError when the response exhausted a limit after `begun` (child.py).
        """
        answer = self._answer(request, self.timeout_s)
        return check_number(float.fromhex(str(answer["value"]))), str(answer.get("note", ""))

    @property
    def takes_batches(self) -> bool:
        """Whether the reward is a function called once per batch. Raises: RewardFailure."""
        try:
            self._ensure_ready()
        except NoAnswerError as error:
            raise RewardFailure(_explain(error)) from None
        return self._takes_batches

    def ask_batch(
        self, responses: Sequence[dict[str, Any]], progress: tuple[int, int] = (0, 0), longest_s: float = 0.0
    ) -> list[float | RewardFailure | None]:
        """A number, a failure, or None (the function skips it) for each response of a batch.

        progress: (finished steps, all steps). longest_s: upper limit of the batch's timeout, which is otherwise the sum
        of its responses' timeouts. Raises: RewardFailure when there is no answer at all.
        """
        timeout_s = max(self.timeout_s, min(longest_s, self.timeout_s * len(responses)))
        answer = self._answer({"responses": list(responses), "progress": progress}, timeout_s, len(responses))
        for name, (total, count) in answer.get("metrics", {}).items():
            self._metrics.append((f"{self.label}/{name}", float(total), int(count)))
        return [None if value is None else _read_number(value) for value in answer["values"]]

    def take_metrics(self) -> list[tuple[str, float, int]]:
        """(`NAME/METRIC`, sum, count) of the numbers that each call of the function has logged since the last take."""
        metrics, self._metrics = self._metrics, []
        return metrics

    def _answer(self, request: dict[str, Any], timeout_s: float, num_values: int = 0) -> dict[str, Any]:
        """The reward's answer. Raises: RewardFailure, ExhaustedError."""
        try:
            answer = self._exchange(request, timeout_s, num_values)
        except NoAnswerError as error:
            raise RewardFailure(_explain(error), is_late=isinstance(error, LateError)) from None
        if "failure" in answer:
            raise RewardFailure(str(answer["failure"]))
        return answer

    def _exchange(self, request: dict[str, Any], timeout_s: float, num_values: int) -> dict[str, Any]:
        """Send a request and receive its answer; a process that fails is replaced. Raises: NoAnswerError."""
        process, is_alone, has_begun = self._ensure_ready(), False, False
        process.max_bytes = 3 * MAX_ANSWER + MAX_VALUE * num_values  # `begun`, `ended` and the answer may come together
        deadline = Deadline(timeout_s)
        try:
            process.send(json.dumps(request), deadline)
            is_alone = True  # the request was sent whole, so a fork that fails now can be replaced by another fork
            answer = _receive(process, deadline)
            if has_begun := "begun" in answer:
                answer = _receive(process, deadline)
            if "ended" in answer:
                # SIGKILL comes from the host (its OOM killer), so it is not the response's fault.
                has_begun = has_begun and int(answer["ended"]) != -signal.SIGKILL
                raise NoAnswerError(describe_exit(int(answer["ended"])))
            if process.unread:
                raise GarbledError("it wrote more than one answer")
        except NoAnswerError as error:
            self._replace(by_a_fork=is_alone and not isinstance(error, GarbledError))
            if has_begun and ("ended" in answer or not deadline.remaining_s):
                raise ExhaustedError("killed" if "ended" in answer else "timeout") from None
            raise
        return answer

    def _launch(self) -> LineProcess:
        self._process = LineProcess(
            make_module_command("rlplan.runtime.rewards.child"),
            subprocess.DEVNULL,
            3 * MAX_ANSWER,
            {**os.environ, "OMP_NUM_THREADS": "1"},  # several reward processes share the host's cores
        )
        self._process.send(json.dumps(self.setting), make_start_deadline())
        return self._process

    def _ensure_ready(self) -> LineProcess:
        """The process, ready for a request. Raises: NoAnswerError when it does not start."""
        if self._is_ready and self._process is not None:
            return self._process
        deadline = make_start_deadline()
        try:
            process = self._process or self._launch()
            answer = _receive(process, deadline)
            while "ready" not in answer and "unable" not in answer:  # late answers of the killed fork
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
        """End the failed process and start the next one at once, so that it starts while other rewards work.

        by_a_fork: kill only the fork; its parent then forks again without importing anything.
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
        process, self._process = self._process, None
        self._is_ready, self._fork = False, 0
        if process is not None:
            process.close()


def _receive(process: LineProcess, deadline: Deadline) -> dict[str, Any]:
    answer = process.receive(deadline)
    if not ANSWER_KEYS & set(answer):
        raise GarbledError("an unknown kind of answer")
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
