"""A real browser for tests: headless Chromium, spoken to by its DevTools protocol."""

from __future__ import annotations

import itertools
import json
import shutil
import subprocess
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from websockets.sync.client import connect

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


class Browser:
    """One page. `problems`: errors on its console, exceptions, refused resources."""

    def __init__(self, width: int = 1280, height: int = 800, *, dark: bool = False) -> None:
        assert CHROMIUM is not None
        self._folder = tempfile.TemporaryDirectory(prefix="featcache-browser-", ignore_cleanup_errors=True)
        arguments = [
            "--headless=new",
            "--no-sandbox",
            "--disable-gpu",
            "--disable-dev-shm-usage",
            "--no-first-run",
        ]
        arguments += ["--disable-background-networking", "--remote-debugging-port=0", "about:blank"]
        self._process = subprocess.Popen(
            [CHROMIUM, f"--user-data-dir={self._folder.name}", *arguments],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        self._numbers = itertools.count(1)
        self.problems: list[str] = []
        self._stack = ExitStack()
        self._socket = self._stack.enter_context(connect(self._address(), max_size=None, compression=None))
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        self._session = session
        for domain in ("Runtime", "Log", "Page", "Network"):
            self.call(f"{domain}.enable")
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=width < 600,
        )
        scheme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self.call("Emulation.setEmulatedMedia", features=scheme)

    _session: str | None = None

    def _address(self) -> str:
        ports = Path(self._folder.name) / "DevToolsActivePort"
        deadline = time.monotonic() + 30
        while not (ports.exists() and ports.read_text().count("\n") >= 1):
            assert self._process.poll() is None and time.monotonic() < deadline, "the browser doesn't start"
            time.sleep(0.05)
        port, path = ports.read_text().splitlines()[:2]
        return f"ws://127.0.0.1:{port}{path}"

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        number = next(self._numbers)
        message: dict[str, Any] = {"id": number, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        self._socket.send(json.dumps(message))
        while True:
            answer = json.loads(self._socket.recv(timeout=30))
            if answer.get("id") == number:
                assert "error" not in answer, (method, answer["error"])
                result: dict[str, Any] = answer["result"]
                return result
            self._note(answer)

    def _note(self, event: dict[str, Any]) -> None:
        method, params = event.get("method"), event.get("params", {})
        if method == "Log.entryAdded" and params["entry"]["level"] == "error":
            self.problems.append(params["entry"]["text"])
        elif method == "Runtime.exceptionThrown":
            self.problems.append(json.dumps(params["exceptionDetails"])[:500])
        elif method == "Runtime.consoleAPICalled" and params["type"] == "error":
            self.problems.append(json.dumps(params["args"])[:500])

    def open(self, url: str) -> None:
        self.call("Page.navigate", url=url)

    def run(self, script: str) -> Any:
        """The value of an expression in the page."""
        answer = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def wait_for(self, script: str, seconds: float = 20) -> Any:
        """The first true value of an expression, which may fail until then."""
        deadline = time.monotonic() + seconds
        patient = f"(() => {{ try {{ return {script} }} catch {{ return null }} }})()"
        while not (value := self.run(patient)):
            assert time.monotonic() < deadline, f"never true: {script}"
            time.sleep(0.05)
        return value

    def press(self, key: str) -> None:
        codes = {"Tab": 9, "Enter": 13}
        text = {"text": "\r"} if key == "Enter" else {}
        for kind in ("keyDown", "keyUp"):
            extra = text if kind == "keyDown" else {}
            self.call(
                "Input.dispatchKeyEvent",
                type=kind,
                key=key,
                code=key,
                windowsVirtualKeyCode=codes[key],
                **extra,
            )

    def type(self, text: str) -> None:
        self.call("Input.insertText", text=text)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()
        self._process.terminate()
        self._process.wait(20)
        self._folder.cleanup()
