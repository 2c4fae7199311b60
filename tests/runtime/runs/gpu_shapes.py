"""Jobs that a search over GPUs has come to, made so small that they run on a CPU host: the same shape, other sizes.

In: a budget file of examples/, a number of devices. Out: a job with the same placement, ZeRO stage, ways to share
passes, engines and switches. Other are what a CPU lacks (bfloat16 matrix units, CUDA graphs, CUDA IPC) and every size.
"""

from pathlib import Path
from typing import Any

from rlplan.planner.executable import require_executable
from rlplan.planner.search import find_best_plan
from rlplan.spec.base import validate
from rlplan.spec.files.job_file import load_job
from rlplan.spec.job import JobSpec
from rlplan.spec.resolved import ResolvedJob
from rlplan.spec.resolved import resolve_on_cpu as settled_on_a_cpu_host
from tests.factories import EXAMPLES

SORTER = str(EXAMPLES / "models" / "sorter")
WORKLOAD = {
    "num_steps": 3,
    "num_prompts_per_step": 8,
    "num_samples_per_prompt": 4,
    "mini_batch_size": 32,
    "micro_batch_size_per_gpu": 8,
    "max_prompt_len": 8,
    "max_response_len": 12,
    "evaluate_every": 3,
    "num_heldout_prompts": 32,
    "response_lengths": {"kind": "constant"},
    "mean_prompt_len": None,
    "mean_response_len": None,
}


def shrink_to_cpu(example: str, *overrides: str, num_devices: int = 2) -> ResolvedJob:
    """The job of an example, small. overrides: choices of the budget that are not left to the search."""
    budget = find_best_plan(load_job(EXAMPLES / example, overrides))
    data: dict[str, Any] = require_executable(budget).job.model_dump(mode="json")
    data["policy"]["path"] = SORTER
    data["hardware"] = {"profile": "cpu-host", "num_devices": num_devices, "memory": "16GiB"}
    data["algorithm"] |= {"learning_rate": 1e-4}
    data["workload"] |= WORKLOAD
    data["rewards"] = [{"kind": "answer_matcher"}]
    data["training"] |= {"dtype": "float32", "max_tokens_per_micro_batch": "auto", "persistence_threshold": 1000}
    data["training"] |= {"reduce_bucket_size": 1_000_000}
    tp = min(data["rollout"]["tp"], num_devices)
    sizes = {
        "tp": tp,
        "num_engines": num_devices // tp,
        "kv_cache_memory": "32MiB",
        "max_num_seqs": 64,
        "block_size": 32,
    }
    data["rollout"] |= {"dtype": "float32", "has_cuda_graphs": False, "max_num_batched_tokens": 2048, **sizes}
    transport = {"cuda_ipc": "shared_memory", "nccl": "gloo"}.get(data["placement"]["transport"], "disk")
    data["placement"] |= {"transport": transport, "sync_bucket": "1MiB"}
    data["roles"] = {role: part for role, part in data["roles"].items() if part.get("path")}
    for part in data["roles"].values():
        part["path"] = SORTER
    return settled_on_a_cpu_host(validate(JobSpec, data, file=example))


def make_bundle(example: str, folder: Path, *overrides: str) -> Path:
    """Its bundle."""
    from rlplan.emit.bundle import write_bundle
    from rlplan.planner.search import find_plan

    write_bundle(find_plan(shrink_to_cpu(example, *overrides)), folder)
    return folder
