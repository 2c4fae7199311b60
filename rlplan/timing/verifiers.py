"""Verifiers: seconds that a step waits for rewards from separate processes after its last token.

    n   rollouts of a step
    w   responses judged at the same time, limits.num_reward_workers
    C   cores of the host
    c   core seconds per response, all rewards together
    g   seconds of generation, during which most responses are judged

In: a job, the number of cores and the seconds of generation. Out: seconds. Left out: functions that a user supplies,
the computation of a judged program itself, and every test after the first.
"""

from rlplan.spec.parts.rewards import AnswerMatcherSpec, CodeExecutorSpec, RewardSpec
from rlplan.spec.resolved import ResolvedJob

SANDBOX_S = 0.020
"""Seconds of a fresh sandbox with one test. Source: reports/sandbox: two cores, CPython 3.11, bubblewrap."""
MATH_S = 0.003
"""Seconds to compare two short numbers. Source: measured, math-verify 0.9.0, CPU time: integers 2.5 ms, fractions
3.2 ms."""


def judging_s(reward: RewardSpec) -> float:
    """Core seconds per response; 0 for rewards that the driver computes and for those that cannot be predicted.

    Counts: one sandbox, or one comparison of mathematical answers. Source: this module's constants.
    Assumes: short programs and answers.

    >>> from rlplan.spec.parts.rewards import CodeExecutorSpec, FormatCheckerSpec
    >>> judging_s(CodeExecutorSpec(kind="code_executor")), judging_s(FormatCheckerSpec(kind="format_checker"))
    (0.02, 0.0)
    """
    if isinstance(reward, CodeExecutorSpec):
        return SANDBOX_S
    return MATH_S if isinstance(reward, AnswerMatcherSpec) and reward.compares == "math" else 0.0


def waiting_s(num_responses: int, response_s: float, num_at_a_time: int, beside_s: float) -> float:
    """Seconds that a step waits for rewards after generation has ended.

    Counts: n c / min(w, C) - g, at least the c of the last response. Source: each response is judged when it ends
    (runtime/rewards/reward_pool.py). Assumes: responses end evenly over generation, and judging finds free cores.

    >>> waiting_s(100, 0.02, 2, 0.4), waiting_s(100, 0.02, 2, 60.0)
    (0.6, 0.02)
    """
    return max(response_s, num_responses * response_s / num_at_a_time - beside_s)


def verify_s(job: ResolvedJob, num_cores: int, beside_s: float) -> float:
    """Seconds that a step waits for all rewards with their own processes.

    Counts: `waiting_s` with the rewards added up. Source: as `waiting_s`. Assumes: as `waiting_s`.
    """
    response_s = sum(judging_s(reward) for reward in job.rewards)
    at_a_time = min(job.limits.num_reward_workers, num_cores)
    return waiting_s(job.workload.num_rollouts_per_step, response_s, at_a_time, beside_s)
