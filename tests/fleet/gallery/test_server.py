"""What the page is served: on both storages, as records come, and to no other site's page."""

import asyncio
import hashlib
import io
import json
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import aiohttp
import pytest
from PIL import Image
from yarl import URL

import made_records
import polling
import sent_jobs
from fleet.keys import mint
from imagefleet import errors, redaction
from imagefleet.job.message import read_job
from imagefleet.records.log import RecordLog
from imagefleet.records.record import Lora, Record
from imagefleet.storage.azure.roles import ROLES
from imagefleet.storage.open import Storage, open_storage
from imagefleet.storage.settings import StorageSettings

HOSTILE = "<img src=x onerror=alert(1)>\x1b[2J\u202e\"'</script>"


def picture(color: str = "teal", size: int = 64) -> bytes:
    stored = io.BytesIO()
    Image.new("RGB", (size, size), color).save(stored, "PNG")
    return stored.getvalue()


async def store(storage: Storage, log: RecordLog, number: int, **fields: Any) -> None:
    """Stores an image with its record."""
    blob = f"spring/{number}.png"
    await storage.blobs.create(blob, picture(), "image/png", {})
    known = {
        "outcome": "completed",
        "id": str(number),
        "campaign": "spring",
        "blob": blob,
    }
    known["sha256"] = hashlib.sha256(picture()).hexdigest()
    at = datetime(2026, 11, 22, 12, number % 60, tzinfo=UTC)
    await log.add([Record.model_validate(known | {"at": at} | fields)])


async def fail(storage: Storage, log: RecordLog, number: int, **fields: Any) -> Record:
    """Moves a job to the poison queue, with its record."""
    body = {"prompt": "a cat", "id": f"f{number}", "campaign": "spring"}
    await storage.queue.send([json.dumps(body)])
    [message] = await storage.queue.receive(1, 60)
    job = read_job(message.body, message.id)
    await made_records.dead_letter(
        storage, message, job, errors.MissingFileError("no LoRA"), "w1"
    )
    await storage.queue.delete(message)
    known = {
        "outcome": "failed",
        "id": f"f{number}",
        "campaign": "spring",
        "source": message.id,
    }
    known |= {"at": datetime.now(UTC), "error": "MissingFileError", "reason": "no LoRA"}
    record = Record.model_validate(known | {"prompt": "a cat"} | fields)
    await log.add([record])
    return record


@pytest.fixture
def log(storage: Storage) -> RecordLog:
    return RecordLog(storage.blobs, "worker-1")


async def test_images_appear_as_they_are_stored(
    storage: Storage,
    storage_settings: StorageSettings,
    log: RecordLog,
    serve,
):
    async with serve(storage_settings) as served:
        assert (await served.get("/api/campaigns", first=1))["newest"] is None
        await store(
            storage, log, 1, prompt="a red house", loras=(Lora("ink", 1),), worker="w1"
        )
        found = await polling.until(
            lambda: served.get("/api/campaigns", first=1), lambda found: found["newest"]
        )
        assert found["campaigns"] == ["spring"]
        await served.state_when(lambda state: state["total"] == 1, campaign="spring")
        await store(storage, log, 2, prompt="a blue fish", worker="w2")
        await sent_jobs.note(storage, "spring", 5, ids=("1", "2"))
        state = await served.state_when(
            lambda state: state["total"] == 2, campaign="spring"
        )
        assert state["counts"] == {
            "images": 2,
            "failed": 0,
            "cancelled": 0,
            "dropped": 0,
        }
        assert (state["jobs"], state["problem"]) == (2, "")
        names = await served.get("/api/names", campaign="spring")
        assert names["lora"] == [["ink", 1]]
        of_lora = {"campaign": "spring", "lora": "ink"}
        assert (await served.get("/api/state", **of_lora))["total"] == 1
        found = await served.get("/api/rows", **of_lora, **{"from": 0, "count": 9})
        [[seq, job, prompt, reason]] = found["rows"]
        assert (job, prompt, reason) == ("1", "a red house", None)
        for path in ("thumbnail", "picture"):
            async with served.client.get(
                f"/{path}?campaign=spring&seq={seq}"
            ) as answer:
                with Image.open(io.BytesIO(await answer.read())) as shown:
                    assert (answer.status, shown.size) == (200, (64, 64))
                    assert (
                        answer.content_type == f"image/{(shown.format or '').lower()}"
                    )


async def test_a_copied_job_draws_the_same_image_again(
    storage: Storage, storage_settings: StorageSettings, log: RecordLog, serve
):
    sent = read_job(
        '{"prompt": "a <lora:ink:0.5> cat", "steps": 7, "campaign": "spring"}', "x"
    )
    fields = {
        "seed": 12,
        "sampler": sent.sampler,
        "steps": 7,
        "cfg_scale": 7.0,
        "clip_skip": 1,
    }
    fields |= {"prompt": sent.prompt, "negative_prompt": "", "width": 64, "height": 128}
    await store(storage, log, 1, **fields, metadata={"order": 7})
    async with serve(storage_settings) as served:
        await served.state_when(lambda state: state["total"] == 1, campaign="spring")
        record = await served.get("/api/record", campaign="spring", seq=1)
    job = read_job(record["text"], "new")
    assert (job.id, job.campaign, job.metadata) == ("new", "spring", {"order": 7})
    for name in (
        "prompt",
        "steps",
        "cfg_scale",
        "sampler",
        "clip_skip",
        "negative_prompt",
    ):
        assert getattr(job, name) == getattr(sent, name)
    assert (job.seed, job.width, job.height) == (12, 64, 128)


async def test_the_monitors_token_shows_all(azurite_settings: StorageSettings, serve):
    async with open_storage(azurite_settings) as storage:
        await storage.create()
        log = RecordLog(storage.blobs, "worker-1")
        await store(storage, log, 1)
        await fail(storage, log, 1)
        minted = mint.Minter(azurite_settings).mint(
            ROLES["monitor"], timedelta(hours=1)
        )
        update = {"storage": minted.storage, "sas": minted.sas}
        reading = StorageSettings(**(azurite_settings.model_dump() | update))
        async with serve(reading) as served:
            await served.state_when(
                lambda state: state["total"] == 1, campaign="spring", tab="failed"
            )
            rows = await served.get(
                "/api/rows", campaign="spring", **{"from": 0, "count": 1}
            )
            image = f"/thumbnail?campaign=spring&seq={rows['rows'][0][0]}"
            async with served.client.get(image) as answer:
                assert answer.status == 200


@pytest.fixture
async def local(local_settings: StorageSettings) -> StorageSettings:
    """A local storage with an image and a failed job."""
    async with open_storage(local_settings) as storage:
        await storage.create()
        log = RecordLog(storage.blobs, "worker-1")
        await store(
            storage, log, 1, prompt=HOSTILE, worker=HOSTILE, loras=(Lora(HOSTILE, 1),)
        )
        await fail(storage, log, 1, reason=HOSTILE, error=HOSTILE)
    return local_settings


#: The Host of a request, and whether it is answered.
HOSTS = {
    "127.0.0.1:{port}": 200,
    "localhost:{port}": 200,
    "[::1]:{port}": 200,
    "LOCALHOST": 200,
    "evil.example": 403,
    "evil.example:{port}": 403,
    "127.0.0.1.evil.example:{port}": 403,
    "localhost.evil.example": 403,
    "127.0.0.1:{port}@evil.example": 403,
    "": 403,
}


async def test_a_name_that_resolves_to_this_machine_gets_nothing(
    local: StorageSettings, serve
):
    async with serve(local) as served:
        for host, status in HOSTS.items():
            headers = {"Host": host.format(port=served.url.rpartition(":")[2])}
            for path in ("/", "/api/campaigns", "/page/gallery.js"):
                async with served.client.get(path, headers=headers) as answer:
                    assert answer.status == status, (host, path)


async def test_another_sites_page_can_neither_embed_nor_read(
    local: StorageSettings, serve
):
    async with serve(local) as served:
        for site in ("cross-site", "same-site"):
            embedded = {"Sec-Fetch-Site": site}
            for path in (
                "/picture?campaign=spring&seq=1",
                "/api/rows",
                "/page/gallery.js",
            ):
                async with served.client.get(path, headers=embedded) as answer:
                    assert answer.status == 403, path
            # A link is followed.
            async with served.client.get("/", headers=embedded) as answer:
                assert answer.status == 200


ANSWERS = {
    "/": 200,
    "/page/gallery.css": 200,
    "/page/../server.py": 404,
    "/page/..%2fserver.py": 404,
    "/api/state?campaign=spring": 200,
    "/api/state?campaign=winter": 404,
    "/api/state?campaign=../..": 404,
    "/api/state": 404,
    "/api/rows?campaign=spring&from=0&count=999999999": 400,
    "/api/rows?campaign=spring&from=-1&count=1": 400,
    "/api/rows?campaign=spring&from=x&count=1": 400,
    "/api/rows?campaign=spring&from=99999999999999999999&count=1": 400,
    "/api/rows?campaign=spring&from=999999999999&count=1": 200,
    "/api/rows?campaign=spring&tab=nonsense&from=0&count=1": 400,
    "/api/record?campaign=spring&seq=999999999999": 404,
    "/thumbnail?campaign=spring&seq=999999999999": 404,
    "/api/replay": 404,
    "/nonsense": 404,
}


async def test_every_answer_is_locked_down(local: StorageSettings, serve):
    async with serve(local) as served, aiohttp.ClientSession() as client:
        for path, status in ANSWERS.items():
            async with client.get(URL(served.url + path, encoded=True)) as answer:
                assert answer.status == status, (path, await answer.text())
                policy = answer.headers["Content-Security-Policy"]
                assert "default-src 'none'" in policy
                assert "unsafe" not in policy
                assert "frame-ancestors 'none'" in policy
                assert answer.headers["X-Content-Type-Options"] == "nosniff"
                assert answer.headers["Cross-Origin-Resource-Policy"] == "same-origin"
                assert "Traceback" not in await answer.text()


async def test_what_is_no_image_says_so_and_is_never_given_as_something_else(
    local: StorageSettings, serve
):
    async with open_storage(local) as storage:
        log = RecordLog(storage.blobs, "worker-1")
        page = b"<!doctype html><script>alert(1)</script>"
        await storage.blobs.create("spring/2.png", page, "text/html", {})
        await storage.blobs.create("spring/3.png", page, "text/html", {})
        at = datetime(2026, 11, 22, 13, tzinfo=UTC)
        for number in (2, 3):
            await log.add(
                [
                    Record(
                        outcome="completed",
                        id=str(number),
                        sha256=hashlib.sha256(page).hexdigest(),
                        campaign="spring",
                        blob=f"spring/{number}.png",
                        at=at,
                    )
                ]
            )
    async with serve(local) as served:
        await served.state_when(lambda state: state["total"] == 3, campaign="spring")
        async with open_storage(local) as storage:
            await storage.blobs.delete("spring/3.png")
        reasons = {}
        for seq in range(1, 5):
            shown = await served.get("/api/record", campaign="spring", seq=seq)
            for path in ("thumbnail", "picture"):
                async with served.client.get(
                    f"/{path}?campaign=spring&seq={seq}"
                ) as answer:
                    if shown["id"] in {"2", "3"}:
                        assert (answer.status, answer.content_type) == (
                            415,
                            "application/json",
                        )
                        reasons[shown["id"]] = (await answer.json())["error"]
    assert reasons == {
        "2": "is not a PNG, JPEG or WebP image",
        "3": "the image has been deleted",
    }


async def test_a_forged_prompt_is_not_shown_beside_another_picture(
    storage: Storage, storage_settings: StorageSettings, log: RecordLog, serve
):
    """Of a squatted name, of one whose honest record came later, and of none that is stored."""
    squatted = {"sha256": "0" * 64, "prompt": "forged"}
    await store(storage, log, 1, **squatted)
    await store(storage, log, 2, **squatted)
    honest = hashlib.sha256(picture()).hexdigest()
    named = {"outcome": "completed", "campaign": "spring", "at": datetime.now(UTC)}
    for number, told in ((2, {"sha256": honest, "prompt": "honest"}), (3, squatted)):
        which = {"id": str(number), "blob": f"spring/{number}.png"}
        await log.add([Record.model_validate(named | which | told)])
    async with serve(storage_settings) as served:
        await served.state_when(lambda state: state["total"] == 2, campaign="spring")
        query = {"campaign": "spring", "from": 0, "count": 9}
        rows = (await served.get("/api/rows", **query))["rows"]
        shown = [
            await served.get("/api/record", campaign="spring", seq=seq)
            for seq, *_ in rows
        ]
        statuses = []
        for seq, *_ in rows:
            async with served.client.get(
                f"/thumbnail?campaign=spring&seq={seq}"
            ) as answer:
                statuses.append(answer.status)
        state = await served.get("/api/state", campaign="spring")
    assert [row[2] for row in rows if row[1] == "2"] == [""], (
        "until a picture was looked at"
    )
    assert {each["id"]: each.get("prompt") for each in shown} == {
        "1": None,
        "2": "honest",
    }
    assert sorted(statuses) == [200, 415]
    assert (state["misfits"], state["damaged"]) == (1, 1)


async def test_nothing_is_read_while_nobody_looks(local: StorageSettings, serve):
    async with serve(local) as served:
        await served.state_when(lambda state: state["total"] == 1, campaign="spring")
        assert [
            task.get_name() for task in asyncio.all_tasks() if "_poll" in repr(task)
        ] == []


async def test_the_first_answer_has_the_images_of_an_empty_cache(
    local: StorageSettings, serve
):
    async with serve(local) as served:
        state = await served.get("/api/state", campaign="spring")
    assert (state["total"], state["counts"]["failed"], state["reading"]) == (
        1,
        1,
        False,
    )


async def test_a_storage_that_fails_is_told_and_comes_back(
    local: StorageSettings, serve, tmp_path
):
    records = tmp_path / "storage" / "images"
    async with serve(local) as served:
        await served.state_when(lambda state: state["total"] == 1, campaign="spring")
        records.rename(tmp_path / "away")
        state = await served.state_when(
            lambda state: state["problem"], campaign="spring"
        )
        assert state["total"] == 1
        (tmp_path / "away").rename(records)
        await served.state_when(lambda state: not state["problem"], campaign="spring")


def strings(value: Any) -> Iterator[str]:
    """Every text in an answer."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for each in value.items() if isinstance(value, dict) else value:
            yield from strings(list(each) if isinstance(each, tuple) else each)


async def test_texts_of_jobs_control_nothing(local: StorageSettings, serve):
    async with serve(local) as served:
        await served.state_when(lambda state: state["jobs"] == 2, campaign="spring")
        answers = [
            await served.get("/api/record", campaign="spring", seq=seq)
            for seq in (1, 2)
        ]
        query = {"campaign": "spring", "from": 0, "count": 9}
        answers += [
            await served.get("/api/rows", **query, tab=tab)
            for tab in ("images", "failed")
        ]
        for each in answers:
            texts = [*strings(each)]
            assert any("<img src=x" in text for text in texts)
            assert not any(map(redaction.CONTROLS.search, texts))
