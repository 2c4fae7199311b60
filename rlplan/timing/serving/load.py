"""Latency of an engine under a closed loop: a fixed number of clients, each with one request at a time.

In: EngineRates, the loop, how many sequences the cache holds. Out: seconds to the first token and of each token after
it. Left out: the client's own work and the network to it, a spread of lengths, prefix caching.

Symbols: c clients, b of them served at once, P prompt, R response, D a step that only decodes, M one that prefills too.
"""

import math
from dataclasses import dataclass

from rlplan.timing.serving.step import EngineRates, StepLoad

REQUESTS_PER_CLIENT = 6
"""How often each client asks: published sweeps ask 5 to 10 times, and all begin at once, so that the first round waits
for each other and the last one ends alone."""
CLIENT = 10e-3
"""Seconds from the client to the scheduler and back. Assumed; matters for short prompts only."""
ROUNDS = 4
"""Passes of the fixed point between the two latencies; they move by less than 1 % after the third."""


@dataclass(frozen=True, slots=True)
class ClosedLoop:
    """Clients that each send the next request when the last is answered."""

    num_clients: float
    """Requests in flight."""
    prompt_len: float
    response_len: float
    max_num_seqs: float
    """Served at once, by the engine's limit or its cache."""
    max_batched_tokens: float = 8192.0
    """Of one step."""


@dataclass(frozen=True, slots=True)
class Latency:
    """Of one request."""

    first_token_s: float
    """From the request to the first token."""
    token_s: float
    """Of each token after it."""


def closed_loop_latency(rates: EngineRates, loop: ClosedLoop) -> Latency:
    """Mean latencies of a benchmark with a fixed concurrency.

    Counts: while a request decodes, each of the b - 1 others begins once for every time it does itself, less what falls
    into its own wait: (b-1) * (1 - 1/(2*rounds)) * R*t / (R*t + first) prefills. A share f of its steps has one or
    more of them (Poisson, or as many as the token budget forces), t = (1-f)*D + f*M. First token: the step under way,
    the own prefill with those that came with it, the first round's queue, and while c > b the wait for a place.
    Source: Little's law; vLLM's scheduler (decodes first, then prompts up to the budget).
    Assumes: requests are out of step with each other. Differs: (b-1) * prefill / R alone is up to 30 % more for
    prompts that are long beside their responses.
    """
    served = max(1.0, min(loop.num_clients, loop.max_num_seqs))
    prompt, response = loop.prompt_len, loop.response_len
    context = served * (prompt + response / 2)

    def step(num_prefills: float) -> float:
        load = StepLoad(served, context, num_prefills * prompt, num_prefills * prompt**2 / 2, num_prefills)
        return rates.seconds(load)

    decode, one = step(0.0), step(1.0)
    others = (served - 1) * (1 - 1 / (2 * REQUESTS_PER_CLIENT))
    token, first, each = decode, one, others / response
    for _ in range(ROUNDS):
        if each <= 0:
            break
        share = max(1 - math.exp(-each), min(1.0, each * prompt / loop.max_batched_tokens))
        token = (1 - share) * decode + share * step(each / share)
        first = step(1 + each) + token
        each = others / response * response * token / (response * token + first)
    queue = max(one - decode, 0.0) * served / (2 * REQUESTS_PER_CLIENT)
    waiting = (loop.num_clients - served) / served * (first + response * token)
    return Latency(first + queue + max(0.0, waiting) + CLIENT, token)
