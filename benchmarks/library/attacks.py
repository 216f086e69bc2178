"""Everything that one client of a gateway may send to keep the others waiting.

    python benchmarks/library/attacks.py PORT KIND

`strangers.py` starts it, at the lowest priority of the processor: a stranger has a machine of its
own. It goes on until it is killed.
"""

import asyncio
import base64
import contextlib
import io
import itertools
import json
import os
import sys
import zlib
from collections.abc import Awaitable, Callable
from typing import Any

import aiohttp
from PIL import Image

KEY = "stranger-key"
HEADERS = {"Authorization": f"Bearer {KEY}"}

TXT2IMG, IMG2IMG = "/sdapi/v1/txt2img", "/sdapi/v1/img2img"
GENERATIONS, EDITS = "/v1/images/generations", "/v1/images/edits"

#: Requests at once, and connections with half a header.
AT_ONCE = 64
HALVES = 1_100

#: Between two bytes of a slow body.
SLOW_SECONDS = 1.0

MEBIBYTE = 2**20

Body = bytes | dict[str, Any]


class Stranger:
    """A client with a valid key that sends what it should not."""

    def __init__(self, port: int, session: aiohttp.ClientSession) -> None:
        self.port = port
        self._session = session
        self._numbers = itertools.count()

    async def post(
        self, path: str, body: Body, headers: dict[str, str] | None = None
    ) -> None:
        """Sends a body and takes the answer, whatever it is."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        terms = {"headers": {**HEADERS, **(headers or {})}, "compress": None}
        with contextlib.suppress(aiohttp.ClientError, TimeoutError, OSError):
            async with self._session.post(
                path, data=io.BytesIO(data), **terms
            ) as answer:
                await answer.read()

    async def get(self, path: str) -> None:
        with contextlib.suppress(aiohttp.ClientError, TimeoutError, OSError):
            async with self._session.get(path, headers=HEADERS) as answer:
                await answer.read()

    async def send_raw(self, head: str) -> asyncio.StreamWriter:
        """Opens a connection and sends the beginning of a request."""
        _, writer = await asyncio.open_connection("127.0.0.1", self.port)
        writer.write(head.encode())
        await writer.drain()
        return writer

    def prompt(self) -> dict[str, Any]:
        """A payload that nobody has sent before."""
        number = next(self._numbers)
        return {"prompt": f"stranger {number}", "width": 64, "height": 64, "steps": 1}


Attack = Callable[[Stranger], Awaitable[None]]


def _posted(path: str, body: Body, **headers: str) -> Attack:
    async def attack(stranger: Stranger) -> None:
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        await stranger.post(path, body, named)

    return attack


def _picture(side: int) -> str:
    made = io.BytesIO()
    Image.effect_noise((side, side), 90).convert("RGB").save(made, "PNG")
    return base64.b64encode(made.getvalue()).decode()


async def _half_a_header(stranger: Stranger) -> None:
    """A connection that never says what it wants."""
    writer = await stranger.send_raw(f"POST {TXT2IMG} HTTP/1.1\r\nHost: local")
    await writer.wait_closed()


async def _slow_body(stranger: Stranger) -> None:
    """A body that comes byte by byte."""
    head = f"POST {TXT2IMG} HTTP/1.1\r\nHost: localhost\r\nContent-Length: 900000\r\n"
    writer = await stranger.send_raw(f"{head}Authorization: Bearer {KEY}\r\n\r\n")
    while not writer.is_closing():
        writer.write(b" ")
        await writer.drain()
        await asyncio.sleep(SLOW_SECONDS)


async def _never_read(stranger: Stranger) -> None:
    """Requests in a row whose answers nobody takes."""
    one = (
        f"GET /openapi.json HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {KEY}"
    )
    writer = await stranger.send_raw(f"{one}\r\n\r\n" * 200)
    await writer.wait_closed()


async def _hang_up(stranger: Stranger) -> None:
    """A request whose client is gone before it is answered."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(0.05):
            await stranger.post(TXT2IMG, stranger.prompt())


async def _connect(stranger: Stranger) -> None:
    writer = await stranger.send_raw("")
    writer.close()


async def _many_images(stranger: Stranger) -> None:
    """A job of 400 images."""
    await stranger.post(TXT2IMG, stranger.prompt() | {"n_iter": 400})


async def _as_many_as_allowed(stranger: Stranger) -> None:
    """Valid requests, each for one image."""
    await stranger.post(TXT2IMG, stranger.prompt())


async def _unknown_model(stranger: Stranger) -> None:
    await stranger.post(GENERATIONS, {"prompt": "a", "model": "gpt-image-1"})
    await stranger.post(TXT2IMG, stranger.prompt() | {"model": "another"})


async def _poll(stranger: Stranger) -> None:
    for path in ("progress", "sd-models", "loras", "options", "upscalers"):
        await stranger.get(f"/sdapi/v1/{path}")
    for path in ("/jobs/nothing", "/jobs/nothing/0", "/metrics", "/docs"):
        await stranger.get(path)


def _nested() -> list[Attack]:
    bodies = (
        (TXT2IMG, b'{"a":' * (12 * MEBIBYTE)),
        (GENERATIONS, b"[" * (60 * MEBIBYTE)),
        (TXT2IMG, b'{"prompt": [' + b'"AA",' * (10 * MEBIBYTE)),
    )
    return 4 * [_posted(*body) for body in bodies]


def _encoded() -> list[Attack]:
    json_type = "application/json; charset=punycode"
    packed = zlib.compress(bytes(100 * MEBIBYTE), 1) * 10
    plain = _posted(TXT2IMG, b"a" * (20 * MEBIBYTE), Content_Type=json_type)
    return 8 * [plain, _posted(TXT2IMG, packed, Content_Encoding="deflate")]


def _long_prompts() -> list[Attack]:
    prompts = (
        "(" * 10_000 + ")" * 10_000,
        "[" * 5_000,
        "a, " * 80_000,
        "((a:1.1)" * 9_000,
    )
    return 8 * [_posted(TXT2IMG, {"prompt": prompt}) for prompt in prompts]


def _forms() -> list[Attack]:
    part = b'--x\r\nContent-Disposition: form-data; name="a"\r\n\r\n1\r\n'
    form = "multipart/form-data; boundary=x"
    bodies = (part * 500_000 + b"--x--\r\n", b"\r\n" * (30 * MEBIBYTE))
    return 4 * [_posted(EDITS, body, Content_Type=form) for body in bodies]


def _large_images() -> list[Attack]:
    picture = _picture(2_048)
    eight = [_picture(1_024)] * 8
    return 4 * [
        _posted(IMG2IMG, {"prompt": "a", "init_images": [picture]}),
        _posted(IMG2IMG, {"prompt": "a", "init_images": eight}),
        _posted("/sdapi/v1/png-info", {"image": picture}),
    ]


#: What each kind sends, as often at once.
KINDS: dict[str, Callable[[], list[Attack]]] = {
    "nested JSON": _nested,
    "charsets and deflate": _encoded,
    "brackets and long prompts": _long_prompts,
    "forms of many parts": _forms,
    "half a header": lambda: HALVES * [_half_a_header],
    "connections": lambda: AT_ONCE * [_connect],
    "slow bodies": lambda: 200 * [_slow_body],
    "answers never read": lambda: 200 * [_never_read],
    "large images": _large_images,
    "models that nobody has": lambda: AT_ONCE * [_unknown_model],
    "polls": lambda: AT_ONCE * [_poll],
    "requests hung up on": lambda: AT_ONCE * [_hang_up],
    "jobs of 400 images": lambda: 4 * [_many_images],
    "as many images as allowed": lambda: 400 * [_as_many_as_allowed],
}


def _all_at_once() -> list[Attack]:
    """A quarter of each."""
    return [attack for made in list(KINDS.values()) for attack in made()[::4]]


KINDS_AND_ALL = {**KINDS, "all at once": _all_at_once}


async def attack(port: int, kind: str) -> None:
    """Sends what *kind* says, again and again."""
    timeout = aiohttp.ClientTimeout(None)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(
        f"http://127.0.0.1:{port}", connector=connector, timeout=timeout
    ) as session:
        stranger = Stranger(port, session)

        async def repeat(sent: Attack) -> None:
            while True:
                with contextlib.suppress(OSError):
                    await sent(stranger)
                await asyncio.sleep(0)

        repeated = KINDS_AND_ALL[kind]()
        print("ready", flush=True)
        await asyncio.gather(*map(repeat, repeated))


def main() -> None:
    os.nice(19)
    asyncio.run(attack(int(sys.argv[1]), sys.argv[2]))


if __name__ == "__main__":
    main()
