"""Latency of an engine under a closed loop: a fixed number of clients, each with one open request.

vLLM's scheduler runs in simulated time: each step decodes what runs and fills its token budget with prompts, in the
order of their arrival. Requests that end together are followed by requests that start together, so prompts queue
behind each other however empty the engine is. Which ones end together depends on the lengths and on the budget.

In: EngineRates, the loop, the number of sequences that fit in the KV cache. Out: time to first token and time per
output token. Left out: the network, prompts of different lengths, prefix caching, preemption.
"""

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from heapq import heappop, heappush
from random import Random
from statistics import fmean

from rlplan.timing.serving.step import EngineRates, StepLoad

REQUESTS_PER_CLIENT = 10
"""Requests of each client; all begin at once, so the first round queues. Source: InferenceX and AIConfigurator's
benchmarks send 10 to 20 times the number of clients."""
MOST_REQUESTS = 4000
"""Requests after which a simulation ends: means of more clients hardly change with further rounds."""
CLIENT, SPREAD = 12e-3, 0.5
"""Mean seconds from the end of a request until the next one of its client waits in the scheduler (stream, client, HTTP,
tokenizer), and the width of their uniform distribution relative to the mean. Assumed: with half of this mean, predicted
times to first token fall by 3 points on AIConfigurator's own deployments and by 10 points on gpt-oss-120b. A first
token takes half of it on its way back."""
CONTEXT_GRAIN = 4096
"""Cached tokens within which steps count as equal; they change a step by less than 1 %."""


@dataclass(frozen=True, slots=True)
class ClosedLoop:
    """Clients that send the next request when the last one is answered."""

    num_clients: float
    """Requests in flight."""
    prompt_len: float
    draw_response_len: Callable[[float], float]
    """Response length that a share, from 0 to 1, of the responses does not exceed."""
    max_num_seqs: float
    """Sequences served at once, limited by the engine or its KV cache."""
    max_batched_tokens: float = 8192.0
    """Token budget of one step."""


@dataclass(frozen=True, slots=True)
class Latency:
    """Latencies of one request."""

    first_token_s: float
    """Seconds from the request to the first token."""
    token_s: float
    """Seconds per token after the first."""


@dataclass(slots=True)
class _Request:
    sent_s: float
    response_len: int
    prefilled: int = 0
    first_token_s: float = 0.0


class _Engine:
    """A scheduler in simulated time."""

    def __init__(self, rates: EngineRates, loop: ClosedLoop) -> None:
        self.rates, self.loop = rates, loop
        self.prompt_len, self.now, self.num_steps = max(1, round(loop.prompt_len)), 0.0, 0
        self.arrivals: list[tuple[float, int, _Request]] = []
        self.waiting: deque[_Request] = deque()
        self.running: list[tuple[int, int, _Request]] = []
        self.sum_of_starts = self.num_sent = 0
        self.random = Random(0)
        clients = max(1, round(loop.num_clients))
        self.num_requests = clients * max(2, min(REQUESTS_PER_CLIENT, MOST_REQUESTS // clients))
        self.step_s = lru_cache(maxsize=None)(self._time_step)
        for _ in range(clients):
            self._send()

    def run(self) -> Latency:
        """Serve all requests and return their mean latencies."""
        first_tokens: list[float] = []
        tokens: list[float] = []
        while self.arrivals or self.waiting or self.running:
            if not self.waiting and not self.running:
                self.now = max(self.now, self.arrivals[0][0])
            while self.arrivals and self.arrivals[0][0] <= self.now:
                self.waiting.append(heappop(self.arrivals)[2])
            for request in self._step():
                request.first_token_s = self.now
                first_tokens.append(self.now - request.sent_s + CLIENT / 2)
                end = self.num_steps + request.response_len - 1
                heappush(self.running, (end, len(first_tokens), request))
                self.sum_of_starts += self.num_steps
            while self.running and self.running[0][0] <= self.num_steps:
                end, _, request = heappop(self.running)
                self.sum_of_starts -= end - request.response_len + 1
                if request.response_len > 1:
                    tokens.append((self.now - request.first_token_s) / (request.response_len - 1))
                self._send()
        return Latency(fmean(first_tokens), fmean(tokens) if tokens else 0.0)

    def _send(self) -> None:
        if self.num_sent < self.num_requests:
            length = max(1, round(self.loop.draw_response_len(self.random.random())))
            arrival = (
                self.now + CLIENT * (1 + SPREAD * (self.random.random() - 0.5))
                if self.num_sent >= self.loop.num_clients
                else 0.0
            )
            heappush(self.arrivals, (arrival, self.num_sent, _Request(self.now, length)))
            self.num_sent += 1

    def _step(self) -> list[_Request]:
        """Run one step, or decode steps until something changes. Returns the requests whose prefill ends."""
        num_seqs = len(self.running)
        budget, slots = int(self.loop.max_batched_tokens) - num_seqs, max(1.0, self.loop.max_num_seqs) - num_seqs
        ended: list[_Request] = []
        tokens, pairs = 0, 0.0
        while self.waiting and len(ended) < slots and tokens < budget:
            request = self.waiting[0]
            chunk = min(budget - tokens, self.prompt_len - request.prefilled)
            pairs += chunk * (request.prefilled + chunk / 2)
            tokens, request.prefilled = tokens + chunk, request.prefilled + chunk
            if request.prefilled < self.prompt_len:
                break
            ended.append(self.waiting.popleft())
        context = num_seqs * (self.prompt_len + self.num_steps) - self.sum_of_starts
        steps = 1
        if not tokens:
            steps = self.running[0][0] - self.num_steps
            step_s = self.step_s(num_seqs, (context + num_seqs * steps // 2) // CONTEXT_GRAIN, 0, 0.0, 0)
            if self.arrivals and len(self.running) < self.loop.max_num_seqs:
                steps = min(steps, max(1, math.ceil((self.arrivals[0][0] - self.now) / step_s)))
        else:
            step_s = self.step_s(num_seqs, context // CONTEXT_GRAIN, tokens, pairs, len(ended))
        self.now, self.num_steps = self.now + steps * step_s, self.num_steps + steps
        return ended

    def _time_step(self, num_seqs: int, grains: int, tokens: int, pairs: float, num_prefills: int) -> float:
        context = (grains + 0.5) * CONTEXT_GRAIN if num_seqs else 0.0
        return self.rates.seconds(StepLoad(num_seqs, context, tokens, pairs, num_prefills))


def closed_loop_latency(rates: EngineRates, loop: ClosedLoop) -> Latency:
    """Mean latencies of a benchmark with a fixed concurrency, seeded.

    Source: vLLM 0.32.0 v1/core/sched/scheduler.py: decodes first, then prompts up to the token budget, in chunks.
    Assumes: no prompt is cached. Differs: Little's law for random arrivals gives a third of this time to first token
    where all lengths are equal, because equal requests stay together.
    """
    return _Engine(rates, loop).run()
