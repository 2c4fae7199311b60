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
from collections.abc import Callable, Mapping
from http.client import HTTPMessage
from typing import Any
from urllib.error import HTTPError
from urllib.parse import urlsplit
from urllib.request import ProxyHandler, Request

from rlplan.runtime.environments.protocols import parse_answer
from rlplan.runtime.processes.http_exchange import FAILURES, explain_failure, fetch
from rlplan.runtime.processes.line_process import Deadline, NoAnswerError, parse_json
from rlplan.vocabulary import TOKEN_VARIABLE

MAX_BYTES = 1 << 20
"""Most bytes of an answer."""


class RemoteEnvironment:
    """See the module docstring. run: id of this run, part of each session's id, so that runs share no session."""

    def __init__(self, url: str, run: str, timeout_s: float) -> None:
        self.url, self.run, self.timeout_s = url.rstrip("/"), run, timeout_s

    def check(self, deadline: Deadline) -> None:
        """Check that the server answers. Raises: NoAnswerError."""
        # the only request that is valid for an unknown session and starts none
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
    is_enough: Callable[[bytes], bool] = lambda part: False,
) -> tuple[bytes, HTTPMessage]:
    """(a server's answer to a JSON object, its headers). is_enough: whether a part of the answer completes it.

    Raises: LateError, TooLongError, NoAnswerError.
    """
    sent = {"Content-Type": "application/json", "Accept": "application/json", **(headers or {})}
    if token := os.environ.get(TOKEN_VARIABLE, "").strip():
        sent["Authorization"] = f"Bearer {token}"
    request = Request(url, json.dumps(content).encode(), sent, method="POST")
    # A job's address may use plain http on this machine only (spec/parts/environment.py), where a proxy is wrong.
    proxies = ProxyHandler({} if urlsplit(url).scheme == "http" else None)
    try:
        return fetch(request, deadline, MAX_BYTES, proxies, is_enough=is_enough)
    except HTTPError as error:
        raise NoAnswerError(f"{url} answered with status {error.code}") from None
    except FAILURES as error:
        raise NoAnswerError(f"{url} does not answer: {explain_failure(error)}") from None
