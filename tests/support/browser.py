"""One page of a headless Chromium, driven over the DevTools protocol. It knows no page of ours.

The browser is the one that CHROMIUM names, else one on the path, else QtWebEngine.
"""

from __future__ import annotations

import asyncio
import importlib.util
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import httpx
from waiting import until

from sgray.launch_server import free_ports

NAMES = ("chromium", "chromium-headless-shell", "chromium-browser", "google-chrome")
NARROW = 600  # below so many pixels a screen is a telephone's
KEYS = {"Tab": (9, None), "Enter": (13, "\r"), "Escape": (27, None)}
TIMEOUT_S = 30.0


def browser_command() -> list[str] | None:
    """What starts a browser on this machine; None where there is none."""
    if named := os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, NAMES)), None):
        return [named, "--headless", "about:blank"]
    if importlib.util.find_spec("PyQt6") and importlib.util.find_spec("PyQt6.QtWebEngineWidgets"):
        return [sys.executable, str(Path(__file__).with_name("qt_browser.py"))]
    return None


@contextmanager
def opened(command: list[str]) -> Iterator[Page]:
    """The page of a browser of its own, which ends with the block, and its processes with it."""
    port = free_ports(1)[0]
    with tempfile.TemporaryDirectory(prefix="sgray-browser-", ignore_cleanup_errors=True) as folder:
        log = Path(folder) / "log"
        with log.open("wb") as output:
            browser = subprocess.Popen(
                # Chromium's sandbox refuses root, and wants a kernel that lets users have namespaces.
                [*command, "--no-sandbox", f"--remote-debugging-port={port}", f"--user-data-dir={folder}/profile"],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        try:
            page = Page(_address(browser, port, log))
            try:
                yield page
            finally:
                page.close()
        finally:
            with suppress(ProcessLookupError):  # it ended by itself
                os.killpg(browser.pid, signal.SIGKILL)
            browser.wait()


def _address(browser: subprocess.Popen[bytes], port: int, log: Path) -> str:
    """Where the page of a browser that starts listens."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and browser.poll() is None:
        try:
            targets = httpx.get(f"http://127.0.0.1:{port}/json", timeout=TIMEOUT_S, trust_env=False).json()
        except httpx.TransportError:
            targets = []
        for target in targets:
            if target["type"] == "page":
                return str(target["webSocketDebuggerUrl"])
        time.sleep(0.1)
    raise AssertionError(f"{browser.args} did not start: {log.read_text(errors='replace')[-4000:]}")


class Page:
    """What a person does at a page and sees of it, and what the browser says of it since it was opened last."""

    def __init__(self, address: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._count = 0
        self._events: list[tuple[str, dict[str, Any]]] = []
        self._loop.run_until_complete(self._connect(address))
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def close(self) -> None:
        """Let go of the browser, which goes on."""
        self._loop.run_until_complete(self._session.close())
        self._loop.close()

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """The answer to one command of the protocol."""
        return self._loop.run_until_complete(asyncio.wait_for(self._call(method, params), TIMEOUT_S))

    def open(self, url: str, *, width: int = 1200, height: int = 900) -> None:
        """Load a page on a screen of that many pixels."""
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < NARROW
        )
        self.call("Page.navigate", url="about:blank")
        self.until("location.href === 'about:blank'")
        self._events.clear()
        told = self.call("Page.navigate", url=url)
        assert "errorText" not in told, told
        self.until("location.href !== 'about:blank' && document.readyState === 'complete'")

    def value(self, expression: str) -> Any:
        """What an expression of JavaScript is worth in the page."""
        told = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in told, told["exceptionDetails"]
        return told["result"].get("value")

    def until(self, expression: str, timeout_s: float = 60.0) -> None:
        """Wait for an expression to be true."""
        until(lambda: self.value(expression), f"never true: {expression}; {self.complaints()}", timeout_s)

    def write(self, text: str) -> None:
        """Put text in where the cursor is."""
        self.call("Input.insertText", text=text)

    def press(self, key: str) -> None:
        """Press and release a key of KEYS."""
        code, text = KEYS[key]
        names = {"key": key, "code": key, "windowsVirtualKeyCode": code}
        self.call("Input.dispatchKeyEvent", type="keyDown", **names, **({} if text is None else {"text": text}))
        self.call("Input.dispatchKeyEvent", type="keyUp", **names)

    def tab_to(self, element: str) -> None:
        """Move by the keyboard alone to the element of that id."""
        for _ in range(20):
            self.press("Tab")
            if self.value("document.activeElement.id") == element:
                return
        raise AssertionError(f"the Tab key never comes to {element}")

    def complaints(self) -> list[str]:
        """Errors and warnings of the console, exceptions that nobody caught, and what was refused or failed to load."""
        self.value("0")  # takes in what was said until now
        said = []
        for method, params in self._events:
            if method == "Runtime.exceptionThrown":
                said.append(str(params["exceptionDetails"]))
            elif method == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning", "assert"):
                said.append(str(params["args"]))
            elif method == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
                said.append(f"{params['entry']['text']} {params['entry'].get('url', '')}")
        return said

    def hosts(self) -> set[str]:
        """Whom the page asked for anything: host and port."""
        self.value("0")
        urls = [params["request"]["url"] for method, params in self._events if method == "Network.requestWillBeSent"]
        return {host for url in urls if (host := urlsplit(url).netloc)}

    async def _connect(self, address: str) -> None:
        self._session = aiohttp.ClientSession()
        self._socket = await self._session.ws_connect(address, max_msg_size=0)

    async def _call(self, method: str, params: dict[str, Any]) -> dict[str, Any]:
        self._count += 1
        await self._socket.send_json({"id": self._count, "method": method, "params": params})
        async for message in self._socket:
            told = message.json()
            if told.get("id") == self._count:
                assert "error" not in told, (method, told["error"])
                return dict(told["result"])
            self._events.append((told["method"], told.get("params", {})))
        raise AssertionError("the browser is gone")
