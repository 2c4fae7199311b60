"""Functions of TRL's signature: called once with all responses of a batch, as TRL's trainers call them.

A reward may compare the responses of a batch with each other, so how many come in one call is part of what it means. A
batch is what is asked for together: all rollouts of a step, group after group; all greedy baselines of a step; all
responses to held-out prompts; and with dynamic sampling the groups that were generated together.

In: responses. Out: for each of them the function's number, why there is none, or None where the function leaves it to
the other rewards. Functions work at the same time, each in one process, which keeps what the function remembers.
Left out: rewards of one response (judge.py).
"""

import time
from collections.abc import Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from rlplan.runtime.rewards.judge import Response, make_function_process, request_about
from rlplan.runtime.rewards.processes import RewardProcess
from rlplan.runtime.rewards.verdict import RewardFailure
from rlplan.spec.parts.rewards import FunctionSpec, RewardSpec


@dataclass(slots=True)
class BatchVerdicts:
    """What the functions say of a batch."""

    answers: dict[str, list[float | RewardFailure | None]] = field(default_factory=dict)
    """One for each response, by the reward's name."""

    start_s: float = 0.0
    """When the first call began, in seconds since 1970."""

    end_s: float = 0.0

    def get_answers(self, index: int) -> dict[str, float | RewardFailure | None]:
        """The answers about one response of the batch."""
        return {label: answers[index] for label, answers in self.answers.items()}


class BatchedFunctions:
    """See the module docstring. longest_s: the most seconds of one call."""

    def __init__(self, rewards: Sequence[RewardSpec], longest_s: float) -> None:
        self.longest_s = longest_s
        functions = [spec for spec in rewards if isinstance(spec, FunctionSpec)]
        self._functions = [spec for spec in functions if spec.signature != "verl"]
        self._processes: dict[str, RewardProcess] = {}
        self._threads = ThreadPoolExecutor(max(1, len(self._functions)), thread_name_prefix="batched-reward")

    def start(self, columns: Collection[str] | None = None) -> None:
        """Load the functions that may take batches, and keep the processes of those that do. Raises: SpecError."""
        for spec in self._functions:
            process = make_function_process(spec)
            try:
                process.start(columns)
                if process.takes_batches:
                    self._processes[spec.label] = process
            finally:
                if spec.label not in self._processes:
                    process.close()

    @property
    def labels(self) -> frozenset[str]:
        """Names of the rewards that take batches, once they have started."""
        return frozenset(self._processes)

    def judge(self, responses: Sequence[Response], progress: tuple[int, int]) -> BatchVerdicts:
        """Call every function once. progress: steps done, and in all."""
        verdicts = BatchVerdicts(start_s=time.time())
        if responses:
            asked = [request_about(response) for response in responses]
            calls = {
                label: self._threads.submit(process.ask_batch, asked, progress, self.longest_s)
                for label, process in self._processes.items()
            }
            for label, call in calls.items():
                try:
                    verdicts.answers[label] = call.result()
                except RewardFailure as failure:
                    verdicts.answers[label] = [failure] * len(responses)
        verdicts.end_s = time.time()
        return verdicts

    def close(self) -> None:
        """End every process; a call that is under way is given up."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        for process in self._processes.values():
            process.close()
        self._threads.shutdown(wait=True)
        for process in self._processes.values():  # one that was just being replaced
            process.close()
