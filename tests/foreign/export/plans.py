"""Thirty plans to write for each stack, with what the stack has by itself alone."""

from functools import cache
from itertools import product

from rlplan.planner.plan import Plan
from rlplan.planner.search import best_plan
from rlplan.spec.files.job_file import job_from

COLOCATED = ("placement.placement=colocated", "placement.offload=host", "placement.offload_roles=all")
SLEEPING = ("placement.placement=colocated", "placement.offload=none", "rollout.sleep_level=2")
ASKED = {
    "verl": (*COLOCATED, "training.backend=megatron", "rollout.sleep_level=2"),
    "openrlhf": (
        *COLOCATED,
        "rollout.sleep_level=2",
        "rollout.max_num_seqs=256",
        "rollout.max_num_batched_tokens=16384",
        "training.logits=kept",
    ),
    "slime": (
        *COLOCATED,
        "training.backend=megatron",
        "rollout.sleep_level=2",
        "rollout.max_num_seqs=256",
        "training.logits=copied",
    ),
    "nemo_rl": (
        *COLOCATED,
        "training.backend=fsdp2",
        "rollout.sleep_level=1",
        "rollout.max_num_seqs=1024",
        "rollout.max_num_batched_tokens=16384",
        "training.logits=plain",
    ),
    "trl": (*SLEEPING, "rollout.max_num_batched_tokens=4096", "rollout.max_num_seqs=128", "rollout.tp=1"),
    "vllm": COLOCATED,
    "deepspeed": COLOCATED,
}
"""What each stack can say of a job."""
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
"""What a stack has no key for, and is refused (test_learning.py)."""
TRL_ENGINES = "rollout.max_num_seqs=256"
"""TRL gives an engine of two GPUs the sequences of both."""


def asked_of(target: str, every: int = 1) -> list[tuple[str, ...]]:
    """Overrides of the thirty plans, or of each so many of them, as a stack can say them."""
    beside = {overrides: (TRL_ENGINES,) for overrides in GRID if target == "trl" and "rollout.tp=2" in overrides}
    return [
        (
            *ASKED[target],
            *(word for word in overrides if not word.startswith(LACKS.get(target, ()))),
            *beside.get(overrides, ()),
        )
        for overrides in GRID[::every]
    ]


@cache
def plan_of(*overrides: str, model: str = "Qwen/Qwen2.5-1.5B-Instruct") -> Plan:
    return best_plan(job_from({"policy": model, "hardware": "8xH100", "algorithm": "grpo"}, overrides))
