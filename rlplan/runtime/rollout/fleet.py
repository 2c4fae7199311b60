"""Fleet: all rollout engines of a run. Requests are balanced over engines by their expected length.

In: requests. Out: finished requests and measurements. Calls go to rank 0 of an engine, which leads the other ranks.
Open requests are remembered with their engine, so that a restarted engine gets them again.
Left out: moving a running request to another engine; restoring a lost engine (recovery.py).
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
from rlplan.runtime.workers.typed_calls import ENGINE, TRAINER, WORKER, bind_call

LENGTH_MEMORY = 0.5
"""Weight of a prompt's newest completions in its expected length (exponential moving average)."""


class ExpectedLengths:
    """Expected length of a prompt's samples, in tokens, learned from finished ones.

    mean: moving average over all prompts; 0 before the first one.
    """

    def __init__(self) -> None:
        self.by_prompt: dict[tuple[int, ...], float] = {}
        self.mean = 0.0

    def estimate(self, request: RolloutRequest) -> float:
        """Expected tokens of a sample: the prompt's average, else the average of all prompts, else the maximum."""
        expected = self.by_prompt.get(request.prompt) or self.mean or float(request.max_tokens)
        return min(expected, float(request.max_tokens))

    def learn(self, request: RolloutRequest, finished: FinishedRequest) -> None:
        mean = sum(len(completion.tokens) for completion in finished.completions) / len(finished.completions)
        before = self.by_prompt.get(request.prompt)
        self.by_prompt[request.prompt] = _blend(before, mean)
        self.mean = _blend(self.mean or None, mean)


class Fleet:
    """The engines of a schedule, each with its ranks' processes; none for offline data without evaluation.

    changing: lock that is held while an engine is restarted. The engine gets no requests before it has its weights.
    num_begun_anew: number of requests that were submitted again after a loss; the caller resets it.
    """

    def __init__(self, worker_group: WorkerGroup, schedule: Schedule, *, shares_base: bool = False) -> None:
        """shares_base: engines use the weights of the trainer on their device."""
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
        """All ranks of the engine that a process belongs to."""
        return next((ranks for ranks in self.engines if process in ranks), ())

    def restart(self, ranks: tuple[str, ...], timeout_s: float) -> None:
        """Restart the processes of an engine and import their libraries; no model is loaded."""
        for process in ranks:
            self.worker_group.restart(process)
        calls = [self.worker_group.submit(process, *bind_call(WORKER.import_libraries)) for process in ranks]
        self.worker_group.gather(calls, timeout_s)

    def num_open(self, process: str) -> int:
        """Number of open requests of a process's engine."""
        return sum(leader in self.engine_ranks(process) for _, leader in self._open.values())

    def submit_again(self, ranks: tuple[str, ...], timeout_s: float) -> None:
        """Submit an engine's open requests again after its restart; their partial samples are lost."""
        lost = [request for request, leader in self._open.values() if leader == ranks[0]]
        self.num_begun_anew += len(lost)
        if lost:
            self.worker_group.gather([self.worker_group.submit(ranks[0], *bind_call(ENGINE.submit, lost))], timeout_s)

    def load(
        self, engines: Sequence[tuple[str, ...]], model_folder: str, version: int, timeout_s: float
    ) -> list[Measurement]:
        """Load the model on every rank of some engines. The rendezvous of an engine's ranks is at its first rank."""
        meetings: list[tuple[str, int] | None] = [None] * len(engines)
        if len(self.engines[0]) > 1:  # a single rank needs no rendezvous
            addresses = [self.worker_group.addresses[ranks[0]] for ranks in engines]
            listening = [
                self.worker_group.submit(ranks[0], *bind_call(WORKER.open_rendezvous, address, 0))
                for ranks, address in zip(engines, addresses, strict=True)
            ]
            meetings = list(zip(addresses, self.worker_group.gather(listening, timeout_s), strict=True))
        bases = self._share_bases([process for ranks in engines for process in ranks], timeout_s)
        calls = [
            self.worker_group.perform(
                process, *bind_call(ENGINE.start, model_folder, rank, meeting, version, bases.get(process))
            )
            for ranks, meeting in zip(engines, meetings, strict=True)
            for rank, process in enumerate(ranks)
        ]
        return self.worker_group.gather_measured(calls, timeout_s)[1]

    def _share_bases(self, processes: Sequence[str], timeout_s: float) -> dict[str, Any]:
        """Handles of the trainer's frozen base on each process's device; empty if engines have their own weights."""
        if not self.shares_base:
            return {}
        device_of = dict(self.schedule.processes)
        holders = {device_of[process]: process for process, _ in self.schedule.find_layout("policy_trainer").processes}
        share_base = bind_call(TRAINER.share_base)
        calls = [self.worker_group.submit(holders[device_of[process]], *share_base) for process in processes]
        return dict(zip(processes, self.worker_group.gather(calls, timeout_s), strict=True))

    def generate(
        self, requests: Sequence[RolloutRequest], timeout_s: float
    ) -> tuple[list[FinishedRequest], list[Measurement]]:
        """Complete all requests and return them in order. All samples of a request run on one engine."""
        calls: list[Any] = []
        shares = balance_by_length([self._estimate_tokens(request) for request in requests], len(self.engines))
        for share, ranks in zip(shares, self.engines, strict=True):
            call = bind_call(ENGINE.generate, [requests[index] for index in share])
            calls += [self.worker_group.perform(process, *call) for process in ranks]
        try:
            with self._name_lost_rank():
                results, measurements = self.worker_group.gather_measured(calls, timeout_s)
        except LostProcessError as lost:
            self._abandon([request.id for request in requests], self.engine_ranks(lost.process), timeout_s)
            raise
        finished = {done.id: done for result in results for done in result}
        ordered = [finished[request.id] for request in requests]
        for request, done in zip(requests, ordered, strict=True):
            self.lengths.learn(request, done)
        return ordered, measurements

    def submit(self, requests: Sequence[RolloutRequest], timeout_s: float) -> None:
        """Start requests in addition to open ones.

        Requests that are open already are skipped, because this call is repeated after an engine was restarted.
        """
        with self.changing:
            new = [request for request in requests if request.id not in self._open]
            shares: dict[str, list[RolloutRequest]] = {}
            for request, leader in zip(new, self._assign_engines(new), strict=True):
                shares.setdefault(leader, []).append(request)
                # Recorded before the call: if the engine is lost during it, its restart submits the request again.
                self._open[request.id] = (request, leader)
            calls = [
                self.worker_group.submit(leader, *bind_call(ENGINE.submit, share)) for leader, share in shares.items()
            ]
        with self._name_lost_rank():
            self.worker_group.gather(calls, timeout_s)

    def end_session(self, session: str) -> None:
        self._sessions.pop(session, None)

    def collect(
        self, max_wait_s: float, at_least: int, timeout_s: float
    ) -> tuple[list[FinishedRequest], list[Measurement]]:
        """Return finished requests; each engine waits at most `max_wait_s` for its share of `at_least` requests.

        If an engine is lost, the results of the others are kept for the next call.
        """
        share = max(1, at_least // len(self.engines))
        collect = bind_call(ENGINE.collect, max_wait_s, share)
        calls = [self.worker_group.perform(ranks[0], *collect) for ranks in self.engines]
        measurements, losses = [], []
        for call in calls:  # one by one, so that a lost engine does not discard the results of the others
            try:
                with self._name_lost_rank():
                    (result,), measured = self.worker_group.gather_measured([call], timeout_s)
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
            if not request.session:  # one turn does not predict the length of a conversation
                self.lengths.learn(request, done)
        return finished, measurements

    def finished_samples(self, max_wait_s: float, timeout_s: float) -> list[FinishedRequest]:
        """Return newly finished samples, each as its own request; empty unless the job has reward processes."""
        collect = bind_call(ENGINE.finished_samples, max_wait_s)
        calls = [self.worker_group.submit(ranks[0], *collect) for ranks in self.engines]
        return [sample for samples in self.worker_group.gather(calls, timeout_s) for sample in samples]

    @contextmanager
    def pause(self, timeout_s: float) -> Iterator[None]:
        """Context in which all engines are paused, with all ranks at the same step. Contexts may overlap."""
        with self.changing:
            self._num_pauses += 1
        try:
            self._call_leaders(bind_call(ENGINE.pause), timeout_s)
            yield
        finally:
            with self.changing:
                self._num_pauses -= 1
                is_last = not self._num_pauses
            if is_last:
                self._call_leaders(bind_call(ENGINE.resume), timeout_s)

    def _abandon(self, request_ids: Sequence[str], without: tuple[str, ...], timeout_s: float) -> None:
        """Let all engines but the lost one drop the requests of a failed call, because the call is repeated."""
        leaders = [ranks[0] for ranks in self.engines if ranks != without]
        call = bind_call(ENGINE.abandon, request_ids)
        self.worker_group.gather([self.worker_group.submit(leader, *call) for leader in leaders], timeout_s)

    def _call_leaders(self, call: tuple[Any, ...], timeout_s: float) -> None:
        with self._name_lost_rank():
            self.worker_group.gather([self.worker_group.submit(ranks[0], *call) for ranks in self.engines], timeout_s)

    @contextmanager
    def _name_lost_rank(self) -> Iterator[None]:
        """Context that replaces errors of an engine's other ranks by the loss of the rank that caused them."""
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

    def _assign_engines(self, requests: Sequence[RolloutRequest]) -> list[str]:
        """First rank of each request's engine: its session's engine, or the least loaded one."""
        members: dict[str, list[int]] = {}
        for index, request in enumerate(requests):
            members.setdefault(request.session or request.id, []).append(index)
        new = {name: indices for name, indices in members.items() if name not in self._sessions}
        weights = [sum(self._estimate_tokens(requests[index]) for index in indices) for indices in new.values()]
        names = list(new)
        leaders = {
            names[index]: ranks[0]
            for share, ranks in zip(balance_by_length(weights, len(self.engines)), self.engines, strict=True)
            for index in share
        }
        self._sessions |= {name: leader for name, leader in leaders.items() if requests[new[name][0]].session}
        return [(leaders | self._sessions)[request.session or request.id] for request in requests]

    def _estimate_tokens(self, request: RolloutRequest) -> float:
        return request.num_samples * self.lengths.estimate(request)


def _blend(before: float | None, new: float) -> float:
    return new if before is None else before + LENGTH_MEMORY * (new - before)
