"""A headless Chromium, driven over its debugging pipe, for tests that look at a page as a reader does."""

import json
import os
import shutil
import subprocess
from base64 import b64decode
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from select import select
from typing import Any, Self

from tests.support.patience import patience_s

__all__ = ["Chromium", "chromium", "find_chromium"]

KEY_CODES = {"Tab": 9, "Escape": 27, "End": 35, "Home": 36, "ArrowLeft": 37, "ArrowRight": 39}
"""What browsers go by for keys without a letter."""

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome", "headless_shell")


def find_chromium() -> str | None:
    """The browser that this machine offers."""
    return next((path for name in NAMES if (path := shutil.which(name)) is not None), None)


@contextmanager
def chromium(binary: str, folder: Path) -> "Iterator[Chromium]":
    """A browser with a page, until the block ends. `folder` is for what it keeps meanwhile."""
    to_read, to_write = os.pipe(), os.pipe()
    words = [
        binary,
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--no-first-run",
        "--hide-scrollbars",
        f"--user-data-dir={folder / 'profile'}",
        "--remote-debugging-pipe",
    ]

    # The browser reads what we say at 3 and answers at 4.
    ends = (to_read[0], to_write[1])
    script = f'exec "$0" "$@" 3<&{ends[0]} 4>&{ends[1]}'
    with (folder / "chromium.log").open("wb") as log:
        process = subprocess.Popen(["bash", "-c", script, *words], stdout=log, stderr=log, pass_fds=ends)
    os.close(to_read[0])
    os.close(to_write[1])
    try:
        page = Chromium.over(to_read[1], to_write[0])
        yield page
        page.call("Browser.close")
        process.wait(timeout=patience_s())
    finally:
        process.kill()
        process.wait(timeout=patience_s())
        os.close(to_read[1])
        os.close(to_write[0])


class Chromium:
    """The page of a browser. `complaints` are errors of its scripts and of its console."""

    def __init__(self, to: int, back: int) -> None:
        self.to, self.back = to, back
        self.buffer = b""
        self.count = 0
        self.session: str | None = None
        self.complaints: list[str] = []
        self.loaded = False

    @classmethod
    def over(cls, to: int, back: int) -> Self:
        """A new page of the browser at the other end."""
        page = cls(to, back)
        target = page.call("Target.createTarget", url="about:blank")["targetId"]
        found = page.call("Target.attachToTarget", targetId=target, flatten=True)
        page.session = found["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            page.call(f"{domain}.enable")
        return page

    def open(self, path: Path | str, *, width: int = 1280, height: int = 800, dark: bool = False) -> None:
        """Load a file or an address, in a window of a size, for a reader who likes it light or dark."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.call("Emulation.setDeviceMetricsOverride", **size)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self.loaded = False
        self.call("Page.navigate", url=path if isinstance(path, str) else path.resolve().as_uri())
        while not self.loaded:
            self._take(self._message())

    def value(self, script: str) -> Any:
        """What a script comes to."""
        found = self.call("Runtime.evaluate", expression=script, returnByValue=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def mouse(self, kind: str, x: float, y: float, *, pressed: bool = False, clicks: int = 1) -> None:
        """Move, press or release the mouse."""
        button = {"button": "left", "buttons": 1, "clickCount": clicks} if pressed else {}
        self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, **button)

    def press(self, key: str) -> None:
        """Press and release a key, by its name or its letter."""
        code = KEY_CODES.get(key, 0)
        text = {"text": key} if len(key) == 1 else {}
        self.call("Input.dispatchKeyEvent", type="keyDown", key=key, windowsVirtualKeyCode=code, **text)
        self.call("Input.dispatchKeyEvent", type="keyUp", key=key, windowsVirtualKeyCode=code)

    def picture(self, path: Path, *, whole: bool = True) -> None:
        """A PNG of the page."""
        found = self.call("Page.captureScreenshot", captureBeyondViewport=whole, **self._whole(whole))
        path.write_bytes(b64decode(found["data"]))

    def _whole(self, whole: bool) -> dict[str, Any]:
        if not whole:
            return {}
        size = self.call("Page.getLayoutMetrics")["cssContentSize"]
        return {"clip": {"x": 0, "y": 0, "width": size["width"], "height": size["height"], "scale": 1}}

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """A command of the debugging protocol and what it brings."""
        self.count += 1
        message: dict[str, Any] = {"id": self.count, "method": method, "params": parameters}
        if self.session is not None:
            message["sessionId"] = self.session
        os.write(self.to, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._message()
            if answer.get("id") == self.count:
                assert "error" not in answer, answer
                result = answer["result"]
                assert isinstance(result, dict)
                return result
            self._take(answer)

    def _message(self) -> dict[str, Any]:
        while b"\0" not in self.buffer:
            ready, _, _ = select([self.back], [], [], patience_s())
            assert ready, "The browser says nothing."
            read = os.read(self.back, 1 << 20)
            assert read, "The browser has ended."
            self.buffer += read
        text, _, self.buffer = self.buffer.partition(b"\0")
        found = json.loads(text)
        assert isinstance(found, dict)
        return found

    def _take(self, message: dict[str, Any]) -> None:
        """What the browser says by itself."""
        match message.get("method"):
            case "Page.loadEventFired":
                self.loaded = True
            case "Runtime.exceptionThrown" | "Runtime.consoleAPICalled" | "Log.entryAdded":
                self.complaints.append(json.dumps(message["params"]))
            case "Network.requestWillBeSent":
                url = message["params"]["request"]["url"]
                if not url.startswith(("file:", "about:", "data:")):
                    self.complaints.append(f"asks for {url}")
