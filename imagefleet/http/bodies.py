"""Bodies of requests: bounded in bytes, time, depth and count, and parsed beside the event loop.

A strict reader: what JSON takes long to parse, or forms may be encoded in, is refused before it is
parsed. A large body is read alone of its client's, and parsed alone of all, so that none takes more
than some 250 MB of memory. It is parsed in a thread that parses all of them: each thread keeps what
it has freed.
"""

import asyncio
import contextlib
import ctypes
import email.parser
import json
from asyncio import Semaphore
from collections.abc import AsyncIterator, Callable, Hashable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple, TypeVar
from weakref import WeakValueDictionary

from aiohttp.web import Request

from imagefleet.http.refused import Refused
from imagefleet.validation import JSONDict, JSONObject

#: The longest body: eight images of 2,048 x 2,048 pixels.
MAX_BODY_BYTES = 64 * 2**20

#: A body of more is large.
_LARGE_BYTES = 2**20

#: Small bodies of one client that are read at once.
_SMALL_AT_ONCE = 4

#: Threads that parse small bodies: more would keep the event loop from Python's lock.
_SMALL_THREADS = 2

#: Seconds within which a body has to arrive.
_SECONDS = 60.0

#: Characters of JSON's structure, and escapes, of which a job has fewer than its message has bytes.
_MAX_MARKS = 100_000
#: Some programs escape each slash, which is every 64th character of base64.
_MAX_ESCAPES = 2**21

#: Lists in lists, and values of all; a payload with ControlNets has six and some hundred.
_MAX_DEPTH = 20
_MAX_VALUES = 10_000

#: The longest text that is no image, and the longest key.
_MAX_TEXT = 2**18
_MAX_KEY = 200

#: Parts of a form.
_MAX_PARTS = 64

_CHARSETS = {None, "", "utf-8", "utf8", "us-ascii"}

_Parsed = TypeVar("_Parsed")


#: glibc's option (malloc.h): blocks of so many bytes are given back as they are freed.
_M_MMAP_THRESHOLD = -3


def give_memory_back() -> None:
    """Has the system take large blocks back at once, where its C library can be told to.

    glibc otherwise keeps as much for every thread that has once read a large body.
    """
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, _LARGE_BYTES)


class Form(NamedTuple):
    """The fields of a form, and its files by their fields."""

    fields: dict[str, str]
    files: dict[str, list[bytes]]


class Bodies:
    """Reads the bodies of all requests."""

    def __init__(self) -> None:
        self._large = WeakValueDictionary[Hashable, Semaphore]()
        self._small = WeakValueDictionary[Hashable, Semaphore]()
        self._large_thread = ThreadPoolExecutor(1, "large-body")
        self._small_threads = ThreadPoolExecutor(_SMALL_THREADS, "small-body")

    @contextlib.asynccontextmanager
    async def read(
        self,
        request: Request,
        client: Hashable,
        parse: Callable[[bytearray, str], _Parsed],
    ) -> AsyncIterator[_Parsed]:
        """What *parse*, which gets the content type as well, makes of a body, in a thread.

        Until the block ends, no other large body of the client's is read.
        """
        _check_header(request)
        length = request.content_length
        places = self._small
        most = _SMALL_AT_ONCE
        threads = self._small_threads
        if length is None or length > _LARGE_BYTES:
            places = self._large
            most = 1
            threads = self._large_thread
        place = places.setdefault(client, Semaphore(most))
        async with place:
            body = await _received(request)
            content_type = request.headers.get("Content-Type", "")
            loop = asyncio.get_running_loop()
            yield await loop.run_in_executor(threads, parse, body, content_type)


def _check_header(request: Request) -> None:
    if request.headers.get("Content-Encoding", "identity").lower() != "identity":
        raise Refused(415, "Content-Encoding: compressed bodies are not read")
    if (request.charset or "").lower() not in _CHARSETS:
        raise Refused(415, "charset: bodies are UTF-8")
    if (request.content_length or 0) > MAX_BODY_BYTES:
        raise _too_large()


def _too_large() -> Refused:
    return Refused(413, f"the body has more than {MAX_BODY_BYTES:,} bytes")


async def _received(request: Request) -> bytearray:
    body = bytearray()
    try:
        async with asyncio.timeout(_SECONDS):
            async for data in request.content.iter_any():
                body += data
                if len(body) > MAX_BODY_BYTES:
                    raise _too_large()
    except TimeoutError:
        raise Refused(
            408, f"the body has not arrived in {_SECONDS:g} seconds"
        ) from None
    except ValueError:
        raise Refused(400, "the body is cut off") from None
    return body


def json_object(body: bytearray, _: str = "") -> JSONDict:
    """The JSON object of a body, which it empties; raises Refused."""
    if _has_more(body, (b",", b":", b"[", b"{"), _MAX_MARKS):
        raise Refused(413, "the body has more values than any job")
    if _has_more(body, (b"\\",), _MAX_ESCAPES):
        raise Refused(413, "the body has more escapes than any job")
    try:
        text = body.decode()
        body.clear()
        found = json.loads(text or "{}")
    except (ValueError, RecursionError):
        raise Refused(400, "the body is not JSON") from None
    if not isinstance(found, dict):
        raise Refused(422, "the body should be a JSON object")
    return found


def _has_more(body: bytearray, marks: Iterable[bytes], most: int) -> bool:
    """True if there are more than *most* of these characters; looks no further then."""
    count = 0
    for at in range(0, len(body), _LARGE_BYTES):
        count += sum(body.count(mark, at, at + _LARGE_BYTES) for mark in marks)
        if count > most:
            return True
    return False


def check_values(payload: JSONObject, images: frozenset[str]) -> None:
    """Raises Refused for more than a job has: depth, values, and text but in fields of *images*."""
    left = [(payload, 0, False)]
    count = 0
    while left:
        value, depth, is_image = left.pop()
        count += 1
        if depth > _MAX_DEPTH or count > _MAX_VALUES:
            raise Refused(422, "the body has more values than any job, or deeper ones")
        if isinstance(value, str) and len(value) > _MAX_TEXT and not is_image:
            raise Refused(422, f"a text has more than {_MAX_TEXT:,} characters")
        if isinstance(value, list):
            left += [(each, depth + 1, is_image) for each in value]
        elif isinstance(value, dict):
            if max(map(len, value), default=0) > _MAX_KEY:
                raise Refused(422, f"a key has more than {_MAX_KEY} characters")
            left += [(each, depth + 1, key in images) for key, each in value.items()]


def form(body: bytearray, content_type: str) -> Form:
    """The fields and files of a multipart form, as browsers and clients write them (RFC 7578)."""
    header = _parsed_header(f"Content-Type: {content_type}".encode())
    boundary = header.get_boundary()
    if header.get_content_type() != "multipart/form-data" or not boundary:
        raise Refused(415, "the body should be a form, multipart/form-data")
    separator = b"\r\n--" + boundary.encode()
    body[:0] = b"\r\n"
    # Counted before it is taken apart, which takes as much memory again.
    if _has_more(body, (separator,), _MAX_PARTS):
        parts = []
    else:
        _, *parts = body.split(separator)
    body.clear()
    if not 1 <= len(parts) <= _MAX_PARTS or not parts[-1].startswith(b"--"):
        raise Refused(400, f"the body is not a form of {_MAX_PARTS} parts at most")
    found = Form({}, {})
    for part in parts[:-1]:
        head, _, data = part.partition(b"\r\n\r\n")
        told = _parsed_header(head.lstrip())
        name = str(told.get_param("name", "", "Content-Disposition"))
        if told.get_filename() is not None:
            found.files.setdefault(name.removesuffix("[]"), []).append(bytes(data))
            continue
        if len(data) > _MAX_TEXT:
            raise Refused(422, f"a text has more than {_MAX_TEXT:,} characters")
        try:
            found.fields[name] = data.decode()
        except UnicodeDecodeError:
            raise Refused(415, f"{name[:80]}: forms are UTF-8") from None
    return found


def _parsed_header(head: bytes | bytearray) -> Any:
    if len(head) > _LARGE_BYTES // 64:
        raise Refused(400, "the header of a part is too long")
    return email.parser.BytesHeaderParser().parsebytes(bytes(head))
