"""The bundled catalogue: shapes of popular models by hub id, and how a model is named on a command line.

In: an id such as `Qwen/Qwen2.5-7B`, or a path. Out: a ModelSpec. Left out: downloads (`runtime/models/hub`), weights.
"""

import difflib
from functools import cache
from pathlib import Path

from rlplan.containment import READING, Budget, read_contained
from rlplan.errors import SpecError, did_you_mean
from rlplan.spec.base import shorten_value
from rlplan.spec.model import ModelSpec, model_from_config, read_model, share_equal_model
from rlplan.spec.models.headers import check_checkpoint
from rlplan.spec.models.names import CatalogueEntry, load_catalogue

__all__ = [
    "MAX_ID",
    "CatalogueEntry",
    "find_bundled_id",
    "find_cached_id",
    "find_model",
    "find_model_path",
    "find_nearest_id",
    "format_model_name",
    "load_catalogue",
    "resolve_model",
]  # fmt: skip

MAX_ID = 200


@cache
def find_model(name: str) -> ModelSpec:
    """ModelSpec of a bundled model. Raises: SpecError with the nearest id.

    >>> find_model("Qwen/Qwen2.5-7B").num_parameters
    7615616512
    """
    entry = load_catalogue().get(name)
    if entry is None:
        raise _unknown_model(name)
    return model_from_config(entry.config, where=f"catalogue: {name}")


def resolve_model(name: str, *, where: str = "model", may_classify: bool = False) -> ModelSpec:
    """ModelSpec of a path (a folder or a config file) if it exists, else of a bundled id. Raises: SpecError.

    A missing folder `models/ORG/NAME` stands for the bundled model of that id. A checkpoint in the folder must agree
    with its config. may_classify: whether a sequence classifier is allowed.
    """
    path = find_model_path(name)
    if path is None:
        known = find_bundled_id(name)
        if known is None:
            raise _unknown_model(name, where)
        return find_model(known)
    files = list(path.glob("*.safetensors")) if path.is_dir() else []
    # a header has at most 32 MiB
    budget = Budget(READING.cpu_s + len(files) / 4, READING.memory_bytes + (len(files) << 25))
    return share_equal_model(read_contained(lambda: _read_checked(path, may_classify), path, ModelSpec, budget))


def _read_checked(path: Path, may_classify: bool) -> ModelSpec:
    model = read_model(path, may_classify=may_classify)
    if path.is_dir():
        check_checkpoint(model, path)
    return model


def find_bundled_id(name: str) -> str | None:
    """The bundled id that a name is, or that a folder's path ends with (`models/ORG/NAME`, or a folder of the hub's
    cache).

    None for any other name. With it, a job can be planned on a machine without its models.
    """
    if hub_id := find_cached_id(name):
        name = hub_id
    end = "/".join(Path(name).parts[-2:]) if len(name) < MAX_ID * 20 else name
    return next((known for known in (name, end) if known in load_catalogue()), None)


def format_model_name(path: str) -> str:
    """A model's name for display: its id, or its folder's name."""
    file_name = Path(path).parent.name if path.endswith(".json") else Path(path).name
    return find_bundled_id(path) or find_cached_id(path) or file_name


def find_cached_id(path: str) -> str:
    """The hub id of a snapshot folder in the hub's cache; empty for any other path.

    >>> find_cached_id("/cache/hub/models--Qwen--Qwen2.5-7B/snapshots/d149729")
    'Qwen/Qwen2.5-7B'
    """
    *_, repository, kind, _ = ("", "", "", *Path(path).parts)
    is_snapshot = kind == "snapshots" and repository.startswith("models--")
    return repository.removeprefix("models--").replace("--", "/", 1) if is_snapshot else ""


def find_model_path(name: str) -> Path | None:
    """The file or folder of that name; None if it does not exist."""
    if "\0" in name or len(name) >= MAX_ID * 20:
        return None
    path = Path(name).expanduser()
    try:
        return path if path.exists() else None
    except OSError:
        return None


def find_nearest_id(name: str) -> str:
    """The bundled id that differs only in spelling or lacks its organization; empty if there is none.

    A path is matched by its end, since a job's relative paths are absolute by now.
    """
    from rlplan.spec.models.names import match_model

    path = Path(name[: MAX_ID * 20])
    ends = [path.name] if path.is_absolute() or len(path.parts) == 1 else ["/".join(path.parts[-2:])]
    match = match_model(ends[0])
    return match.id if match.is_exact and not (match.packed or match.ignored) else ""


def list_similar_ids(name: str) -> list[str]:
    """Up to three bundled ids whose last part resembles the last part of a name, the most similar first."""
    ends = {known_id.rpartition("/")[2].lower(): known_id for known_id in load_catalogue()}
    end = Path(name[: MAX_ID * 20]).name.lower()
    return [ends[near] for near in difflib.get_close_matches(end, ends, n=3, cutoff=0.7)]


def _unknown_model(name: str, where: str = "model") -> SpecError:
    known = load_catalogue()
    near = find_nearest_id(name)
    hint = f" Did you mean '{near}'?" if near else did_you_mean("/".join(Path(name).parts[-2:])[:MAX_ID], known)
    return SpecError(
        f"model {shorten_value(name)} is neither a path nor a bundled model",
        where=where,
        rule=f"a folder, a config.json, or one of {len(known)} ids, written as on the hub (case matters).{hint}",
        way_out=(f"write {near}, which has its shape if it is a copy, or " if near else "")
        + "download its config.json and give that path",
    )
