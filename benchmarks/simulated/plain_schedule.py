"""Schedules for simulations of which nothing matters but who generates and who trains: rollouts, training, weight sync.

In: sizes. Out: a Schedule of the one builder, without evaluation. Left out: bytes; seconds are the caller's.
"""

from rlplan.dataflow.build import build_schedule
from rlplan.dataflow.choice import NO_TRAINER, Arrangement, Choice, EngineChoice
from rlplan.dataflow.schedule import Schedule
from rlplan.planner.answers.simulated_plan import drop_evaluation
from rlplan.spec.files.job_file import job_from
from rlplan.spec.resolved import settle
from rlplan.vocabulary import Placement


def plain_schedule(
    placement: Placement, num_training: int, num_generation: int, *, tp: int = 1, num_mini_batches: int = 1
) -> Schedule:
    """A step of GRPO without a reference on GPUs; of a disaggregated placement each group has its own."""
    num_gpus = num_training + (num_generation if placement is Placement.DISAGGREGATED else 0)
    prompts = f"workload.num_prompts_per_step={num_mini_batches}"
    sizes = ("workload.num_samples_per_prompt=2", "workload.mini_batch_size=2", "algorithm.kl_coef=0", prompts)
    job = settle(job_from({"policy": "Qwen/Qwen2.5-0.5B", "hardware": f"{num_gpus}xH100"}, sizes))
    arrangement = Arrangement(placement, num_training, num_generation)
    choice = Choice(arrangement, NO_TRAINER, EngineChoice(tp, 0), "nccl")
    return drop_evaluation(build_schedule(job, choice))
