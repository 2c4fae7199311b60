"""Whole models by hub id, as folders of the hub library's own cache: what a run reads where a job names an id.

In: an id such as `Qwen/Qwen2.5-7B`. Out: a folder with config, tokenizer, chat template and every part of the weights.
The hub's own library fetches, goes on where a download was cut off, checks sizes and shows the bar; `hf download ID`
fills the same cache. Never fetched: code, pickles, other formats of the same weights.
Left out: a config alone, for planning (hub.py, which needs no library); other hosts of a cluster.
"""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rlplan import __version__
from rlplan.errors import HostError, RlplanError
from rlplan.runtime.models.hub import NEEDS_A_TOKEN, refused
from rlplan.spec.models.headers import has_weights
from rlplan.units import format_bytes

FILES = ("*.json", "*.jinja", "merges.txt", "*.model", "model*.safetensors")
"""Configs, tokenizers, chat templates, weights: whole, or in the parts that an index names."""
OTHERS = ("*/*",)
"""Folders of a repository hold other formats (`original/`, `onnx/`)."""


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


def _snapshot(name: str, **options: Any) -> Any:
    """The folder; with `dry_run` the files. Raises: whatever the hub's library raises."""
    from huggingface_hub import snapshot_download

    options |= {"allow_patterns": [*FILES], "ignore_patterns": [*OTHERS]}
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


def _failed(name: str, where: str, cache: Path, error: Exception) -> RlplanError:
    """What went wrong, as an error for people."""
    if isinstance(error, RlplanError):
        return error
    cause = error.__cause__ or error
    code = getattr(getattr(cause, "response", None), "status_code", None)
    if code in (*NEEDS_A_TOKEN, 404):
        return refused(name, where, "model", f"HTTP {code}")
    if isinstance(error, OSError) and error.errno is not None and error.filename is not None:
        return HostError(
            f"model '{name}' cannot be kept: {error.strerror}",
            where=str(error.filename),
            rule=f"the hub's cache, {cache}, can be written",
            way_out="mend its permissions or free space, or set HF_HOME to another folder",
        )
    why = (str(cause).strip().splitlines() or [type(cause).__name__])[0]
    return HostError(
        f"model '{name}' is not on this machine, and the hub cannot be reached: {why}",
        where=where,
        rule=f"a run reads its models from folders: models/{name} beside the job file, the hub's cache, {cache}, or a "
        "path that the job names",
        way_out=f"with a network: hf download {name}; or the model's folder in place of the id",
    )
