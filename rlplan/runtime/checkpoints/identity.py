"""Identity: what must be the same in two runs of which one goes on where the other stopped, and what is said if not.

In: a job. Out: short texts by key, compared one by one. Left out: what may change without a word: devices, ZeRO stage,
placement, learning rate, number of steps.
"""

import hashlib
from collections.abc import Iterator, Mapping
from functools import reduce
from pathlib import Path

from rlplan.errors import SpecError
from rlplan.reading import opened
from rlplan.runtime.models.snapshots import located
from rlplan.spec.fingerprints import RULE, model_fingerprint, unversioned_fingerprint
from rlplan.spec.parts.adapter_files import WEIGHTS_FILE
from rlplan.spec.parts.data import DataSpec
from rlplan.spec.resolved import ResolvedJob

OF_OLDER = {
    "training.tp": "1",
    "training.optimizer": "adamw",
    "data.shuffles": "True",
    "data.difficulty_column": "None",
    "data.heldout": "of its own",
    "rollout.base_path": "none",
}
"""What a checkpoint that does not say it has: others were not saved then."""
MAY_CHANGE = (
    "algorithm", "rewards", "roles", "rollout.environment", "data.prompt_column", "data.answer_column",
    "data.system_prompt", "workload.temperature", "workload.max_response_len",
    "rollout.base_path",
)  # fmt: skip
"""What may change on purpose: a run that goes on says that it has."""

UNVERSIONED = "digests without a version"
"""Key of each model's digest of now with the one that checkpoints have from before digests had a version."""


class ForeignCheckpointError(SpecError):
    """The checkpoint is of another job."""


def identity_of(job: ResolvedJob) -> dict[str, str]:
    """By the job's keys. Raises: SpecError when a file cannot be read."""
    return {
        "policy.path": model_fingerprint(Path(job.policy.path)),
        "policy.init": job.policy.init,
        "data.heldout": "of its own"
        if job.needed_data.heldout
        else f"up to {job.workload.num_heldout_prompts} prompts",
        "data.prompts": _prompts(job.needed_data),
        "data.shuffles": str(job.needed_data.shuffles),
        "data.difficulty_column": str(job.needed_data.difficulty_column),
        "workload.num_prompts_per_step": str(job.workload.num_prompts_per_step),
        "workload.num_samples_per_prompt": str(job.workload.num_samples_per_prompt),
        "seed": str(job.seed),
        "training.lora": job.training.lora.model_dump_json(exclude={"path"}) if job.training.lora else "none",
        "algorithm's trained roles": ", ".join(job.trained_roles),
        "training.tp": str(job.training.tp),
        "training.optimizer": job.training.optimizer,
        **_said(job),
        UNVERSIONED: _unversioned(job),
    }


def compare(identity: Mapping[str, str], found: Mapping[str, str], where: Path) -> list[str]:
    """Texts on what is not as it was and may be otherwise.

    Raises: ForeignCheckpointError that names the first key that must not.
    """
    texts = []
    is_older = RULE not in found.get("policy.path", RULE)
    digests = dict(pair.split("=") for pair in identity[UNVERSIONED].split()) if is_older else {}
    for key, current in identity.items():
        value = reduce(lambda text, digest: text.replace(*digest), digests.items(), current)
        saved = found.get(key, OF_OLDER.get(key))
        if saved == value or key == UNVERSIONED:
            continue
        if key not in MAY_CHANGE:
            raise ForeignCheckpointError(
                f"the checkpoint is of another job: {key} is {value}, in the checkpoint {saved or 'not said'}",
                where=str(where),
                rule="model, adapters, prompts, prompts a step, samples of each, seed, optimizer and tp stay the same",
                way_out="resume with the job that made the checkpoint, or restart without --resume",
            )
        if saved is not None:
            texts.append(f"{key} is {value} from here on, and was {saved}")
    return texts


def _said(job: ResolvedJob) -> dict[str, str]:
    """What may change: in words where they are few, else a digest."""
    work, algorithm = job.workload, job.algorithm
    said = {
        "algorithm": algorithm.name
        if algorithm.custom is None
        else f"{algorithm.name} {_short(str(algorithm.custom))}",
        "rewards": ", ".join(f"{spec.label} {_short(spec.model_dump_json())}" for spec in job.rewards),
        "roles": ", ".join((*_roles(job), *_adapters(job))),
        "data.prompt_column": str(job.needed_data.prompt_column),
        "data.answer_column": str(job.needed_data.answer_column),
        "data.system_prompt": _short(job.needed_data.system_prompt or ""),
        "workload.temperature": str(work.temperature),
        "workload.max_response_len": str(work.max_response_len),
        "rollout.base_path": _model(job.rollout.base_path) if job.rollout.base_path else "",
        "rollout.environment": _short(job.rollout.environment.model_dump_json()),
    }
    return {key: value or "none" for key, value in said.items()}


def _prompts(data: DataSpec) -> str:
    """Of one data set its bytes; of several also their names and weights, on which the order of prompts depends."""
    digests = [_digest(located(source.path, "data.prompts")) for source in data.sources]
    if len(digests) == 1:
        return digests[0]
    return _short(str([(each.label, each.weight, digest) for each, digest in zip(data.sources, digests, strict=True)]))


def _roles(job: ResolvedJob) -> Iterator[str]:
    yield from (f"{role} {_model(path)}" for role, path in job.roles.paths.items())


def _adapters(job: ResolvedJob) -> Iterator[str]:
    """Those of frozen roles; the trained one has gone on since."""
    for role, adapter in job.frozen_adapters.items():
        yield f"{role} adapter {_digest(Path(str(adapter.path)) / WEIGHTS_FILE)}"


def _model(path: str) -> str:
    return model_fingerprint(Path(path)) if Path(path).exists() else "absent"


def _unversioned(job: ResolvedJob) -> str:
    base = (job.rollout.base_path,) if job.rollout.base_path else ()
    folders = {Path(path) for path in (job.policy.path, *base, *job.roles.paths.values())}
    return " ".join(
        f"{model_fingerprint(folder)}={unversioned_fingerprint(folder)}"
        for folder in sorted(folders)
        if folder.exists()
    )


def _short(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:8]


def _digest(path: Path) -> str:
    """Of a file's bytes; of a folder's files by name and bytes. Raises: SpecError when they cannot be read."""
    digest = hashlib.sha256()
    try:
        for part in sorted(part for part in path.rglob("*") if part.is_file()) if path.is_dir() else [path]:
            if part != path:
                digest.update(f"{part.relative_to(path)}\0{part.stat().st_size}\0".encode())
            with opened(part, "the data") as file:
                while piece := file.read(1 << 20):
                    digest.update(piece)
    except OSError as error:
        raise SpecError(
            f"the prompts cannot be read: {error.strerror}",
            where=str(error.filename or path),
            rule="a readable file, or a folder of them",
            way_out="mend its permissions, or put the file back",
        ) from None
    return digest.hexdigest()[:16]
