"""Thirty plans to write for each stack."""

from functools import cache
from itertools import product

from rlplan.foreign.export.folders import TARGETS, set_framework
from rlplan.planner.plan import Plan
from rlplan.planner.search import find_best_plan
from rlplan.spec.files.job_file import job_from
from rlplan.spec.job import JobSpec

STARTED = dict.fromkeys(TARGETS, "train.sh") | {
    "nemo_rl": "train.yaml",
    "vllm": "vllm.yaml",
    "deepspeed": "deepspeed.json",
}
"""The file of each stack's folder that says the whole job."""
COLOCATED = ("placement.placement=colocated", "placement.offload=host", "placement.offload_roles=all")
ASKED = {
    "verl": ("framework=verl", *COLOCATED, "training.backend=megatron"),
    "openrlhf": ("framework=openrlhf", *COLOCATED),
    "slime": ("framework=slime", *COLOCATED),
    "nemo_rl": ("framework=nemo_rl", *COLOCATED, "training.backend=fsdp2"),
    "trl": ("framework=trl", "placement.placement=colocated"),
    "vllm": COLOCATED,
    "deepspeed": COLOCATED,
}
"""The framework of each stack, and engines that take turns with the trainer."""
LENGTHS = [(f"workload.max_prompt_len={size}", f"workload.max_response_len={3 * size}") for size in (1024, 512, 256)]
BATCHES = [
    ("workload.num_prompts_per_step=128", "workload.num_samples_per_prompt=8"),
    ("workload.num_prompts_per_step=64", "workload.num_samples_per_prompt=16", "workload.mini_batch_size=256"),
]
OTHERS = [
    (),
    ("training.gradient_checkpointing=true", "workload.micro_batch_size_per_gpu=4"),
    ("algorithm.kl_coef=0.0", "rollout.tp=2"),
    ("algorithm.name=gspo", "algorithm.kl_coef=0.0"),
    (
        "algorithm.learning_rate=3e-6",
        "algorithm.lr_scheduler_type=cosine",
        "algorithm.lr_warmup_ratio=0.05",
        "workload.num_epochs_per_step=2",
        "workload.temperature=0.8",
        "algorithm.clip_high=0.28",
    ),
]
GRID = [sum(parts, ()) for parts in product(LENGTHS, BATCHES, OTHERS)]
LACKS = {
    "slime": ("workload.num_epochs_per_step=2",),
    "nemo_rl": ("workload.num_epochs_per_step=2", "algorithm.lr_scheduler_type=", "algorithm.lr_warmup_ratio="),
}
"""Job keys without a setting in a stack, which are refused (test_learning.py)."""


def list_asked(target: str, every: int = 1) -> list[tuple[str, ...]]:
    """Overrides of the thirty plans, or of each so many of them, without what a stack lacks."""
    return [
        (*ASKED[target], *(word for word in overrides if not word.startswith(LACKS.get(target, ()))))
        for overrides in GRID[::every]
    ]


def plan_stack(job: JobSpec, stack: str) -> Plan:
    """The best plan of a job for a stack's framework."""
    return find_best_plan(set_framework(job, stack), with_others=False)


@cache
def make_plan(*overrides: str, model: str = "Qwen/Qwen2.5-1.5B-Instruct") -> Plan:
    return find_best_plan(job_from({"policy": model, "hardware": "8xH100", "algorithm": "grpo"}, overrides))
