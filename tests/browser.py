"""A headless Chromium, driven over its DevTools pipe: pages as people see them, without a package for it."""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium (Debian package of that name) here")
AXE = Path(os.environ.get("FEDLENS_AXE", "node_modules/axe-core/axe.min.js"))  # npm install axe-core
needs_axe = pytest.mark.skipif(not AXE.is_file(), reason="FEDLENS_AXE does not name axe.min.js (npm package axe-core)")
_OFF = ("gpu", "dev-shm-usage", "background-networking", "component-update", "sync", "extensions")
_FLAGS = (
    *(f"--disable-{name}" for name in _OFF),
    *("--headless=new", "--remote-debugging-pipe", "--no-sandbox", "--no-first-run", "--mute-audio"),
    *("--hide-scrollbars", "--force-color-profile=srgb", "--disable-features=Translate,OptimizationHints"),
)
_PATIENCE = 30.0  # seconds


class Chromium:
    """A browser with a profile of its own, gone when the `with` block ends."""

    def __enter__(self) -> Chromium:
        self._profile = tempfile.TemporaryDirectory(prefix="fedlens-browser-", ignore_cleanup_errors=True)
        theirs_in, ours_out = os.pipe()
        ours_in, theirs_out = os.pipe()

        def plug() -> None:  # Chromium reads from descriptor 3 and writes to 4; they may be those very numbers
            high_in, high_out = os.dup(theirs_in), os.dup(theirs_out)
            os.dup2(high_in, 3)
            os.dup2(high_out, 4)

        assert CHROMIUM is not None
        command = [CHROMIUM, *_FLAGS, f"--user-data-dir={self._profile.name}", "about:blank"]
        quiet = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.DEVNULL)
        self._process = subprocess.Popen(command, close_fds=False, preexec_fn=plug, start_new_session=True, **quiet)
        os.close(theirs_in)
        os.close(theirs_out)
        self._in, self._out, self._left, self._number = ours_in, ours_out, b"", 0
        self._events: list[dict[str, Any]] = []
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self.call("Browser.close")
            self._process.wait(10)
        except (OSError, TimeoutError, subprocess.TimeoutExpired):
            self._process.kill()
            self._process.wait()
        os.close(self._in)
        os.close(self._out)
        self._profile.cleanup()

    def call(self, method: str, session: str = "", **parameters: Any) -> dict[str, Any]:
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        text = json.dumps(message | ({"sessionId": session} if session else {})).encode() + b"\0"
        while text:
            text = text[os.write(self._out, text) :]
        while True:
            answer = self._read(_PATIENCE)
            if answer is None:
                raise TimeoutError(f"Chromium does not answer {method}")
            if answer.get("id") == self._number:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']['message']}")
                return answer["result"]

    def _read(self, seconds: float) -> dict[str, Any] | None:
        end = time.monotonic() + seconds
        while b"\0" not in self._left:
            ready, _, _ = select.select([self._in], [], [], max(0.0, end - time.monotonic()))
            if not ready:
                return None
            if not (more := os.read(self._in, 1 << 20)):
                raise OSError("Chromium has ended")
            self._left += more
        text, _, self._left = self._left.partition(b"\0")
        message = json.loads(text)
        if "method" in message:
            self._events.append(message)
        return message

    def events(self, session: str, *methods: str) -> list[dict[str, Any]]:
        """What was reported so far."""
        while self._read(0.0) is not None:
            pass
        return [e["params"] for e in self._events if e.get("sessionId") == session and e["method"] in methods]

    def open(
        self, address: str, width: int = 1280, height: int = 800, *, dark: bool = False, phone: bool = False
    ) -> Page:
        """A new page at this address, once it has loaded; `phone`: with touch and twice the pixels."""
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        page = Page(self, session, target)
        for domain in ("Page", "Runtime", "Log", "Network"):
            page.call(f"{domain}.enable")
        page.resize(width, height, phone=phone)
        scheme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        page.call("Emulation.setEmulatedMedia", features=scheme)
        began = time.perf_counter()
        page.call("Page.navigate", url=address)
        page.until("document.readyState === 'complete' && location.href !== 'about:blank'")
        page.seconds = time.perf_counter() - began
        return page


class Page:
    def __init__(self, browser: Chromium, session: str, target: str):
        self.browser, self.session, self.target = browser, session, target
        self.seconds = 0.0  # until it had loaded

    def __enter__(self) -> Page:
        return self

    def __exit__(self, *_: object) -> None:
        self.browser.call("Target.closeTarget", targetId=self.target)

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        return self.browser.call(method, self.session, **parameters)

    def resize(self, width: int, height: int, *, phone: bool = False) -> None:
        scale = 2 if phone else 1
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=scale, mobile=phone
        )

    def evaluate(self, script: str) -> Any:
        """The value of a JavaScript expression; promises are waited for."""
        found = self.call(
            "Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True, userGesture=True
        )
        if "exceptionDetails" in found:
            raise AssertionError(found["exceptionDetails"].get("exception", {}).get("description", script))
        return found["result"].get("value")

    def until(self, script: str, seconds: float = 10.0) -> None:
        """Wait until an expression is true."""
        end = time.monotonic() + seconds
        while not self.evaluate(script):
            assert time.monotonic() < end, f"after {seconds:g} s still not: {script}"
            time.sleep(0.02)

    def place(self, selector: str, across: float = 0.5, down: float = 0.5) -> tuple[float, float]:
        """A point of an element, in the window; the page is scrolled to it."""
        script = (
            f"(() => {{ const e = document.querySelector({json.dumps(selector)}); if (!e) return null;"
            "e.scrollIntoView({block: 'center', behavior: 'instant'}); const b = e.getBoundingClientRect();"
            f"return [b.x + b.width * {across}, b.y + b.height * {down}]; }})()"
        )
        found = self.evaluate(script)
        assert found is not None, f"there is no {selector} on the page"
        return found[0], found[1]

    def hover(self, selector: str, across: float = 0.5, down: float = 0.5) -> None:
        x, y = self.place(selector, across, down)
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def click(self, selector: str) -> None:
        """As a person would: not while the page still moves, as when an answer above takes its room."""
        x, y = self.place(selector)
        busy = "document.querySelector('[aria-busy=true]') !== null"
        for _ in range(100):
            time.sleep(0.05)
            before, (x, y) = (x, y), self.place(selector)
            if before == (x, y) and not self.evaluate(busy):
                break
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def press(self, key: str, code: int = 0) -> None:
        """A key such as Tab, Enter or ArrowRight."""
        more = {"text": "\r"} if key == "Enter" else {}
        names = {"Tab": 9, "Enter": 13, "Escape": 27, "ArrowLeft": 37, "ArrowRight": 39, "Home": 36, "End": 35}
        shared = {"key": key, "code": key, "windowsVirtualKeyCode": code or names.get(key, 0)}
        self.call("Input.dispatchKeyEvent", type="keyDown", **shared, **more)
        self.call("Input.dispatchKeyEvent", type="keyUp", **shared)

    def screenshot(self, path: Path, *, whole: bool = False) -> Path:
        """What the window shows as PNG, or all of the page."""
        found = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole, **self._clip(whole))
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(base64.b64decode(found["data"]))
        return path

    def _clip(self, whole: bool) -> dict[str, Any]:
        if not whole:
            return {}
        size = self.call("Page.getLayoutMetrics")["cssContentSize"]
        return {"clip": {"x": 0, "y": 0, "width": size["width"], "height": size["height"], "scale": 1}}

    def pdf(self) -> bytes:
        return base64.b64decode(self.call("Page.printToPDF", printBackground=True)["data"])

    @property
    def errors(self) -> list[str]:
        """Exceptions, errors in the console, what a policy has blocked."""
        found = []
        for event in self.browser.events(
            self.session, "Runtime.exceptionThrown", "Runtime.consoleAPICalled", "Log.entryAdded"
        ):
            if "exceptionDetails" in event:
                details = event["exceptionDetails"]
                found.append(details.get("exception", {}).get("description") or details["text"])
            elif "entry" in event and event["entry"]["level"] in ("error", "warning"):
                found.append(event["entry"]["text"])
            elif event.get("type") in ("error", "warning", "assert"):
                found.append(" ".join(str(one.get("value", one.get("description"))) for one in event["args"]))
        return found

    @property
    def requests(self) -> list[str]:
        """Addresses that were asked for."""
        return [event["request"]["url"] for event in self.browser.events(self.session, "Network.requestWillBeSent")]


def axe(page: Page) -> tuple[int, list[str]]:
    """How many rules of axe-core the page passes, and what it finds, with the effect it names."""
    page.evaluate(f"{AXE.read_text('utf-8')};0")
    passed, found = page.evaluate(
        "axe.run(document).then((r) => [r.passes.length, r.violations.map((v) => `${v.impact} ${v.id}: `"
        " + v.nodes.map((n) => n.html).slice(0, 3))])"
    )
    return passed, found
