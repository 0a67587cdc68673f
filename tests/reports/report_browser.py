"""A headless Chromium for the tests of the pages: one process, driven over a pipe by its own protocol.

`Browser.open(page)` returns a `Tab` whose console, requests and exceptions are recorded. In CI a missing browser is a
failure; elsewhere these tests are skipped.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import Any

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome")
BROWSER = next(filter(None, map(shutil.which, NAMES)), None)
IN_CI = os.environ.get("CI", "").lower() not in ("", "0", "false")

needs_browser = pytest.mark.skipif(
    BROWSER is None and not IN_CI, reason=f"none of {', '.join(NAMES)} is here: `make browser` installs it on Debian"
)

_FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-quic",
    "--no-first-run",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
    "--disable-extensions",
    "--hide-scrollbars",
    "--remote-debugging-pipe",
)
_PATIENCE = 150.0
"""Seconds to wait for an answer, on a busy machine."""


class Browser:
    """One running browser. Use it in a `with` statement."""

    def __init__(self) -> None:
        if BROWSER is None:
            raise FileNotFoundError(f"none of {', '.join(NAMES)} is installed: `make browser` installs chromium")
        self._profile = tempfile.TemporaryDirectory(prefix="browser-", ignore_cleanup_errors=True)
        to_read, self._write = os.pipe()
        self._read, to_write = os.pipe()
        # The browser reads commands from descriptor 3 and writes answers to 4; a shell puts the pipes there.
        script = f'exec 3<&{to_read} 4>&{to_write}; exec "$@"'
        command = ["bash", "-c", script, "bash", BROWSER, *_FLAGS, f"--user-data-dir={self._profile.name}"]
        self._process = subprocess.Popen(
            command, pass_fds=(to_read, to_write), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        os.close(to_read)
        os.close(to_write)
        self._buffer, self._id = b"", 0
        self._answers: dict[int, Any] = {}
        self._tabs: dict[str, Tab] = {}

    def __enter__(self) -> Browser:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        try:
            self.call("Browser.close")
            with contextlib.suppress(subprocess.TimeoutExpired):  # on a busy machine it may take long to end
                self._process.wait(_PATIENCE)
        finally:
            self._process.kill()
            self._process.wait()
            os.close(self._write)
            os.close(self._read)
            self._profile.cleanup()

    def open(self, page: Path, *, width: int = 1200, height: int = 900, dark: bool = False, paper: bool = False) -> Tab:
        """Open a file in a tab of that width and colour scheme, and wait until its script has run."""
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        tab = self._tabs[session] = Tab(self, target, session)
        for domain in ("Page", "Runtime", "Log", "Network"):
            tab.call(f"{domain}.enable")
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        tab.call("Emulation.setEmulatedMedia", media="print" if paper else "", features=[scheme])
        tab.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        begin = time.monotonic()
        tab.call("Page.navigate", url=page.resolve().as_uri())
        ready = "document.documentElement?.dataset.ready === 'yes' && document.readyState === 'complete'"
        while not tab.run(ready):
            assert time.monotonic() - begin < _PATIENCE, f"the script of {page} did not run: {tab.console}"
        tab.seconds = time.monotonic() - begin
        return tab

    def call(self, method: str, session: str = "", **arguments: Any) -> Any:
        """One command of the protocol; events that come meanwhile are recorded."""
        number = self.send(method, session, **arguments)
        while number not in self._answers:
            self._receive()
        answer = self._answers.pop(number)
        assert "error" not in answer, f"{method}: {answer['error']}"
        return answer["result"]

    def send(self, method: str, session: str = "", **arguments: Any) -> int:
        """Send a command and return its number, without waiting for the answer."""
        self._id += 1
        message = {"id": self._id, "method": method, "params": arguments} | ({"sessionId": session} if session else {})
        os.write(self._write, json.dumps(message).encode() + b"\0")
        return self._id

    def _receive(self) -> None:
        ready, _, _ = select.select([self._read], [], [], _PATIENCE)
        data = os.read(self._read, 1 << 20) if ready else b""
        assert data, "the browser has ended or does not answer"
        *messages, self._buffer = (self._buffer + data).split(b"\0")
        for message in map(json.loads, messages):
            if "id" in message:
                self._answers[message["id"]] = message
            elif message.get("sessionId") in self._tabs:
                self._tabs[message["sessionId"]].record(message["method"], message["params"])


def visit(page: Path, *, width: int = 1280, dark: bool = False, script: str = "") -> tuple[str, list[str]]:
    """The document after its script ran, and then another script; and the lines of the console."""
    with Browser() as browser:
        tab = browser.open(page, width=width, dark=dark)
        if script:
            tab.run(f"(async () => {{ {script} }})()")
        return tab.run("document.documentElement.outerHTML"), tab.console


class Tab:
    """A page in the browser."""

    def __init__(self, browser: Browser, target: str, session: str) -> None:
        self._browser, self._target, self._session = browser, target, session
        self.console: list[str] = []
        """Messages, errors and exceptions of the page."""
        self.requests: list[str] = []
        """Addresses that were asked for, with that of the page itself."""
        self.seconds = 0.0
        """From the request until the script had run."""

    def record(self, event: str, values: dict[str, Any]) -> None:
        """Keep what the tests look at."""
        if event == "Runtime.consoleAPICalled":
            self.console.append(" ".join(str(x.get("value", x.get("description"))) for x in values["args"]))
        elif event == "Runtime.exceptionThrown":
            self.console.append(json.dumps(values["exceptionDetails"]))
        elif event == "Log.entryAdded":
            self.console.append(values["entry"]["text"])
        elif event == "Network.requestWillBeSent":
            self.requests.append(values["request"]["url"])
        elif event == "Page.javascriptDialogOpening":
            self.console.append(f"dialog: {values['message']}")
            self._browser.send("Page.handleJavaScriptDialog", self._session, accept=True)

    def call(self, method: str, **arguments: Any) -> Any:
        """One command about this tab."""
        return self._browser.call(method, self._session, **arguments)

    def run(self, script: str) -> Any:
        """The value of an expression in the page."""
        answer = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def key(self, key: str) -> None:
        """Press and release a key."""
        code = {"Tab": 9, "Enter": 13, "+": 187, "-": 189, "0": 48}[key]
        values = {"key": key, "windowsVirtualKeyCode": code}
        text = {"text": "\r"} if key == "Enter" else {"text": key} if len(key) == 1 else {}
        self.call("Input.dispatchKeyEvent", type="keyDown", **values, **text)
        self.call("Input.dispatchKeyEvent", type="keyUp", **values)

    def wheel(self, x: float, y: float, by: float, *, ctrl: bool = False) -> None:
        """Turn the wheel at a place."""
        self.call(
            "Input.dispatchMouseEvent", type="mouseWheel", x=x, y=y, deltaX=0, deltaY=by, modifiers=2 if ctrl else 0
        )

    def point(self, x: float, y: float) -> None:
        """Move the mouse to a place."""
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def click(self, x: float, y: float) -> None:
        """Press the left button at a place."""
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def middle(self, selector: str) -> tuple[float, float]:
        """The middle of the first such element, scrolled into view; scrolling has ended."""
        where = f"document.querySelector({json.dumps(selector)})"
        self.run(f"{where}.scrollIntoView({{block: 'center'}})")
        self.pause()
        box = self.run(
            f"(() => {{ const b = {where}.getBoundingClientRect(); return [b.x, b.y, b.width, b.height]; }})()"
        )
        return box[0] + box[2] / 2, box[1] + box[3] / 2

    def pause(self) -> None:
        """Let the page handle its events."""
        self.run("new Promise((done) => setTimeout(done, 60))")

    def screenshot(self, path: Path) -> None:
        """The whole page as a PNG."""
        size = self.call("Page.getLayoutMetrics")["cssContentSize"]
        clip = {"x": 0, "y": 0, "width": size["width"], "height": size["height"], "scale": 1}
        data = self.call("Page.captureScreenshot", captureBeyondViewport=True, clip=clip)["data"]
        path.write_bytes(base64.b64decode(data))

    def pdf(self, path: Path) -> None:
        """The page as it is printed."""
        path.write_bytes(base64.b64decode(self.call("Page.printToPDF", printBackground=True)["data"]))

    def close(self) -> None:
        """Close the tab."""
        self._browser.call("Target.closeTarget", targetId=self._target)
