"""Verifiers: seconds that a step waits for rewards in processes of their own, after its last token.

    n   rollouts of a step
    w   responses judged at the same time, limits.num_reward_workers
    C   cores of the host
    c   seconds of a core that one response takes, all rewards together
    g   seconds of generation, during which most of them are judged

In: a job, cores and generation's seconds. Out: seconds. Left out: a user's own functions, whose time is their author's;
what a program itself computes, and tests after the first.
"""

from rlplan.spec.parts.rewards import AnswerMatcherSpec, CodeExecutorSpec, RewardSpec
from rlplan.spec.resolved import ResolvedJob

SANDBOX_S = 0.020
"""A fresh sandbox with one test. Source: reports/sandbox: two cores, CPython 3.11, bubblewrap."""
MATH_S = 0.003
"""A comparison of two short numbers. Source: measured, math-verify 0.9.0, CPU time: integers 2.5 ms, fractions 3.2."""


def judged_s(reward: RewardSpec) -> float:
    """Seconds of a core that one response takes; 0 where the driver computes it, or it cannot be known.

    Counts: a sandbox, or a comparison of mathematics. Source: this module's constants.
    Assumes: short programs and answers.

    >>> from rlplan.spec.parts.rewards import CodeExecutorSpec, FormatCheckerSpec
    >>> judged_s(CodeExecutorSpec(kind="code_executor")), judged_s(FormatCheckerSpec(kind="format_checker"))
    (0.02, 0.0)
    """
    if isinstance(reward, CodeExecutorSpec):
        return SANDBOX_S
    return MATH_S if isinstance(reward, AnswerMatcherSpec) and reward.compares == "math" else 0.0


def waiting_s(num_responses: int, response_s: float, num_at_a_time: int, beside_s: float) -> float:
    """Seconds that are waited for rewards once generation has ended.

    Counts: n c / min(w, C) - g, at least the last response's c. Source: responses are judged as they end
    (runtime/rewards/reward_pool.py). Assumes: they end evenly over generation, which leaves the cores that judging
    takes.

    >>> waiting_s(100, 0.02, 2, 0.4), waiting_s(100, 0.02, 2, 60.0)
    (0.6, 0.02)
    """
    return max(response_s, num_responses * response_s / num_at_a_time - beside_s)


def verify_s(job: ResolvedJob, num_cores: int, beside_s: float) -> float:
    """Seconds that a step waits for its rewards' own processes.

    Counts: waiting_s of all rewards together. Source: as there. Assumes: as there.
    """
    response_s = sum(judged_s(reward) for reward in job.rewards)
    at_a_time = min(job.limits.num_reward_workers, num_cores)
    return waiting_s(job.workload.num_rollouts_per_step, response_s, at_a_time, beside_s)
