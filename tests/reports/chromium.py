"""Headless Chromium over the DevTools protocol: just what looking at a page needs."""

from __future__ import annotations

import base64
import json
import shutil
import subprocess
import tempfile
from pathlib import Path
from types import TracebackType
from typing import Any

import websocket

FLAGS = [
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-component-update",
    "--disable-background-networking", "--disable-sync", "--hide-scrollbars", "--remote-debugging-port=0",
    "--remote-allow-origins=*",
]  # fmt: skip
DEADLINE_S = 30


def find() -> str | None:
    """Return the path of Chromium, or None."""
    return next((p for name in ("chromium", "chromium-browser", "google-chrome") if (p := shutil.which(name))), None)


class Browser:
    """One Chromium with one page. Use as a context manager."""

    def __init__(self, binary: str) -> None:
        self._home = tempfile.TemporaryDirectory(prefix="pdproof-chromium-", ignore_cleanup_errors=True)
        """Its helpers may write for a moment longer than it lives."""
        self._process = subprocess.Popen(
            [binary, *FLAGS, f"--user-data-dir={self._home.name}", "about:blank"],
            stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True,
        )  # fmt: skip
        self._socket = self._connect()
        self._serial = 0
        self.problems: list[str] = []
        """What the console, the page's own errors and failed loads said."""
        target = self.call("Target.getTargets")["targetInfos"]
        page = next(t["targetId"] for t in target if t["type"] == "page")
        self._session = str(self.call("Target.attachToTarget", targetId=page, flatten=True)["sessionId"])
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def _connect(self) -> websocket.WebSocket:
        assert self._process.stderr is not None
        for line in self._process.stderr:
            if "DevTools listening on " in line:
                return websocket.create_connection(line.split(" on ")[1].strip(), timeout=DEADLINE_S)
        raise RuntimeError("Chromium ended before it listened")

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """Send one command and return its result; events that arrive meanwhile are looked through for problems."""
        self._serial += 1
        message: dict[str, Any] = {"id": self._serial, "method": method, "params": params}
        if hasattr(self, "_session") and not method.startswith("Target."):
            message["sessionId"] = self._session
        self._socket.send(json.dumps(message))
        while True:
            answer = json.loads(self._socket.recv())
            if answer.get("id") == self._serial:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']}")
                return dict(answer["result"])
            self._note(answer)

    def _note(self, event: dict[str, Any]) -> None:
        method, params = event.get("method"), event.get("params", {})
        if method in ("Log.entryAdded", "Runtime.exceptionThrown", "Runtime.consoleAPICalled", "Network.loadingFailed"):
            self.problems.append(f"{method}: {json.dumps(params)[:400]}")
        url = params.get("request", {}).get("url", "") if method == "Network.requestWillBeSent" else ""
        if url and not url.startswith(("file:", "data:", "about:")):
            self.problems.append(f"asked the network for {url}")

    def show(self, page: Path, width: int, *, dark: bool = False) -> None:
        """Load `page` at this width and colour scheme, and wait until it is laid out."""
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=False
        )  # fmt: skip
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self.call("Page.navigate", url=page.resolve().as_uri())
        self.value("new Promise(r => document.readyState === 'complete' ? r(1) : addEventListener('load', () => r(1)))")

    def value(self, expression: str) -> Any:
        """Evaluate JavaScript (a promise is waited for) and return its value."""
        result = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in result:
            raise RuntimeError(json.dumps(result["exceptionDetails"])[:400])
        return result["result"].get("value")

    def picture(self, out: Path, top: int = 0, height: int = 0) -> None:
        """Write a PNG of the page, or of `height` pixels of it from `top` on."""
        size = self.value("[document.documentElement.scrollWidth, document.documentElement.scrollHeight]")
        clip = {"x": 0, "y": top, "width": size[0], "height": height or size[1], "scale": 1}
        picture = self.call("Page.captureScreenshot", clip=clip, captureBeyondViewport=True)
        out.write_bytes(base64.b64decode(picture["data"]))

    def __enter__(self) -> Browser:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._socket.close()
        self._process.terminate()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(10)
        if self._process.stderr is not None:
            self._process.stderr.close()
        self._home.cleanup()
