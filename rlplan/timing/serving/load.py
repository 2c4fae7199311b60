"""Latency of an engine under a closed loop: a fixed number of clients, each with one open request.

In: EngineRates, the loop, the number of sequences that fit in the KV cache. Out: time to first token and time per
output token. Left out: the client's own work, its network, different lengths, prefix caching.

Symbols: c clients, b of them served at once, P prompt, R response, D a decode-only step, M a step that also prefills.
"""

import math
from dataclasses import dataclass

from rlplan.timing.serving.step import EngineRates, StepLoad

REQUESTS_PER_CLIENT = 6
"""Requests of each client: published sweeps send 5 to 10. All begin at once, so the first round queues and the last one
ends with few requests left."""
CLIENT = 10e-3
"""Seconds from the client to the scheduler and back. Assumed; matters for short prompts only."""
ROUNDS = 4
"""Iterations of the fixed point between the two latencies; they change by less than 1 % after the third."""


@dataclass(frozen=True, slots=True)
class ClosedLoop:
    """Clients that send the next request when the last one is answered."""

    num_clients: float
    """Requests in flight."""
    prompt_len: float
    response_len: float
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


def closed_loop_latency(rates: EngineRates, loop: ClosedLoop) -> Latency:
    """Mean latencies of a benchmark with a fixed concurrency.

    Counts: while a request decodes, each of the b - 1 others starts once per round trip, less the starts during its own
    wait: (b-1) * (1 - 1/(2*rounds)) * R*t / (R*t + first) prefills. A share f of its steps has at least one prefill
    (Poisson, or as many as the token budget forces), t = (1-f)*D + f*M. First token: the step in progress, its own
    prefill with those that arrived together, the queue of the first round, and the wait for a slot where c > b.
    Source: Little's law; vLLM's scheduler (decodes first, then prompts up to the budget).
    Assumes: requests are not synchronized. Differs: (b-1) * prefill / R alone is up to 30 % higher for long prompts
    with short responses.
    """
    served = max(1.0, min(loop.num_clients, loop.max_num_seqs))
    prompt, response = loop.prompt_len, loop.response_len
    context = served * (prompt + response / 2)

    def step_s(num_prefills: float) -> float:
        load = StepLoad(served, context, num_prefills * prompt, num_prefills * prompt**2 / 2, num_prefills)
        return rates.seconds(load)

    decode, one_prefill = step_s(0.0), step_s(1.0)
    others = (served - 1) * (1 - 1 / (2 * REQUESTS_PER_CLIENT))
    token, first, prefills_per_step = decode, one_prefill, others / response
    for _ in range(ROUNDS):
        if prefills_per_step <= 0:
            break
        budget_share = min(1.0, prefills_per_step * prompt / loop.max_batched_tokens)
        share = max(1 - math.exp(-prefills_per_step), budget_share)
        token = (1 - share) * decode + share * step_s(prefills_per_step / share)
        first = step_s(1 + prefills_per_step) + token
        prefills_per_step = others / response * response * token / (response * token + first)
    queue = max(one_prefill - decode, 0.0) * served / (2 * REQUESTS_PER_CLIENT)
    waiting = (loop.num_clients - served) / served * (first + response * token)
    return Latency(first + queue + max(0.0, waiting) + CLIENT, token)
