"""A real browser for tests: Chromium without a window, spoken to over two pipes (no port, no package).

Its protocol is described at https://chromedevtools.github.io/devtools-protocol/; over pipes, a message is a
JSON object and a zero byte.
"""

import base64
import fcntl
import json
import os
import re
import select
import shutil
import signal
import time
from pathlib import Path

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
OPTIONS = (
    "--headless=new",
    "--no-sandbox",  # root has none, and the pages are our own
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--disable-extensions",
    "--disable-background-networking",
    "--hide-scrollbars",
    "--window-size=1280,900",
    "--remote-debugging-pipe",
)
WHY_NOT = f"no Chromium here (looked for {', '.join(NAMES)}): pages are not tried in a browser"


def installed():
    return next((found for name in NAMES if (found := shutil.which(name))), None)


class Browser:
    """One page at a time; ``requests`` are the addresses it asked for, ``errors`` what went wrong in it."""

    def __init__(self, folder, timeout_s=60.0):
        self._timeout_s, self._count, self._rest = timeout_s, 0, b""
        self.requests, self.errors, self._events = [], [], []
        theirs, self._send = _pipe()
        self._receive, theirs_too = _pipe()
        environment = {**os.environ, "HOME": str(folder), "XDG_RUNTIME_DIR": str(folder)}
        log = os.open(Path(folder, "log"), os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC)
        actions = [(os.POSIX_SPAWN_DUP2, theirs, 3), (os.POSIX_SPAWN_DUP2, theirs_too, 4)]
        actions += [(os.POSIX_SPAWN_DUP2, log, 1), (os.POSIX_SPAWN_DUP2, log, 2)]
        words = [installed(), *OPTIONS, f"--user-data-dir={folder}/profile", "about:blank"]
        self._process = os.posix_spawn(words[0], words, environment, file_actions=actions, setpgroup=0)
        for end in (theirs, theirs_too, log):
            os.close(end)
        self._session = None
        (target,) = (t for t in self._call("Target.getTargets")["targetInfos"] if t["type"] == "page")
        attached = self._call("Target.attachToTarget", targetId=target["targetId"], flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self._call(f"{domain}.enable")

    def close(self):
        """End it, and what it started."""
        os.killpg(self._process, signal.SIGKILL)
        os.waitpid(self._process, 0)
        os.close(self._send)
        os.close(self._receive)

    def open(self, path):
        """Show a page, and wait until it is there."""
        self.requests.clear()
        self.errors.clear()
        self._events.clear()
        self._call("Page.navigate", url=Path(path).as_uri())
        self._wait("Page.loadEventFired")

    def eval(self, expression):
        """The value of a JavaScript expression in the page."""
        done = self._call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in done:
            raise AssertionError(done["exceptionDetails"])
        return done["result"].get("value")

    def box(self, selector):
        """Where an element is on the screen: left, top, width, height."""
        rect = f"document.querySelector({json.dumps(selector)}).getBoundingClientRect()"
        return self.eval(f"(r => [r.left, r.top, r.width, r.height])({rect})")

    def mouse(self, kind, x, y, **more):
        """``Moved``, ``Pressed``, ``Released`` or ``Wheel``; then a frame is drawn."""
        buttons = {} if kind == "Wheel" else {"button": "left", "clickCount": 1}
        if kind == "Moved" and not more.get("buttons"):
            buttons = {}
        self._call("Input.dispatchMouseEvent", type=f"mouse{kind}", x=x, y=y, **{**buttons, **more})
        self.frame()

    def drag(self, begin, end, **more):
        """Press, move and release."""
        self.mouse("Moved", *begin)
        self.mouse("Pressed", *begin, buttons=1, **more)
        self.mouse("Moved", *end, buttons=1, button="left", **more)
        self.mouse("Released", *end, **more)

    def key(self, key):
        """Press a key and let it go."""
        for kind in ("keyDown", "keyUp"):
            self._call("Input.dispatchKeyEvent", type=kind, key=key)
        self.frame()

    def click(self, selector):
        """Press the middle of an element, and let go."""
        left, top, width, height = self.box(selector)
        for kind in ("Moved", "Pressed", "Released"):
            self.mouse(kind, left + width / 2, top + height / 2)

    def prefer(self, scheme):
        """``dark``, ``light``, or an empty text for what a page gets by default."""
        self._call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        self.frame()

    def frame(self):
        """Wait until what was asked for is drawn."""
        self.eval("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(() => done(1))))")

    def screenshot(self, path):
        """The page as an image, for a person to look at."""
        shot = self._call("Page.captureScreenshot", format="png", captureBeyondViewport=True)
        Path(path).write_bytes(base64.b64decode(shot["data"]))

    def _call(self, method, **parameters):
        self._count += 1
        message = {"id": self._count, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._send, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("id") == self._count:
                assert "error" not in answer, f"{method}: {answer['error']}"
                return answer["result"]

    def _wait(self, event):
        while event not in self._events:
            self._next()

    def _next(self):
        deadline = time.monotonic() + self._timeout_s
        while b"\0" not in self._rest:
            left = deadline - time.monotonic()
            ready, _, _ = select.select([self._receive], [], [], max(0.0, left))
            assert ready, f"the browser did not answer in {self._timeout_s} s"
            part = os.read(self._receive, 1 << 16)
            assert part, "the browser ended"
            self._rest += part
        text, self._rest = self._rest.split(b"\0", 1)
        message = json.loads(text)
        self._note(message)
        return message

    def _note(self, message):
        method, parameters = message.get("method"), message.get("params", {})
        if method is not None:
            self._events.append(method)
        if method == "Network.requestWillBeSent":
            self.requests.append(parameters["request"]["url"])
        elif method == "Runtime.exceptionThrown":
            self.errors.append(parameters["exceptionDetails"])
        elif method == "Log.entryAdded" and parameters["entry"]["level"] == "error":
            self.errors.append(parameters["entry"]["text"])


def contrast(one, other):
    """Of two colours as a browser tells them, as the WCAG has it: from 1 to 21."""

    def luminance(colour):
        parts = [float(part) / 255 for part in re.findall(r"[\d.]+", colour)[:3]]
        red, green, blue = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts)
        return 0.2126 * red + 0.7152 * green + 0.0722 * blue

    light, dark = sorted((luminance(one), luminance(other)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


def _pipe():
    """Two ends with high numbers, out of the way of those that the browser is to have."""
    ends = os.pipe()
    high = tuple(fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 16) for end in ends)
    for end in ends:
        os.close(end)
    return high
