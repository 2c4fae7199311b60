"""Download of whole models and data sets by hub id, into the cache of huggingface_hub.

The library downloads, resumes, checks sizes and shows the progress bar; `hf download ID` fills the same cache. Code,
pickles and other formats of the same weights are never downloaded.

In: an id such as `Qwen/Qwen2.5-7B`. Out: a folder with config, tokenizer, chat template and all weights.
Left out: configs for planning (hub.py, which needs no library); other hosts of a cluster.
"""

import shutil
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

from rlplan.errors import HostError, RlplanError
from rlplan.runtime.models.hub import NEEDS_A_TOKEN, make_refusal
from rlplan.runtime.processes.http_exchange import run_within
from rlplan.runtime.processes.line_process import Deadline
from rlplan.spec.files.hub_data import FILES as DATA_FILES
from rlplan.spec.files.hub_data import HUB_DATA, split_address
from rlplan.spec.model_files import KINDS
from rlplan.spec.models.headers import has_weights
from rlplan.units import format_bytes
from rlplan.version import __version__

FILES = (*KINDS, "model*.safetensors")
"""Patterns of downloaded files: configs, tokenizers, chat templates and weights."""
LIST_S = 60.0
"""Seconds for the hub to list a model's files. The download itself has no limit: the user sees its progress."""
OTHERS = tuple(f"*/{kind}" for kind in FILES if kind != "*.jinja")
"""Ignored patterns: subfolders hold other formats (`original/`, `onnx/`). Chat templates in subfolders are kept."""


def find_cached_model(name: str) -> Path | None:
    """Folder of a model that is complete in the hub's cache, else None. Uses no network."""
    folder = _find_snapshot(name)
    return folder if folder is not None and (folder / "config.json").is_file() and has_weights(folder) else None


def download_model(name: str, where: str, tell: Callable[[str], None]) -> Path:
    """Download a model into the hub's cache. where: the job's key, for messages. tell: receives a line for the user.

    Raises: SpecError (no such model on the hub), HostError (no network, no disk space).
    """
    from huggingface_hub.constants import HF_HUB_CACHE

    cache = Path(HF_HUB_CACHE)
    try:
        files = run_within(Deadline(LIST_S), partial(_fetch_snapshot, name, dry_run=True))
        size = sum(file.file_size for file in files if file.will_download)
        _check_room(name, size, cache, where)
        tell(f"downloading {name}, {format_bytes(size)}, into {cache}")
        _fetch_snapshot(name)
    except Exception as error:  # any error of the hub's library, its HTTP client or the disk
        raise _make_error(name, where, cache, error) from None
    folder = find_cached_model(name)
    if folder is None:
        raise make_refusal(name, where, "config.json with safetensors", "it has no such files")
    return folder


def locate_data(place: str, key: str) -> Path:
    """Path of a data set: the given path, or its folder in the hub's cache. key: the job's key. Uses no network.

    Raises: HostError when the cache lacks it.
    """
    if not place.startswith(HUB_DATA):
        return Path(place)
    name, part = split_address(place)
    folder = _find_snapshot(name, repo_type="dataset")
    if folder is None or not (folder / part).exists():
        raise HostError(
            f"data set '{name}' " + ("is not on this machine" if folder is None else f"has no '{part}'"),
            where=key,
            rule="ORG/NAME, or ORG/NAME:PART for a file or a folder in it, in the hub's cache; or a path",
            way_out=f"with a network: hf download --repo-type dataset {name}; or {key}=FILE",
        )
    return folder / part


def download_data(places: Iterable[str | None], where: str, say: Callable[[str], None]) -> None:
    """Download the hub data sets among these places that the cache lacks. Raises: SpecError, HostError."""
    names = dict.fromkeys(split_address(place)[0] for place in places if place and place.startswith(HUB_DATA))
    if not names:
        return  # local files need no huggingface_hub
    from huggingface_hub.constants import HF_HUB_CACHE

    for name in names:
        if _find_snapshot(name, repo_type="dataset") is not None:
            continue
        say(f"downloading the data set {name} into {HF_HUB_CACHE}")
        try:
            _fetch_snapshot(name, repo_type="dataset")
        except Exception as error:  # any error of the hub's library, its HTTP client or the disk
            raise _make_error(name, where, Path(HF_HUB_CACHE), error, "--repo-type dataset ") from None


def _find_snapshot(name: str, **options: Any) -> Path | None:
    """The folder of a snapshot in the hub's cache; None if it is missing or incomplete."""
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        return Path(_fetch_snapshot(name, local_files_only=True, **options))
    except LocalEntryNotFoundError:
        return None


def _fetch_snapshot(name: str, **options: Any) -> Any:
    """The folder of a snapshot, or its files with `dry_run`. Raises: any error of the hub's library."""
    from huggingface_hub import snapshot_download

    if options.get("repo_type") == "dataset":
        options["allow_patterns"] = [f"*{ending}" for ending in DATA_FILES]
    else:
        options |= {"allow_patterns": [*FILES], "ignore_patterns": [*OTHERS]}
    return snapshot_download(name, library_name="rlplan", library_version=__version__, **options)


def _check_room(name: str, size: int, cache: Path, where: str) -> None:
    """Raises: HostError when the disk lacks space for the remaining download."""
    place = next(folder for folder in (cache, *cache.parents) if folder.exists())
    free = shutil.disk_usage(place).free
    if size > free:
        raise HostError(
            f"model '{name}' needs {format_bytes(size)} more, and {place} has {format_bytes(free)} free",
            where=where,
            rule="a model is downloaded completely into the hub's cache",
            way_out="free space, or set HF_HOME to a folder on a larger disk",
        )


def _make_error(name: str, where: str, cache: Path, error: Exception, kind: str = "") -> RlplanError:
    """A failed download as an error for the user."""
    if isinstance(error, RlplanError):
        return error
    cause = error.__cause__ or error
    code = getattr(getattr(cause, "response", None), "status_code", None)
    if code in (*NEEDS_A_TOKEN, 404):
        return make_refusal(name, where, "data set" if kind else "model", f"HTTP {code}")
    if isinstance(error, OSError) and error.errno is not None and error.filename is not None:
        return HostError(
            f"model '{name}' cannot be stored: {error.strerror}",
            where=str(error.filename),
            rule=f"the hub's cache, {cache}, must be writable",
            way_out="fix its permissions or free space, or set HF_HOME to another folder",
        )
    why = (str(cause).strip().splitlines() or [type(cause).__name__])[0]
    return HostError(
        f"{'data set' if kind else 'model'} '{name}' is not on this machine, and the hub cannot be reached: {why}",
        where=where,
        rule=f"a run reads models from models/{name} beside the job file, from the hub's cache, {cache}, or from a "
        "path in the job; data from files or the cache",
        way_out=f"with a network: hf download {kind}{name}; or give a path instead of the id",
    )
