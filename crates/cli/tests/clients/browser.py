"""A headless Chromium, over its DevTools pipe: what the scripts that look at pages share."""

import contextlib
import json
import os
import subprocess
import tempfile
import time

PATIENCE = 60
FITS = "document.documentElement.scrollWidth <= window.innerWidth"


class Browser:
    """Commands out on descriptor 3, answers and events in on descriptor 4, each ended by a zero byte."""

    def __init__(self, chromium, folder):
        commands, self.out = os.pipe()
        self.inp, events = os.pipe()

        def wire():
            # Away from 3 and 4 first: the pipes may have these very numbers.
            a, b = os.dup(commands), os.dup(events)
            a, b = os.dup2(a, 103), os.dup2(b, 104)
            os.dup2(a, 3)
            os.dup2(b, 4)

        flags = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run",
                 "--disable-background-networking", "--disable-component-update", "--disable-sync",
                 f"--user-data-dir={folder}", "--remote-debugging-pipe"]
        self.process = subprocess.Popen([chromium, *flags], preexec_fn=wire, close_fds=False,
                                        stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        os.close(commands)
        os.close(events)
        self.rest, self.number, self.events, self.session = b"", 0, [], None

    def command(self, method, **params):
        self.number += 1
        message = {"id": self.number, "method": method, "params": params}
        if self.session:
            message["sessionId"] = self.session
        os.write(self.out, json.dumps(message).encode() + b"\0")
        while True:
            while b"\0" not in self.rest:
                data = os.read(self.inp, 1 << 16)
                assert data, "the browser has gone"
                self.rest += data
            line, self.rest = self.rest.split(b"\0", 1)
            answer = json.loads(line)
            if answer.get("id") == self.number:
                assert "error" not in answer, (method, answer["error"])
                return answer["result"]
            self.events.append(answer)

    def open(self, url, width, height, mobile):
        self.session = None
        target = self.command("Target.createTarget", url="about:blank")["targetId"]
        self.session = self.command("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Runtime", "Log", "Page"):
            self.command(f"{domain}.enable")
        self.command("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=mobile)
        self.command("Page.navigate", url=url)

    def js(self, expression):
        answer = self.command("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in answer, (expression, answer)
        return answer["result"].get("value")

    def wait(self, expression):
        begun = time.monotonic()
        while time.monotonic() - begun < PATIENCE:
            if value := self.js(expression):
                return value
            time.sleep(0.05)
        raise AssertionError(f"waited in vain for {expression}: {self.js('document.body.innerText')}")

    def say(self, text):
        """As a person does: types and presses Enter."""
        self.command("Input.insertText", text=text)
        for kind in ("keyDown", "keyUp"):
            self.command("Input.dispatchKeyEvent", type=kind, key="Enter", code="Enter", windowsVirtualKeyCode=13,
                         text="\r" if kind == "keyDown" else "")

    def complaints(self):
        found = []
        for event in self.events:
            params = event.get("params", {})
            if event["method"] == "Runtime.exceptionThrown":
                found.append(params["exceptionDetails"])
            if event["method"] == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning", "assert"):
                found.append(params["args"])
            if event["method"] == "Log.entryAdded" and params["entry"]["level"] == "error":
                found.append(params["entry"])
        return found


@contextlib.contextmanager
def started(chromium):
    """A browser with a profile of its own that is gone afterwards; it must have nothing to complain about."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        browser = Browser(chromium, folder)
        try:
            yield browser
            assert not browser.complaints(), browser.complaints()
        finally:
            browser.process.kill()
            browser.process.wait()
