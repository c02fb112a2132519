"""A real browser without a driver: headless chromium, spoken to by its own DevTools protocol."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import itertools
import json
import shutil
import subprocess
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
LIVE = "document.getElementById('link')?.dataset.state === 'live'"  # the dashboard is up to date
_FLAGS = [
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-extensions",
    "--disable-background-networking",
    "--disable-component-update",
    "--no-first-run",
    "--remote-debugging-port=0",
]


class Page:
    """One tab."""

    def __init__(self, line: aiohttp.ClientWebSocketResponse) -> None:
        self._line = line
        self._numbers = itertools.count(1)
        self._asked: dict[int, asyncio.Future[Any]] = {}
        self.complaints: list[str] = []  # errors and warnings of the console, exceptions, failed requests
        self.requests: list[str] = []  # every address it asked for
        self.received_bytes = 0  # over WebSockets

    async def listen(self) -> None:
        async for message in self._line:
            told = json.loads(message.data)
            if "id" in told:
                asked = self._asked.pop(told["id"])
                if "error" in told:
                    asked.set_exception(RuntimeError(str(told["error"])))
                else:
                    asked.set_result(told["result"])
            else:
                self._note(told["method"], told["params"])

    def _note(self, method: str, params: dict[str, Any]) -> None:
        match method:
            case "Runtime.exceptionThrown":
                details = params["exceptionDetails"]
                said = details.get("exception", {}).get("description", details["text"])
                self.complaints.append(said)
            case "Runtime.consoleAPICalled" if params["type"] in ("error", "warning", "assert"):
                self.complaints.append(" ".join(str(arg.get("value")) for arg in params["args"]))
            case "Log.entryAdded" if params["entry"]["level"] in ("error", "warning"):
                self.complaints.append(params["entry"]["text"])
            case "Network.requestWillBeSent":
                self.requests.append(params["request"]["url"])
            case "Network.webSocketCreated":
                self.requests.append(params["url"])
            case "Network.webSocketFrameReceived":
                self.received_bytes += len(params["response"]["payloadData"])

    async def do(self, method: str, **params: Any) -> Any:
        number = next(self._numbers)
        self._asked[number] = asyncio.get_running_loop().create_future()
        await self._line.send_str(json.dumps({"id": number, "method": method, "params": params}))
        return await asyncio.wait_for(self._asked[number], 60)

    async def open(self, address: str) -> None:
        await self.do("Page.navigate", url=address)

    async def sign_in(self, address: str, token: str) -> None:
        """Open the dashboard and give the token that it asks for."""
        await self.open(address)
        await self.until("document.getElementById('ask-token')?.open", within_s=60)
        await self.click("#token")
        await self.type(token)
        await self.click("#token-form button")
        await self.until(LIVE, within_s=60)

    async def value(self, expression: str) -> Any:
        told = await self.do(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True, userGesture=True
        )
        if "exceptionDetails" in told:
            raise RuntimeError(told["exceptionDetails"]["exception"].get("description"))
        return told["result"].get("value")

    async def until(self, expression: str, *, within_s: float = 60.0) -> Any:
        """What it is once it is true."""
        told: Any = None
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                while not (told := await self.value(expression)):
                    await asyncio.sleep(0.02)
                return told
        text = await self.value("document.body.innerText")
        raise TimeoutError(
            f"not within {within_s:g} s: {expression}; the page says {text!r}, {self.complaints}"
        )

    async def click(self, selector: str) -> None:
        """With the mouse, where it is: what is covered or hidden cannot be clicked."""
        place = await self.until(
            f"""(() => {{ const found = document.querySelector({json.dumps(selector)});
            if (!found || found.disabled) return null; found.scrollIntoView({{block: "center"}});
            const box = found.getBoundingClientRect();
            return box.width ? {{x: box.x + box.width / 2, y: box.y + box.height / 2}} : null; }})()"""
        )
        await self.click_at(place["x"], place["y"])

    async def click_at(self, x: float, y: float) -> None:
        for kind in ("mousePressed", "mouseReleased"):
            await self.do("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    async def key(self, name: str) -> None:
        for kind in ("keyDown", "keyUp"):
            await self.do("Input.dispatchKeyEvent", type=kind, key=name, code=name)

    async def type(self, text: str) -> None:
        await self.do("Input.insertText", text=text)

    async def look(self, *, width: int, height: int, dark: bool) -> None:
        """The window's size and what the reader prefers."""
        await self.do(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=width < 600,
        )
        await self.do("Emulation.setScrollbarsHidden", hidden=True)  # a picture of the whole page has none
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        await self.do("Emulation.setEmulatedMedia", features=[scheme])

    async def picture(self, path: Path, *, whole: bool = False) -> None:
        """Of the window, or of the whole page."""
        told = await self.do("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(told["data"]))


class Browser:
    def __init__(
        self, process: subprocess.Popen[bytes], address: str, session: aiohttp.ClientSession
    ) -> None:
        self.process, self._address, self._session = process, address, session

    @contextlib.asynccontextmanager
    async def page(self) -> AsyncIterator[Page]:
        async with self._session.put(f"{self._address}/json/new?about:blank") as answer:
            target = await answer.json()
        async with self._session.ws_connect(target["webSocketDebuggerUrl"], max_msg_size=64 << 20) as line:
            page = Page(line)
            listening = asyncio.create_task(page.listen())
            for domain in ("Page", "Runtime", "Log", "Network"):
                await page.do(f"{domain}.enable")
            try:
                yield page
            finally:
                listening.cancel()


@contextlib.asynccontextmanager
async def browser() -> AsyncIterator[Browser]:
    if CHROMIUM is None:
        raise RuntimeError("chromium is not installed (Debian: chromium)")
    with tempfile.TemporaryDirectory(prefix="everstep-browser-", ignore_cleanup_errors=True) as name:
        process = subprocess.Popen(
            [CHROMIUM, *_FLAGS, f"--user-data-dir={name}", "about:blank"],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            port = await _port(Path(name) / "DevToolsActivePort", process)
            async with aiohttp.ClientSession() as session:
                yield Browser(process, f"http://127.0.0.1:{port}", session)
        finally:
            process.terminate()
            try:
                process.wait(5)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


async def _port(path: Path, process: subprocess.Popen[bytes]) -> int:
    async with asyncio.timeout(20):
        while not (path.exists() and path.read_text().count("\n")):
            if process.poll() is not None:
                raise RuntimeError(f"chromium ended with code {process.returncode}")
            await asyncio.sleep(0.02)
    return int(path.read_text().split()[0])
