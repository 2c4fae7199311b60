"""A headless Chromium, spoken to over a pipe: pages opened, asked, clicked, and photographed.

In: Chromium of the system (`make system-packages` installs it). Out: what a page says, PNG files. The protocol is
Chromium's own (DevTools over --remote-debugging-pipe), so no package is needed. Used by tests and evidence.py.
"""

import base64
import json
import os
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome")
WIDTHS = {"wide": (1366, 900), "phone": (390, 844)}


def found() -> str | None:
    """Where Chromium is; None where there is none."""
    return next((path for path in map(shutil.which, NAMES) if path), None)


class Chromium:
    """One browser, one page in it at a time; ends with the `with` block."""

    def __enter__(self) -> "Chromium":
        self.profile = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)  # its children end a little later
        path = found()
        assert path, "Chromium is missing: `make system-packages` installs it"
        theirs_in, self.out = os.pipe()
        self.answers, theirs_out = os.pipe()
        arguments = [path, "--headless=new", "--no-sandbox", "--disable-gpu", "--no-first-run",
                     "--disable-dev-shm-usage",
                     "--disable-background-networking", "--hide-scrollbars", f"--user-data-dir={self.profile.name}",
                     "--remote-debugging-pipe", "about:blank"]  # fmt: skip
        # the protocol's pipes are descriptors 3 and 4
        shell = f'exec "$@" 3<&{theirs_in} 4>&{theirs_out}'
        self.process = subprocess.Popen(
            ["bash", "-c", shell, "bash", *arguments], pass_fds=(theirs_in, theirs_out), stderr=subprocess.DEVNULL
        )
        os.close(theirs_in)
        os.close(theirs_out)
        self.number, self.buffer, self.session, self.said = 0, b"", "", list[str]()
        target = self.ask("Target.createTarget", url="about:blank")["targetId"]
        self.session = self.ask("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.ask(f"{domain}.enable")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self.process.terminate()
        self.process.wait(20)
        os.close(self.out)
        os.close(self.answers)
        self.profile.cleanup()

    def ask(self, method: str, **parameters: Any) -> Any:
        """One command and its answer; meanwhile what the page's console says is kept."""
        self.number += 1
        message = {"id": self.number, "method": method, "params": parameters}
        if self.session:
            message["sessionId"] = self.session
        os.write(self.out, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("id") == self.number:
                assert "error" not in answer, f"{method}: {answer['error']}"
                return answer["result"]

    def _next(self) -> Any:
        while b"\0" not in self.buffer:
            part = os.read(self.answers, 1 << 20)
            assert part, "Chromium ended"
            self.buffer += part
        line, _, self.buffer = self.buffer.partition(b"\0")
        answer = json.loads(line)
        self._note(answer.get("method", ""), answer.get("params", {}))
        return answer

    def _note(self, method: str, parameters: Any) -> None:
        if method == "Runtime.exceptionThrown":
            self.said.append(str(parameters["exceptionDetails"].get("exception", parameters["exceptionDetails"])))
        elif method == "Runtime.consoleAPICalled" and parameters["type"] in ("error", "warning"):
            self.said.append(str(parameters["args"]))
        elif method == "Log.entryAdded" and parameters["entry"]["level"] in ("error", "warning"):
            self.said.append(parameters["entry"]["text"] + " " + parameters["entry"].get("url", ""))
        elif method == "Network.requestWillBeSent" and not parameters["request"]["url"].startswith(
            ("file:", "data:", "http://127.")
        ):
            self.said.append(f"asked the network: {parameters['request']['url']}")

    def open(self, address: str | Path, size: str = "wide", *, dark: bool = False, fine: bool = False) -> None:
        """Load a page (a file or a URL) and wait until its charts are drawn. fine: two pixels for one."""
        width, height = WIDTHS[size]
        phone = size == "phone"
        self.said.clear()
        self.ask(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=2 if phone or fine else 1,
            mobile=phone,
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.ask("Emulation.setEmulatedMedia", features=[scheme])
        self.ask("Page.navigate", url=address.resolve().as_uri() if isinstance(address, Path) else address)
        self.wait("document.documentElement?.dataset.drawn === ''")

    def wait(self, expression: str, seconds: float = 20) -> None:
        """Until an expression is true. Raises: AssertionError after those seconds."""
        end = time.monotonic() + seconds
        while not self.says(expression):
            assert time.monotonic() < end, f"{expression}: not within {seconds} s; the console: {self.said}"
            time.sleep(0.02)

    def says(self, expression: str) -> Any:
        """The value of an expression in the page."""
        reply = self.ask("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in reply, reply["exceptionDetails"]
        return reply["result"].get("value")

    def point(self, expression: str, x: float = 0.5, y: float = 0.5) -> None:
        """Move the mouse to a place of an element, parts of its width and height from its upper left."""
        self.says(f"({expression}).scrollIntoView({{block: 'center', behavior: 'instant'}})")
        box = self.says(f"(({{x, y, width, height}}) => [x, y, width, height])(({expression}).getBoundingClientRect())")
        place = {"x": box[0] + x * box[2], "y": box[1] + y * box[3]}
        self.ask("Input.dispatchMouseEvent", type="mouseMoved", **{**place, "x": place["x"] - 1})
        self.ask("Input.dispatchMouseEvent", type="mouseMoved", **place)
        self.at = place

    def click(self, expression: str) -> None:
        """Press the mouse on an element."""
        self.point(expression)
        for kind in ("mousePressed", "mouseReleased"):
            self.ask("Input.dispatchMouseEvent", type=kind, button="left", clickCount=1, **self.at)

    def press(self, key: str) -> None:
        """A key, such as ArrowRight."""
        text = key if len(key) == 1 else ""
        self.ask("Input.dispatchKeyEvent", type="keyDown", key=key, text=text)
        self.ask("Input.dispatchKeyEvent", type="keyUp", key=key)

    def picture(self, path: Path, *, whole: bool = True, of: str = "") -> None:
        """A PNG of the whole page, of what is seen of it, or of one element (an expression)."""
        clip = {}
        if of:
            box = self.says(f"(({{x, y, width, height}}) => [x, y, width, height])(({of}).getBoundingClientRect())")
            x, y, width, height = box[0] - 12, box[1] + self.says("window.scrollY") - 12, box[2] + 24, box[3] + 24
            clip = {"clip": {"x": x, "y": y, "width": width, "height": height, "scale": 1}}
        reply = self.ask("Page.captureScreenshot", format="png", captureBeyondViewport=whole, **clip)
        path.write_bytes(base64.b64decode(reply["data"]))

    def pdf(self) -> bytes:
        """The page as it is printed."""
        return base64.b64decode(self.ask("Page.printToPDF", printBackground=True)["data"])
