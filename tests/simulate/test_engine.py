"""The engine: what an engine that takes every step by itself does, and what can be added up by hand."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from simpy import Environment

from benchmarks.simulated.linear_speed import LinearSpeed
from rlplan.simulate.engine import Engine, EngineLimits, Group, Rollout
from rlplan.units import ceil_div
from tests.repository.at_night import examples
from tests.simulate.cases import ROOMY, SPEED
from tests.simulate.plain_engine import PlainEngine, PlainSequence


class Watched:
    """An engine with the moment at which each rollout ended."""

    def __init__(self, limits: EngineLimits = ROOMY, speed: LinearSpeed = SPEED) -> None:
        self.env = Environment()
        self.ended_s: dict[Rollout, float] = {}
        self.engine = Engine(self.env, speed, limits, self._note)

    def _note(self, rollout: Rollout) -> None:
        assert rollout not in self.ended_s
        self.ended_s[rollout] = self.env.now

    def play(self, groups: list[Group]) -> float:
        self.engine.submit([rollout for group in groups for rollout in group.rollouts])
        self.env.run()
        return float(self.env.now)


def test_one_rollout_takes_its_prefill_and_a_step_for_every_further_token() -> None:
    # Prefill of 32 tokens; then 2 steps that read 32 and 33 tokens.
    assert Watched().play([Group(0, 32, [3])]) == pytest.approx(32e-5 + 2 * 0.011 + 65e-6)


def test_a_response_of_one_token_is_there_after_its_prefill() -> None:
    assert Watched().play([Group(0, 32, [1])]) == pytest.approx(32e-5)


def test_the_prompt_of_a_group_is_computed_once_but_for_its_last_block() -> None:
    watched = Watched()
    watched.play([Group(0, 40, [5, 5, 5])])
    assert watched.engine.num_prefill_tokens == 40 + 2 * (40 - 32)


def test_the_batch_shrinks_when_the_shorter_rollout_has_ended() -> None:
    # Both 10 tokens: 9 steps of two sequences, then 10 of one. Tokens held: 2 x 16 and more.
    watched = Watched(speed=LinearSpeed(0.01, 0.001))
    assert watched.play([Group(0, 16, [10]), Group(1, 16, [20])]) == pytest.approx(9 * 0.012 + 10 * 0.011)


def test_who_waits_joins_when_a_place_is_free() -> None:
    watched = Watched(EngineLimits(2, 1000), LinearSpeed(1.0))
    short, long, late = (Group(number, 16, [length]) for number, length in enumerate((4, 9, 3)))
    watched.play([short, long, late])
    ends = [watched.ended_s[group.rollouts[0]] for group in (short, long, late)]
    assert ends == pytest.approx([3, 8, 3 + 2])


def test_rollouts_that_come_later_join_at_the_end_of_the_step_in_progress() -> None:
    watched = Watched(speed=LinearSpeed(1.0))
    first, second = Group(0, 16, [11]), Group(1, 16, [3])
    watched.engine.submit(first.rollouts)
    watched.env.run(until=2.5)
    watched.engine.submit(second.rollouts)
    watched.env.run()
    assert [watched.ended_s[group.rollouts[0]] for group in (first, second)] == pytest.approx([10, 3 + 2])


def test_steps_that_grow_longer_end_on_time_when_the_batch_changes_between_them() -> None:
    speed = LinearSpeed(0.01, 0.0, 1e-3)
    alone = [speed.decode_step_s(1, 16 + step) for step in range(10)]
    watched = Watched(speed=speed)
    first, second = Group(0, 16, [11]), Group(1, 16, [1])
    watched.engine.submit(first.rollouts)
    watched.env.run(until=sum(alone[:4]) + 0.001)
    watched.engine.submit(second.rollouts)
    watched.env.run()
    assert watched.ended_s[second.rollouts[0]] == pytest.approx(sum(alone[:5]))
    assert watched.ended_s[first.rollouts[0]] == pytest.approx(sum(alone))


def test_a_pause_waits_for_the_step_and_keeps_the_tokens_but_not_the_cache() -> None:
    watched = Watched(speed=LinearSpeed(1.0))
    group = Group(0, 16, [11])
    watched.engine.submit(group.rollouts)
    watched.env.run(until=2.5)
    stopped = watched.engine.pause()
    watched.env.run(until=5.0)
    assert stopped.processed
    assert watched.engine.intervals == [(0.0, 3.0)]
    assert group.rollouts[0].done == 4
    watched.engine.resume(1)
    watched.env.run()
    # Its new prefill gives the fifth token; six more steps.
    assert watched.ended_s[group.rollouts[0]] == pytest.approx(5 + 6)
    assert group.rollouts[0].spans == ((0, 4), (1, 7))
    assert watched.engine.num_prefill_tokens == 16 + 20


def test_without_blocks_the_last_to_come_gives_way_and_starts_anew() -> None:
    # Two sequences of 16 + up to 32 tokens in 4 blocks: 2 blocks each until both want a third.
    watched = Watched(EngineLimits(8, 4, 16), LinearSpeed(1.0))
    first, second = Group(0, 16, [20]), Group(1, 16, [20])
    watched.play([first, second])
    # After 16 steps both hold 32 tokens; the second leaves, the first takes 3 more, the second its new prefill and 2.
    assert watched.engine.num_preemptions == 1
    assert [watched.ended_s[group.rollouts[0]] for group in (first, second)] == pytest.approx([19, 19 + 2])
    assert watched.engine.max_blocks_used <= 4


GROUPS = st.lists(
    st.tuples(st.integers(1, 40), st.lists(st.integers(1, 70), min_size=1, max_size=4)), min_size=1, max_size=8
)


@examples(150)
@given(GROUPS, st.integers(1, 12), st.integers(0, 12), st.sampled_from([4, 16]))
def test_an_engine_that_takes_every_step_by_itself_does_the_same(
    shapes: list[tuple[int, list[int]]], max_num_seqs: int, extra: int, size: int
) -> None:
    longest = max(prompt + max(lengths) for prompt, lengths in shapes)
    limits = EngineLimits(max_num_seqs, ceil_div(longest, size) + extra, size)
    groups = [Group(number, prompt, lengths) for number, (prompt, lengths) in enumerate(shapes)]
    watched = Watched(limits)
    seconds = watched.play(groups)

    sequences = [PlainSequence(group.number, group.prompt_len, r.length) for group in groups for r in group.rollouts]
    plain = PlainEngine(SPEED, limits, sequences)
    plain.play()

    rollouts = [rollout for group in groups for rollout in group.rollouts]
    assert seconds == pytest.approx(plain.seconds)
    assert [watched.ended_s[rollout] for rollout in rollouts] == pytest.approx([s.ended_s for s in sequences])
    assert watched.engine.num_preemptions == plain.num_preemptions
    assert watched.engine.num_prefill_tokens == plain.num_prefill_tokens


@examples(100)
@given(GROUPS, st.integers(1, 12), st.integers(0, 12), st.lists(st.floats(0.001, 0.4), max_size=5))
def test_every_token_is_generated_once_whatever_stops_the_engine(
    shapes: list[tuple[int, list[int]]], max_num_seqs: int, extra: int, pauses: list[float]
) -> None:
    longest = max(prompt + max(lengths) for prompt, lengths in shapes)
    groups = [Group(number, prompt, lengths) for number, (prompt, lengths) in enumerate(shapes)]
    watched = Watched(EngineLimits(max_num_seqs, ceil_div(longest, 16) + extra))
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    watched.engine.submit(rollouts)
    for version, pause in enumerate(pauses, 1):
        watched.env.run(until=watched.env.now + pause)
        watched.env.run(until=watched.engine.pause())
        watched.engine.resume(version)
    watched.env.run()
    assert set(watched.ended_s) == set(rollouts)
    for rollout in rollouts:
        assert rollout.done == rollout.length == sum(tokens for _, tokens in rollout.spans)
        assert [version for version, _ in rollout.spans] == sorted(version for version, _ in rollout.spans)
    assert watched.engine.num_tokens == sum(rollout.length for rollout in rollouts)
    assert watched.engine.max_blocks_used <= watched.engine.limits.num_blocks
    assert all(start <= end for start, end in watched.engine.intervals)
