"""An engine that takes every single step by itself: slow, and simple enough to be read as what is meant."""

from benchmarks.simulated.linear_speed import LinearSpeed
from rlplan.simulate.engine import EngineLimits
from rlplan.units import ceil_div


class PlainSequence:
    """done: tokens it has. held: of which the KV cache holds these, its prompt included."""

    def __init__(self, group: int, prompt_len: int, length: int) -> None:
        self.group, self.prompt_len, self.length = group, prompt_len, length
        self.done = self.held = 0
        self.ended_s = 0.0


class PlainEngine:
    """Everything counted anew in every step. A prefill is a step of its own, which the batch waits for."""

    def __init__(self, speed: LinearSpeed, limits: EngineLimits, sequences: list[PlainSequence]) -> None:
        self.speed, self.limits = speed, limits
        self.waiting, self.running = list(sequences), []
        self.seconds, self.num_preemptions, self.num_prefill_tokens = 0.0, 0, 0

    def blocks(self, extra: int = 0) -> int:
        """Blocks in use when each running sequence holds `extra` more tokens; a group's prompt counts once."""
        size = self.limits.block_size
        prompts = {sequence.group: sequence.prompt_len // size for sequence in self.running}
        own = sum(ceil_div(s.held + extra, size) - s.prompt_len // size for s in self.running)
        return own + sum(prompts.values())

    def play(self) -> None:
        """Until nothing is left."""
        while self.waiting or self.running:
            is_full = False
            while self.blocks(1) > self.limits.num_blocks:
                self.waiting.insert(0, self.running.pop())
                self.num_preemptions += 1
                is_full = True
            if not is_full:
                self._admit()
            if self._drop_ended():
                continue
            if self.running and self.blocks(1) <= self.limits.num_blocks:
                context = sum(sequence.held for sequence in self.running)
                self.seconds += self.speed.decode_step_s(len(self.running), context)
                for sequence in self.running:
                    sequence.done += 1
                    sequence.held += 1
                self._drop_ended()

    def _admit(self) -> None:
        size, joined, tokens = self.limits.block_size, [], 0
        reserved = self.blocks(1) - self.blocks()
        while self.waiting and len(self.running) < self.limits.max_num_seqs:
            first = self.waiting[0]
            cached, before = first.prompt_len + first.done, self.blocks()
            shared = first.prompt_len // size if any(s.group == first.group for s in self.running) else 0
            first.held = cached
            self.running.append(first)
            if self.blocks() + reserved > self.limits.num_blocks:
                self.running.pop()
                break
            assert self.blocks() - before == ceil_div(cached, size) - shared
            self.waiting.pop(0)
            joined.append(first)
            tokens += max(1, cached - shared * size)
        self.num_prefill_tokens += tokens
        self.seconds += self.speed.prefill_s(tokens)
        for sequence in joined:
            sequence.done += 1

    def _drop_ended(self) -> int:
        ended = [each for each in self.running if each.done == each.length]
        for sequence in ended:
            self.running.remove(sequence)
            sequence.ended_s = self.seconds
        return len(ended)
