"""An agent's conversations as samples: each with its own prompt, all with one advantage; and the jobs that allow it."""

from pathlib import Path
from typing import Any

import pytest

from rlplan.errors import SpecError
from rlplan.planner.plan_parts import list_uncounted
from rlplan.runtime.learning.learner import share_advantage
from rlplan.runtime.learning.mini_batch import assign_rollouts, make_train_sample, token_weights
from rlplan.runtime.losses.advantages import ADVANTAGES
from rlplan.runtime.rewards.total import finish_rewards
from rlplan.runtime.rollout.buffer import BufferedGroup, ExperienceBuffer
from rlplan.runtime.rollout.experience import Completion, FinishedRequest, Rollout, add_branches
from rlplan.runtime.rollout.groups import GroupMaker
from rlplan.spec.parts.environment import EnvironmentSpec
from tests.factories import EXAMPLES, make_job
from tests.runtime.environments.chat_policy import chat_prompt

AGENT = f"{EXAMPLES / 'agents' / 'clerk.py'}:run"
BRANCH = Completion((5, 6, 7), (-1.0, -2.0), "stop", observed=((1, 2),), prompt_tokens=(9, 9))
MAIN = Completion((8,), (-3.0,), "stop", reward=1.0, answer="42", branches=(BRANCH,), prompt_tokens=(9,))
OTHER = Completion((4,), (-1.0,), "stop", reward=0.0, prompt_tokens=(9,))
FAILED = Completion((4,), (-1.0,), "stop", failure="no", branches=(BRANCH,), prompt_tokens=(9,))


def agent_job(**overrides: Any) -> Any:
    return make_job(rewards=[], **{"rollout.environment": {"agent": AGENT, **overrides}})


def make_rollouts(job: Any) -> list[Rollout]:
    maker = GroupMaker(job, lambda number: chat_prompt(), frozenset())
    group = maker.make((0, (MAIN, OTHER, FAILED)))
    rollouts = [*group.rollouts, *group.baselines]
    finish_rewards(rollouts, [], job, 1)
    for rollout, judged in zip(rollouts, ADVANTAGES["group_normalized"](rollouts, job.algorithm), strict=True):
        rollout.advantage, rollout.advantages = judged.whole, judged.advantages
        share_advantage(rollout)
    return rollouts


def test_a_branch_is_a_sample_of_its_own_with_the_advantage_of_its_rollout() -> None:
    job = agent_job()
    rollouts = make_rollouts(job)
    assert rollouts[0].text == "42"
    samples = [make_train_sample(sequence) for sequence in add_branches(rollouts)]
    assert [sample.prompt_tokens for sample in samples] == [(9,), (9, 9), (9,), (9,), (9, 9)]
    assert [len(sample.advantages) for sample in samples] == [1, 2, 1, 1, 2]
    rounded = [round(sample.advantages[0], 4) for sample in samples]
    assert rounded == [0.7071, 0.7071, -0.7071, 0.0, 0.0]  # a group of two: the failed rollout does not count
    assert [sample.num_learned for sample in samples] == [1, 2, 1, 0, 0]
    assert samples[1].observed == ((1, 2),)
    assert token_weights(samples, job)[0] == 1 / 5
    (passes,) = assign_rollouts(rollouts, job, 1)
    assert sum(len(rollouts_of_pass) for rollouts_of_pass in passes) == 5


def test_branches_are_kept_in_a_buffer_on_disk(tmp_path: Path) -> None:
    buffer = ExperienceBuffer(0, max_in_memory=0, folder=tmp_path)
    group = BufferedGroup(0, 0, FinishedRequest("generate/1/0", (MAIN,)))
    buffer.add(group)
    assert buffer.take(1) == [group]


def test_a_rollout_without_any_reward_is_masked_with_the_way_out() -> None:
    rollout = Rollout(chat_prompt(), 0, Completion((4,), (-1.0,), "stop"))
    finish_rewards([rollout], [], agent_job(), 1)
    assert rollout.has_failed
    assert "post it to /v1/reward" in rollout.failure


REFUSED = {
    "tools": (
        {"rollout.environment": {"agent": AGENT, "tools": [f"{EXAMPLES / 'environments' / 'look_up.py'}:look_up"]}},
        "an agent has tools",
    ),
    "a value model": ({"rollout.environment": {"agent": AGENT}, "algorithm": {"name": "ppo"}}, "share one advantage"),
    "a discount": (
        {"rollout.environment": {"agent": AGENT}, "algorithm": {"name": "grpo", "gamma": 0.9}},
        "share one advantage",
    ),
    "an empty command": ({"rollout.environment": {"agent": []}}, "rollout.environment.agent"),
    "a module": ({"rollout.environment": {"agent": "clerk"}}, "file.py:function"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_jobs_that_do_not_suit_an_agent_are_refused(case: str) -> None:
    overrides, words = REFUSED[case]
    with pytest.raises(SpecError) as error:
        make_job(**overrides)  # type: ignore[arg-type]
    assert words in str(error.value)


def test_python_files_of_a_command_are_found_beside_the_job() -> None:
    spec = EnvironmentSpec(agent=("python", "-u", "agent.py", "--name", "x"))
    assert spec.files == (("rollout.environment.agent", "agent.py"),)
    assert spec.map_paths(lambda path: f"/job/{path}").agent == ("python", "-u", "/job/agent.py", "--name", "x")


def test_the_verdict_names_what_agents_add() -> None:
    later, memory, waiting = list_uncounted(agent_job(), [])
    assert later.startswith("turns 2 to 4")
    assert (memory, waiting) == ("the memory of agents", "waiting for the agent (at most 10 s per answer)")
