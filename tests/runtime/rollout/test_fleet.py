"""How requests are balanced over engines."""

from hypothesis import given
from hypothesis import strategies as st

from rlplan.runtime.learning.packing import balance_by_length
from rlplan.runtime.rollout.experience import Completion, FinishedRequest, RolloutRequest
from rlplan.runtime.rollout.fleet import ExpectedLengths


@given(st.lists(st.floats(0.1, 1e6), max_size=40), st.integers(1, 5))
def test_every_request_is_dealt_once_and_no_share_is_heavier_than_the_rest_by_more_than_one_request(
    weights: list[float], num_shares: int
) -> None:
    shares = balance_by_length(weights, num_shares)
    assert sorted(index for share in shares for index in share) == list(range(len(weights)))
    loads = [sum(weights[index] for index in share) for share in shares]
    if weights:
        assert max(loads) - min(loads) <= max(weights) * (1 + 1e-9)


def test_a_prompt_is_expected_to_take_what_it_took_before_and_a_new_one_what_all_took() -> None:
    lengths = ExpectedLengths()
    known, new = RolloutRequest("a", (1,), 2, 1.0, 0, 100), RolloutRequest("b", (2,), 2, 1.0, 0, 30)
    assert lengths.estimate(known) == 100
    samples = tuple(Completion((0,) * size, (0.0,) * size, "stop") for size in (30, 50))
    lengths.learn(known, FinishedRequest("a", samples))
    assert lengths.estimate(known) == 40
    assert lengths.estimate(new) == 30
