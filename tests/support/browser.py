"""A headless Chromium that is driven through its debugging pipe. Standard library only; Linux."""

from __future__ import annotations

import base64
import fcntl
import json
import os
import shutil
import subprocess
import tempfile
from pathlib import Path
from types import TracebackType
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
TIMEOUT_S = 60.0


def find_browser() -> str | None:
    """Path of an installed browser, None where there is none."""
    return next((path for name in NAMES if (path := shutil.which(name)) is not None), None)


def _moved_up(descriptor: int) -> int:
    """The same file under a descriptor of 10 or more."""
    moved = fcntl.fcntl(descriptor, fcntl.F_DUPFD, 10)
    os.close(descriptor)
    return moved


class Page:
    """One page in a browser of its own, without a network.

    Parameters
    ----------
    url : str
        What to open; the constructor returns once it has loaded.
    width, height : int
        Of the window, in CSS pixels.
    dark : bool
        Whether the reader prefers dark colours.
    """

    def __init__(self, url: str, width: int = 1200, height: int = 900, dark: bool = False) -> None:
        browser = find_browser()
        if browser is None:
            raise RuntimeError("no browser is installed")
        # A process of the browser may still write into its profile when it is removed.
        self._folder = tempfile.TemporaryDirectory(prefix="browser", ignore_cleanup_errors=True)
        # The browser reads commands from descriptor 3, and answers on 4.
        commands, self._commands = os.pipe()
        self._answers, answers = os.pipe()
        # Moved out of the way of 3 and 4, which they are to become.
        commands, answers = (_moved_up(descriptor) for descriptor in (commands, answers))
        self._process = subprocess.Popen(
            [
                # Not sh, which takes no descriptor over 9.
                "bash",
                "-c",
                f'exec "$@" 3<&{commands} 4>&{answers}',
                "bash",
                browser,
                "--headless=new",
                "--remote-debugging-pipe",
                "--no-sandbox",
                "--disable-gpu",
                "--disable-dev-shm-usage",
                "--hide-scrollbars",
                "--no-first-run",
                "--proxy-server=127.0.0.1:9",
                f"--user-data-dir={self._folder.name}",
            ],
            pass_fds=(commands, answers),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(commands)
        os.close(answers)
        self._buffer, self._count, self._session = b"", 0, None
        self.problems: list[str] = []
        target = self._ask("Target.createTarget", url="about:blank")["targetId"]
        self._session = self._ask("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self._ask(f"{domain}.enable")
        mobile = width < 600
        self._ask("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=mobile)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self._ask("Emulation.setEmulatedMedia", features=[scheme])
        self._ask("Page.navigate", url=url)
        self._wait_for("Page.loadEventFired")

    def __enter__(self) -> Page:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._process.terminate()
        self._process.wait(TIMEOUT_S)
        os.close(self._commands)
        os.close(self._answers)
        self._folder.cleanup()

    def evaluate(self, script: str) -> Any:
        """The value of an expression. Raises RuntimeError where it throws."""
        answer = self._ask("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in answer:
            raise RuntimeError(json.dumps(answer["exceptionDetails"]))
        return answer["result"].get("value")

    def text(self, selector: str = "body") -> str:
        """What a reader sees of an element."""
        return str(self.evaluate(f"document.querySelector({json.dumps(selector)}).innerText"))

    def place(self, selector: str, index: int = 0) -> tuple[float, float]:
        """The middle of the index-th such element, scrolled into view."""
        box = self.evaluate(
            f"""(async () => {{
                const element = document.querySelectorAll({json.dumps(selector)})[{index}];
                element.scrollIntoView({{ block: "center" }});
                // Until the page has been told that it scrolled.
                for (let frame = 0; frame < 2; frame += 1) await new Promise(requestAnimationFrame);
                const box = element.getClientRects()[0];
                return [box.left + box.width / 2, box.top + box.height / 2];
            }})()"""
        )
        return box[0], box[1]

    def hover(self, selector: str, index: int = 0) -> None:
        """Move the pointer onto the index-th such element."""
        x, y = self.place(selector, index)
        self._ask("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def click(self, selector: str, index: int = 0) -> None:
        """Click the index-th such element."""
        x, y = self.place(selector, index)
        for kind in ("mousePressed", "mouseReleased"):
            self._ask("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def screenshot(self, to: Path, whole: bool = False) -> None:
        """A PNG of the window, or of the whole page."""
        picture = self._ask("Page.captureScreenshot", captureBeyondViewport=whole)
        to.write_bytes(base64.b64decode(picture["data"]))

    def _ask(self, method: str, **parameters: Any) -> dict[str, Any]:
        self._count += 1
        message = {"id": self._count, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._commands, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("id") == self._count:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']}")
                result: dict[str, Any] = answer["result"]
                return result

    def _wait_for(self, method: str) -> None:
        while self._next().get("method") != method:
            pass

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            block = os.read(self._answers, 1 << 16)
            if not block:
                raise RuntimeError("the browser has gone")
            self._buffer += block
        line, self._buffer = self._buffer.split(b"\0", 1)
        message: dict[str, Any] = json.loads(line)
        if message.get("method") == "Runtime.exceptionThrown":
            self.problems.append(json.dumps(message["params"]["exceptionDetails"]))
        if message.get("method") == "Log.entryAdded" and message["params"]["entry"]["level"] == "error":
            self.problems.append(message["params"]["entry"]["text"])
        return message
