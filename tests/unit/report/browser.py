"""Chromium without a window, through its debugging protocol over pipes."""

import base64
import contextlib
import json
import os
import select
import shutil
import subprocess
import time

PROGRAM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "chrome"))), None)
_SECONDS = 60.0


class Browser:
    """A browser with one tab.

    Args:
        profile: a new folder.
    """

    def __init__(self, profile):
        requests, self._to = os.pipe()
        self._from, answers = os.pipe()
        options = (
            "--headless=new --no-sandbox --disable-gpu --hide-scrollbars --remote-debugging-pipe"
        )
        # Chromium reads requests from descriptor 3, and writes answers to 4.
        command = f'exec "$0" "$@" 3<&{requests} 4>&{answers}'
        self._process = subprocess.Popen(
            ["bash", "-c", command, PROGRAM, *options.split(), f"--user-data-dir={profile}"],
            pass_fds=(requests, answers),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            # It lives for several tests, and starts processes in them.
            env=dict(os.environ) | {"HVDKIT_TEST_SERVER": "chromium"},
            start_new_session=True,
        )
        os.close(requests)
        os.close(answers)
        self._number, self._buffer, self.events = 0, b"", []
        self._session = None
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Network", "Log", "Runtime"):
            self.call(f"{domain}.enable")

    def call(self, method, **parameters):
        """Call a method of the protocol, and return its result."""
        self._number += 1
        request = {"id": self._number, "method": method, "params": parameters}
        if self._session is not None:
            request["sessionId"] = self._session
        os.write(self._to, json.dumps(request).encode() + b"\0")
        deadline = time.monotonic() + _SECONDS
        while True:
            message = self._next(deadline)
            if message.get("id") == self._number:
                assert "error" not in message, message
                return message["result"]
            self.events.append(message)

    def _next(self, deadline):
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._from], [], [], max(deadline - time.monotonic(), 0))
            assert ready, "the browser does not answer"
            data = os.read(self._from, 1 << 20)
            assert data, "the browser has ended"
            self._buffer += data
        message, _, self._buffer = self._buffer.partition(b"\0")
        return json.loads(message)

    def open(self, path, width=1280, media="screen", scheme="light"):
        """Open a page in a window of a width."""
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=900,
            deviceScaleFactor=1,
            mobile=False,
        )
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self.call("Emulation.setEmulatedMedia", media=media, features=features)
        self.events.clear()
        self.call("Page.navigate", url=path.absolute().as_uri())
        deadline = time.monotonic() + _SECONDS
        while not any(event.get("method") == "Page.loadEventFired" for event in self.events):
            self.events.append(self._next(deadline))

    def evaluate(self, expression):
        """Return the value of an expression in the page."""
        result = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    def picture(self, path):
        """Write a picture of the whole page."""
        data = self.call("Page.captureScreenshot", captureBeyondViewport=True)["data"]
        path.write_bytes(base64.b64decode(data))

    def paper(self, path):
        """Write the page as PDF."""
        options = {"printBackground": False, "paperWidth": 8.27, "paperHeight": 11.69}
        path.write_bytes(base64.b64decode(self.call("Page.printToPDF", **options)["data"]))

    def close(self):
        """End the browser."""
        with contextlib.suppress(OSError, AssertionError):
            self._session = None
            self.call("Browser.close")
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(10)
        os.close(self._to)
        os.close(self._from)
