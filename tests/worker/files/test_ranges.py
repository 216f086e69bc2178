"""Every answer that RFC 9110 allows to a request for a range, from a real server."""

import gzip
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
from aiohttp import web

from imagefleet import concurrency, errors
from worker.files.disk_cache import DiskCache
from worker.files.download import Download, HttpSource

CONTENT = os.urandom(3_000_000)
OTHER = os.urandom(len(CONTENT))
SIZE = len(CONTENT)

#: A connection that breaks off has brought so much: no progress that resets the count of tries.
BROKEN = 500_000

#: One that is cut after this has brought some.
CUT = 1_200_000

TRIES = 6
POLICY = concurrency.RetryPolicy(
    tries=TRIES, first_wait_seconds=0.001, longest_wait_seconds=0.001
)

#: Requests that suffice for any answer, with a file of three times what counts as progress.
MOST_REQUESTS = 4 * TRIES


@dataclass(slots=True)
class Answer:
    """An answer; without a *length* it ends with its connection, *cut* before its end."""

    status: int
    headers: Mapping[str, str] = field(default_factory=dict)
    body: bytes = b""
    has_length: bool = True
    cut: int | None = None


#: Answers a request from an offset on (None: for all), by its number among those for a range.
Respond = Callable[[int | None, int], Answer]

STRONG = {"ETag": '"v1"'}
WHOLE = Answer(200, STRONG, CONTENT)


def part(begin: int, end: int = SIZE - 1, *, status: int = 206) -> Answer:
    return stating(begin, f"bytes {begin}-{end}/{SIZE}", end, status)


def stating(
    begin: int, content_range: str, end: int = SIZE - 1, status: int = 206
) -> Answer:
    """A part of the file that the answer says is another, perhaps."""
    headers = STRONG | {"Content-Range": content_range}
    return Answer(status, headers, CONTENT[begin : end + 1])


def ranged(
    answer: Callable[[int], Answer], *, every: bool = True, whole: Answer = WHOLE
) -> Respond:
    """Answers requests for a range with *answer*, or the first one alone; else properly."""

    def respond(offset: int | None, number: int) -> Answer:
        if offset is None:
            return whole
        return answer(offset) if every or number == 1 else part(offset)

    return respond


def always(answer: Answer) -> Respond:
    return lambda _offset, _number: answer


def redirected(offset: int | None, number: int) -> Answer:
    if number % 2:
        return Answer(302, {"Location": "/other"})
    return WHOLE if offset is None else part(offset)


UNKNOWN_LENGTH = Answer(200, STRONG, CONTENT, has_length=False)

GZIP = {"Content-Encoding": "gzip"}
WEAK = {"ETag": 'W/"v1"'}

ENDS_WHOLE: Mapping[str, Respond] = {
    "206": ranged(part),
    "200": ranged(lambda _: WHOLE),
    "200-with-the-range": ranged(lambda at: part(at, status=200)),
    "200-with-another-range": ranged(lambda at: part(at + 1, status=200)),
    "206-that-overlaps": ranged(lambda at: part(at - 1000)),
    "206-that-begins-at-0": ranged(lambda _: part(0)),
    "206-of-blocks-over-a-line-that-is-cut": ranged(
        lambda at: replace(part(at - at % 100_000), cut=CUT)
    ),
    "206-of-unknown-size-over-a-line-that-is-cut": ranged(
        lambda at: replace(stating(at, f"bytes {at}-{SIZE - 1}/*"), cut=CUT)
    ),
    "206-that-is-shorter": ranged(lambda at: part(at, min(at + 10**6, SIZE) - 1)),
    "206-of-another-range": ranged(lambda at: part(at + 1000)),
    "206-without-its-range": ranged(lambda at: Answer(206, STRONG, CONTENT[at:])),
    "206-of-unknown-size": ranged(lambda at: stating(at, f"bytes {at}-9999999/*")),
    "206-of-another-size": ranged(
        lambda at: stating(at, f"bytes {at}-{SIZE - 1}/9999999")
    ),
    "206-of-another-version": ranged(
        lambda at: Answer(206, {**part(at).headers, "ETag": '"v2"'}, OTHER[at:])
    ),
    "206-of-several-ranges": ranged(
        lambda at: Answer(
            206, STRONG | {"Content-Type": "multipart/byteranges; boundary=x"}, b"--x"
        )
    ),
    "206-longer-than-the-file": ranged(
        lambda at: Answer(
            206, part(at).headers, CONTENT[at:] + b"more", has_length=False
        )
    ),
    "416": ranged(lambda _: Answer(416)),
    "416-with-the-size": ranged(
        lambda _: Answer(416, {"Content-Range": f"bytes */{SIZE}"})
    ),
    "412": ranged(lambda _: Answer(412)),
    "redirect": redirected,
    "429-and-500": ranged(lambda _: Answer(429), every=False),
    "unknown-length": always(UNKNOWN_LENGTH),
    "weak-etag": ranged(
        lambda _: Answer(200, WEAK, CONTENT), whole=Answer(200, WEAK, CONTENT)
    ),
    "compressed": always(Answer(200, STRONG | GZIP, gzip.compress(CONTENT, 1))),
    "206-to-a-request-for-all": lambda at, _: part(at or 0),
}

ENDS_IN_AN_ERROR: Mapping[str, tuple[Respond, str]] = {
    "always-cut": (always(Answer(200, STRONG, CONTENT, cut=1_500_000)), "broke off"),
    "always-cut-of-changing-versions": (
        lambda _offset, number: Answer(
            200, {"ETag": f'"v{number}"'}, CONTENT, cut=1_500_000
        ),
        "broke off",
    ),
    "nothing-but-another-range": (
        always(part(7)),
        "another part of the file than was asked for",
    ),
    "always-206-without-a-range": (
        always(Answer(206, STRONG, CONTENT)),
        "another part",
    ),
    "tiny-ranges": (
        lambda at, _: part(at or 0, (at or 0) + 9),
        "sent 10 bytes and no more",
    ),
    "always-416": (always(Answer(416)), "HTTP 416"),
    "redirects-in-a-circle": (
        always(Answer(302, {"Location": "/other"})),
        "TooManyRedirects",
    ),
    "304": (always(Answer(304)), "HTTP 304"),
}


@dataclass(slots=True)
class Server:
    """Answers as *respond* says; the first answer with the whole file breaks off."""

    respond: Respond
    requests: int = 0
    for_a_range: int = 0
    url: str = ""

    async def answer(self, request: web.BaseRequest) -> web.StreamResponse:
        self.requests += 1
        asked = request.headers.get("Range")
        offset = int(asked.removeprefix("bytes=").removesuffix("-")) if asked else None
        self.for_a_range += offset is not None
        found = self.respond(
            offset, self.requests if offset is None else self.for_a_range
        )
        is_first = self.requests == 1 and found.status == 200
        response = web.StreamResponse(status=found.status, headers=found.headers)
        if found.has_length:
            response.content_length = len(found.body)
        else:
            response.enable_chunked_encoding()
        await response.prepare(request)
        cut = BROKEN if is_first and found.cut is None else found.cut
        await response.write(found.body[:cut])
        if cut is not None and cut < len(found.body):
            transport = request.transport
            assert transport is not None
            transport.close()
        return response


Serve = Callable[[Respond], Awaitable[Server]]


@pytest.fixture
async def serve() -> AsyncIterator[Serve]:
    runners: list[web.ServerRunner] = []

    async def start(respond: Respond) -> Server:
        server = Server(respond)
        runner = web.ServerRunner(web.Server(server.answer), shutdown_timeout=0)
        runners.append(runner)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        server.url = f"http://127.0.0.1:{runner.addresses[0][1]}/x"
        return server

    yield start
    for runner in runners:
        await runner.cleanup()


def download(server: Server, folder: Path) -> Download:
    source = HttpSource(server.url, requires_https=False)

    def check(path: Path, is_whole: bool) -> None:
        if is_whole and path.read_bytes() != CONTENT:
            raise errors.SetupError("another file")

    folder.mkdir(exist_ok=True)
    return Download(DiskCache(folder), "x", source, None, 1, check)


@pytest.mark.parametrize("name", ENDS_WHOLE)
async def test_any_answer_to_a_request_for_the_rest_ends_in_the_whole_file(
    serve: Serve, tmp_path, name: str
):
    """After one that sends more than was asked for, it does not begin again."""
    server = await serve(ENDS_WHOLE[name])
    found = download(server, tmp_path / "cache")
    await found.run(POLICY)
    assert found.part.read_bytes() == CONTENT
    assert server.requests <= MOST_REQUESTS
    if "cut" in name or name == "206-that-overlaps":
        assert server.requests - server.for_a_range == 1


@pytest.mark.parametrize(
    ("respond", "why"), ENDS_IN_AN_ERROR.values(), ids=ENDS_IN_AN_ERROR
)
async def test_a_server_that_never_sends_the_file_is_given_up_with_a_reason(
    serve: Serve, tmp_path, respond: Respond, why: str
):
    server = await serve(respond)
    with pytest.raises((errors.TransientError, errors.SetupError), match=why):
        await download(server, tmp_path / "cache").run(POLICY)
    assert server.requests <= 10 * TRIES  # so many redirects are followed
