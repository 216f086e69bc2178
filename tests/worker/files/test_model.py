"""Downloads from a real server over connections that break."""

import asyncio
import hashlib
import json
import os
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from aiohttp import web
from yarl import URL

import polling
from header_files import LORA, REFINER, file_of
from imagefleet import concurrency, errors
from imagefleet.storage.open import Storage, open_storage
from imagefleet.storage.protocol import BlobStore
from imagefleet.storage.settings import StorageSettings
from tar_files import tar_of
from worker import tasks
from worker.files import disk_cache, download, model
from worker.settings import WorkerSettings

CONTENT = file_of(data=os.urandom(3_000_000))
SHA256 = hashlib.sha256(CONTENT).hexdigest()
IMPATIENT = concurrency.RetryPolicy(
    tries=4, first_wait_seconds=0.001, longest_wait_seconds=0.001
)


@dataclass(slots=True)
class ModelServer:
    """Serves one file; the next answers break off after so many bytes, or are only a status."""

    folder: Path  # where its client has its cache
    content: bytes = CONTENT
    disposition: str | None = None
    etag: str | None = '"v1"'
    takes_ranges: bool = True
    breaks_after: list[int] = field(default_factory=list)
    statuses: list[int] = field(default_factory=list)
    hangs: bool = False
    over: asyncio.Event = field(default_factory=asyncio.Event)
    url: str = ""
    ranges: list[str | None] = field(default_factory=list)
    sent_bytes: int = 0

    def has_stored(self, begin: int, part: bytes) -> bool:
        """Whether the client has what was sent last."""
        found = [file.stat().st_size for file in self.folder.rglob("*.part")]
        return not part or max(found, default=0) >= begin + len(part)

    async def answer(self, request: web.Request) -> web.StreamResponse:
        self.ranges.append(request.headers.get("Range"))
        if self.statuses:
            return web.Response(status=self.statuses.pop(0))
        hangs = self.hangs
        begin = 0
        same = request.headers.get("If-Range") in {None, self.etag}
        if self.takes_ranges and same and (asked := request.headers.get("Range")):
            begin = int(asked.removeprefix("bytes=").removesuffix("-"))
        if begin >= len(self.content):
            return web.Response(status=416)
        response = web.StreamResponse(status=206 if begin else 200)
        if begin:
            last = len(self.content) - 1
            response.headers["Content-Range"] = (
                f"bytes {begin}-{last}/{len(self.content)}"
            )
        if self.etag:
            response.headers["ETag"] = self.etag
        if self.disposition:
            response.headers["Content-Disposition"] = self.disposition
        response.content_length = len(self.content) - begin
        await response.prepare(request)
        rest = self.content[begin:]
        part = rest[: self.breaks_after.pop(0)] if self.breaks_after else rest
        await response.write(part)
        self.sent_bytes += len(part)
        if hangs:
            await self.over.wait()
        if len(part) < len(rest):
            transport = request.transport
            assert transport is not None
            # An error drops what the client has not taken yet.
            await polling.until(
                lambda: transport.is_closing() or self.has_stored(begin, part)
            )
            transport.abort()
        return response


@pytest.fixture
async def server(tmp_path) -> AsyncIterator[ModelServer]:
    served = ModelServer(tmp_path)
    runner = web.ServerRunner(web.Server(served.answer), shutdown_timeout=0)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    served.url = f"http://127.0.0.1:{runner.addresses[0][1]}/models/sd15.safetensors"
    yield served
    served.over.set()
    await runner.cleanup()


class Client:
    """A worker that fetches a model, by default that of the server."""

    def __init__(self, url: str, folder: Path, blobs: BlobStore) -> None:
        self._fields = {
            "model": url,
            "model_sha256": SHA256,
            "cache": folder / "cache",
            "storage": f"local:{folder}",
        }
        self.blobs = blobs

    def settings(self, **changes: Any) -> WorkerSettings:
        return WorkerSettings(**{**self._fields, **changes})

    async def fetch(self, **changes: Any) -> Path:
        settings = self.settings(**changes)
        await model.fetch(settings, self.blobs, IMPATIENT)
        return model.local_path(settings)


@pytest.fixture
def client(server: ModelServer, tmp_path, local_settings: StorageSettings) -> Client:
    return Client(server.url, tmp_path, open_storage(local_settings).files)


def kept_in(folder: Path) -> set[str]:
    """All but the locks."""
    return {each.name for each in folder.iterdir() if each.suffix != ".lock"}


async def test_a_path_is_used_as_it_is_and_nothing_is_fetched(
    client: Client, server: ModelServer
):
    path = Path("models/sd15")
    assert await client.fetch(model=path, model_sha256=None) == path
    assert server.ranges == []


async def test_a_broken_download_resumes_where_it_was(
    client: Client, server: ModelServer
):
    server.breaks_after = [1_000_000, 500_000]
    place = await client.fetch()
    assert place.read_bytes() == CONTENT
    assert place.name == "sd15.safetensors"
    assert server.ranges[0] is None
    assert len(server.ranges) == 3
    assert server.sent_bytes < 1.2 * len(CONTENT)
    assert kept_in(place.parent) == {"sd15.safetensors"}


async def test_more_breaks_than_tries_are_survived_while_something_arrives(
    client: Client,
    server: ModelServer,
    monkeypatch,
):
    monkeypatch.setattr(download, "PROGRESS_BYTES", 100_000)
    server.breaks_after = [300_000] * 8
    assert (await client.fetch()).read_bytes() == CONTENT


async def test_a_restarted_worker_resumes_the_download(
    client: Client, server: ModelServer
):
    server.breaks_after = [1_000_000]
    server.hangs = True
    running = asyncio.create_task(client.fetch())
    await polling.until(lambda: server.has_stored(0, bytes(1_000_000)))
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    server.hangs = False
    assert (await client.fetch()).read_bytes() == CONTENT
    assert server.ranges[1] is not None
    assert server.sent_bytes < 1.2 * len(CONTENT)


async def test_what_was_fetched_once_is_not_requested_again(
    client: Client, server: ModelServer
):
    await client.fetch()
    # A token is renewed; the file behind it is the same.
    await client.fetch(model=f"{server.url}?sig=another")
    assert len(server.ranges) == 1


async def test_another_hash_is_refused_with_both_named(client: Client):
    other = {"model_sha256": "0" * 64}
    with pytest.raises(errors.SetupError, match=f"{SHA256}, not {'0' * 64}"):
        await client.fetch(**other)
    assert kept_in(model.local_path(client.settings(**other)).parent) == set()


async def test_without_a_hash_https_must_not_lead_to_plain_http(
    server: ModelServer,
):
    source = download.HttpSource(server.url, requires_https=True)
    with pytest.raises(errors.SetupError, match="--model-sha256"):
        async with source.opened(0, None):
            pass


def test_without_a_hash_not_even_one_hop_may_be_plain_http():
    source = download.HttpSource(
        "https://a.example/sd15.safetensors", requires_https=True
    )
    hop = SimpleNamespace(url=URL("http://b.example/sd15"))
    response: Any = SimpleNamespace(url=URL("https://c.example/sd15"), history=(hop,))
    with pytest.raises(errors.SetupError, match="plain http"):
        source._answer(response, 0)


async def test_a_refusal_is_reported_at_once_and_without_the_token(
    client: Client, server: ModelServer
):
    server.statuses = [403] * 9
    with pytest.raises(errors.SetupError, match="HTTP 403") as refused:
        await client.fetch(model=f"{server.url}?sig=secret")
    assert "secret" not in str(refused.value)
    assert len(server.ranges) == 1


async def test_a_busy_server_is_asked_again_and_given_up_if_it_stays_busy(
    client: Client, server: ModelServer
):
    server.statuses = [503, 429]
    await client.fetch()
    server.statuses = [503] * 9
    with pytest.raises(errors.TransientError, match="HTTP 503"):
        await client.fetch(model=server.url.replace("sd15", "other"))


async def test_a_stalled_server_is_given_up_and_asked_again(
    client: Client,
    server: ModelServer,
    monkeypatch,
):
    monkeypatch.setattr(download, "STALL_SECONDS", 0.2)
    server.breaks_after = [1_500_000]
    server.hangs = True
    running = asyncio.create_task(client.fetch())
    await polling.until(lambda: server.ranges)
    server.hangs = False  # the first answer is in it already
    assert (await running).read_bytes() == CONTENT


# Addresses that do not tell what they are of


@pytest.mark.parametrize(
    ("disposition", "name"),
    [
        ('attachment; filename="dreamshaper_8.safetensors"', "dreamshaper_8"),
        ("attachment; filename*=UTF-8''epic%20v2.safetensors", "epic v2"),
        ('attachment; filename="../../outside.safetensors"', "128713"),
        ('attachment; filename="..%2Foutside.safetensors"', "128713"),
        ('attachment; filename="a.ckpt"', "128713"),
        ("inline", "128713"),
        (None, "128713"),
    ],
)
async def test_an_address_without_a_suffix_is_taken_by_its_content_and_the_servers_name(
    disposition: str | None,
    name: str,
    client: Client,
    server: ModelServer,
    tmp_path,
):
    server.disposition = disposition
    address = server.url.replace(
        "models/sd15.safetensors", "api/download/models/128713?type=Model"
    )
    place = await client.fetch(model=f"{address}&token=one")

    assert place.name == f"{name}.safetensors"
    assert place.read_bytes() == CONTENT
    assert kept_in(place.parent) == {place.name}
    assert await client.fetch(model=f"{address}&token=another") == place
    assert len(server.ranges) == 1
    assert "outside" not in str(list(os.walk(tmp_path)))


async def test_such_a_download_resumes_with_its_name(
    client: Client, server: ModelServer
):
    server.disposition = 'attachment; filename="dreams.safetensors"'
    server.breaks_after = [1_500_000] + [0] * 9
    address = server.url.replace("sd15.safetensors", "1")
    with pytest.raises(errors.TransientError):
        await client.fetch(model=address)
    server.breaks_after = []
    server.disposition = None
    assert (await client.fetch(model=address)).name == "dreams.safetensors"
    assert server.sent_bytes < 1.2 * len(CONTENT)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"<!doctype html><title>Log in</title>" + b" " * 2_000_000, "is a web page"),
        (b'{"error": "Unauthorized"}', "is JSON"),
        (b"PK\x03\x04" + os.urandom(1000), "is a pickle.*convert it: python -c"),
        (file_of(*LORA), "is a LoRA for"),
        (file_of(*REFINER, data=bytes(3_000_000)), "an SDXL refiner checkpoint"),
        (CONTENT[:-1], "is cut off"),
    ],
    ids=["page", "json", "pickle", "LoRA", "REFINER", "cut off"],
)
@pytest.mark.parametrize("path", ["models/1?token=secret", "models/sd15.safetensors"])
async def test_a_download_that_is_no_checkpoint_is_refused_and_not_kept(
    path: str,
    content: bytes,
    reason: str,
    client: Client,
    server: ModelServer,
):
    server.content = content
    is_cut_off = reason == "is cut off"  # which only its end tells
    server.breaks_after = [] if is_cut_off else [1_500_000]
    settings = {
        "model": server.url.replace("models/sd15.safetensors", path),
        "model_sha256": hashlib.sha256(content).hexdigest(),
    }
    with pytest.raises(errors.SetupError, match=reason) as refused:
        await client.fetch(**settings)
    assert "secret" not in refused.value.message
    assert len(server.ranges) == 1
    assert kept_in(model.local_path(client.settings(**settings)).parent) == set()


async def test_two_workers_share_one_download_and_one_says_that_it_fetched(
    client: Client, caplog
):
    caplog.set_level("INFO")
    first, second = await asyncio.gather(*(client.fetch() for _ in range(2)))
    assert first == second
    assert sum(message.endswith("is fetched") for message in caplog.messages) == 1


async def test_a_worker_that_stops_does_not_wait_for_the_model(
    client: Client, server: ModelServer
):
    server.breaks_after = [1_000_000]
    server.hangs = True
    stop = asyncio.Event()
    asyncio.get_running_loop().call_later(0.1, stop.set)
    fetching = model.fetch(client.settings(), client.blobs, IMPATIENT)
    assert not await tasks.run_until(stop, fetching)


async def test_a_disk_that_is_too_small_is_reported_before_it_is_full(
    client: Client,
    server: ModelServer,
    monkeypatch,
):
    monkeypatch.setattr(disk_cache, "SPARE_BYTES", 10**15)
    with pytest.raises(errors.NodeError, match="larger disk"):
        await client.fetch()


# Folders in diffusers' format, as .tar


@pytest.mark.parametrize("suffix", [".tar", ""])
@pytest.mark.parametrize("top", ["", "sd15/"])
async def test_a_tar_becomes_the_folder_in_it(
    suffix: str,
    top: str,
    client: Client,
    server: ModelServer,
):
    names = {f"{top}model_index.json": b"{}", f"{top}unet/config.json": b'{"a": 1}'}
    server.content = tar_of(names)
    server.url = server.url.replace(".safetensors", suffix)
    sha256 = hashlib.sha256(server.content).hexdigest()
    place = await client.fetch(model=server.url, model_sha256=sha256.upper())
    assert place.name == "sd15"
    assert (place / "unet" / "config.json").read_bytes() == b'{"a": 1}'
    assert kept_in(place.parent) == {"sd15"}


# models/ in the storage


async def test_a_model_comes_from_the_storage(
    storage: Storage, client: Client, monkeypatch
):
    client.blobs = storage.files
    monkeypatch.setattr(download, "_PART_BYTES", 300_000)
    kind = "application/octet-stream"
    content = file_of(data=os.urandom(800_000))
    await storage.files.create("models/sd/v15.safetensors", content, kind, {})
    place = await client.fetch(model="store:sd/v15.safetensors", model_sha256=None)
    assert place.read_bytes() == content


async def test_a_part_of_a_model_that_the_storage_has_no_more_is_fetched_again(
    storage: Storage, client: Client
):
    client.blobs = storage.files
    content = file_of(data=b"weights" * 100)
    await storage.files.create("models/v15.safetensors", content, "text/plain", {})
    stored = {"model": "store:v15.safetensors", "model_sha256": None}
    folder = model.local_path(client.settings(**stored)).parent
    folder.mkdir(parents=True)
    (folder / "v15.safetensors.part").write_bytes(b"of one that was larger" * 100)
    state = {"total_bytes": 10_000, "version": "old"}
    (folder / "v15.safetensors.part.json").write_text(json.dumps(state))
    assert (await client.fetch(**stored)).read_bytes() == content


async def test_a_model_that_is_not_in_the_storage_is_named(
    storage: Storage, client: Client
):
    client.blobs = storage.files
    with pytest.raises(errors.SetupError, match="models/v15"):
        await client.fetch(model="store:v15.safetensors", model_sha256=None)
