"""The game of guess_digit.py behind HTTP, on this machine: `python examples/environments/guess_digit_server.py 8765`.

A session is one rollout. Three addresses answer: /play/reset, /play/step and /play/close.
"""

import json
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from guess_digit import play  # beside this file

SESSIONS: dict[str, dict[str, Any]] = {}
"""Turns so far and the prompt's answer of each rollout."""


def reset(asked: dict[str, Any]) -> dict[str, Any]:
    SESSIONS[asked["session"]] = {"messages": [], "answer": asked["row"]["answer"]}
    return {}


def step(asked: dict[str, Any]) -> dict[str, Any]:
    session = SESSIONS[asked["session"]]
    session["messages"].append({"role": "assistant", "content": asked["action"]})
    verdict = play(session["messages"], session["answer"])
    return {
        "observation": verdict.get("observation"),
        "reward": verdict.get("reward", 0.0),
        "done": "reward" in verdict,
    }


def close(asked: dict[str, Any]) -> dict[str, Any]:
    SESSIONS.pop(asked["session"], None)
    return {}


class Game(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        answer = {"/play/reset": reset, "/play/step": step, "/play/close": close}[self.path](asked)
        content = json.dumps(answer).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: Any) -> None:
        """A line for each request would be thousands."""


if __name__ == "__main__":
    ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Game).serve_forever()
