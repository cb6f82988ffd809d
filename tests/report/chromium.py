"""A headless Chromium driven over its debugging pipe: no network, no package beside the browser."""

import json
import os
import shutil
import signal
import tempfile
import time
from base64 import b64decode
from pathlib import Path

import pytest

CHROMIUM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
needs_chromium = pytest.mark.skipif(
    CHROMIUM is None, reason="no Chromium here; on Debian: apt-get install chromium"
)


class Page:
    """One open page and everything it complained about."""

    def __init__(self, browser, session):
        self.browser, self.session = browser, session
        self.complaints = []
        self.requests = []
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method, **parameters):
        return self.browser.call(method, parameters, self.session, self._hear)

    def _hear(self, event):
        name, told = event.get("method"), event.get("params", {})
        if name == "Runtime.exceptionThrown":
            self.complaints.append(told["exceptionDetails"].get("exception", told))
        elif name == "Runtime.consoleAPICalled" and told["type"] in ("error", "warning", "assert"):
            self.complaints.append(told["args"])
        elif name == "Log.entryAdded" and told["entry"]["level"] in ("error", "warning"):
            self.complaints.append(told["entry"]["text"])
        elif name == "Network.requestWillBeSent":
            self.requests.append(told["request"]["url"])

    def look(self, width=1100, height=900, dark=False, media="screen"):
        """Set the window and what the reader prefers."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        self.call("Emulation.setDeviceMetricsOverride", **size)
        prefers = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", media=media, features=[prefers])

    def open(self, path):
        self.call("Page.navigate", url=Path(path).resolve().as_uri())
        self.wait_for("document.readyState === 'complete'")

    def evaluate(self, script):
        found = self.call(
            "Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def wait_for(self, condition):
        while not self.evaluate(condition):
            time.sleep(0.02)

    def hover(self, x, y):
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def screenshot(self, path, whole=True):
        shot = self.call(
            "Page.captureScreenshot", format="png", captureBeyondViewport=whole, **self._clip(whole)
        )
        Path(path).write_bytes(b64decode(shot["data"]))

    def _clip(self, whole):
        if not whole:
            return {}
        size = self.call("Page.getLayoutMetrics")["cssContentSize"]
        return {
            "clip": {"x": 0, "y": 0, "width": size["width"], "height": size["height"], "scale": 1}
        }


class Browser:
    """A process of its own with a profile of its own, gone when closed."""

    def __init__(self):
        self.profile = tempfile.mkdtemp(prefix="chromium-")
        commands, self._write = os.pipe()
        self._read, events = os.pipe()
        arguments = [
            CHROMIUM, "--headless=new", "--remote-debugging-pipe", "--no-sandbox", "--disable-gpu",
            "--disable-dev-shm-usage", "--no-first-run", "--disable-background-networking",
            "--disable-extensions", "--disable-component-update", f"--user-data-dir={self.profile}",
        ]  # fmt: skip
        quiet = os.open(os.devnull, os.O_RDWR)
        # Chromium reads commands from descriptor 3 and writes events to 4.
        high = [os.dup2(commands, 1003), os.dup2(events, 1004)]
        self.process = os.posix_spawn(
            CHROMIUM,
            arguments,
            os.environ | {"HOME": self.profile},
            file_actions=[
                (os.POSIX_SPAWN_DUP2, high[0], 3),
                (os.POSIX_SPAWN_DUP2, high[1], 4),
                *((os.POSIX_SPAWN_DUP2, quiet, stream) for stream in (0, 1, 2)),
            ],
            setpgroup=0,
        )
        for used in (commands, events, quiet, *high):
            os.close(used)
        self._count, self._heard = 0, b""

    def call(self, method, parameters=None, session=None, hear=lambda event: None):
        self._count += 1
        message = {"id": self._count, "method": method, "params": parameters or {}}
        if session:
            message["sessionId"] = session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while True:
            reply = self._next()
            if reply.get("id") == self._count:
                assert "error" not in reply, f"{method}: {reply['error']}"
                return reply["result"]
            hear(reply)

    def _next(self):
        while b"\0" not in self._heard:
            piece = os.read(self._read, 1 << 20)
            assert piece, "Chromium has gone"
            self._heard += piece
        line, _, self._heard = self._heard.partition(b"\0")
        return json.loads(line)

    def page(self):
        target = self.call("Target.createTarget", {"url": "about:blank"})["targetId"]
        attach = {"targetId": target, "flatten": True}
        return Page(self, self.call("Target.attachToTarget", attach)["sessionId"])

    def close(self):
        os.killpg(self.process, signal.SIGKILL)
        os.waitpid(self.process, 0)
        os.close(self._write)
        os.close(self._read)
        shutil.rmtree(self.profile, ignore_errors=True)
