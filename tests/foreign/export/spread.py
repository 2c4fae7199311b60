"""Thirty jobs that differ in algorithm, model, number of GPUs and lengths, each planned for six frameworks."""

from pathlib import Path

from rlplan.spec.files.job_file import job_from, override_job
from rlplan.spec.job import JobSpec

FRAMEWORKS = ("verl", "trl", "openrlhf", "slime", "nemo_rl", "rlplan")
LONG = ("workload.max_prompt_len=2048", "workload.max_response_len=16384")
SHORT = ("workload.max_prompt_len=512", "workload.max_response_len=1024")
ASYNC = ("placement.placement=disaggregated", "placement.max_staleness=1")
ADAPTERS = "training.lora={rank: 32, alpha: 64}"
JOBS: dict[str, tuple[str, str, str, tuple[str, ...]]] = {
    "grpo-0.5b-1": ("Qwen/Qwen2.5-0.5B-Instruct", "1xH100", "grpo", SHORT),
    "grpo-1.5b-4": ("Qwen/Qwen2.5-1.5B-Instruct", "4xA100", "grpo", SHORT),
    "grpo-7b-8": ("Qwen/Qwen2.5-7B", "8xH100", "grpo", ()),
    "grpo-8b-8-h200": ("Qwen/Qwen3-8B", "8xH200", "grpo", ()),
    "grpo-14b-16": ("Qwen/Qwen3-14B", "2xDGX-H100", "grpo", ()),
    "grpo-32b-64": ("Qwen/Qwen2.5-32B", "8xDGX-H100", "grpo", ()),
    "grpo-7b-8-kl": ("Qwen/Qwen2.5-7B", "8xH100", "grpo", ("algorithm.kl_coef=0.001",)),
    "grpo-7b-long": ("Qwen/Qwen2.5-7B-Instruct", "8xH100", "grpo", LONG),
    "grpo-7b-async": ("Qwen/Qwen2.5-7B", "8xH100", "grpo", (*ASYNC, *SHORT)),
    "grpo-8b-async-16": ("Qwen/Qwen3-8B", "2xDGX-H100", "grpo", ASYNC),
    "grpo-7b-updates": ("Qwen/Qwen2.5-7B", "8xH100", "grpo", ("workload.mini_batch_size=256", *SHORT)),
    "grpo-3b-lora-1": ("Qwen/Qwen2.5-3B-Instruct", "1xRTX4090", "grpo", (ADAPTERS, *SHORT)),
    "grpo-7b-lora-4": ("Qwen/Qwen2.5-7B", "4xA100", "grpo", (ADAPTERS,)),
    "grpo-30b-a3b-8": ("Qwen/Qwen3-30B-A3B", "8xH200", "grpo", ()),
    "grpo-30b-a3b-32": ("Qwen/Qwen3-30B-A3B", "4xDGX-H100", "grpo", LONG),
    "grpo-235b-64": ("Qwen/Qwen3-235B-A22B", "8xDGX-H200", "grpo", ()),
    "gspo-30b-a3b-16": ("Qwen/Qwen3-30B-A3B", "2xDGX-H100", "gspo", ()),
    "gspo-4b-8": ("Qwen/Qwen3-4B", "8xH100", "gspo", ()),
    "dapo-7b-8": ("Qwen/Qwen2.5-7B", "8xH100", "dapo", ()),
    "dapo-32b-32": ("Qwen/Qwen2.5-32B", "4xDGX-H100", "dapo", LONG),
    "dr-grpo-3b-4": ("Qwen/Qwen2.5-3B-Instruct", "4xH100", "dr_grpo", ()),
    "rloo-7b-8": ("Qwen/Qwen2.5-7B-Instruct", "8xA100", "rloo", SHORT),
    "remax-7b-8": ("Qwen/Qwen2.5-7B-Instruct", "8xH100", "remax", SHORT),
    "reinforce++-8b-8": ("meta-llama/Llama-3.1-8B-Instruct", "8xH100", "reinforce++", SHORT),
    "ppo-1.5b-2": ("Qwen/Qwen2.5-1.5B-Instruct", "2xH100", "ppo", SHORT),
    "ppo-7b-8": ("Qwen/Qwen2.5-7B", "8xH100", "ppo", ()),
    "ppo-70b-64": ("meta-llama/Llama-3.1-70B-Instruct", "8xDGX-H100", "ppo", ()),
    "sft-8b-8": ("Qwen/Qwen3-8B", "8xH100", "sft", ()),
    "sft-7b-lora-1": ("Qwen/Qwen2.5-7B", "1xA100", "sft", (ADAPTERS,)),
    "dpo-8b-8": ("meta-llama/Llama-3.1-8B-Instruct", "8xA100", "dpo", ()),
}
"""Model, GPUs, algorithm and overrides, by name."""


def make_job(name: str, framework: str, folder: Path) -> JobSpec:
    """A job of the spread for a framework, with data and rewards, without which rlplan's own bundle is not written."""
    policy, hardware, algorithm, overrides = JOBS[name]
    prompts = folder / "train.jsonl"
    prompts.touch()
    written = {"policy": policy, "hardware": hardware, "algorithm": algorithm, "framework": framework}
    job = job_from({**written, "data": {"prompts": str(prompts)}}, overrides)
    return override_job(job, ["rewards=[{kind: answer_matcher}]"]) if job.has_rollouts else job
