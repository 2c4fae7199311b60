"""What a checkpoint says of itself: its manifest, and where the run stood beside the trained states.

    checkpoints/latest.json                  the pointer: the last checkpoint that counts, written last
    checkpoints/best.json                    the same, of the one with the best checkpoints.best_metric
    checkpoints/step-000012/manifest.json    every file with its size and SHA-256, the roles, whose checkpoint it is
    checkpoints/step-000012/run.json         where the run stood: data, versions, seeds, what generation holds
    checkpoints/step-000012/policy-00000-of-00002.safetensors    a rank's part of a role's states
    checkpoints/step-000012/experience.json    the buffer: finished rollouts that no step has taken yet

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


class StoredFile(Spec):
    num_bytes: int = Field(ge=0)
    sha256: str = Field(pattern=r"^[0-9a-f]{64}$")


class RoleStates(Spec):
    files: tuple[str, ...] = Field(min_length=1)
    """Names of its files, one of each rank, in order."""

    num_steps: int = Field(ge=0)
    """Adam's steps so far."""

    scaler: dict[str, float] = Field(default_factory=dict)
    """The state of the loss scale in fp16, by DeepSpeed's names; empty otherwise."""


class Manifest(Spec):
    schema_version: Literal[1] = 1
    kind: Literal["rlplan_checkpoint"] = "rlplan_checkpoint"
    rlplan_version: str = __version__
    job: str
    step: int = Field(ge=1)
    """The last one that is in it."""

    identity: dict[str, str]
    """What must be the same in a run that goes on from it."""

    files: dict[str, StoredFile]
    """Every other file of the checkpoint, by its name."""

    roles: dict[str, RoleStates] = Field(min_length=1)
    digest: str = ""
    """SHA-256 of everything else in the manifest, as JSON with sorted keys."""

    def sealed(self) -> "Manifest":
        """The same with the digest of everything else in it."""
        return self.model_copy(update={"digest": self._digest()})

    @property
    def is_as_sealed(self) -> bool:
        """Whether it says what it said when it was sealed."""
        return self.digest == self._digest()

    def _digest(self) -> str:
        values = self.model_dump(mode="json", exclude={"digest"})
        return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()

    @field_validator("files")
    @classmethod
    def _names_stay_inside(cls, files: dict[str, StoredFile]) -> dict[str, StoredFile]:
        for name in files:
            if not _PLAIN_NAME.fullmatch(name):
                raise ValueError(f"'{name}' is no plain file name")
        return files

    @model_validator(mode="after")
    def _roles_have_files_of_the_checkpoint(self) -> "Manifest":
        for role, states in self.roles.items():
            for name in states.files:
                if name not in self.files:
                    raise ValueError(f"'{name}' of {role} is no file of the checkpoint")
        return self


class StreamState(Spec):
    """Generation that runs ahead of the steps. Finished groups lie in `experience.json`."""

    num_begun: int = Field(ge=0)
    """Prompts that were begun, numbered from 0."""

    num_replaced: int = Field(default=0, ge=0)
    """Of these, so many are beyond what the steps take."""

    again: tuple[int, ...] = ()
    """Numbers of prompts that were under way or are lost; they are begun anew."""


class Best(Spec):
    """The best value of a metric so far."""

    value: float
    step: int = Field(ge=0)
    """That had it; 0 is the start."""

    num_without: int = Field(default=0, ge=0)
    """Values since then, none of them better."""


class RunState(Spec):
    """Where a run stood when a step had ended.

    Seeds of requests and the order of prompts follow from the job's seed and the step.
    """

    schema_version: Literal[1] = 1
    step: int = Field(ge=1)
    """That had ended."""

    version: int = Field(ge=0)
    """Of the weights that the engines held."""

    mean_length: float = 0.0
    """Tokens of a response in the mean: the length of prompts without an expected one."""

    lengths: tuple[tuple[tuple[int, ...], float], ...] = ()
    """(prompt, tokens that its samples are expected to take), by which prompts are dealt out over engines."""

    stream: StreamState | None = None
    """None where every step generates its own rollouts."""

    num_replaced: int = Field(default=0, ge=0)
    """Prompts begun beyond those of the steps."""

    response_lengths: tuple[tuple[int, int], ...] = ()
    """(tokens, how many responses had so many) over the whole run."""

    early_stopping: Best | None = None
    """Of the metric by which the run stops early."""

    best_checkpoint: Best | None = None
    """Of the metric whose best checkpoint is kept."""


class Pointer(Spec):
    """The last checkpoint that counts."""

    schema_version: Literal[1] = 1
    checkpoint: str = Field(pattern=r"^step-[0-9]{6,12}$")


def folder_name(step: int) -> str:
    return f"step-{step:06d}"


def step_of(name: str) -> int | None:
    """The step whose checkpoint's folder has this name; None for another one, such as a backup's."""
    digits = re.fullmatch(r"step-([0-9]{6,12})", name)
    step = int(digits[1]) if digits else 0
    return step if step and folder_name(step) == name else None


def states_name(role: str, rank: int, num_ranks: int) -> str:
    return f"{role}-{rank:05d}-of-{num_ranks:05d}.safetensors"


def checkpoints_of(run_folder: Path) -> Path:
    return run_folder / "checkpoints"
