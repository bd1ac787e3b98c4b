# SPDX-License-Identifier: Apache-2.0
"""Headless Chromium over its debugging pipe, with nothing but the standard library."""
import base64
import json
import os
import select
import shutil
import subprocess
import tempfile
import time

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


def find():
    """The browser named by LOOPGAUGE_BROWSER, else the first on PATH; None when there is none."""
    named = os.environ.get("LOOPGAUGE_BROWSER")
    return named or next((path for path in map(shutil.which, NAMES) if path), None)


class Page:
    """One page of one browser; a context manager."""

    def __init__(self, program):
        self._profile = tempfile.TemporaryDirectory()
        to_browser, self._write = os.pipe()
        self._read, from_browser = os.pipe()

        def use_pipes():
            os.dup2(to_browser, 3)
            os.dup2(from_browser, 4)
            os.set_inheritable(3, True)
            os.set_inheritable(4, True)

        self._process = subprocess.Popen(
            [program, "--headless=new", "--remote-debugging-pipe", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars",
             "--no-first-run", f"--user-data-dir={self._profile.name}", "about:blank"],
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, close_fds=False, preexec_fn=use_pipes)
        os.close(to_browser)
        os.close(from_browser)
        self._pending, self._last, self._session, self.events = b"", 0, None, []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.call(f"{domain}.enable")

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._process.terminate()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        os.close(self._write)
        os.close(self._read)
        shutil.rmtree(self._profile.name, ignore_errors=True)

    def _receive(self, deadline):
        while b"\0" not in self._pending:
            ready, _, _ = select.select([self._read], [], [], max(0.0, deadline - time.monotonic()))
            if not ready:
                raise TimeoutError("the browser does not answer")
            data = os.read(self._read, 1 << 20)
            if not data:
                raise RuntimeError("the browser ended")
            self._pending += data
        text, self._pending = self._pending.split(b"\0", 1)
        return json.loads(text)

    def call(self, method, timeout=120, **parameters):
        self._last += 1
        message = {"id": self._last, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        deadline = time.monotonic() + timeout
        while True:
            answer = self._receive(deadline)
            if answer.get("id") == self._last:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']['message']}")
                return answer["result"]
            if "method" in answer:
                self.events.append(answer)

    def evaluate(self, expression):
        """The value of a JavaScript expression; a promise is awaited."""
        result = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in result:
            raise RuntimeError(result["exceptionDetails"].get("exception", {}).get("description", "exception"))
        return result["result"].get("value")

    def open(self, path, fragment="", width=1280, height=900, dark=False, media="", ready="document.documentElement.dataset.ready === 'true'"):
        """Loads a local file and waits for `ready`; returns the seconds from the start of navigation."""
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600)
        self.call("Emulation.setEmulatedMedia", media=media, features=[{"name": "prefers-color-scheme", "value": "dark" if dark else "light"},
                                                                       {"name": "prefers-reduced-motion", "value": "reduce"}])
        self.call("Page.navigate", url="about:blank")
        self.events.clear()
        begin = time.monotonic()
        self.call("Page.navigate", url=f"file://{os.path.abspath(path)}{fragment}")
        while not self.evaluate(f"location.href !== 'about:blank' && document.readyState === 'complete' && ({ready})"):
            if time.monotonic() - begin > 120:
                raise TimeoutError(f"{path} is not ready after 120 s")
            time.sleep(0.02)
        self.evaluate("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")
        return time.monotonic() - begin

    def screenshot(self, path, whole=False):
        options = {}
        if whole:
            options["captureBeyondViewport"] = True
            size = self.call("Page.getLayoutMetrics")["cssContentSize"]
            options["clip"] = {"x": 0, "y": 0, "width": size["width"], "height": min(size["height"], 12000), "scale": 1}
        data = self.call("Page.captureScreenshot", format="png", **options)["data"]
        with open(path, "wb") as file:
            file.write(base64.b64decode(data))

    def pdf(self, path):
        data = self.call("Page.printToPDF", printBackground=True, preferCSSPageSize=True)["data"]
        with open(path, "wb") as file:
            file.write(base64.b64decode(data))

    def press(self, key, code=None, text=None, modifiers=0):
        event = {"key": key, "code": code or key, "modifiers": modifiers, "windowsVirtualKeyCode": {"Tab": 9, "Enter": 13, "Escape": 27, "End": 35}.get(key, 0)}
        if key == "Enter":
            text = "\r"
        if text:
            event["text"] = text
        self.call("Input.dispatchKeyEvent", type="keyDown", **event)
        self.call("Input.dispatchKeyEvent", type="keyUp", **{name: value for name, value in event.items() if name != "text"})

    def complaints(self):
        """Exceptions, console errors and messages of the browser (content security policy, failed loads) since the page was opened."""
        self.evaluate("0")
        out = []
        for event in self.events:
            if event["method"] == "Runtime.exceptionThrown":
                out.append(event["params"]["exceptionDetails"].get("exception", {}).get("description", "exception"))
            elif event["method"] == "Log.entryAdded" and event["params"]["entry"]["level"] in ("error", "warning"):
                out.append(event["params"]["entry"]["text"])
            elif event["method"] == "Runtime.consoleAPICalled" and event["params"]["type"] in ("error", "warning", "assert"):
                out.append(str(event["params"]["args"]))
        return out

    def requests(self):
        """URLs that were asked for since the page was opened, the page itself left out."""
        self.evaluate("0")
        urls = [event["params"]["request"]["url"] for event in self.events if event["method"] == "Network.requestWillBeSent"]
        return [url for url in urls if not url.startswith("file://")]
