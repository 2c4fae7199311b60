"""A value that is sent between processes takes few bytes a token and comes back equal, of the same types."""

import pickle
import random
from array import array
from typing import Any

import pytest

from rlplan.runtime.rollout.experience import Completion, SequencePair, TrainSample, WeightSpan

NUM_TOKENS = 2000


def draw_logprobs() -> tuple[float, ...]:
    """Numbers as they come from a tensor of 32 bits."""
    return tuple(array("f", (-random.Random(seed).expovariate(1) for seed in range(NUM_TOKENS))))


def make(vocabulary: int) -> list[tuple[Any, float]]:
    """(a value as it is sent, the most bytes a token that it may take)."""
    tokens = tuple(random.Random(0).randrange(vocabulary) for _ in range(NUM_TOKENS))
    numbers = draw_logprobs()
    completion = Completion(tokens, numbers, "stop", (WeightSpan(3, 0, NUM_TOKENS),), observed=((2, 4),))
    sample = TrainSample(
        (1, 2, 3), tokens, numbers, numbers[::-1], (0.7,) * NUM_TOKENS, old_logprobs=numbers, images=()
    )
    with_values = TrainSample(
        (1,),
        tokens,
        numbers,
        (),
        tuple(1.1 * x for x in numbers),
        values=numbers,
        returns=tuple(x / 3 for x in numbers),
    )
    return [(completion, 9), (sample, 20), (with_values, 29), (SequencePair((1, 2), tokens), 5)]


@pytest.mark.parametrize("vocabulary", [50_000, 200_000])
def test_each_value_comes_back_as_it_was_in_few_bytes(vocabulary: int) -> None:
    for value, most in make(vocabulary):
        data = pickle.dumps(value)
        back = pickle.loads(data)
        assert back == value
        assert [*map(type, list_numbers(back))] == [*map(type, list_numbers(value))]
        assert len(data) <= most * NUM_TOKENS, type(value)


def list_numbers(value: Any) -> list[Any]:
    """The first numbers of each tuple."""
    tuples = [getattr(value, name) for name in value.__slots__ if isinstance(getattr(value, name), tuple)]
    return [number for numbers in tuples for number in numbers[:3]]


def test_what_is_empty_or_short_comes_back_too() -> None:
    for value in (Completion((), (), "abort"), Completion((1,), (-0.5,), "length", reward=0.1, ended="final")):
        assert pickle.loads(pickle.dumps(value)) == value
