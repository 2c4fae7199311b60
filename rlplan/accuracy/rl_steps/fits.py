"""Published recipes that run: `rl_fits`. Does the same layout fit here?

In: a point with the layout of an RL step, measured true where it ran. Out: the verdict of that job, right or wrong, not
near. Left out: what a source does not state (its engine's share of a GPU), which the plan chooses.
"""

from typing import Any

from rlplan.accuracy.points import MeasuredPoint
from rlplan.accuracy.registry import CannotPredict, Prediction, predicts
from rlplan.accuracy.rl_steps.settings import RlRun, read_rl_run
from rlplan.planner.machine import search_of
from rlplan.spec.files.job_file import job_from
from rlplan.spec.parts.lengths import ConstantLengths
from rlplan.timing.network.cluster import Cluster


@predicts("rl_fits")
def predict_fit(point: MeasuredPoint) -> Prediction:
    """The verdict of the job with its published layout forced, also with the longest responses that are allowed."""
    if not isinstance(point.measured.value, bool):
        raise CannotPredict(f"measured is {point.measured.value!r}; a point of kind rl_fits says true or false")
    job = job_from(forced_job(point, read_rl_run(point)))
    plan = search_of(job).run(with_others=False, may_leave_idle=False)
    return Prediction(plan.verdict.value, is_right=plan.fits == point.measured.value)


def forced_job(point: MeasuredPoint, run: RlRun) -> dict[str, Any]:
    """The job of a published step: who trains and generates, how each is cut, and what is offloaded."""
    choice, shape, settings = run.choice, run.lengths.spec, run.settings
    offload = str(settings.raw("offload") or "").lower()
    mini_batch = settings.count("mini_batch") if "mini_batch" in settings else run.mini_batch
    quantization = str(settings.raw("rollout_quantization") or "none")
    is_shared = run.training is run.generation
    return {
        "policy": point.model,
        "algorithm": "grpo",
        "target": run.backend,
        "hardware": hardware_of(run.training if is_shared else run.generation, run),
        "workload": {
            "num_prompts_per_step": max(1, run.num_rollouts // run.num_samples),
            "num_samples_per_prompt": run.num_samples,
            "mini_batch_size": mini_batch,
            "max_prompt_len": run.max_prompt,
            "mean_prompt_len": int(run.prompt_len),
            "max_response_len": run.lengths.longest,
            "response_lengths": {"kind": "constant"} if isinstance(shape, ConstantLengths) else shape.model_dump(),
        },
        "training": {
            **{axis: getattr(choice, axis) for axis in ("tp", "pp", "cp", "ep")},
            "offloads_optimizer": "optimizer" in offload or "auto",
            "gradient_checkpointing": choice.gradient_checkpointing,
        },
        "rollout": {
            "tp": run.engine_tp,
            "attention_dp": 1,
            "has_cuda_graphs": "eager" not in str(settings.raw("rollout")).lower(),
            "quantization": quantization,
        },
        "placement": {"placement": "colocated"}
        if is_shared
        else {"placement": "disaggregated", "num_generation_devices": run.generation.num_gpus},
    }


def hardware_of(cluster: Cluster, run: RlRun) -> str:
    """All GPUs in the short form: `12xhgx-h20`, or `6xh20` where they fill no hosts."""
    count = cluster.num_gpus if run.training is run.generation else cluster.num_gpus + run.training.num_gpus
    node = cluster.node
    if node is None or node.gpu != cluster.gpu.name or count % node.num_gpus:
        return f"{count}x{cluster.gpu.name}"
    return f"{count // node.num_gpus}x{node.name}"
