"""Remote: an environment behind HTTP with one session per rollout, and the JSON POST that tools over HTTP share.

The protocol consists of POST requests with a JSON object, answered with status 200 and a JSON object:

- ADDRESS/reset {"session": id, "row": {...}}: starts or restarts a session; {"observation": text or null}
- ADDRESS/step {"session": id, "action": text}: {"observation": text or null, "reward": number or null, "done": bool}
- ADDRESS/close {"session": id}: ends a session, known or not; {"reward": number or null}, or {}

The server keeps a session's state, so it survives the client process. Requests are never repeated, because the server
may have processed a lost step. Redirects are not followed, so rows and the token reach no other host.

In: an address, requests. Out: answers in the format of a local environment.
"""

import json
import os
import urllib.request
from collections.abc import Callable, Mapping
from http.client import HTTPException, HTTPMessage
from typing import IO, Any
from urllib.error import HTTPError, URLError
from urllib.parse import urlsplit

from rlplan.runtime.environments.protocols import parse_answer
from rlplan.runtime.processes.line_process import Deadline, GarbledError, NoAnswerError, TooLongError
from rlplan.vocabulary import TOKEN_VARIABLE

MAX_BYTES = 1 << 20
"""Most bytes of an answer."""
_CHUNK_BYTES = 1 << 16


class RemoteEnvironment:
    """See the module docstring. run: id of this run, part of each session's id, so that runs share no session."""

    def __init__(self, url: str, run: str, timeout_s: float) -> None:
        self.url, self.run, self.timeout_s = url.rstrip("/"), run, timeout_s

    def check(self, deadline: Deadline) -> None:
        """Check that the server answers. Raises: NoAnswerError."""
        self._ask("close", {"session": f"{self.run}/check"}, deadline)

    def answer(self, question: Mapping[str, Any]) -> Any:
        """Raises: NoAnswerError."""
        session, deadline = {"session": f"{self.run}/{question['session']}"}, Deadline(self.timeout_s)
        if "reset" in question:
            return self._ask("reset", {**session, "row": question["reset"]}, deadline)
        if "step" in question:
            return parse_answer(self._ask("step", {**session, "action": question["step"]}, deadline))
        return self._ask("close", session, deadline)

    def _ask(self, method: str, content: dict[str, Any], deadline: Deadline) -> Any:
        text, _ = post(f"{self.url}/{method}", content, deadline)
        return parse_json(text)


def post(
    url: str,
    content: Mapping[str, Any],
    deadline: Deadline,
    headers: Mapping[str, str] | None = None,
    is_enough: Callable[[bytes], bool] = lambda read: False,
) -> tuple[bytes, HTTPMessage]:
    """(a server's answer to a JSON object, its headers). is_enough: whether the bytes read so far suffice.

    Raises: LateError, TooLongError, NoAnswerError.
    """
    sent = {"Content-Type": "application/json", "Accept": "application/json", **(headers or {})}
    if token := os.environ.get(TOKEN_VARIABLE, "").strip():
        sent["Authorization"] = f"Bearer {token}"
    request = urllib.request.Request(url, json.dumps(content).encode(), sent, method="POST")
    try:
        with _build_opener(url).open(request, timeout=deadline.check()) as answer:
            read = b""
            while not is_enough(read) and (part := answer.read1(_CHUNK_BYTES)):
                read += part
                if len(read) > MAX_BYTES:
                    raise TooLongError(f"an answer of more than {MAX_BYTES} bytes")
                deadline.check()
            return read, answer.headers
    except HTTPError as error:
        raise NoAnswerError(f"{url} answered with status {error.code}") from None
    except TimeoutError:
        raise deadline.make_error() from None
    except (URLError, OSError, HTTPException, ValueError) as error:
        reason = getattr(error, "reason", error)
        if isinstance(reason, TimeoutError):
            raise deadline.make_error() from None
        raise NoAnswerError(f"{url} does not answer: {str(reason)[:200] or type(error).__name__}") from None


def parse_json(text: bytes) -> Any:
    """Parse an answer. Raises: GarbledError."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        raise GarbledError("an answer that is not JSON") from None


def _build_opener(url: str) -> urllib.request.OpenerDirector:
    """An opener without redirects; it uses the user's proxies except for servers on this machine."""
    # A job's address may use plain http on this machine only (spec/parts/environment.py), where a proxy is wrong.
    proxies = urllib.request.ProxyHandler({} if urlsplit(url).scheme == "http" else None)
    return urllib.request.build_opener(_NoRedirects, proxies)


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    def redirect_request(
        self, req: urllib.request.Request, fp: IO[bytes], code: int, msg: str, headers: HTTPMessage, newurl: str
    ) -> None:
        """Refuse a redirect; its status is then reported as an error."""
