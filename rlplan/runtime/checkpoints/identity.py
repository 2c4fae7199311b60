"""Identity of a job: the settings that a resumed run must share with its checkpoint.

In: a job. Out: short texts by key, compared one by one. Some must be equal; others may change, and are reported.
Left out: settings that may change silently (devices, ZeRO stage, placement, learning rate, number of steps).
"""

import hashlib
from collections.abc import Iterator, Mapping
from pathlib import Path

from rlplan.errors import SpecError
from rlplan.reading import open_regular
from rlplan.runtime.models.snapshots import locate_data
from rlplan.spec.fingerprints import model_fingerprint
from rlplan.spec.parts.adapter_files import WEIGHTS_FILE
from rlplan.spec.parts.data import DataSpec
from rlplan.spec.resolved import ResolvedJob

MAY_CHANGE = (
    "algorithm", "rewards", "roles", "rollout.environment", "data.prompt_column", "data.answer_column",
    "data.system_prompt", "workload.temperature", "workload.max_response_len",
    "rollout.base_path",
)  # fmt: skip
"""Keys that may change on purpose; a resumed run reports each change."""


class ForeignCheckpointError(SpecError):
    """The checkpoint belongs to another job."""


def describe_identity(job: ResolvedJob) -> dict[str, str]:
    """Describe a job by short texts. Raises: SpecError when a file cannot be read."""
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
        **_describe_changeable(job),
    }


def compare(identity: Mapping[str, str], saved_identity: Mapping[str, str], where: Path) -> list[str]:
    """Compare a job's identity with a checkpoint's. Returns a text for each change that is allowed.

    Raises: ForeignCheckpointError with the first key that must not change.
    """
    texts = []
    for key, value in identity.items():
        saved = saved_identity.get(key)
        if saved == value:
            continue
        if key not in MAY_CHANGE:
            raise ForeignCheckpointError(
                f"the checkpoint belongs to another job: {key} is {value}, in the checkpoint {saved or 'not recorded'}",
                where=str(where),
                rule="model, adapters, prompts, prompts per step, samples per prompt, seed, optimizer and tp must not "
                "change",
                way_out="resume with the job that wrote the checkpoint, or start again without --resume",
            )
        if saved is not None:
            texts.append(f"{key} is now {value}, was {saved}")
    return texts


def _describe_changeable(job: ResolvedJob) -> dict[str, str]:
    """Settings that may change: short values as they are, long ones as a digest."""
    work, algorithm = job.workload, job.algorithm
    values = {
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
    return {key: value or "none" for key, value in values.items()}


def _prompts(data: DataSpec) -> str:
    """Digest of the training prompts. With several data sets, names and weights count too: they set the order."""
    digests = [_digest(locate_data(source.path, "data.prompts")) for source in data.sources]
    if len(digests) == 1:
        return digests[0]
    parts = zip(data.sources, digests, strict=True)
    return _short(str([(source.label, source.weight, digest) for source, digest in parts]))


def _roles(job: ResolvedJob) -> Iterator[str]:
    yield from (f"{role} {_model(path)}" for role, path in job.roles.paths.items())


def _adapters(job: ResolvedJob) -> Iterator[str]:
    """Adapters of frozen roles; the trained adapter changes at every step."""
    for role, adapter in job.frozen_adapters.items():
        yield f"{role} adapter {_digest(Path(str(adapter.path)) / WEIGHTS_FILE)}"


def _model(path: str) -> str:
    return model_fingerprint(Path(path)) if Path(path).exists() else "absent"


def _short(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:8]


def _digest(path: Path) -> str:
    """Digest of a file's bytes, or of the names and bytes of a folder's files. Raises: SpecError if unreadable."""
    digest = hashlib.sha256()
    try:
        for part in sorted(part for part in path.rglob("*") if part.is_file()) if path.is_dir() else [path]:
            if part != path:  # names and sizes tell where a file ends, so bytes that move to another file are noticed
                digest.update(f"{part.relative_to(path)}\0{part.stat().st_size}\0".encode())
            with open_regular(part, "the data") as file:
                while piece := file.read(1 << 20):
                    digest.update(piece)
    except OSError as error:
        raise SpecError(
            f"the prompts cannot be read: {error.strerror}",
            where=str(error.filename or path),
            rule="a readable file, or a folder of them",
            way_out="fix its permissions, or put the file back",
        ) from None
    return digest.hexdigest()[:16]
