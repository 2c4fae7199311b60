"""Lengths of rollouts that a job draws instead of leaving them to the policy.

In: a job, a step, a prompt's place in it. Out: tokens of each of the prompt's rollouts. Seeded: the same for every run
of the job, and for whatever it is compared with.
"""

import random

from rlplan.spec.job import JobSpec
from rlplan.spec.lengths import cut_lengths


def drawn_lengths(job: JobSpec, step: int, index: int) -> tuple[int, ...]:
    """Tokens of the rollouts of one prompt; nothing where the job has no `controls.response_lengths`."""
    spec, work = job.controls.response_lengths, job.workload
    if spec is None:
        return ()
    lengths, dice = cut_lengths(spec, work.max_response_len), random.Random(f"{job.seed}/lengths/{step}/{index}")
    return tuple(max(1, round(lengths.quantile(dice.random()))) for _ in range(work.num_samples_per_prompt))
