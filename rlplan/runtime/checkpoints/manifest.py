"""The JSON files of a checkpoint: the manifest, and the run's state besides the trained states.

    checkpoints/latest.json                  pointer to the last committed checkpoint, written last
    checkpoints/best.json                    pointer to the checkpoint with the best checkpoints.best_metric
    checkpoints/step-000012/manifest.json    every file with its size and SHA-256, the roles, the job's identity
    checkpoints/step-000012/run.json         the run's state: step, versions, response lengths, generation
    checkpoints/step-000012/policy-00000-of-00002.safetensors    one rank's part of a role's states
    checkpoints/step-000012/experience.json    the buffer: finished rollouts that no step has trained on yet

In: parsed JSON. Out: frozen values, or a SpecError. Left out: files (folder.py, finding.py).
"""

import hashlib
import json
import re
from pathlib import Path
from typing import Literal

from pydantic import Field, field_validator, model_validator

from rlplan.spec.base import Spec
from rlplan.version import __version__

SCHEMA_VERSION = 1
MANIFEST, RUN, POINTER, EXPERIENCE = "manifest.json", "run.json", "latest.json", "experience.json"
BEST = "best.json"

_PLAIN_NAME = re.compile(r"[a-z0-9][a-z0-9_.-]{0,99}")
"""Names without a slash or a leading dot: a manifest must not lead out of its folder."""


class StoredFile(Spec):
    num_bytes: int = Field(ge=0)
    sha256: str = Field(pattern=r"^[0-9a-f]{64}$")


class RoleStates(Spec):
    files: tuple[str, ...] = Field(min_length=1)
    """File names, one per rank, in rank order."""

    num_steps: int = Field(ge=0)
    """Optimizer steps so far."""

    scaler: dict[str, float] = Field(default_factory=dict)
    """State of the fp16 loss scaler, by DeepSpeed's names; empty in other types."""


class Manifest(Spec):
    schema_version: Literal[1] = 1
    kind: Literal["rlplan_checkpoint"] = "rlplan_checkpoint"
    rlplan_version: str = __version__
    job: str
    step: int = Field(ge=1)
    """The last step whose update is in the states."""

    identity: dict[str, str]
    """Settings that a resumed run must share (identity.py)."""

    files: dict[str, StoredFile]
    """Every other file of the checkpoint, by name."""

    roles: dict[str, RoleStates] = Field(min_length=1)
    digest: str = ""
    """SHA-256 of everything else in the manifest, as JSON with sorted keys."""

    def seal(self) -> "Manifest":
        """Copy the manifest with the digest filled in."""
        return self.model_copy(update={"digest": self._digest()})

    @property
    def is_as_sealed(self) -> bool:
        """Whether the contents still have the digest of when they were sealed."""
        return self.digest == self._digest()

    def _digest(self) -> str:
        values = self.model_dump(mode="json", exclude={"digest"})
        return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()

    @field_validator("files")
    @classmethod
    def _names_stay_inside(cls, files: dict[str, StoredFile]) -> dict[str, StoredFile]:
        for name in files:
            if not _PLAIN_NAME.fullmatch(name):
                raise ValueError(f"'{name}' is not a plain file name")
        return files

    @model_validator(mode="after")
    def _roles_have_files_of_the_checkpoint(self) -> "Manifest":
        for role, states in self.roles.items():
            for name in states.files:
                if name not in self.files:
                    raise ValueError(f"'{name}' of {role} is not a file of the checkpoint")
        return self


class StreamState(Spec):
    """State of asynchronous generation. Finished groups are in `experience.json`."""

    num_begun: int = Field(ge=0)
    """Prompts that were started, numbered from 0."""

    num_replaced: int = Field(default=0, ge=0)
    """Number of prompts that were started in place of zero-variance groups (dynamic sampling)."""

    again: tuple[int, ...] = ()
    """Numbers of prompts that were in flight or are lost; a resumed run generates them again."""


class Best(Spec):
    """The best value of a metric so far."""

    value: float
    step: int = Field(ge=0)
    """The step with that value; 0 is the start of the run."""

    num_without: int = Field(default=0, ge=0)
    """Number of values since then, none of them better."""


class RunState(Spec):
    """The run's state at the end of a step.

    Request seeds and the order of prompts are not stored: they follow from the job's seed and the step.
    """

    schema_version: Literal[1] = 1
    step: int = Field(ge=1)
    """The step that has ended."""

    version: int = Field(ge=0)
    """Version of the engines' weights."""

    mean_length: float = 0.0
    """Mean response length in tokens, used for prompts without an expected length."""

    lengths: tuple[tuple[tuple[int, ...], float], ...] = ()
    """(prompt, expected tokens of its samples), used to balance prompts over engines."""

    stream: StreamState | None = None
    """State of asynchronous generation; None when every step generates its own rollouts."""

    num_replaced: int = Field(default=0, ge=0)
    """Number of prompts that were started in place of zero-variance groups (dynamic sampling)."""

    response_lengths: tuple[tuple[int, int], ...] = ()
    """(tokens, number of responses with that length) over the whole run."""

    early_stopping: Best | None = None
    """Best value of the early-stopping metric."""

    best_checkpoint: Best | None = None
    """Best value of `checkpoints.best_metric`."""


class Pointer(Spec):
    """Pointer to a committed checkpoint."""

    schema_version: Literal[1] = 1
    checkpoint: str = Field(pattern=r"^step-[0-9]{6,12}$")


def folder_name(step: int) -> str:
    return f"step-{step:06d}"


def parse_step(name: str) -> int | None:
    """Parse the step from a checkpoint folder's name; None for any other name, such as a backup's."""
    digits = re.fullmatch(r"step-([0-9]{6,12})", name)
    step = int(digits[1]) if digits else 0
    # step-0000012 has the right form too, but a run names step 12 otherwise
    return step if step and folder_name(step) == name else None


def states_name(role: str, rank: int, num_ranks: int) -> str:
    return f"{role}-{rank:05d}-of-{num_ranks:05d}.safetensors"


def checkpoints_folder(run_folder: Path) -> Path:
    return run_folder / "checkpoints"
