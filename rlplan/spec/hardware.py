"""Hardware profiles: what a machine offers and what its processes cost before any model, each value with its source.

In: `hardware_profiles/**/*.yaml`. Out: frozen profiles by name.
Left out: CUDA devices (their profiles come with the GPU memory model).
"""

from functools import cache
from importlib import resources
from pathlib import Path
from typing import Literal

from pydantic import Field

from rlplan.errors import SpecError, did_you_mean
from rlplan.spec.base import ByteCount, Spec, validate
from rlplan.spec.yaml import read_yaml
from rlplan.vocabulary import Provenance


class SourcedBytes(Spec):
    """A byte count with where it comes from."""

    value: ByteCount
    provenance: Provenance
    source: str


class ProcessOverheads(Spec):
    """Resident memory of each kind of process once its libraries are imported and before it holds a model."""

    policy_trainer: SourcedBytes
    scorer: SourcedBytes
    rollout_engine: SourcedBytes
    driver: SourcedBytes
    ray_system: SourcedBytes


class ProcessSlack(Spec):
    """What a process holds beyond its imports and its tensors: heap that is not given back, thread stacks, objects."""

    policy_trainer: SourcedBytes
    scorer: SourcedBytes
    rollout_engine: SourcedBytes


class WeightPacking(Spec):
    """How the rollout engine repacks linear weights on this machine. Blocks are in elements.

    bytes_per_weight: the handler beside each packed weight. bytes_per_shape: code compiled once a shape.
    """

    row_block: int = Field(ge=1)
    column_block: int = Field(ge=1)
    bytes_per_weight: SourcedBytes
    bytes_per_shape: SourcedBytes


class HardwareProfile(Spec):
    """One kind of machine.

    memory: bytes of one device; on a `cpu` profile the devices share the host's memory, so it is the host's.
    weight_packing: how vLLM's CPU build repacks linear weights into opaque buffers after loading.
    """

    schema_version: Literal[1]
    name: str
    kind: Literal["cpu"]
    description: str
    memory: SourcedBytes
    max_devices: int = Field(ge=1)
    weight_packing: WeightPacking
    process_overheads: ProcessOverheads
    process_slack: ProcessSlack


def _profile_folder() -> Path:
    """The packaged folder, or the checkout's in an editable install (which does not show force-included files)."""
    packaged = Path(str(resources.files("rlplan"))) / "_hardware_profiles"
    return packaged if packaged.is_dir() else Path(__file__).resolve().parents[2] / "hardware_profiles"


@cache
def load_profiles() -> dict[str, HardwareProfile]:
    """All profiles by name. Raises: SpecError when a profile file is broken or a name stands twice."""
    profiles: dict[str, HardwareProfile] = {}
    for path in sorted(_profile_folder().rglob("*.yaml")):
        profile = validate(HardwareProfile, read_yaml(path, "the hardware profile"), file=str(path))
        if profile.name in profiles:
            raise SpecError(
                f"profile name '{profile.name}' stands twice",
                where=str(path),
                rule="names are unique",
                way_out="rename one",
            )
        profiles[profile.name] = profile
    return profiles


def get_profile(name: str, *, where: str) -> HardwareProfile:
    """The profile of that name. Raises: SpecError with the known names."""
    profiles = load_profiles()
    if name not in profiles:
        raise SpecError(
            f"hardware profile '{name}' is unknown",
            where=where,
            rule=f"known profiles: {', '.join(sorted(profiles))}." + did_you_mean(name, profiles),
            way_out="use one of them, or add a file under hardware_profiles/ (its README says how)",
        )
    return profiles[name]
