"""Whole models and data sets by hub id, in the hub library's own cache: what a run reads where a job names an id.

In: an id such as `Qwen/Qwen2.5-7B`. Out: a folder with config, tokenizer, chat template and every part of the weights.
The hub's own library fetches, goes on where a download was cut off, checks sizes and shows the bar; `hf download ID`
fills the same cache. Never fetched: code, pickles, other formats of the same weights.
Left out: a config alone, for planning (hub.py, which needs no library); other hosts of a cluster.
"""

import shutil
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

from rlplan.errors import HostError, RlplanError
from rlplan.runtime.models.hub import NEEDS_A_TOKEN, refused
from rlplan.spec.files.hub_data import FILES as DATA_FILES
from rlplan.spec.files.hub_data import HUB_DATA, id_and_part
from rlplan.spec.model_files import KINDS
from rlplan.spec.models.headers import has_weights
from rlplan.units import format_bytes
from rlplan.version import __version__

FILES = (*KINDS, "model*.safetensors")
"""Configs, tokenizers, chat templates, weights: whole, or in the parts that an index names."""
OTHERS = tuple(f"*/{kind}" for kind in FILES if kind != "*.jinja")
"""Folders of a repository hold other formats (`original/`, `onnx/`), and more chat templates."""


def cached_model(name: str) -> Path | None:
    """The folder of a model that lies whole in the hub's cache, None where it does not. Asks no network."""
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        folder = Path(_snapshot(name, local_files_only=True))
    except LocalEntryNotFoundError:
        return None
    return folder if (folder / "config.json").is_file() and has_weights(folder) else None


def download_model(name: str, where: str, say: Callable[[str], None]) -> Path:
    """Fetch a model into the hub's cache, with a bar on a terminal. where: names it, for messages. say: gets a line.

    Raises: SpecError (the hub gives no such model), HostError (no network, no room).
    """
    from huggingface_hub.constants import HF_HUB_CACHE

    cache = Path(HF_HUB_CACHE)
    try:
        size = sum(file.file_size for file in _snapshot(name, dry_run=True) if file.will_download)
        _check_room(name, size, cache, where)
        say(f"downloading {name}, {format_bytes(size)}, into {cache}")
        _snapshot(name)
    except Exception as error:  # of the hub's library, of its HTTP client, of the disk
        raise _failed(name, where, cache, error) from None
    found = cached_model(name)
    if found is None:
        raise refused(name, where, "config.json with safetensors", "it has no such files")
    return found


def located(place: str, key: str) -> Path:
    """Where data lie: a path as it is, a data set on the hub in the hub's cache. key: of the job. Asks no network.

    Raises: HostError where it is not there.
    """
    if not place.startswith(HUB_DATA):
        return Path(place)
    from huggingface_hub.errors import LocalEntryNotFoundError

    name, part = id_and_part(place)
    try:
        found = Path(_snapshot(name, repo_type="dataset", local_files_only=True)) / part
    except LocalEntryNotFoundError:
        found = None
    if found is None or not found.exists():
        what = f"data set '{name}' is not on this machine" if found is None else f"data set '{name}' has no '{part}'"
        raise HostError(
            what,
            where=key,
            rule="ORG/NAME, or ORG/NAME:PART for a file or a folder in it, in the hub's cache; or a path",
            way_out=f"with a network: hf download --repo-type dataset {name}; or {key}=FILE",
        )
    return found


def download_data(places: Iterable[str | None], where: str, say: Callable[[str], None]) -> None:
    """Fetch the data sets among these places that are not in the hub's cache. Raises: SpecError, HostError."""
    from huggingface_hub.constants import HF_HUB_CACHE
    from huggingface_hub.errors import LocalEntryNotFoundError

    for name in dict.fromkeys(id_and_part(place)[0] for place in places if place and place.startswith(HUB_DATA)):
        with suppress(LocalEntryNotFoundError):
            _snapshot(name, repo_type="dataset", local_files_only=True)
            continue
        say(f"downloading the data set {name} into {HF_HUB_CACHE}")
        try:
            _snapshot(name, repo_type="dataset")
        except Exception as error:  # of the hub's library, of its HTTP client, of the disk
            raise _failed(name, where, Path(HF_HUB_CACHE), error, "--repo-type dataset ") from None


def _snapshot(name: str, **options: Any) -> Any:
    """The folder; with `dry_run` the files. Raises: whatever the hub's library raises."""
    from huggingface_hub import snapshot_download

    of_data = options.get("repo_type") == "dataset"
    patterns = (
        {"allow_patterns": [f"*{ending}" for ending in DATA_FILES]}
        if of_data
        else {"allow_patterns": [*FILES], "ignore_patterns": [*OTHERS]}
    )
    options |= patterns
    return snapshot_download(name, library_name="rlplan", library_version=__version__, **options)


def _check_room(name: str, size: int, cache: Path, where: str) -> None:
    """Raises: HostError where the disk has no room for what is still to come."""
    place = next(folder for folder in (cache, *cache.parents) if folder.exists())
    free = shutil.disk_usage(place).free
    if size > free:
        raise HostError(
            f"model '{name}' takes {format_bytes(size)} more, {format_bytes(free)} are free in {place}",
            where=where,
            rule="a model that is downloaded lies whole in the hub's cache",
            way_out="free space, or set HF_HOME to a folder on a larger disk",
        )


def _failed(name: str, where: str, cache: Path, error: Exception, kind: str = "") -> RlplanError:
    """What went wrong, as an error for people."""
    if isinstance(error, RlplanError):
        return error
    cause = error.__cause__ or error
    code = getattr(getattr(cause, "response", None), "status_code", None)
    if code in (*NEEDS_A_TOKEN, 404):
        return refused(name, where, "data set" if kind else "model", f"HTTP {code}")
    if isinstance(error, OSError) and error.errno is not None and error.filename is not None:
        return HostError(
            f"model '{name}' cannot be kept: {error.strerror}",
            where=str(error.filename),
            rule=f"the hub's cache, {cache}, can be written",
            way_out="mend its permissions or free space, or set HF_HOME to another folder",
        )
    why = (str(cause).strip().splitlines() or [type(cause).__name__])[0]
    return HostError(
        f"{'data set' if kind else 'model'} '{name}' is not on this machine, and the hub cannot be reached: {why}",
        where=where,
        rule=f"a run reads its models from folders: models/{name} beside the job file, the hub's cache, {cache}, or a "
        "path that the job names; its data from files, or the cache",
        way_out=f"with a network: hf download {kind}{name}; or a path in place of the id",
    )
