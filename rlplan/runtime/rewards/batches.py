"""Reward functions with TRL's signature, called once with all responses of a batch, as TRL's trainers call them.

A reward may compare the responses of a batch, so the batch is part of its definition. A batch holds what is requested
together: all rollouts of a step, group by group; all greedy baselines of a step; all responses to held-out prompts; or,
with dynamic sampling, the groups that were generated together.

In: responses. Out: for each response a number, the reason for a failure, or None when the function leaves it to other
rewards. Functions run concurrently, each in one process that keeps the function's state.
Left out: rewards of single responses (judge.py).
"""

from collections.abc import Collection, Sequence
from concurrent.futures import ThreadPoolExecutor

from rlplan.runtime.rewards.judge import Response, make_function_process, make_request
from rlplan.runtime.rewards.processes import RewardProcess
from rlplan.runtime.rewards.verdict import RewardFailure
from rlplan.spec.parts.rewards import FunctionSpec, RewardSpec

Answers = dict[str, list[float | RewardFailure | None]]
"""Answers of all batch functions about one batch, by the reward's name, one per response."""


class BatchedFunctions:
    """See the module docstring. longest_s: time limit of one call, in seconds."""

    def __init__(self, rewards: Sequence[RewardSpec], longest_s: float) -> None:
        self.longest_s = longest_s
        functions = [spec for spec in rewards if isinstance(spec, FunctionSpec)]
        self._functions = [spec for spec in functions if spec.signature != "verl"]
        self._processes: dict[str, RewardProcess] = {}
        self._threads = ThreadPoolExecutor(max(1, len(self._functions)), thread_name_prefix="batched-reward")

    def start(self, columns: Collection[str] | None = None) -> None:
        """Load the functions, and keep the processes of those that take batches. Raises: SpecError."""
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
        """Names of the rewards that take batches; known after `start`."""
        return frozenset(self._processes)

    @property
    def processes(self) -> Collection[RewardProcess]:
        return self._processes.values()

    def judge(self, responses: Sequence[Response], progress: tuple[int, int]) -> Answers:
        """Call every function once. progress: (finished steps, all steps)."""
        if not responses:
            return {}
        requests, answers = [make_request(response) for response in responses], Answers()
        calls = {
            label: self._threads.submit(process.ask_batch, requests, progress, self.longest_s)
            for label, process in self._processes.items()
        }
        for label, call in calls.items():
            try:
                answers[label] = call.result()
            except RewardFailure as failure:
                answers[label] = [failure] * len(responses)
        return answers

    def close(self) -> None:
        """End every process and abandon running calls."""
        # Processes are closed before the threads are joined: a thread may wait for an answer of its process.
        self._threads.shutdown(wait=False, cancel_futures=True)
        for process in self._processes.values():
            process.close()
        self._threads.shutdown(wait=True)
        for process in self._processes.values():  # again: a thread may just have replaced a process
            process.close()
