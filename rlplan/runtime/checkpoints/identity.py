"""Identity: what must be the same in two runs of which one goes on where the other stopped.

In: a job. Out: short texts by key, compared one by one. Left out: what may change between them: devices, ZeRO stage,
placement, learning rate, number of steps.
"""

import hashlib
from pathlib import Path

from rlplan.errors import SpecError
from rlplan.spec.fingerprints import model_fingerprint
from rlplan.spec.job import JobSpec

OF_OLDER = {"training.tp": "1", "training.optimizer": "adamw"}
"""What a checkpoint that does not say it has: others were not saved then."""


def identity_of(job: JobSpec) -> dict[str, str]:
    """By the job's keys. Raises: SpecError when a file cannot be read."""
    return {
        "policy.path": model_fingerprint(Path(job.policy.path)),
        "policy.init": job.policy.init,
        "workload.prompts": _digest(Path(job.workload.prompts)),
        "workload.num_prompts_per_step": str(job.workload.num_prompts_per_step),
        "workload.num_samples_per_prompt": str(job.workload.num_samples_per_prompt),
        "seed": str(job.seed),
        "training.lora": job.training.lora.model_dump_json() if job.training.trains_adapters else "none",
        "algorithm's trained roles": ", ".join(job.trained_roles),
        "training.tp": str(job.training.tp),
        "training.optimizer": job.training.optimizer,
    }


def check_identity(job: JobSpec, found: dict[str, str], where: Path) -> None:
    """Raises: SpecError that names the first key that differs."""
    for key, mine in identity_of(job).items():
        if found.get(key, OF_OLDER.get(key)) != mine:
            raise SpecError(
                f"the checkpoint is of another job: {key} is {mine}, in the checkpoint {found.get(key, 'not said')}",
                where=str(where),
                rule="model, adapters, prompts, prompts a step, samples of each, seed, optimizer and tp stay the same",
                way_out="resume with the job that made the checkpoint, or start anew without --resume",
            )


def _digest(path: Path) -> str:
    """Of a file's bytes; of a folder's file names and sizes."""
    digest = hashlib.sha256()
    if path.is_dir():
        for part in sorted(part for part in path.rglob("*") if part.is_file()):
            digest.update(f"{part.relative_to(path)}\0{part.stat().st_size}\0".encode())
    else:
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]
