"""Functions of TRL's signature get what TRL's trainers give them: a batch in one call, and chats as messages.

Source: TRL 1.16, `GRPOTrainer._calculate_rewards`. Where TRL is installed, its own functions are called.
"""

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

from rlplan.runtime.measure.step_metrics import StepMetrics
from rlplan.runtime.rewards.reward_pool import RewardPool
from rlplan.runtime.rollout.experience import Completion, Prompt, Rollout
from tests.factories import make_job

SHAPES = Path(__file__).with_name("trl_shaped.py")
CHAT = json.dumps([{"role": "system", "content": "be brief"}, {"role": "user", "content": "1 + 1?"}])


def rollout(text: str, number: int = 0, *, chat: str = "", tokens: int = 2, **columns: Any) -> Rollout:
    prompt = Prompt("p", "1 + 1?", "2", (1,), json.dumps(columns), chat=chat)
    return Rollout(prompt, 0, Completion((5,) * tokens, (-0.1,) * tokens, "stop"), text, id=f"generate/1/{number}")


def judge_all(rollouts: list[Rollout], *names: str, path: Path = SHAPES, weights: tuple[float, ...] = ()) -> RewardPool:
    """A pool that has judged them as one step's, and is closed."""
    rewards = [{"kind": "function", "path": f"{path}:{name}", "name": name, "timeout_s": 60} for name in names]
    for reward, weight in zip(rewards, weights, strict=False):
        reward["weight"] = weight
    pool = RewardPool(make_job(rewards=rewards))
    try:
        pool.start({"answer"} | set(json.loads(rollouts[0].prompt.columns)))
        pool.judge(rollouts, 2)
    finally:
        pool.close()
    return pool


def test_a_chat_comes_as_messages_and_a_text_as_a_text() -> None:
    chats = [rollout("<think>a</think>2", 0, chat=CHAT), rollout("2", 1, chat=CHAT)]
    judge_all(chats, "has_thoughts", "says_role")
    assert [each.rewards for each in chats] == [{"has_thoughts": value, "says_role": 1.0} for value in (1.0, 0.0)]
    texts = [rollout("2")]
    judge_all(texts, "is_text")
    assert texts[0].rewards == {"is_text": 1.0}


def test_a_chat_that_no_template_wrote_comes_as_messages_too() -> None:
    prompt = Prompt("p", "be brief\n1 + 1?", "2", (1,), joined=CHAT)
    each = Rollout(prompt, 0, Completion((5,), (-0.1,), "stop"), "<think>", id="generate/1/0")
    judge_all([each], "has_thoughts")
    assert each.rewards == {"has_thoughts": 1.0}


def test_one_call_has_the_whole_batch_so_that_responses_can_be_compared() -> None:
    rollouts = [rollout("a" * length, number) for number, length in enumerate((3, 7, 5, 7))]
    judge_all(rollouts, "best_of_batch", "num_calls")
    assert [each.rewards["best_of_batch"] for each in rollouts] == [0.0, 1.0, 0.0, 1.0]
    assert {each.rewards["num_calls"] for each in rollouts} == {104.0}, "one call of four"


def test_each_batch_is_a_call_of_the_same_process() -> None:
    pool = RewardPool(make_job(rewards=[{"kind": "function", "path": f"{SHAPES}:num_calls"}]))
    first, second = ([rollout("a", number) for number in range(size)] for size in (2, 3))
    try:
        for batch in (first, second):
            pool.judge(batch)
    finally:
        pool.close()
    assert [batch[0].reward for batch in (first, second)] == [102.0, 203.0]


def test_a_rollout_that_every_reward_leaves_to_the_reward_model_is_judged_once() -> None:
    """Asked again, as after a lost process, the function would get a batch of those alone."""
    never = {"kind": "function", "path": f"{SHAPES}:unless_hard"}
    pool = RewardPool(make_job(rewards=[never], **{"roles.reward.path": "other"}))
    step = [rollout("a", number, level=number > 0) for number in range(3)]
    try:
        for _ in range(2):
            pool.judge(step)
        assert pool.take_notes() == ({"function/skipped": 2}, 3)
    finally:
        pool.close()
    assert [(each.rewards, each.has_failed) for each in step] == [({"function": 1.0}, False), ({}, False), ({}, False)]


def test_async_functions_are_awaited_on_one_loop() -> None:
    pool = RewardPool(make_job(rewards=[{"kind": "function", "path": f"{SHAPES}:one_loop"}]))
    batches = [[rollout("a")], [rollout("a"), rollout("b", 1)]]
    try:
        for batch in batches:
            pool.judge(batch)
    finally:
        pool.close()
    assert {each.reward for batch in batches for each in batch} == {1.0}
    alone = [rollout("2")]
    judge_all(alone, "sorts_alone")
    assert alone[0].rewards == {"sorts_alone": 1.0}


def test_none_leaves_a_response_to_the_other_rewards() -> None:
    rollouts = [rollout("aa", 0, level=False), rollout("a", 1, level=True)]
    pool = judge_all(rollouts, "unless_hard", "best_of_batch", weights=(2.0, 0.5))
    assert [each.rewards for each in rollouts] == [{"unless_hard": 1.0, "best_of_batch": 1.0}, {"best_of_batch": 0.0}]
    assert [(each.reward, each.has_failed, each.failure) for each in rollouts] == [(2.5, False, ""), (0.0, False, "")]
    metrics = StepMetrics(make_job())
    metrics.add_rewards(rollouts)
    assert metrics.learning["reward/unless_hard/mean"] == 1.0, "of the responses that it judges"
    assert pool.take_notes() == ({"unless_hard/skipped": 1}, 2)


def test_a_response_that_every_reward_leaves_is_not_learned_from_and_no_failure() -> None:
    rollouts = [rollout("a", 0, level=False), rollout("b", 1, level=True)]
    pool = judge_all(rollouts, "unless_hard", "never")
    assert [(each.num_learned, each.failure) for each in rollouts] == [(2, ""), (0, "")]
    pool.check_failures(rollouts, 1)
    metrics = StepMetrics(make_job())
    metrics.add_rewards(rollouts)
    assert (metrics.learning["reward/failed_fraction"], metrics.learning["reward/mean"]) == (0.0, 1.0)


def test_a_function_has_the_run_s_own_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    rollouts = [rollout("a")]
    judge_all(rollouts, "is_online")
    assert rollouts[0].reward == 1.0


def test_columns_are_lists_and_the_trainer_s_progress_is_known() -> None:
    rollouts = [rollout("a", number, level=number) for number in range(3)]
    judge_all(rollouts, "progress")
    assert [each.reward for each in rollouts] == [2 + 10 * 3 + 100 * level for level in range(3)]


def test_what_a_function_logs_becomes_a_metric(tmp_path: Path) -> None:
    (tmp_path / "judge.py").write_text(JUDGE)
    rollouts = [rollout("a", number, level=number) for number in range(4)]
    pool = judge_all(rollouts, "costly", "compute_score", path=tmp_path / "judge.py")
    assert [each.rewards for each in rollouts] == [{"costly": 1.0, "compute_score": float(n)} for n in range(4)]
    logged = pool.take_metrics()
    assert logged == {"compute_score/acc": 0.25, "compute_score/format": 0.5, "costly/cost_usd": 0.003}
    assert pool.take_metrics() == {}
    metrics = StepMetrics(make_job())
    metrics.add_reward_notes({}, 4, logged)
    assert metrics.learning["reward/costly/cost_usd"] == 0.003


def test_a_judge_that_misses_its_deadline_is_counted(tmp_path: Path) -> None:
    (tmp_path / "judge.py").write_text(JUDGE)
    reward = {"kind": "function", "path": f"{tmp_path / 'judge.py'}:hangs", "name": "hangs", "timeout_s": 0.2}
    pool = RewardPool(make_job(rewards=[reward]))
    rollouts = [rollout("a", number) for number in range(2)]
    try:
        pool.start()
        pool.judge(rollouts)
    finally:
        pool.close()
    assert all(each.has_failed and "timeout after" in each.failure for each in rollouts)
    assert pool.take_notes() == ({"hangs/late": 2}, 2)


JUDGE = """
import asyncio, math

async def costly(completions, log_metric, **columns):
    log_metric("cost_usd", 0.002)
    log_metric("cost_usd", 0.004)
    log_metric("odd name <b>", math.nan)
    log_metric("text", "no number")
    return [1.0] * len(completions)

def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    level = extra_info["level"]
    return {"score": float(level), "acc": level == 3, "format": level % 2, "pred": "text"}

async def hangs(completions, **columns):
    await asyncio.sleep(60)
"""


def test_an_object_that_can_be_called_is_a_function() -> None:
    rollouts = [rollout("a", number, tokens=number + 1) for number in range(3)]
    judge_all(rollouts, "too_long")
    assert [each.reward for each in rollouts] == [0.0, 0.0, -1.0]


def test_a_large_batch_comes_and_goes_whole() -> None:
    rollouts = [rollout("a" * 2000, number, tokens=500) for number in range(2000)]
    judge_all(rollouts, "num_calls", "never")
    assert {each.reward for each in rollouts} == {2100.0}


OF_TRL = """
from trl.rewards import accuracy_reward, get_cosine_scaled_reward, get_repetition_penalty_reward
from trl.rewards import get_soft_overlong_punishment, reasoning_accuracy_reward, think_format_reward
overlong = get_soft_overlong_punishment(max_completion_len=4, soft_punish_cache=2)
"""


@pytest.mark.skipif(importlib.util.find_spec("trl") is None, reason="TRL is not installed")
def test_trl_s_own_functions_judge_chats(tmp_path: Path) -> None:
    (tmp_path / "of_trl.py").write_text(OF_TRL)
    texts = (r"<think>so</think> It is \boxed{2}.", r"It is \boxed{2}.", r"<think>so</think> It is \boxed{3}.")
    rollouts = [rollout(text, n, chat=CHAT, tokens=2 + n, solution="$2$") for n, text in enumerate(texts)]
    names = ("think_format_reward", "accuracy_reward", "reasoning_accuracy_reward", "overlong")
    judge_all(rollouts, *names, path=tmp_path / "of_trl.py")
    expected = [(1.0, 1.0, 1.0, 0.0), (0.0, 1.0, 0.0, -0.5), (1.0, 0.0, 0.0, -1.0)]
    assert [tuple(each.rewards.values()) for each in rollouts] == expected, [each.failure for each in rollouts]
    unreadable = [rollout("2", chat=CHAT, solution="no mathematics at all"), rollout("2", 1, chat=CHAT, solution="$2$")]
    judge_all(unreadable, "accuracy_reward", path=tmp_path / "of_trl.py")
    assert (unreadable[0].has_failed, unreadable[0].failure) == (True, "")
