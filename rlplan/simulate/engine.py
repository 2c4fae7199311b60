"""Engine: continuous batching with a paged KV cache, as in vLLM's scheduler, with one event per change of the batch.

In: rollouts with predetermined lengths, a Speed, limits. Out: end times; tokens, preemptions, busy seconds.
Left out: chunked prefill (a prefill stops the batch for the seconds that its chunks would add), cached blocks without a
running sequence, individual drafted tokens (a speed has their mean).

Between two changes of the batch, every sequence gains one token per step, so a segment of k steps is one event:

    seconds = k x decode_step_s(n, C + n (k - 1) / 2)        exact where the speed is linear in the cached tokens

A segment ends with the next finished rollout, or before the step that lacks blocks. Then the rollout that joined last
gives up its blocks and restarts later (recompute).

Symbols: n running sequences, C cached tokens, B block size, t decode steps since the start.

A sequence with v tokens needs a new block when v is a multiple of B. All v grow together, so (v - t) mod B never
changes. Counting the n sequences in B classes therefore tells when blocks are needed, without visiting each sequence.
"""

import heapq
import math
from collections import Counter, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Protocol

from simpy import Environment, Event
from simpy.events import NORMAL


class Speed(Protocol):
    """Seconds of one engine (all its tensor-parallel ranks)."""

    def decode_step_s(self, num_seqs: float, context_tokens: float) -> float:
        """Seconds of a step with one token for each of `num_seqs` sequences with `context_tokens` in total."""
        ...

    def prefill_s(self, num_tokens: float, context_tokens: float = 0.0) -> float:
        """Seconds to prefill `num_tokens` of one prompt after `context_tokens` cached ones."""
        ...


def batch_prefill_s(speed: Speed, num_tokens: int, num_attended: float) -> float:
    """Seconds to prefill several prompts together. num_attended: attended tokens, summed over all prompt tokens.

    Counts: one prompt with the same sums. With c cached tokens before it, t tokens attend to t (c + t / 2), so
    c = attended / t - t / 2, which is negative for many short prompts.
    Assumes: seconds depend on these two numbers only.
    """
    return speed.prefill_s(num_tokens, num_attended / num_tokens - num_tokens / 2)


CELL = 1 << 14
"""Grid of context tokens on which a remembered speed is computed; values in between are interpolated."""


class RememberedSpeed:
    """Cache of another speed, computed once for each number of sequences and grid cell of tokens.

    A simulation asks a million times, and the model of an engine needs microseconds for each answer.
    """

    def __init__(self, speed: Speed) -> None:
        self._speed = speed
        self._lines: dict[tuple[float, int], tuple[float, float]] = {}

    def decode_step_s(self, num_seqs: float, context_tokens: float) -> float:
        """Seconds of a step with one token for each sequence."""
        cell = int(context_tokens) // CELL
        line = self._lines.get((num_seqs, cell))
        if line is None:
            low, high = (self._speed.decode_step_s(num_seqs, place * CELL) for place in (cell, cell + 1))
            line = self._lines[(num_seqs, cell)] = (low, (high - low) / CELL)
        return line[0] + (context_tokens - cell * CELL) * line[1]

    def prefill_s(self, num_tokens: float, context_tokens: float = 0.0) -> float:
        """Seconds to prefill tokens of one prompt."""
        return self._speed.prefill_s(num_tokens, context_tokens)


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """Limits of one engine."""

    max_num_seqs: int
    num_blocks: int
    """Blocks of `block_size` tokens in the KV cache."""
    block_size: int = 16


class Timeout(Event):
    """A reduced form of SimPy's Timeout; a simulation makes a million of them.

    It occurs after `delay_s` and calls `callbacks`, which cannot be extended.

    >>> env, calls = Environment(), []
    >>> _ = Timeout(env, 2.5, [lambda event: calls.append((env.now, event.value))], "value")
    >>> env.run()
    >>> calls
    [(2.5, 'value')]
    """

    def __init__(
        self, env: Environment, delay_s: float, callbacks: list[Callable[[Event], None]], value: Any = None
    ) -> None:
        self.env, self.callbacks, self._value, self._ok = env, callbacks, value, True
        env.schedule(self, NORMAL, delay_s)


class Group:
    """Rollouts of one prompt."""

    __slots__ = ("batch", "left", "number", "prompt_len", "rollouts")

    def __init__(self, number: int, prompt_len: int, lengths: Iterable[int]) -> None:
        self.number, self.prompt_len = number, prompt_len
        self.rollouts = [Rollout(self, length) for length in lengths]
        self.left = len(self.rollouts)
        """Rollouts without a reward."""
        self.batch = 0
        """RL step that the group belongs to."""


class Rollout:
    """One completion."""

    __slots__ = ("done", "group", "joined", "length", "newer_spans", "num_cached", "ticket", "version")
    num_cached: int
    """Tokens in the KV cache when it joined the batch."""
    joined: int
    """The engine's decode steps when it joined the batch."""
    ticket: int
    """Number of the current stay in the batch; a preempted rollout gets a new one."""
    version: int
    """Version of the weights that generated its first token."""

    def __init__(self, group: Group, length: int) -> None:
        self.group, self.length = group, length
        self.done = 0
        """Generated tokens; not updated while the rollout is in the batch."""
        self.newer_spans: tuple[tuple[int, int], ...] = ()
        """(version, tokens) of the tokens that newer weights generated."""

    @property
    def spans(self) -> tuple[tuple[int, int], ...]:
        """(version, tokens) in order; a version may repeat after a preemption."""
        first = self.done - sum(tokens for _, tokens in self.newer_spans)
        return ((self.version, first), *self.newer_spans)


class Engine:
    """One rollout engine. on_finish: called with each completed rollout. keeps_versions: a rollout finishes under the
    version that it was submitted under."""

    def __init__(
        self,
        env: Environment,
        speed: Speed,
        limits: EngineLimits,
        on_finish: Callable[[Rollout], None],
        *,
        keeps_versions: bool = False,
    ) -> None:
        self.env, self.speed, self.limits, self.on_finish = env, speed, limits, on_finish
        self.keeps_versions = keeps_versions
        self.waiting: deque[Rollout] = deque()
        self.running: dict[Rollout, None] = {}
        self.version = 0
        self.num_segments = self.num_preemptions = self.num_tokens = self.num_prefill_tokens = 0
        self.max_blocks_used = 0
        self.intervals: list[tuple[float, float]] = []
        self._ends: list[tuple[int, int, Rollout]] = []
        # rollouts of a group in the batch; as long as there is one, the prompt's blocks are cached once for all
        self._num_resident: Counter[Group] = Counter()
        self._size, self._num_blocks, self._decode_step_s = limits.block_size, limits.num_blocks, speed.decode_step_s
        self._classes = [0] * self._size
        self._steps = self._held = self._blocks = self._order = 0
        self._planned = 0
        self._next: Event | None = None
        self._decode_from = self._busy_from = 0.0
        self._is_busy = self._is_paused = False
        self._stopped: Event | None = None
        self._at_end: list[Callable[[Event], None]] = [self._end]

    @property
    def num_unfinished(self) -> int:
        """Rollouts that run or wait."""
        return len(self.running) + len(self.waiting)

    @property
    def busy_s(self) -> float:
        """Seconds with a non-empty batch until now."""
        open_s = self.env.now - self._busy_from if self._is_busy else 0.0
        return float(sum(end - start for start, end in self.intervals) + open_s)

    def submit(self, rollouts: Iterable[Rollout]) -> None:
        """Append rollouts to the queue; they can join after the step in progress."""
        rollouts = list(rollouts)
        for rollout in rollouts:
            rollout.version = self.version
        self.waiting.extend(rollouts)
        if self._is_paused:
            return
        if not self._is_busy:
            self._is_busy, self._busy_from = True, self.env.now
            self._begin()
        elif len(self.running) < self.limits.max_num_seqs:
            self._cut_segment()

    def pause(self) -> Event:
        """Stop after the step in progress. Running rollouts return to the front of the queue with their tokens but
        without KV cache, unless they keep their version.
        """
        self._is_paused, self._stopped = True, self.env.event()
        if self._is_busy:
            self._cut_segment()
        else:
            self._stopped.succeed()
        return self._stopped

    def resume(self, version: int) -> None:
        """Continue with the weights of `version`."""
        self._is_paused, self.version = False, version
        if self.waiting or self.running:
            self._is_busy, self._busy_from = True, self.env.now
            self._begin()

    # ------------------------------------------------------------------------------------------------- segments

    def _begin(self) -> None:
        """Admit waiting rollouts and plan the next segment."""
        needed = self._classes[-self._steps % self._size]
        seconds = self._admit(needed) if self.waiting or self._blocks + needed > self._num_blocks else 0.0
        self._decode_from = self.env.now + seconds
        steps = self._planned = self._steps_to_go()
        if steps:
            num_seqs = len(self.running)
            seconds += steps * self._decode_step_s(num_seqs, self._held + num_seqs * (steps - 1) / 2)
        self._next = Timeout(self.env, seconds, self._at_end)

    def _end(self, event: Event) -> None:
        """End a segment: all running rollouts gain its tokens, and completed ones leave."""
        if event is not self._next:  # the segment was shortened, and another event ends it
            return
        self.num_segments += 1
        self._grow(self._planned)
        self._planned = 0
        ends, now = self._ends, self._steps
        while ends and ends[0][0] <= now:
            _, ticket, rollout = heapq.heappop(ends)
            if rollout.ticket == ticket:
                self._leave(rollout)
                self.on_finish(rollout)
        if self._is_paused:
            interrupted = [] if self.keeps_versions else list(self.running)
            for rollout in reversed(interrupted):  # reversed, so that the queue keeps their order
                self._leave(rollout)
                self.waiting.appendleft(rollout)
            self._idle()
        elif self.running or self.waiting:
            self._begin()
        else:
            self._idle()

    def _idle(self) -> None:
        self._is_busy = False
        self.intervals.append((self._busy_from, self.env.now))
        if self._stopped is not None and not self._stopped.triggered:
            self._stopped.succeed()

    def _cut_segment(self) -> None:
        """End the segment with the step in progress.

        Seconds per step are assumed to grow linearly within the segment. The first k steps then take a k + b k k
        seconds, which is solved for k at the time that has passed.
        """
        planned, passed = self._planned, self.env.now - self._decode_from
        if passed <= 0:
            steps, left_s = 0, -passed
        else:
            n = len(self.running)
            first = self.speed.decode_step_s(n, self._held)
            last = self.speed.decode_step_s(n, self._held + n * (planned - 1))
            middle = self.speed.decode_step_s(n, self._held + n * (planned - 1) / 2)
            scale = 2 * middle / (first + last)
            slope = scale * (last - first) / (planned - 1) / 2 if planned > 1 else 0.0
            start = scale * first - slope
            root = (-start + math.sqrt(start * start + 4 * slope * passed)) / (2 * slope) if slope else passed / start
            # the tolerance keeps a pause exactly between two steps from adding a step
            steps = min(planned, math.ceil(root - 1e-9))
            left_s = max(0.0, start * steps + slope * steps * steps - passed)
        if steps < planned:
            self._planned = steps
            self._next = Timeout(self.env, left_s, self._at_end)

    def _steps_to_go(self) -> int:
        """Decode steps until the next rollout completes or blocks run out."""
        ends = self._ends
        while ends and ends[0][2].ticket != ends[0][1]:  # a preempted rollout, which rejoins with a new ticket
            heapq.heappop(ends)
        if not ends:
            return 0
        steps = ends[0][0] - self._steps
        n, free = len(self.running), self._num_blocks - self._blocks
        if n * (steps // self._size + 1) <= free:
            return steps
        return min(steps, self._steps_that_fit(n, free))

    def _steps_that_fit(self, n: int, free: int) -> int:
        size, classes = self._size, self._classes
        rounds, left = divmod(free, n)
        for step in range(size):
            left -= classes[-(self._steps + step) % size]
            if left < 0:
                return rounds * size + step
        return (rounds + 1) * size  # unreachable: a full round needs n blocks, and fewer are left

    def _grow(self, steps: int) -> None:
        """Add `steps` tokens to every running sequence."""
        if steps:
            n = len(self.running)
            rounds, remainder = divmod(steps, self._size)
            self._blocks += rounds * n
            if remainder:  # the classes that need a block: those from -t downwards, modulo the block size
                first = -self._steps % self._size
                classes = self._classes
                self._blocks += sum(classes[max(0, first - remainder + 1) : first + 1])
                if remainder > first + 1:
                    self._blocks += sum(classes[first + 1 - remainder :])
            self._steps += steps
            self._held += n * steps
            if self._blocks > self.max_blocks_used:
                self.max_blocks_used = self._blocks

    # ---------------------------------------------------------------------------------- membership of the batch

    def _admit(self, needed: int) -> float:
        """Admit waiting rollouts, first come first served. Returns: seconds of their prefill.

        Blocks for the next step of running sequences have priority; where they run out, the last to join is preempted.
        """
        size, preempted = self._size, False
        while self._blocks + needed > self._num_blocks:
            # a dict keeps insertion order, so this is the rollout that joined last, as in vLLM
            rollout, _ = self.running.popitem()
            self._leave(rollout)
            self.waiting.appendleft(rollout)
            self.num_preemptions += 1
            preempted = True
            needed = self._classes[-self._steps % size]
        if preempted or not self.waiting:
            return 0.0
        free, tokens, attended = self._num_blocks - self._blocks - needed, 0, 0.0
        room = self.limits.max_num_seqs - len(self.running)
        while self.waiting and room:
            rollout = self.waiting[0]
            group, cached = rollout.group, rollout.group.prompt_len + rollout.done
            shared = group.prompt_len // size if self._num_resident[group] else 0
            blocks = -(-cached // size) - shared
            if blocks > free:
                break
            self.waiting.popleft()
            free, room = free - blocks, room - 1
            self._blocks += blocks
            new = max(1, cached - shared * size)
            tokens += new
            attended += new * (cached - new / 2)
            self._join(rollout, cached)
        self.num_prefill_tokens += tokens
        self.max_blocks_used = max(self.max_blocks_used, self._blocks)
        return batch_prefill_s(self.speed, tokens, attended) if tokens else 0.0

    def _join(self, rollout: Rollout, cached: int) -> None:
        """Add a rollout to the batch. Its prefill yields the first token, and each decode step one more."""
        self._order += 1
        rollout.ticket, rollout.num_cached, rollout.joined = self._order, cached, self._steps
        self._num_resident[rollout.group] += 1
        if not rollout.done and not self.keeps_versions:
            rollout.version = self.version
        self.running[rollout] = None
        self._held += cached
        self._classes[(cached - self._steps) % self._size] += 1
        heapq.heappush(self._ends, (self._steps + rollout.length - rollout.done - 1, self._order, rollout))

    def _leave(self, rollout: Rollout) -> None:
        """Remove a rollout from the batch, completed or not: count its tokens and free its blocks."""
        size, group = self._size, rollout.group
        gained = self._steps - rollout.joined + 1
        cached = rollout.num_cached + gained - 1
        self.running.pop(rollout, None)
        rollout.ticket = 0
        rollout.done += gained
        if rollout.version != self.version and not self.keeps_versions:
            rollout.newer_spans += ((self.version, gained),)
        self.num_tokens += gained
        self._held -= cached
        self._classes[(rollout.num_cached - rollout.joined) % size] -= 1
        if self._num_resident[group] > 1:
            self._num_resident[group] -= 1
            cached -= group.prompt_len // size * size
        else:  # the last one frees the prompt's blocks too
            del self._num_resident[group]
        self._blocks -= -(-cached // size)
