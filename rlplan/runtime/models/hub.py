"""Download of a model's `config.json` from the Hugging Face hub without its library. Whole models: snapshots.py.

The client uses Python's own HTTP, because a light installation must plan models that are not bundled, and the hub's
library needs fourteen more packages. HF_ENDPOINT, HF_HUB_OFFLINE, HF_TOKEN, HF_TOKEN_PATH and HF_HOME work as there.
A token is sent only after the hub has refused a request without one, and never to another host. A download is limited
to ten seconds and two megabytes.

In: an id such as `Qwen/Qwen2.5-7B`. Out: a path in the user's cache, where a fetched config stays. Left out: retries.
"""

import os
import re
import urllib.error
import urllib.request
from http.client import HTTPMessage
from pathlib import Path
from typing import IO
from urllib.parse import quote, urlsplit

from rlplan.errors import HostError, RlplanError, SpecError, did_you_mean
from rlplan.runtime.processes.http_exchange import FAILURES, explain_failure, fetch
from rlplan.runtime.processes.line_process import Deadline, NoAnswerError
from rlplan.spec.base import explain_write_errors
from rlplan.spec.models.catalogue import load_catalogue
from rlplan.spec.models.config import MAX_CONFIG_BYTES
from rlplan.version import __version__

_ID = re.compile(r"^[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}$")
TIMEOUT_S = 10
NEEDS_A_TOKEN = (401, 403)
"""Statuses for a gated or a missing model, between which the hub does not distinguish."""


def looks_like_id(name: str) -> bool:
    """Whether a name has the form `owner/model`.

    >>> looks_like_id("Qwen/Qwen2.5-7B"), looks_like_id("../config.json"), looks_like_id("a/b/c")
    (True, False, False)
    """
    return _ID.match(name) is not None and ".." not in name


def fetch_config(name: str, key: str = "model") -> Path:
    """Path of a model's `config.json`, downloaded if needed. key: the job's key, for messages.

    Raises: SpecError (no such model), HostError (no network).
    """
    path = _find_cache() / name.replace("/", "--") / "config.json"
    if not path.exists():
        content = _download(name, key)
        partial = path.with_name(f"config.json.{os.getpid()}")
        with explain_write_errors(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            partial.write_bytes(content)
            partial.replace(path)  # atomic, so that a concurrent reader never sees a partial file
    return path


def _find_cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "rlplan" / "configs"


def _download(name: str, key: str) -> bytes:
    endpoint = os.environ.get("HF_ENDPOINT") or "https://huggingface.co"
    url = f"{endpoint.rstrip('/')}/{quote(name)}/resolve/main/config.json"
    if os.environ.get("HF_HUB_OFFLINE", "").lower() in ("1", "true", "yes", "on"):
        raise _make_unreachable_error(name, key, url, "HF_HUB_OFFLINE is set")
    deadline = Deadline(TIMEOUT_S)
    try:
        try:
            return _get(url, "", deadline)
        except urllib.error.HTTPError as error:
            if error.code not in NEEDS_A_TOKEN or not (token := _read_token()):
                raise
        return _get(url, token, deadline)
    except urllib.error.HTTPError as error:
        if error.code in (*NEEDS_A_TOKEN, 404):
            raise make_refusal(name, key, "config.json", f"HTTP {error.code}") from None
        raise _make_unreachable_error(name, key, url, f"HTTP {error.code}") from None
    except (NoAnswerError, *FAILURES) as error:  # no answer, or a malformed one
        raise _make_unreachable_error(name, key, url, explain_failure(error)) from None


def _get(url: str, token: str, deadline: Deadline) -> bytes:
    """One GET. Raises: as `fetch`."""
    if urlsplit(url).scheme not in ("http", "https"):
        raise ValueError(f"{url} is not an http:// or https:// address")
    request = urllib.request.Request(url, headers={"User-Agent": f"rlplan/{__version__}"})
    if token:
        request.add_header("Authorization", f"Bearer {token}")
    return fetch(request, deadline, MAX_CONFIG_BYTES, _Redirects(), urllib.request.ProxyHandler())[0]


class _Redirects(urllib.request.HTTPRedirectHandler):
    """Redirects that drop the token for other hosts and keep TLS; Python's default does neither."""

    def redirect_request(
        self, req: urllib.request.Request, fp: IO[bytes], code: int, msg: str, headers: HTTPMessage, newurl: str
    ) -> urllib.request.Request | None:
        """The redirected request. Raises: ValueError when TLS would be lost."""
        old, new = urlsplit(req.full_url), urlsplit(newurl)
        if new.scheme != old.scheme and new.scheme != "https":
            raise ValueError(f"it redirects from {old.scheme}:// to {new.scheme}://")
        request = super().redirect_request(req, fp, code, msg, headers, newurl)
        if request is not None and (old.scheme, old.netloc) != (new.scheme, new.netloc):
            request.remove_header("Authorization")
        return request


def _read_token() -> str:
    """The user's token from the environment or from the file of `hf auth login`; empty without one."""
    if token := os.environ.get("HF_TOKEN", "").strip():
        return token
    home = os.environ.get("HF_HOME") or str(_find_cache().parent.parent / "huggingface")
    path = Path(os.environ.get("HF_TOKEN_PATH") or f"{home}/token").expanduser()
    try:
        return path.read_text("utf-8").strip()
    except (OSError, ValueError):
        return ""


def make_refusal(name: str, key: str, what: str, why: str) -> RlplanError:
    """The error for a hub that answers, but refuses a file."""
    return SpecError(
        f"the hub does not provide the {what} of '{name}' ({why})",
        where=key,
        rule="a public model, or one that the token in HF_TOKEN may read." + did_you_mean(name, load_catalogue()),
        way_out=f"check the id; for a gated model accept its terms on the hub and set HF_TOKEN; or give a "
        f"path instead: {key}={'config.json' if what == 'config.json' else 'FOLDER'}",
    )


def _make_unreachable_error(name: str, key: str, url: str, why: str) -> HostError:
    return HostError(
        f"model '{name}' is not bundled, and the hub cannot be reached: {why}",
        where=key,
        rule="models that are not bundled come from the hub." + did_you_mean(name, load_catalogue()),
        way_out=f"with a network: curl -fLo config.json {url}; then give that path instead: {key}=config.json",
    )
