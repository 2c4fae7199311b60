"""The hub: the one place that uses the network. A model's `config.json` by id, as a file; never code, never weights.

In: an id such as `Qwen/Qwen2.5-7B`. Out: a path in the user's cache, where a config stays once it has been fetched.
Left out: retries; the caller says what to do without a network. Bounded: ten seconds, two megabytes.
"""

import os
import re
from pathlib import Path
from typing import NoReturn

from rlplan.errors import HostError, SpecError, did_you_mean
from rlplan.spec.base import writing
from rlplan.spec.models.catalogue import load_catalogue
from rlplan.spec.models.config import MAX_CONFIG_BYTES

_ID = re.compile(r"^[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}$")
TIMEOUT_S = 10


def looks_like_an_id(name: str) -> bool:
    """Whether a name has the form `owner/model`.

    >>> looks_like_an_id("Qwen/Qwen2.5-7B"), looks_like_an_id("../config.json"), looks_like_an_id("a/b/c")
    (True, False, False)
    """
    return _ID.match(name) is not None and ".." not in name


def fetch_config(name: str) -> Path:
    """The file of a model's `config.json`. Raises: SpecError (no such model), HostError (no network)."""
    path = _cache() / name.replace("/", "--") / "config.json"
    if not path.exists():
        content = _download(name)
        with writing(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
    return path


def _cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "rlplan" / "configs"


def _download(name: str) -> bytes:
    from huggingface_hub import hf_hub_url
    from huggingface_hub.utils import build_hf_headers, get_session

    if os.environ.get("HF_HUB_OFFLINE", "").lower() in ("1", "true", "yes", "on"):
        _refuse_unreachable(name, "HF_HUB_OFFLINE is set")
    try:
        answer = get_session().get(
            hf_hub_url(name, "config.json"), headers=build_hf_headers(), timeout=TIMEOUT_S, follow_redirects=True
        )
    except Exception as error:  # whatever the HTTP library raises: there is no answer
        _refuse_unreachable(name, type(error).__name__)
    if answer.status_code in (401, 403, 404):
        raise SpecError(
            f"the hub gives no config.json of '{name}' (HTTP {answer.status_code})",
            where="model",
            rule="a public model, or one that your token may read",
            way_out="check the id, or download its config.json and give that path",
        )
    if answer.status_code != 200 or len(answer.content) > MAX_CONFIG_BYTES:
        _refuse_unreachable(name, f"HTTP {answer.status_code}, {len(answer.content)} bytes")
    return bytes(answer.content)


def _refuse_unreachable(name: str, why: str) -> NoReturn:
    raise HostError(
        f"model '{name}' is not bundled, and the hub cannot be reached: {why}",
        where="model",
        rule="models that are not bundled come from the hub." + did_you_mean(name, load_catalogue()),
        way_out="download its config.json elsewhere and give that path",
    )
