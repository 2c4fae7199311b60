"""Fleet: all rollout engines of a run. Requests are dealt out by the length that they are expected to reach.

In: requests. Out: finished requests and measurements. Rank 0 of an engine is asked; its other ranks come along.
Left out: moving a request from one engine to another once it has begun.
"""

import heapq
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from rlplan.dataflow.layouts import RoleLayout
from rlplan.runtime.crew import Crew
from rlplan.runtime.experience import FinishedRequest, RolloutRequest
from rlplan.runtime.workers.memory_meter import Measurement

LENGTH_MEMORY = 0.5
"""Weight of the newest completions of a prompt in what it is expected to need; half forgets one epoch at a time."""


def deal(weights: Sequence[float], num_shares: int) -> list[list[int]]:
    """Indices dealt out so that the heaviest share is light: longest first, each to the lightest share so far (LPT).

    At most 4/3 of the best possible. Within a share the order stays the given one.

    >>> deal([5, 4, 3, 3, 3], 2)
    [[0, 3], [1, 2, 4]]
    """
    heap = [(0.0, share) for share in range(num_shares)]
    shares: list[list[int]] = [[] for _ in range(num_shares)]
    for index in sorted(range(len(weights)), key=lambda i: (-weights[i], i)):
        load, share = heapq.heappop(heap)
        shares[share].append(index)
        heapq.heappush(heap, (load + weights[index], share))
    return [sorted(share) for share in shares]


class ExpectedLengths:
    """How many tokens a sample of a prompt is expected to take, from those seen so far."""

    def __init__(self) -> None:
        self._by_prompt: dict[tuple[int, ...], float] = {}
        self._mean = 0.0

    def of(self, request: RolloutRequest) -> float:
        """Tokens: what the prompt's samples took before, else what all took, else the most that they may take."""
        expected = self._by_prompt.get(request.prompt) or self._mean or float(request.max_tokens)
        return min(expected, float(request.max_tokens))

    def learn(self, request: RolloutRequest, finished: FinishedRequest) -> None:
        """Take in what a request took."""
        mean = sum(len(completion.tokens) for completion in finished.completions) / len(finished.completions)
        before = self._by_prompt.get(request.prompt)
        self._by_prompt[request.prompt] = _blend(before, mean)
        self._mean = _blend(self._mean or None, mean)


class Fleet:
    """The engines of a layout, each with its ranks' processes."""

    def __init__(self, crew: Crew, layout: RoleLayout) -> None:
        names = [process for process, _ in layout.processes]
        self.crew = crew
        self.engines = [tuple(names[first : first + layout.tp]) for first in range(0, len(names), layout.tp)]
        self.lengths = ExpectedLengths()
        self._open: dict[str, RolloutRequest] = {}

    @property
    def processes(self) -> tuple[str, ...]:
        """Every rank of every engine."""
        return tuple(process for ranks in self.engines for process in ranks)

    def start(self, model_folder: str, version: int, timeout_s: float) -> list[Measurement]:
        """Load the model on every rank of every engine."""
        return self._start(self.engines, model_folder, version, timeout_s)

    def revive(self, process: str, model_folder: str, version: int, timeout_s: float) -> None:
        """Start the engine of a lost rank anew, with all its ranks: they take steps together or not at all."""
        ranks = next(ranks for ranks in self.engines if process in ranks)
        for each in ranks:
            self.crew.restart(each)
        self.crew.gather([self.crew.submit(each, "import_libraries") for each in ranks], timeout_s)
        self._start([ranks], model_folder, version, timeout_s)

    def _start(
        self, engines: Sequence[tuple[str, ...]], model_folder: str, version: int, timeout_s: float
    ) -> list[Measurement]:
        """Ranks of one engine meet at the first of them."""
        meetings: list[tuple[str, int] | None] = [None] * len(engines)
        if len(self.engines[0]) > 1:
            addresses = [self.crew.addresses[ranks[0]] for ranks in engines]
            listening = [
                self.crew.submit(ranks[0], "open_rendezvous", address, 0)
                for ranks, address in zip(engines, addresses, strict=True)
            ]
            meetings = list(zip(addresses, self.crew.gather(listening, timeout_s), strict=True))
        calls = [
            self.crew.perform(process, "start", model_folder, rank, meeting, version)
            for ranks, meeting in zip(engines, meetings, strict=True)
            for rank, process in enumerate(ranks)
        ]
        return self.crew.measured(calls, timeout_s)[1]

    def generate(
        self, requests: Sequence[RolloutRequest], timeout_s: float
    ) -> tuple[list[FinishedRequest], list[Measurement]]:
        """Complete all requests; results in the requests' order. The samples of a request stay on one engine."""
        calls: list[Any] = []
        for share, ranks in zip(self._shares(requests), self.engines, strict=True):
            mine = [requests[index] for index in share]
            calls += [self.crew.perform(process, "generate", mine) for process in ranks]
        results, measurements = self.crew.measured(calls, timeout_s)
        finished = {done.id: done for result in results for done in result}
        ordered = [finished[request.id] for request in requests]
        for request, done in zip(requests, ordered, strict=True):
            self.lengths.learn(request, done)
        return ordered, measurements

    def submit(self, requests: Sequence[RolloutRequest], timeout_s: float) -> dict[str, list[str]]:
        """Begin to complete requests beside those under way. Gives the requests' ids by the engine that has them."""
        self._open |= {request.id: request for request in requests}
        shares = {
            ranks[0]: [requests[i] for i in share]
            for share, ranks in zip(self._shares(requests), self.engines, strict=True)
        }
        self.crew.gather([self.crew.submit(name, "submit", mine) for name, mine in shares.items() if mine], timeout_s)
        return {name: [request.id for request in mine] for name, mine in shares.items()}

    def collect(
        self, max_wait_s: float, at_least: int, timeout_s: float
    ) -> tuple[list[FinishedRequest], list[Measurement]]:
        """What was submitted and is finished; each engine waits at most `max_wait_s` for its share of `at_least`."""
        share = max(1, at_least // len(self.engines))
        calls = [self.crew.perform(ranks[0], "collect", max_wait_s, share) for ranks in self.engines]
        results, measurements = self.crew.measured(calls, timeout_s)
        finished = [done for result in results for done in result]
        for done in finished:
            self.lengths.learn(self._open.pop(done.id), done)
        return finished, measurements

    def finished_samples(self, max_wait_s: float, timeout_s: float) -> list[FinishedRequest]:
        """Samples that have ended since the last time, each as a request of its own; only where the job wants them."""
        calls = [self.crew.submit(ranks[0], "finished_samples", max_wait_s) for ranks in self.engines]
        return [sample for samples in self.crew.gather(calls, timeout_s) for sample in samples]

    @contextmanager
    def paused(self, timeout_s: float) -> Iterator[None]:
        """No engine takes a step inside the block, and all its ranks have taken the same ones."""
        self._ask_leaders("pause", timeout_s)
        yield
        self._ask_leaders("resume", timeout_s)

    def stop(self, timeout_s: float) -> list[Measurement]:
        """Destroy every engine; its process stays and holds next to nothing."""
        return self.crew.measured([self.crew.perform(process, "stop") for process in self.processes], timeout_s)[1]

    def _ask_leaders(self, method: str, timeout_s: float) -> None:
        self.crew.gather([self.crew.submit(ranks[0], method) for ranks in self.engines], timeout_s)

    def _shares(self, requests: Sequence[RolloutRequest]) -> list[list[int]]:
        weights = [request.num_samples * self.lengths.of(request) for request in requests]
        return deal(weights, len(self.engines))


def _blend(before: float | None, new: float) -> float:
    return new if before is None else before + LENGTH_MEMORY * (new - before)
