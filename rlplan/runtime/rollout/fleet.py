"""Fleet: all rollout engines of a run. Requests are dealt out by the length that they are expected to reach.

In: requests. Out: finished requests and measurements. Rank 0 of an engine is asked; its other ranks come along.
What is submitted is remembered with its engine until it is collected: an engine that is lost gets it again.
Left out: moving a request from one engine to another once it has begun; what a lost engine needs (recovery.py).
"""

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from rlplan.dataflow.schedule import Schedule
from rlplan.errors import RunError
from rlplan.runtime.cluster.worker_group import WorkerGroup
from rlplan.runtime.fault_tolerance.supervision import LostProcessError
from rlplan.runtime.learning.packing import balance_by_length
from rlplan.runtime.measure.memory_meter import Measurement
from rlplan.runtime.rollout.experience import FinishedRequest, RolloutRequest

LENGTH_MEMORY = 0.5
"""Weight of the newest completions of a prompt in what it is expected to need; half forgets one epoch at a time."""


class ExpectedLengths:
    """How many tokens a sample of a prompt is expected to take, from those seen so far.

    mean: what all prompts took, the newest counting most; 0 before anything was seen.
    """

    def __init__(self) -> None:
        self.by_prompt: dict[tuple[int, ...], float] = {}
        self.mean = 0.0

    def estimate(self, request: RolloutRequest) -> float:
        """Tokens: what the prompt's samples took before, else what all took, else the most that they may take."""
        expected = self.by_prompt.get(request.prompt) or self.mean or float(request.max_tokens)
        return min(expected, float(request.max_tokens))

    def learn(self, request: RolloutRequest, finished: FinishedRequest) -> None:
        mean = sum(len(completion.tokens) for completion in finished.completions) / len(finished.completions)
        before = self.by_prompt.get(request.prompt)
        self.by_prompt[request.prompt] = _blend(before, mean)
        self.mean = _blend(self.mean or None, mean)


class Fleet:
    """The engines of a schedule, each with its ranks' processes; none where answers are given and nothing is evaluated.

    changing: held while an engine is restarted, so that nothing is submitted to it before it has its weights.
    num_begun_anew: requests that a lost engine had begun, since it was last set to 0.
    """

    def __init__(self, worker_group: WorkerGroup, schedule: Schedule, *, shares_base: bool = False) -> None:
        """shares_base: engines have no weights, but those of the trainer on their device."""
        self.worker_group, self.schedule, self.shares_base = worker_group, schedule, shares_base
        self.engines: list[tuple[str, ...]] = []
        for layout in schedule.layouts:
            if layout.worker == "rollout_engine":
                names = [process for process, _ in layout.processes]
                self.engines += [tuple(names[first : first + layout.tp]) for first in range(0, len(names), layout.tp)]
        self.lengths = ExpectedLengths()
        self.changing = threading.RLock()
        self.num_begun_anew = 0
        self._open: dict[str, tuple[RolloutRequest, str]] = {}
        self._collected: list[FinishedRequest] = []
        self._sessions: dict[str, str] = {}
        self._num_pauses = 0

    @property
    def processes(self) -> tuple[str, ...]:
        return tuple(process for ranks in self.engines for process in ranks)

    def engine_ranks(self, process: str) -> tuple[str, ...]:
        """All ranks of a process's engine: they take steps together or not at all."""
        return next((ranks for ranks in self.engines if process in ranks), ())

    def restart(self, ranks: tuple[str, ...], timeout_s: float) -> None:
        """Start the processes of an engine anew, with their libraries and without a model."""
        for each in ranks:
            self.worker_group.restart(each)
        self.worker_group.gather([self.worker_group.submit(each, "import_libraries") for each in ranks], timeout_s)

    def num_open(self, process: str) -> int:
        """Requests that were submitted to a process's engine and are not collected."""
        return sum(leader in self.engine_ranks(process) for _, leader in self._open.values())

    def submit_again(self, ranks: tuple[str, ...], timeout_s: float) -> None:
        """Begin anew what one engine had under way: what it had made of it is lost."""
        lost = [request for request, leader in self._open.values() if leader == ranks[0]]
        self.num_begun_anew += len(lost)
        if lost:
            self.worker_group.gather([self.worker_group.submit(ranks[0], "submit", lost)], timeout_s)

    def load(
        self, engines: Sequence[tuple[str, ...]], model_folder: str, version: int, timeout_s: float
    ) -> list[Measurement]:
        """Load the model on every rank of some engines. Ranks of one engine meet at the first of them."""
        meetings: list[tuple[str, int] | None] = [None] * len(engines)
        if len(self.engines[0]) > 1:
            addresses = [self.worker_group.addresses[ranks[0]] for ranks in engines]
            listening = [
                self.worker_group.submit(ranks[0], "open_rendezvous", address, 0)
                for ranks, address in zip(engines, addresses, strict=True)
            ]
            meetings = list(zip(addresses, self.worker_group.gather(listening, timeout_s), strict=True))
        bases = self._bases([process for ranks in engines for process in ranks], timeout_s)
        calls = [
            self.worker_group.perform(process, "start", model_folder, rank, meeting, version, bases.get(process))
            for ranks, meeting in zip(engines, meetings, strict=True)
            for rank, process in enumerate(ranks)
        ]
        return self.worker_group.measured(calls, timeout_s)[1]

    def _bases(self, processes: Sequence[str], timeout_s: float) -> dict[str, Any]:
        """What opens the frozen base of the trainer on the same device, for processes without weights of their own."""
        if not self.shares_base:
            return {}
        device_of = dict(self.schedule.processes)
        holders = {device_of[process]: process for process, _ in self.schedule.layout("policy_trainer").processes}
        calls = [self.worker_group.submit(holders[device_of[process]], "share_base") for process in processes]
        return dict(zip(processes, self.worker_group.gather(calls, timeout_s), strict=True))

    def generate(
        self, requests: Sequence[RolloutRequest], timeout_s: float
    ) -> tuple[list[FinishedRequest], list[Measurement]]:
        """Complete all requests; results in the requests' order. The samples of a request stay on one engine."""
        calls: list[Any] = []
        shares = balance_by_length([self._weight(request) for request in requests], len(self.engines))
        for share, ranks in zip(shares, self.engines, strict=True):
            mine = [requests[index] for index in share]
            calls += [self.worker_group.perform(process, "generate", mine) for process in ranks]
        try:
            with self._blaming():
                results, measurements = self.worker_group.measured(calls, timeout_s)
        except LostProcessError as lost:
            self._abandon([request.id for request in requests], self.engine_ranks(lost.process), timeout_s)
            raise
        finished = {done.id: done for result in results for done in result}
        ordered = [finished[request.id] for request in requests]
        for request, done in zip(requests, ordered, strict=True):
            self.lengths.learn(request, done)
        return ordered, measurements

    def submit(self, requests: Sequence[RolloutRequest], timeout_s: float) -> None:
        """Begin to complete requests beside those under way. What has been submitted already is left as it is."""
        with self.changing:
            new = [request for request in requests if request.id not in self._open]
            shares: dict[str, list[RolloutRequest]] = {}
            for request, leader in zip(new, self._leaders(new), strict=True):
                shares.setdefault(leader, []).append(request)
                self._open[request.id] = (request, leader)
            calls = [self.worker_group.submit(leader, "submit", share) for leader, share in shares.items()]
        with self._blaming():
            self.worker_group.gather(calls, timeout_s)

    def end_session(self, session: str) -> None:
        self._sessions.pop(session, None)

    def collect(
        self, max_wait_s: float, at_least: int, timeout_s: float
    ) -> tuple[list[FinishedRequest], list[Measurement]]:
        """What was submitted and has been finished; each engine waits at most `max_wait_s` for its share of `at_least`.

        When an engine is lost, what the others gave is kept for the next time.
        """
        share = max(1, at_least // len(self.engines))
        calls = [self.worker_group.perform(ranks[0], "collect", max_wait_s, share) for ranks in self.engines]
        measurements, losses = [], []
        for call in calls:
            try:
                with self._blaming():
                    (result,), measured = self.worker_group.measured([call], timeout_s)
            except LostProcessError as error:
                losses.append(error)
                continue
            self._collected += result
            measurements += measured
        if losses:
            raise losses[0]
        finished, self._collected = self._collected, []
        for done in finished:
            request = self._open.pop(done.id)[0]
            if not request.session:  # a turn says little about the whole
                self.lengths.learn(request, done)
        return finished, measurements

    def finished_samples(self, max_wait_s: float, timeout_s: float) -> list[FinishedRequest]:
        """Samples that have ended since the last time, each as a request of its own; only where the job wants them."""
        calls = [self.worker_group.submit(ranks[0], "finished_samples", max_wait_s) for ranks in self.engines]
        return [sample for samples in self.worker_group.gather(calls, timeout_s) for sample in samples]

    @contextmanager
    def paused(self, timeout_s: float) -> Iterator[None]:
        """No engine takes a step inside the block, and all its ranks have taken the same ones. Blocks may overlap."""
        with self.changing:
            self._num_pauses += 1
        try:
            self._ask_leaders("pause", timeout_s)
            yield
        finally:
            with self.changing:
                self._num_pauses -= 1
                is_last = not self._num_pauses
            if is_last:
                self._ask_leaders("resume", timeout_s)

    def _abandon(self, request_ids: Sequence[str], without: tuple[str, ...], timeout_s: float) -> None:
        """Let the other engines drop what they were asked for together with a lost one."""
        leaders = [ranks[0] for ranks in self.engines if ranks != without]
        self.worker_group.gather(
            [self.worker_group.submit(name, "abandon", request_ids) for name in leaders], timeout_s
        )

    def _ask_leaders(self, method: str, timeout_s: float) -> None:
        with self._blaming():
            self.worker_group.gather([self.worker_group.submit(ranks[0], method) for ranks in self.engines], timeout_s)

    @contextmanager
    def _blaming(self) -> Iterator[None]:
        """When a rank is lost the others of its engine fail, and may be heard first: name the one that is lost."""
        try:
            yield
        except LostProcessError:
            raise
        except RunError as error:
            gone = [process for process in self.worker_group.lost() if process in self.processes]
            if not gone:
                raise
            parts = {"where": error.where, "rule": error.rule, "way_out": "look at the end of its log"}
            lost = LostProcessError(f"{gone[0]} is gone", process=gone[0], **parts)
            lost.restart_count = self.worker_group.restart_counts[gone[0]]
            raise lost from error

    def _leaders(self, requests: Sequence[RolloutRequest]) -> list[str]:
        """Each request's engine: its session's, or the least loaded; a new session counts as one request."""
        members: dict[str, list[int]] = {}
        for index, request in enumerate(requests):
            members.setdefault(request.session or request.id, []).append(index)
        new = {name: indices for name, indices in members.items() if name not in self._sessions}
        weights = [sum(self._weight(requests[index]) for index in indices) for indices in new.values()]
        names = list(new)
        leaders = {
            names[index]: ranks[0]
            for share, ranks in zip(balance_by_length(weights, len(self.engines)), self.engines, strict=True)
            for index in share
        }
        self._sessions |= {name: leader for name, leader in leaders.items() if requests[new[name][0]].session}
        return [(leaders | self._sessions)[request.session or request.id] for request in requests]

    def _weight(self, request: RolloutRequest) -> float:
        return request.num_samples * self.lengths.estimate(request)


def _blend(before: float | None, new: float) -> float:
    return new if before is None else before + LENGTH_MEMORY * (new - before)
