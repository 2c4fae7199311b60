"""Engine: continuous batching with a KV cache in blocks, as vLLM's scheduler does it, an event per change of the batch.

In: rollouts with the lengths they will have, a Speed, limits. Out: when each ends; tokens, preemptions, busy seconds.
Left out: chunks of a prefill (its seconds stop the batch, as many in sum as chunks would slow it), blocks that stay
cached when no running sequence uses them, drafted tokens one by one (a speed says the mean of them).

Between two changes of the running set every sequence gains one token a step, so a segment of k steps is one event:

    seconds = k x decode_step_s(n, C + n (k - 1) / 2)        exact where the speed is a straight line in the tokens held

k ends with the next rollout, or before the step for which blocks are lacking; then the rollout that came last gives up
its blocks and restarts later (recompute). Symbols: n running sequences, C tokens held, B block size, t decode steps
since the start. A sequence that holds v tokens needs a new block when v is a multiple of B. All v grow together, so
(v - t) mod B never changes: n sequences in B classes say when blocks are needed without looking at each sequence.
"""

import heapq
import math
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from simpy import Environment, Event
from simpy.events import NORMAL

from rlplan.simulate.speed import Speed, batch_prefill_s


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """What one engine can run at once."""

    max_num_seqs: int
    num_blocks: int
    """Of `block_size` tokens, in the KV cache."""
    block_size: int = 16


class Timeout(Event):
    """SimPy's Timeout without what a simulated run does not need, for a million of them are made: it happens after
    `delay_s`, and calls `callbacks` then, to which nothing may be added.

    >>> env, told = Environment(), []
    >>> _ = Timeout(env, 2.5, [lambda event: told.append((env.now, event.value))], "value")
    >>> env.run()
    >>> told
    [(2.5, 'value')]
    """

    def __init__(
        self, env: Environment, delay_s: float, callbacks: list[Callable[[Event], None]], value: Any = None
    ) -> None:
        self.env, self.callbacks, self._value, self._ok = env, callbacks, value, True
        env.schedule(self, NORMAL, delay_s)


class Group:
    """Rollouts of one prompt, on one engine."""

    __slots__ = ("batch", "left", "num_resident", "number", "prompt_len", "rollouts")

    def __init__(self, number: int, prompt_len: int, lengths: Iterable[int]) -> None:
        self.number, self.prompt_len = number, prompt_len
        self.rollouts = [Rollout(self, length) for length in lengths]
        self.left = len(self.rollouts)
        """Rollouts without a reward yet."""
        self.num_resident = 0
        """Rollouts in the batch; the prompt lies in the cache once, while there is one."""
        self.batch = 0
        """The RL step that it was made for."""


class Rollout:
    """One completion."""

    __slots__ = ("done", "group", "held", "joined", "length", "newer_spans", "ticket", "version")
    held: int
    """Tokens in the KV cache when it joined the batch."""
    joined: int
    """The engine's decode steps when it joined the batch."""
    ticket: int
    """Of its last stay in the batch; one that was preempted gets another."""
    version: int
    """Of the weights that made its first token."""

    def __init__(self, group: Group, length: int) -> None:
        self.group, self.length = group, length
        self.done = 0
        """Tokens that it has; while it runs, when it joined the batch."""
        self.newer_spans: tuple[tuple[int, int], ...] = ()
        """(version, tokens) of those that newer weights made."""

    @property
    def spans(self) -> tuple[tuple[int, int], ...]:
        """(version, tokens) in order; versions may repeat after a preemption."""
        first = self.done - sum(tokens for _, tokens in self.newer_spans)
        return ((self.version, first), *self.newer_spans)


class Engine:
    """One rollout engine. on_finish: called with each rollout that has all its tokens. keeps_versions: a rollout ends
    under the weights that it was submitted under."""

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
        self._size, self._num_blocks, self._decode_step_s = limits.block_size, limits.num_blocks, speed.decode_step_s
        self._classes = [0] * self._size
        self._steps = self._held = self._blocks = self._order = 0
        self._planned = 0
        self._next: Event | None = None
        self._decode_from = self._busy_from = 0.0
        self._is_busy = self._is_paused = self._has_preempted = False
        self._stopped: Event | None = None
        self._at_end: list[Callable[[Event], None]] = [self._end]

    @property
    def num_unfinished(self) -> int:
        """Rollouts that run or wait."""
        return len(self.running) + len(self.waiting)

    @property
    def busy_s(self) -> float:
        """Seconds with something in the batch, up to now."""
        open_s = self.env.now - self._busy_from if self._is_busy else 0.0
        return float(sum(end - start for start, end in self.intervals) + open_s)

    def submit(self, rollouts: Iterable[Rollout]) -> None:
        """Put rollouts at the end of the queue; they join when the step in progress has ended and there is room."""
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
            self._shorten()

    def pause(self) -> Event:
        """Stop after the step in progress; what ran waits in front, with its tokens and without its KV cache, unless it
        keeps its version.
        """
        self._is_paused, self._stopped = True, self.env.event()
        if self._is_busy:
            self._shorten()
        else:
            self._stopped.succeed()
        return self._stopped

    def resume(self, version: int) -> None:
        """Go on with the weights of `version`."""
        self._is_paused, self.version = False, version
        if self.waiting or self.running:
            self._is_busy, self._busy_from = True, self.env.now
            self._begin()

    # ------------------------------------------------------------------------------------------------- segments

    def _begin(self) -> None:
        """Admit what fits and plan the next segment."""
        needed = self._classes[-self._steps % self._size]
        seconds = self._admit(needed) if self.waiting or self._blocks + needed > self._num_blocks else 0.0
        self._decode_from = self.env.now + seconds
        steps = self._planned = self._steps_to_go()
        if steps:
            num_seqs = len(self.running)
            seconds += steps * self._decode_step_s(num_seqs, self._held + num_seqs * (steps - 1) / 2)
        self._next = Timeout(self.env, seconds, self._at_end)

    def _end(self, event: Event) -> None:
        """A segment has ended: the batch has its tokens, and who has all of them leaves."""
        if event is not self._next:  # of a segment that was shortened since
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
            for rollout in reversed(interrupted):  # so that the first to come is the first to go on
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

    def _shorten(self) -> None:
        """End the segment with the step in progress.

        A step's seconds are taken to grow evenly from the first to the last of the segment, so that the seconds of
        the first k are a k + b k k; solved for k at the time that has passed.
        """
        planned, passed = self._planned, self.env.now - self._decode_from
        if passed <= 0:
            steps, rest = 0, -passed
        else:
            n = len(self.running)
            first = self.speed.decode_step_s(n, self._held)
            last = self.speed.decode_step_s(n, self._held + n * (planned - 1))
            middle = self.speed.decode_step_s(n, self._held + n * (planned - 1) / 2)
            scale = 2 * middle / (first + last)
            slope = scale * (last - first) / (planned - 1) / 2 if planned > 1 else 0.0
            start = scale * first - slope
            root = (-start + math.sqrt(start * start + 4 * slope * passed)) / (2 * slope) if slope else passed / start
            steps = min(planned, math.ceil(root - 1e-9))
            rest = max(0.0, start * steps + slope * steps * steps - passed)
        if steps < planned:
            self._planned = steps
            self._next = Timeout(self.env, rest, self._at_end)

    def _steps_to_go(self) -> int:
        """Decode steps until the next rollout ends or blocks are lacking."""
        ends = self._ends
        while ends and ends[0][2].ticket != ends[0][1]:  # it was preempted, and joins again with another ticket
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
        return (rounds + 1) * size  # unreachable: a whole round needs n blocks, and fewer are left

    def _grow(self, steps: int) -> None:
        """Every running sequence gains `steps` tokens."""
        if steps:
            n = len(self.running)
            rounds, rest = divmod(steps, self._size)
            self._blocks += rounds * n
            if rest:  # the classes whose turn came: those from -t down, around the circle
                first = -self._steps % self._size
                classes = self._classes
                self._blocks += sum(classes[max(0, first - rest + 1) : first + 1])
                if rest > first + 1:
                    self._blocks += sum(classes[first + 1 - rest :])
            self._steps += steps
            self._held += n * steps
            if self._blocks > self.max_blocks_used:
                self.max_blocks_used = self._blocks

    # --------------------------------------------------------------------------------------- who is in the batch

    def _admit(self, needed: int) -> float:
        """Let waiting rollouts in, first come first served. Returns: seconds of their prefill.

        Running sequences take the blocks of their next step first; where these are lacking, the last to come leaves.
        """
        size, preempted = self._size, False
        while self._blocks + needed > self._num_blocks:
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
            group, held = rollout.group, rollout.group.prompt_len + rollout.done
            shared = group.prompt_len // size if group.num_resident else 0
            blocks = -(-held // size) - shared
            if blocks > free:
                break
            self.waiting.popleft()
            free, room = free - blocks, room - 1
            self._blocks += blocks
            new = max(1, held - shared * size)
            tokens += new
            attended += new * (held - new / 2)
            self._join(rollout, held)
        self.num_prefill_tokens += tokens
        self.max_blocks_used = max(self.max_blocks_used, self._blocks)
        return batch_prefill_s(self.speed, tokens, attended) if tokens else 0.0

    def _join(self, rollout: Rollout, held: int) -> None:
        """Its prefill gives the first token, each decode step one more."""
        self._order += 1
        rollout.ticket, rollout.held, rollout.joined = self._order, held, self._steps
        rollout.group.num_resident += 1
        if not rollout.done and not self.keeps_versions:
            rollout.version = self.version
        self.running[rollout] = None
        self._held += held
        self._classes[(held - self._steps) % self._size] += 1
        heapq.heappush(self._ends, (self._steps + rollout.length - rollout.done - 1, self._order, rollout))

    def _leave(self, rollout: Rollout) -> None:
        """Out of the batch, finished or not: count its tokens, free its blocks."""
        size, group = self._size, rollout.group
        gained = self._steps - rollout.joined + 1
        held = rollout.held + gained - 1
        self.running.pop(rollout, None)
        rollout.ticket = 0
        rollout.done += gained
        if rollout.version != self.version and not self.keeps_versions:
            rollout.newer_spans += ((self.version, gained),)
        self.num_tokens += gained
        self._held -= held
        self._classes[(rollout.held - rollout.joined) % size] -= 1
        group.num_resident -= 1
        self._blocks -= -(-held // size) - (group.prompt_len // size if group.num_resident else 0)
