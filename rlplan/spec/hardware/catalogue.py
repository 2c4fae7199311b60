"""Hardware profiles by name, each read only when it is asked for.

In: `hardware_profiles/gpu/` and `node/*.yaml`, and the folder named by the environment variable RLPLAN_PROFILES. File
names are profile names; a file there replaces the bundled profile of its name. Out: frozen profiles, or a SpecError.

Parsing a profile takes about ten milliseconds, so that names come from the folder listing.
"""

import json
import os
import re
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

from rlplan.errors import SpecError, did_you_mean
from rlplan.spec.base import shorten_value, validate
from rlplan.spec.files.yaml import read_yaml
from rlplan.spec.hardware.profile import CpuProfile, GpuProfile, NodeProfile, Profile

FOLDER_VARIABLE = "RLPLAN_PROFILES"
"""Environment variable with a folder of additional profiles."""

_CLASSES: dict[str, type[CpuProfile] | type[GpuProfile] | type[NodeProfile]] = {
    "cpu": CpuProfile,
    "cuda": GpuProfile,
    "rocm": GpuProfile,
    "node": NodeProfile,
}


USUAL_GPUS_PER_HOST = 8
"""GPUs of a full host with a GPU without a node profile. Assumed: servers for PCIe cards hold up to eight."""


@cache
def profile_folder() -> Path:
    """The packaged folder, or the checkout's in an editable install (which does not show force-included files)."""
    packaged = Path(str(resources.files("rlplan"))) / "_hardware_profiles"
    return packaged if packaged.is_dir() else Path(__file__).resolve().parents[3] / "hardware_profiles"


SHORT_NAMES: dict[str, str] = json.loads((profile_folder() / "short_names.json").read_text("utf-8"))
"""Short names that people use, and the profile that each usually means."""


def profile_paths() -> dict[str, Path]:
    """The file of every profile, by name; no file is read. Additional profiles come after the bundled ones.

    Raises: SpecError where two of one folder have one name, or RLPLAN_PROFILES names no folder.
    """
    bundled, own = _list_paths(profile_folder()), os.environ.get(FOLDER_VARIABLE, "")
    if not own:
        return bundled
    if not Path(own).is_dir():
        raise SpecError(
            f"{FOLDER_VARIABLE} is {shorten_value(own)}, which is not a folder",
            where="environment",
            rule="a folder with hardware profiles, each in a .yaml file of the profile's name",
            way_out=f"unset {FOLDER_VARIABLE}, or name the folder",
        )
    own_paths = _list_paths(Path(own).resolve())
    return {name: path for name, path in bundled.items() if name not in own_paths} | own_paths


@cache
def _list_paths(folder: Path) -> dict[str, Path]:
    paths: dict[str, Path] = {}
    # a user's folder may hold profiles directly, without gpu/ and node/
    files = [path for pattern in ("*.yaml", "gpu/*.yaml", "node/*.yaml") for path in folder.glob(pattern)]
    for path in sorted(files, key=lambda path: (path.parent.name, path.stem)):
        if path.stem in paths:
            raise SpecError(
                f"profile name '{path.stem}' occurs twice",
                where=str(path),
                rule="names are unique",
                way_out=f"rename it or {paths[path.stem]}",
            )
        paths[path.stem] = path
    return paths


def list_gpu_names() -> list[str]:
    """Names of all profiles but those of nodes, which a person types in full."""
    return [name for name, path in profile_paths().items() if path.parent.name != "node"]


def read_profile(path: Path) -> Profile:
    """The profile in a file, bundled or not. Raises: SpecError where it is invalid or its name differs from the
    file's.
    """
    data = _read_data(path)
    kind = data.get("kind") if isinstance(data, dict) else None
    if isinstance(data, dict) and (not isinstance(kind, str) or kind not in _CLASSES):
        raise SpecError(
            f"kind is {shorten_value(kind)}" if "kind" in data else "required key 'kind' is missing",
            where=f"{path}: kind",
            rule=f"kind is one of {', '.join(_CLASSES)}" + did_you_mean(str(kind), _CLASSES),
            way_out="name the kind; hardware_profiles/README.md shows a whole profile",
        )
    profile = validate(_CLASSES[kind or "cuda"], data, file=str(path), way_out="hardware_profiles/README.md shows how")
    if profile.name != path.stem:
        raise SpecError(
            f"name is '{profile.name}', the file is {path.name}",
            where=f"{path}: name",
            rule="a profile is found by its file's name",
            way_out=f"name the file {profile.name}.yaml",
        )
    return profile


def _read_data(path: Path) -> Any:
    """The parsed data of a profile's file. A wheel also holds the bundled profiles as JSON, which loads faster."""
    parsed = path.with_suffix(".json")
    if path.is_relative_to(profile_folder()) and parsed.is_file():
        return json.loads(parsed.read_text("utf-8"))
    return read_yaml(path, "the hardware profile")


_load = cache(read_profile)


def load_profiles() -> dict[str, Profile]:
    """All profiles by name, which takes about a second. Raises: SpecError when a profile is invalid."""
    return {name: _load(path) for name, path in profile_paths().items()}


def find_profile(name: str, *, where: str) -> Profile:
    """The profile of that name or short name, of any kind. Raises: SpecError with similar names.

    where: the place that names it, for the message.
    """
    paths = profile_paths()
    typed = name.strip().lower()
    wanted: str | None = SHORT_NAMES.get(typed, typed)
    if wanted not in paths:
        from rlplan.spec.hardware.names import find_near_names, match_name

        wanted = match_name(name, list_gpu_names(), SHORT_NAMES)
    if wanted is None:
        near = find_near_names(name, [*paths, *SHORT_NAMES])
        raise SpecError(
            f"hardware profile '{shorten_value(name)[1:-1]}' is unknown",
            where=where,
            rule=f"one of {len(paths)} names" + (f". Did you mean {' or '.join(map(repr, near))}?" if near else ""),
            way_out="`rlplan profiles list` lists them; hardware_profiles/README.md shows how to add one",
        )
    return _load(paths[wanted])


def get_profile(name: str, *, where: str) -> CpuProfile:
    """The profile of a CPU host. Raises: SpecError where it is unknown or of another kind."""
    profile = find_profile(name, where=where)
    if not isinstance(profile, CpuProfile):
        raise _wrong_kind(profile, "cpu", where)
    return profile


def is_cpu_host(name: str, *, where: str) -> bool:
    """Whether a profile is that of a host without a GPU. Raises: SpecError where it is unknown."""
    return isinstance(find_profile(name, where=where), CpuProfile)


def get_gpu(name: str, *, where: str) -> GpuProfile:
    """The GPU of that name, or the GPU of the node of that name. Raises: SpecError."""
    profile = find_profile(name, where=where)
    if isinstance(profile, NodeProfile):
        profile = find_profile(profile.gpu, where=f"{profile.name}: gpu")
    if not isinstance(profile, GpuProfile):
        raise _wrong_kind(profile, "cuda or rocm", where)
    return profile


def get_node(name: str, *, where: str) -> NodeProfile:
    """The node of that name. Raises: SpecError."""
    profile = find_profile(name, where=where)
    if not isinstance(profile, NodeProfile):
        raise _wrong_kind(profile, "node", where)
    return profile


def find_usual_node(gpu: GpuProfile) -> NodeProfile | None:
    """The first bundled node with this GPU; None if there is none."""
    # A regular expression over the text, since parsing every node's YAML would take about a second.
    wanted = re.compile(rf"^gpu: *['\"]?{re.escape(gpu.name)}['\"]? *$", re.MULTILINE)
    for name, path in profile_paths().items():
        if path.parent.name != "gpu" and wanted.search(path.read_text("utf-8")):
            return get_node(name, where=name)
    return None


def count_gpus_per_host(profile: Profile) -> int:
    """GPUs of a full host: those of the node, or of the usual node with this GPU; else USUAL_GPUS_PER_HOST."""
    node = profile if isinstance(profile, NodeProfile) else find_usual_node(get_gpu(profile.name, where=profile.name))
    return node.num_gpus if node is not None else USUAL_GPUS_PER_HOST


def _wrong_kind(profile: Profile, wanted: str, where: str) -> SpecError:
    return SpecError(
        f"hardware profile '{profile.name}' is of kind {profile.kind}",
        where=where,
        rule=f"a profile of kind {wanted} is needed here",
        way_out="`rlplan profiles list` shows the kind of each profile",
    )
