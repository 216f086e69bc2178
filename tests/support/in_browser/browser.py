"""Drives a headless Chromium by the DevTools protocol: pages as people see and use them."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import itertools
import json
import shutil
import subprocess
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import aiohttp

BROWSERS = (
    "chromium",
    "chromium-browser",
    "google-chrome",
    "google-chrome-stable",
    "chrome",
)

START_SECONDS = 40

#: Between two looks: a frame or so.
_PAUSE_SECONDS = 0.015
#: For an answer: of a whole scroll, say.
TIMEOUT_SECONDS = 60.0

#: For a condition.
UNTIL_SECONDS = 30.0

#: Windows key codes, which the protocol asks for; a letter's is that of its capital.
_KEYS = {
    "Tab": 9,
    "Enter": 13,
    "Escape": 27,
    "PageUp": 33,
    "PageDown": 34,
    "End": 35,
    "Home": 36,
    "ArrowLeft": 37,
    "ArrowUp": 38,
    "ArrowRight": 39,
    "ArrowDown": 40,
}


def find() -> str | None:
    """The browser's program, if there is one."""
    return next(filter(None, map(shutil.which, BROWSERS)), None)


class Page:
    """A tab. Its errors and what it logs are in `complaints`."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self.complaints: list[str] = []
        self._socket = socket
        self._numbers = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._reading = asyncio.create_task(self._read())

    async def _read(self) -> None:
        async for message in self._socket:
            answer = json.loads(message.data)
            if waiting := self._waiting.pop(answer.get("id"), None):
                waiting.set_result(answer)
            elif answer.get("method") == "Runtime.exceptionThrown":
                details = answer["params"]["exceptionDetails"]
                thrown = details.get("exception", {}).get("description", "")
                self.complaints.append(f"{details['text']} {thrown}")
            elif answer.get("method") == "Log.entryAdded":
                entry = answer["params"]["entry"]
                if entry["level"] == "error":
                    self.complaints.append(f"{entry['text']} {entry.get('url', '')}")

    async def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Calls a method of the protocol."""
        number = next(self._numbers)
        self._waiting[number] = asyncio.get_running_loop().create_future()
        await self._socket.send_json(
            {"id": number, "method": method, "params": parameters}
        )
        async with asyncio.timeout(TIMEOUT_SECONDS):
            answer = await self._waiting[number]
        if "error" in answer:
            raise RuntimeError(f"{method}: {answer['error']['message']}")
        result: dict[str, Any] = answer["result"]
        return result

    async def start(self) -> None:
        for domain in ("Page", "Runtime", "Log", "Network"):
            await self.call(f"{domain}.enable")

    async def open(self, url: str) -> None:
        await self.call("Page.navigate", url=url)

    async def evaluate(self, expression: str) -> Any:
        """The value of an expression in the page, a promise's too."""
        found = await self.call(
            "Runtime.evaluate",
            expression=expression,
            returnByValue=True,
            awaitPromise=True,
        )
        if "exceptionDetails" in found:
            raise RuntimeError(found["exceptionDetails"]["exception"]["description"])
        return found["result"].get("value")

    async def until(self, condition: str, seconds: float = UNTIL_SECONDS) -> Any:
        """The value of an expression as soon as it is true; polls every frame or so."""
        deadline = time.monotonic() + seconds
        expression = f"(value => value instanceof Node || value)({condition})"
        while True:
            with contextlib.suppress(RuntimeError):  # the page may not be there yet
                if value := await self.evaluate(expression):
                    return value
            if time.monotonic() > deadline:
                raise TimeoutError(f"not true after {seconds} seconds: {condition}")
            await asyncio.sleep(_PAUSE_SECONDS)

    async def press(self, key: str) -> None:
        """Presses and releases a key; a character is typed."""
        is_text = len(key) == 1
        code = ord(key.upper()) if is_text else _KEYS[key]
        text = {"text": key} if is_text else {"text": "\r"} if key == "Enter" else {}
        event = {"key": key, "windowsVirtualKeyCode": code}
        await self.call("Input.dispatchKeyEvent", type="keyDown", **event, **text)
        await self.call("Input.dispatchKeyEvent", type="keyUp", **event)

    async def write(self, text: str) -> None:
        await self.call("Input.insertText", text=text)

    async def click(self, selector: str) -> None:
        """Clicks in the middle of an element."""
        x, y = await self.until(
            f"(e => e && (r => [r.x + r.width / 2, r.y + r.height / 2])(e.getBoundingClientRect()))"
            f"(document.querySelector({json.dumps(selector)}))"
        )
        for kind in ("mousePressed", "mouseReleased"):
            await self.call(
                "Input.dispatchMouseEvent",
                type=kind,
                x=x,
                y=y,
                button="left",
                clickCount=1,
            )

    async def resize(self, width: int, height: int, *, scale: float = 1) -> None:
        await self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=scale,
            mobile=width < 600,
        )

    async def use_colors(self, scheme: str) -> None:
        """`dark` or `light`."""
        feature = {"name": "prefers-color-scheme", "value": scheme}
        await self.call("Emulation.setEmulatedMedia", features=[feature])

    async def screenshot(self) -> bytes:
        """A PNG of what is on the screen."""
        taken = await self.call("Page.captureScreenshot", format="png")
        return base64.b64decode(taken["data"])

    async def close(self) -> None:
        await self._socket.close()
        self._reading.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._reading


@contextlib.contextmanager
def running(program: str) -> Iterator[Browser]:
    """A headless browser with a profile of its own, which is deleted in the end."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        command = [
            program,
            "--headless=new",
            "--no-sandbox",
            "--disable-gpu",
            "--hide-scrollbars",
        ]
        command += [
            "--remote-debugging-port=0",
            f"--user-data-dir={profile}",
            "about:blank",
        ]
        with subprocess.Popen(
            command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        ) as process:
            try:
                yield Browser(_port(Path(profile, "DevToolsActivePort")))
            finally:
                process.terminate()


def _port(file: Path) -> int:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        with contextlib.suppress(FileNotFoundError, IndexError):
            return int(file.read_text().splitlines()[0])
        time.sleep(_PAUSE_SECONDS)
    raise TimeoutError("the browser did not start")


class Browser:
    """A running browser."""

    def __init__(self, port: int) -> None:
        self._url = f"http://127.0.0.1:{port}"

    @contextlib.asynccontextmanager
    async def page(
        self, *, width: int = 1280, height: int = 800
    ) -> AsyncIterator[Page]:
        """A new tab."""
        async with aiohttp.ClientSession(self._url) as client:
            async with client.put("/json/new?about:blank") as answer:
                tab = await answer.json()
            async with client.ws_connect(
                tab["webSocketDebuggerUrl"], max_msg_size=2**27
            ) as socket:
                page = Page(socket)
                await page.start()
                await page.resize(width, height)
                try:
                    yield page
                finally:
                    await page.close()
                    async with client.get(f"/json/close/{tab['id']}"):
                        pass
