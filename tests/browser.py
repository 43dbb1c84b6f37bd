"""A headless chromium, driven through the DevTools protocol over two pipes: nothing to install besides the browser."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_SWITCHES = (
    "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run", "--disable-extensions",
    "--disable-background-networking", "--disable-component-update", "--remote-debugging-pipe", "--hide-scrollbars",
)  # fmt: skip

# Chromium reads commands from descriptor 3 and answers on 4.
_START = "import os, sys; os.dup2(int(sys.argv[1]), 3); os.dup2(int(sys.argv[2]), 4); os.execv(sys.argv[3], sys.argv[3:])"


def find_chromium() -> str | None:
    return next((found for name in ("chromium", "chromium-browser", "google-chrome") if (found := shutil.which(name))), None)


@contextlib.contextmanager
def browser(profile: Path, *switches: str) -> Iterator[Page]:
    """A page in a browser of its own, which ends with the block."""
    import fcntl  # where chromium is looked for, not on Windows

    inward, outward = os.pipe(), os.pipe()
    theirs = [fcntl.fcntl(inward[0], fcntl.F_DUPFD, 20), fcntl.fcntl(outward[1], fcntl.F_DUPFD, 20)]
    os.close(inward[0])
    os.close(outward[1])
    command = [
        sys.executable,
        "-c",
        _START,
        *map(str, theirs),
        str(find_chromium()),
        *_SWITCHES,
        *switches,
        f"--user-data-dir={profile}",
        "about:blank",
    ]
    process = subprocess.Popen(command, pass_fds=theirs, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    for descriptor in theirs:
        os.close(descriptor)
    with os.fdopen(inward[1], "wb", buffering=0) as commands, os.fdopen(outward[0], "rb") as answers:
        page = Page(commands, answers)
        try:
            page.attach()
            yield page
        finally:
            process.kill()
            process.wait()


class Page:
    """One tab. `requests` are the addresses it asked for."""

    def __init__(self, commands: Any, answers: Any) -> None:
        self._commands, self._answers, self._count = commands, answers, 0
        self._session: str | None = None
        self._buffer = b""
        self.requests: list[str] = []
        self.errors: list[str] = []
        self._loaded = 0

    def attach(self) -> None:
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Network", "Runtime"):
            self.send(f"{domain}.enable")

    def open(self, place: Path | str) -> None:
        before = self._loaded
        self.send("Page.navigate", url=place if isinstance(place, str) else place.as_uri())
        while self._loaded == before:
            self._note(self._receive())

    def evaluate(self, expression: str) -> Any:
        answer = self.send("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in answer:
            raise AssertionError(f"{expression}: {answer['exceptionDetails']}")
        return answer["result"].get("value")

    def click(self, selector: str) -> None:
        """With the mouse, in the middle of the element."""
        place = f"(() => {{ const e = document.querySelector({json.dumps(selector)}); e.scrollIntoView({{block: 'center'}}); "
        box = self.evaluate(place + "const b = e.getBoundingClientRect(); return [b.x + b.width / 2, b.y + b.height / 2]; })()")
        for kind in ("mousePressed", "mouseReleased"):
            self.send("Input.dispatchMouseEvent", type=kind, x=box[0], y=box[1], button="left", clickCount=1)

    def drag(self, selector: str, points: list[tuple[float, float]]) -> None:
        """Draw a line through points, given as fractions of the element's width and height."""
        place = f"(() => {{ const e = document.querySelector({json.dumps(selector)}); e.scrollIntoView({{block: 'center'}}); "
        x, y, width, height = self.evaluate(place + "const b = e.getBoundingClientRect(); return [b.x, b.y, b.width, b.height]; })()")
        kinds = ["mousePressed", *["mouseMoved"] * (len(points) - 1)]
        for kind, (right, down) in zip(kinds, points, strict=True):
            self.send(
                "Input.dispatchMouseEvent", type=kind, x=x + right * width, y=y + down * height, button="left", buttons=1, clickCount=1
            )
        right, down = points[-1]
        self.send("Input.dispatchMouseEvent", type="mouseReleased", x=x + right * width, y=y + down * height, button="left", clickCount=1)

    def type(self, selector: str, text: str) -> None:
        """Replace what the field holds by typing."""
        self.evaluate(f"(() => {{ const e = document.querySelector({json.dumps(selector)}); e.focus(); e.select(); }})()")
        self.send("Input.insertText", text=text)

    def look(self, *, width: int, height: int = 900, dark: bool = False) -> None:
        """A window of this width; dark mode or light."""
        self.send("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 500)
        features = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self.send("Emulation.setEmulatedMedia", features=features)

    def screenshot(self, path: Path) -> None:
        """What the window shows now, to look at while working on the page."""
        path.write_bytes(base64.b64decode(self.send("Page.captureScreenshot")["data"]))

    def send(self, method: str, **parameters: Any) -> dict[str, Any]:
        self._count += 1
        message: dict[str, Any] = {"id": self._count, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        self._commands.write(json.dumps(message).encode() + b"\0")
        while (answer := self._receive()).get("id") != self._count:
            self._note(answer)
        if "error" in answer:
            raise AssertionError(f"{method}: {answer['error']}")
        return dict(answer["result"])

    def _receive(self) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            piece = self._answers.read1(1 << 16)
            if not piece:
                raise AssertionError("chromium ended")
            self._buffer += piece
        message, _, self._buffer = self._buffer.partition(b"\0")
        return dict(json.loads(message))

    def _note(self, event: dict[str, Any]) -> None:
        method, parameters = event.get("method"), event.get("params", {})
        if method == "Network.requestWillBeSent":
            self.requests.append(parameters["request"]["url"])
        elif method == "Runtime.exceptionThrown":
            self.errors.append(str(parameters["exceptionDetails"]))
        elif method == "Page.loadEventFired":
            self._loaded += 1
