"""Verifiers: bytes of the processes that judge responses, beside the driver on its host.

    w   responses judged at the same time, limits.num_reward_workers
    m   what a reward's process, or a sandbox with all its processes and files, may take before it is ended

In: a job. Out: bytes. Left out: pages of the interpreter and its libraries that processes share.
"""

from rlplan.spec.parts.rewards import AnswerMatcherSpec, CodeExecutorSpec, FunctionSpec, RewardSpec
from rlplan.spec.resolved import ResolvedJob
from rlplan.units import MIB

MATH_PROCESS_BYTES = 64 * MIB
"""A process that has compared mathematics. Source: measured, math-verify 0.9.0, CPython 3.11: 62 MB resident."""
FUNCTION_PROCESS_BYTES = 16 * MIB
"""An interpreter before it has loaded a user's function. Source: CPython 3.11, resident 14 MB."""


def verifier_bytes(job: ResolvedJob) -> int:
    """Bytes that the rewards' own processes may hold at any time, on the driver's host.

    Counts: w x (process + m) of each reward that has processes; of mathematics without m, for answers are short.
    Source: limits that runtime/rewards and runtime/sandbox set. Assumes: every worker is at its limit at once.

    >>> from rlplan.spec.parts.rewards import FunctionSpec
    >>> reward_bytes(FunctionSpec(kind="function", path="a.py:f", memory=100 * MIB)) // MIB
    116
    """
    return job.limits.num_reward_workers * sum(reward_bytes(reward) for reward in job.rewards)


def reward_bytes(reward: RewardSpec) -> int:
    """Bytes of one reward in one worker; 0 where the driver computes it.

    Counts: the process, and what the reward lets it take. Source: this module's constants; the job.
    Assumes: as verifier_bytes.

    >>> from rlplan.spec.parts.rewards import FormatCheckerSpec
    >>> reward_bytes(FormatCheckerSpec(kind="format_checker"))
    0
    """
    if isinstance(reward, CodeExecutorSpec):
        return reward.memory
    if isinstance(reward, FunctionSpec):
        return FUNCTION_PROCESS_BYTES + reward.memory
    return MATH_PROCESS_BYTES if isinstance(reward, AnswerMatcherSpec) and reward.compares == "math" else 0
