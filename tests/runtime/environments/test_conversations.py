"""Rollouts of several turns: what ends up in their tokens, who chose which, and that none is longer than it may be."""

from collections.abc import Iterator, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlplan.memory.roles.ledger import predict_cpu_ledger
from rlplan.runtime.data.text_tokens import TextTokenizer
from rlplan.runtime.environments.conversations import Conversations
from rlplan.runtime.environments.pool import EnvironmentPool
from rlplan.runtime.losses.advantages import ADVANTAGES
from rlplan.runtime.measure.memory_meter import Measurement
from rlplan.runtime.models.logprob_model import make_batch
from rlplan.runtime.rewards.total import finish_rewards
from rlplan.runtime.rollout.experience import (
    Completion,
    FinishedRequest,
    Prompt,
    RolloutRequest,
    WeightSpan,
    chosen_indices,
)
from rlplan.spec.parts.environment import EnvironmentSpec
from tests.factories import EXAMPLES, make_job, make_plan
from tests.repository.at_night import examples

SORTER = EXAMPLES / "models" / "sorter"
WORDS = TextTokenizer(SORTER)
EOS = 1

GAME = """
def play(messages, answer):
    texts = [message["content"] for message in messages if message["role"] == "assistant"]
    if "9" in texts[-1]:
        raise ValueError("nine")
    return {"reward": len(texts)} if "5" in texts[-1] else {"observation": f"abc{len(texts)}"}
"""


class Engines:
    """Stands for the engines: turn t of sample s says digits s + t, as long as it may, with log-probs -1, -2 …"""

    def __init__(self, turn_len: int) -> None:
        self.turn_len, self.asked, self.left = turn_len, [], []  # type: ignore[var-annotated]
        self._waiting: list[RolloutRequest] = []

    processes = ("rollout_engine/0",)

    def submit(self, requests: Sequence[RolloutRequest], timeout_s: float) -> None:
        new = [request for request in requests if request not in self.asked]
        self.asked += new
        self._waiting += new

    def collect(
        self, max_wait_s: float, at_least: int, timeout_s: float
    ) -> tuple[list[FinishedRequest], list[Measurement]]:
        done, self._waiting = self._waiting, []
        return [self._answer(request) for request in reversed(done)], []

    def _answer(self, request: RolloutRequest) -> FinishedRequest:
        sample, turn = map(int, request.id.rpartition("#")[2].split("."))
        length = min(self.turn_len, request.max_tokens)
        digits = [6 + sample + turn] * length
        tokens = (*digits[:-1], EOS) if length == self.turn_len else tuple(digits)
        reason = "stop" if length == self.turn_len else "length"
        spans = (WeightSpan(turn, 0, length),)
        return FinishedRequest(request.id, (Completion(tokens, tuple(-1.0 - i for i in range(length)), reason, spans),))

    def end_session(self, session: str) -> None:
        self.left.append(session)


PROMPT = Prompt("p", "Sort: 52914", "12459", (5, 11, 8, 15, 7, 10))


@pytest.fixture(scope="module")
def game(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[EnvironmentPool, EnvironmentSpec]]:
    folder = tmp_path_factory.mktemp("game")
    (folder / "game.py").write_text(GAME)
    spec = EnvironmentSpec(path=f"{folder / 'game.py'}:play", max_turns=4, max_observation_len=3)
    pool = EnvironmentPool(spec, folder / "log.txt")
    yield pool, spec
    pool.close()


Game = tuple[EnvironmentPool, EnvironmentSpec]


def rollouts(
    game: Game, *, max_tokens: int, turn_len: int = 4, num_samples: int = 4
) -> tuple[Engines, FinishedRequest]:
    pool, _ = game
    engines = Engines(turn_len)
    talks = Conversations(engines, pool, WORDS, lambda name: PROMPT)  # type: ignore[arg-type]
    request = RolloutRequest("generate/1/0", PROMPT.tokens, num_samples, 1.0, 7, max_tokens)
    finished, _ = talks.generate([request], 30.0)
    return engines, finished[0]


def test_turns_and_observations_stand_in_one_row_and_only_the_policy_s_tokens_have_log_probs(game: Game) -> None:
    _, finished = rollouts(game, max_tokens=40)
    second = finished.completions[1]  # says 111, 222, 333, 444; hears abc after each but the last
    abc = tuple(WORDS.tokens("abc"))
    past = [(6 + digit,) * 3 + (EOS,) for digit in (1, 2, 3, 4)]
    assert second.tokens == (*past[0], *abc, *past[1], *abc, *past[2], *abc, *past[3])
    assert second.observed == ((4, 7), (11, 14), (18, 21))
    assert second.chosen == sum(past, ())
    assert second.logprobs == (-1.0, -2.0, -3.0, -4.0) * 4
    assert second.spans == tuple(WeightSpan(turn, 7 * turn, 7 * turn + 4) for turn in range(4))
    assert (second.num_turns, second.reward, second.failure) == (4, 0.0, "")


def test_rollouts_of_a_group_end_when_they_end_and_a_reward_is_the_environment_s(game: Game) -> None:
    _, finished = rollouts(game, max_tokens=40, num_samples=6)
    by_sample = [(each.num_turns, each.reward) for each in finished.completions]
    assert by_sample == [(4, 0.0), (4, 0.0), (4, 4.0), (3, 3.0), (2, 2.0), (1, 1.0)]


def test_a_failure_leaves_what_was_said_and_its_reason(game: Game) -> None:
    _, finished = rollouts(game, max_tokens=40, num_samples=10)
    failed = finished.completions[9]
    assert (failed.num_turns, failed.reward, failed.failure) == (1, None, "ValueError: nine")


def test_every_turn_goes_to_the_engine_of_the_first_with_everything_before_and_a_seed_of_its_own(game: Game) -> None:
    engines, finished = rollouts(game, max_tokens=40, num_samples=2)
    assert {request.session for request in engines.asked} == {"generate/1/0"}
    assert engines.left == ["generate/1/0"]
    assert len({request.seed for request in engines.asked}) == len(engines.asked) == 8
    last = next(request for request in engines.asked if request.id == "generate/1/0#1.3")
    assert last.prompt == (*PROMPT.tokens, *finished.completions[1].tokens[:21])
    assert last.max_tokens == 40 - 21


@examples(20)
@given(max_tokens=st.integers(1, 30), turn_len=st.integers(1, 9))
def test_no_rollout_is_longer_than_a_response_may_be(game: Game, max_tokens: int, turn_len: int) -> None:
    engines, finished = rollouts(game, max_tokens=max_tokens, turn_len=turn_len)
    for each in finished.completions:
        assert len(each.tokens) <= max_tokens
        assert len(each.logprobs) == len(each.chosen) > 0
        assert each.observed == () or each.observed[-1][1] < len(each.tokens)  # the policy has the last word
    assert all(len(request.prompt) + request.max_tokens <= len(PROMPT.tokens) + max_tokens for request in engines.asked)


def test_an_environment_needs_no_memory_in_any_worker(game: Game) -> None:
    plain, _ = make_plan(), game
    job = make_job(**{"rollout.environment.path": f"{EXAMPLES / 'environments' / 'guess_digit.py'}:play"})
    ledger = predict_cpu_ledger(job, job.load_model(), job.load_profile(), plain.schedule)
    workers = {process for process, _ in plain.schedule.processes}
    assert [row for row in ledger.rows if row.process in workers] == [
        row for row in plain.ledger.rows if row.process in workers
    ]


def test_a_trainer_is_asked_about_the_policy_s_tokens_alone() -> None:
    from rlplan.runtime.rollout.experience import SequencePair

    batch = make_batch([SequencePair((5, 6), (3, 20, 21, 4)), SequencePair((5, 6), (3, 20, 21, 4), ((1, 3),))])
    assert batch.sequence_lens == (6, 6)
    assert batch.positions.tolist() == [1, 2, 3, 4, 7, 10]
    assert batch.targets.tolist() == [3, 20, 21, 4, 3, 4]
    assert batch.lengths == (4, 2)


def test_a_rollout_without_an_answer_is_no_part_of_its_group_and_gives_no_gradient(game: Game) -> None:
    from rlplan.runtime.rollout.experience import Rollout

    _, finished = rollouts(game, max_tokens=40, num_samples=10)
    judged = [
        Rollout(PROMPT, 0, each) for each in (finished.completions[5], finished.completions[4], finished.completions[9])
    ]
    job = make_job(
        rewards=[],
        **{"rollout.environment": {"path": f"{EXAMPLES / 'environments' / 'guess_digit.py'}:play", "weight": 2.0}},
    )
    finish_rewards(judged, [], job, 1)
    assert [(rollout.reward, rollout.has_failed) for rollout in judged] == [(2.0, False), (4.0, False), (0.0, True)]
    advantages = [rollout.advantages for rollout in ADVANTAGES["group_normalized"](judged, job.algorithm)]
    assert [round(each[0], 4) for each in advantages] == [-0.7071, 0.7071, 0.0]
    assert [len(each) for each in advantages] == [len(rollout.completion.logprobs) for rollout in judged]
    assert judged[2].num_ignored == len(judged[2].completion.logprobs)


def test_where_the_policy_chose_is_everywhere_but_where_it_was_told() -> None:
    assert chosen_indices(5, ()) == [0, 1, 2, 3, 4]
    assert chosen_indices(5, ((0, 2), (4, 5))) == [2, 3]
