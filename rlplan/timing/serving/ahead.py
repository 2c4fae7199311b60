"""Asynchronous generation in closed form: how often the engines deliver a step's rollouts.

In: one engine's speed and share of a step, the allowed staleness, seconds of the step's other actions. Out: a Cost.
Left out: weight syncs that wait for running rollouts (generation.py has whole batches).

A steady step T is the least that meets three conditions:

    others + sync <= T                                       training waits for nothing
    prompts + anew(n) + sync + N L D(n) / n <= T             n concurrent rollouts make a step's tokens
    wait + G D(n) T / (T - stalls) + J + others + sync <= (1 + s) T   the longest rollout is judged in time

The second line gives the pace of n concurrent rollouts. The engines run the smallest n that keeps pace with T, because
prompts wait for room in the staleness bound. Source: own; Little's law, and the bound of simulate/staleness.py. Against
the simulator on a grid, nine of ten plans are within 10 %; where generation and training take equally long, the formula
is up to 27 % too fast (tests/timing/serving/test_ahead.py).

Symbols: N rollouts of a step per engine, L their mean length, G the longest of all engines, D seconds of a decode step,
J seconds until a rollout is judged, s allowed staleness in versions, S largest number of concurrent rollouts.
"""

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from math import inf, sqrt

from rlplan.timing.cost import Cost, Resource
from rlplan.timing.serving.generation import GRID_RATIO, EngineRollouts, EngineSpeed, prompt_parts, time_prefill
from rlplan.timing.serving.occupancy import mean_age
from rlplan.timing.serving.step import StepLoad, make_cost

NUM_HALVINGS = 48
"""Bisections of the interval that contains the step's length. They exhaust the precision of a float, so that two views
of one schedule, whose seconds are added in different orders, get the same result."""
NEAR = 1e-13
"""Two step lengths closer than this share count as equal; rounding errors are smaller."""
Piece = tuple[float, float, float, float, float, float]
"""(low, high, a, b, c, d): for n in low..high a decode step takes a + b n seconds and c + d n rollouts are interrupted.
"""


@dataclass(frozen=True)
class RolloutsAhead:
    """A step's rollouts where generation may be `staleness` versions ahead and a weight sync interrupts it."""

    speed: EngineSpeed
    rollouts: EngineRollouts
    """One engine's share of the rollouts."""
    num_engines: int
    staleness: float
    reward_latency_s: float = 0.0
    """Seconds from the end of a rollout to its reward; engines do not wait for it."""
    keeps_cache: bool = False
    """Rollouts keep their KV cache at a weight sync: they continue with it, or are not interrupted because they keep
    their adapter version. Otherwise the KV cache is recomputed."""

    def cost(self, others_s: float, sync_s: float) -> Cost:
        """Seconds in which the engines deliver a step's rollouts, without the weight sync.

        others_s: all other actions of a step. Resources are those of the rollouts that run on average; IDLE is the wait
        for the longest one.
        """
        step_s = self.step_s(others_s, sync_s)
        running = self._find_least_running(step_s - sync_s) or self.most
        decoded = self.speed.rates.parts(self._load(running))
        again = 0.0 if self.keeps_cache else self._num_interrupted(running)
        anew = time_prefill(self.speed, again * self._tokens_per_rollout, self._tokens_per_rollout)
        steps = self._num_tokens / running
        triples = zip(prompt_parts(self.speed, self.rollouts), decoded, anew, strict=True)
        compute, memory, latency, link, host = (prompt + steps * token + more for prompt, token, more in triples)
        cost = make_cost((compute, memory, latency, link, host), self.speed.rates.link)
        return cost + Cost({Resource.IDLE: max(0.0, step_s - sync_s - cost.seconds)})

    def least_step_s(self) -> float:
        """Lower bound of a step, whatever its other actions; it falls when more rollouts may run at once."""
        longest = self._longest * self._decode_s(1.0) + self.reward_latency_s
        return max(longest / (1 + self.staleness), self._fastest_pace)

    @cached_property
    def _fastest_pace(self) -> float:
        return min(self._least_pace(*piece) for piece in self._pieces)

    def step_s(self, others_s: float, sync_s: float) -> float:
        """The least T that satisfies both conditions on the engines."""
        low = self.least_step_s() + sync_s
        high = low
        while not self._is_long_enough(high, others_s, sync_s):
            low, high = high, 1.5 * high
        if high == low:
            return high
        short, enough = self._bracket(low, high, others_s, sync_s)
        for _ in range(NUM_HALVINGS):
            middle = (low + high) / 2
            if middle <= short * (1 - NEAR):
                low = middle
            elif middle >= enough * (1 + NEAR) or self._is_long_enough(middle, others_s, sync_s):
                high = middle
            else:
                low = middle
        return high

    def _bracket(self, low: float, high: float, others_s: float, sync_s: float) -> tuple[float, float]:
        """Bracket the solution tightly: a step that is too short and one that is long enough, both close to it.

        Bisection steps outside the bracket need no evaluation. Method: false position (Illinois variant).
        """
        above, below = self._compute_slack(high, others_s, sync_s), self._compute_slack(low, others_s, sync_s)
        if below is None:  # no n keeps pace with `low`: just above it, some n does
            below = self._compute_slack(first := low * (1 + NEAR), others_s, sync_s)
            low, high = (low, first) if below is not None and below >= 0 else (first, high)
        again = 0
        while below is not None and above is not None and below < 0 and high - low > NEAR * high:
            at = high - above * (high - low) / (above - below)
            if not low < at < high or (spare := self._compute_slack(at, others_s, sync_s)) is None:
                break
            if spare >= 0:
                high, above, below, again = at, spare, below / (2 if again > 0 else 1), 1
            else:
                low, below, above, again = at, spare, above / (2 if again < 0 else 1), -1
        return low, high

    def _find_least_running(self, room: float) -> float | None:
        """The least n whose pace is at most `room` seconds; None where there is none."""
        prompts, token, tokens, pieces = self._prompts_s, self._recompute_s, self._num_tokens, self._pieces
        for low, high, a, b, c, d in pieces:
            if prompts + token * (c + d * low) + tokens * (a / low + b) <= room:
                return low
            # x / n + y n + z = room
            x, y = tokens * a, token * d
            left = room - (prompts + token * c + tokens * b)
            root = left * left - 4 * x * y
            if left > 0 and root >= 0:
                running = 2 * x / (left + sqrt(root))
                if running and low <= running <= high:
                    return running
        return None

    @cached_property
    def most(self) -> float:
        """S: most concurrent rollouts, limited by the staleness bound, the engine and its KV cache."""
        rollouts = self.rollouts
        begun = self.staleness * rollouts.num_rollouts
        return max(1.0, min(begun, rollouts.max_num_seqs, rollouts.kv_tokens / self._tokens_per_rollout))

    def _is_long_enough(self, step_s: float, others_s: float, sync_s: float) -> bool:
        """Whether a step of this length satisfies both conditions on the engines."""
        spare = self._compute_slack(step_s, others_s, sync_s)
        return spare is not None and spare >= 0

    def _compute_slack(self, step_s: float, others_s: float, sync_s: float) -> float | None:
        """Slack in seconds before the longest rollout is too old; None where no n keeps pace."""
        running = self._find_least_running(step_s - sync_s)
        if running is None:
            return None
        interrupted = self._num_interrupted(running)
        stalls = self._prompts_s + self._recompute_s * interrupted + sync_s
        begun_with_it = (running - interrupted) * self.rollouts.lengths.mean * self._slope(running)
        lasts = (self._longest * self._decode_s(running) + begun_with_it) * step_s / (step_s - stalls)
        lasts += self.reward_latency_s
        return (1 + self.staleness) * step_s - (self._wait_s + lasts + others_s + sync_s)

    def _num_interrupted(self, running: float) -> float:
        """Rollouts that a weight sync interrupts when `running` run on average.

        Counts: half of a step's rollouts start after one sync and end before the next, where there is room for them.
        """
        return max(0.0, running - self.rollouts.num_rollouts / 2, 2 * running - self.most)

    @cached_property
    def _pieces(self) -> tuple[Piece, ...]:
        """Pieces from 1 to the most concurrent rollouts, cut at nodes and at kinks of the number interrupted."""
        half, most = self.rollouts.num_rollouts / 2, self.most
        kinks = {half, most / 2, most - half, *self._nodes()}
        places = [1.0, *sorted(kink for kink in kinks if 1.0 < kink < most), most]
        return tuple(self._piece(low, high) for low, high in pairwise(places))

    def _piece(self, low: float, high: float) -> Piece:
        first, cut, width = self._decode_s(low), self._num_interrupted(low), max(high - low, 1e-12)
        slope = (self._decode_s(high) - first) / width
        growth = (self._num_interrupted(high) - cut) / width
        return low, high, first - slope * low, slope, cut - growth * low, growth

    def _pace(self, running: float, a: float, b: float, c: float, d: float) -> float:
        return self._prompts_s + self._recompute_s * (c + d * running) + self._num_tokens * (a / running + b)

    def _least_pace(self, low: float, high: float, a: float, b: float, c: float, d: float) -> float:
        """Least pace within a piece: x / n + y n has its minimum at sqrt(x / y)."""
        falling, rising = self._num_tokens * a, self._recompute_s * d
        at = min(high, max(low, sqrt(falling / rising))) if falling > 0 and rising > 0 else high
        return self._pace(at, a, b, c, d)

    def _nodes(self) -> Iterator[float]:
        # a geometric grid: step times are smooth in the logarithm of the concurrency
        node = GRID_RATIO
        while node < inf:
            yield node
            if node >= self.most:
                return
            node *= GRID_RATIO

    def _load(self, running: float) -> StepLoad:
        return StepLoad(running, running * (self.rollouts.prompt_len + mean_age(self.rollouts.lengths)))

    def _decode_s(self, running: float) -> float:
        """Seconds of a decode step, interpolated linearly between nodes."""
        nodes = self._node_seconds
        position = max(0, bisect_right(nodes, (running, inf)) - 1)
        (low, first), (high, last) = nodes[position], nodes[min(position + 1, len(nodes) - 1)]
        return first if high == low else first + (last - first) * (running - low) / (high - low)

    def _slope(self, running: float) -> float:
        """Seconds that a decode step grows per additional rollout."""
        return (self._decode_s(running * GRID_RATIO) - self._decode_s(running)) / (running * (GRID_RATIO - 1))

    @cached_property
    def _node_seconds(self) -> list[tuple[float, float]]:
        """Decode steps at the nodes, up to one past the most concurrent rollouts; cached per engine speed."""
        rollouts = self.rollouts
        key = "decode", rollouts.prompt_len, rollouts.lengths.spec, rollouts.lengths.longest
        grid = self.speed.grids.setdefault(key, [])
        nodes = [1.0, *self._nodes()]
        while len(grid) < len(nodes):
            grid.append(self.speed.rates.parts(self._load(nodes[len(grid)])))
        return [(node, sum(parts)) for node, parts in zip(nodes, grid, strict=False)]

    @cached_property
    def _num_tokens(self) -> float:
        return self.rollouts.num_rollouts * self.rollouts.lengths.mean

    @cached_property
    def _longest(self) -> float:
        return self.rollouts.lengths.estimate_longest(self.rollouts.num_rollouts * self.num_engines)

    @cached_property
    def _tokens_per_rollout(self) -> float:
        """Tokens in the KV cache per running rollout; samples of a prompt share its blocks."""
        return self.rollouts.prompt_len / max(1, self.rollouts.num_samples) + mean_age(self.rollouts.lengths)

    @cached_property
    def _prompts_s(self) -> float:
        return sum(prompt_parts(self.speed, self.rollouts))

    @cached_property
    def _recompute_s(self) -> float:
        """Seconds to recompute one interrupted rollout."""
        if self.keeps_cache:
            return 0.0
        tokens = self.rollouts.num_rollouts * self._tokens_per_rollout
        return sum(time_prefill(self.speed, tokens, self._tokens_per_rollout)) / self.rollouts.num_rollouts

    @cached_property
    def _wait_s(self) -> float:
        """Wait of the longest rollout for a slot, if not all rollouts fit at once: half of the waiting ones start
        before it."""
        most, lengths = self.most, self.rollouts.lengths
        left_out = max(0.0, 1 - most / self.rollouts.num_rollouts)
        total = self.rollouts.num_rollouts * self.num_engines
        # rollouts within 2 % of the longest count as equally long
        as_long = max(1.0, total * (1 - lengths.compute_probability(0.98 * self._longest)))
        return left_out * self._num_tokens * self._decode_s(most) / most * as_long / (1 + as_long)
