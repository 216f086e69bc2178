"""Strangers at the gateway's door: nothing of theirs gets in, and nothing of others out."""

import asyncio
import base64
import contextlib
import io
import struct
import zlib
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from PIL import Image

import bombs
from gateway import server
from gateway.server import Gateway
from gateway.settings import GatewaySettings
from imagefleet import aio, errors
from imagefleet.http import bodies
from imagefleet.storage.open import open_storage
from imagefleet.storage.settings import StorageSettings
from imagefleet.validation import JSONDict
from polling import until


@pytest.fixture
def storage_settings(local_settings: StorageSettings) -> StorageSettings:
    """One kind of storage: nothing gets that far."""
    return local_settings


ALICE, BOB = ({"Authorization": f"Bearer {name}-key"} for name in ("alice", "bob"))
TXT2IMG = "/sdapi/v1/txt2img"


def whole_picture() -> str:
    made = io.BytesIO()
    Image.new("RGB", (64, 64)).save(made, "PNG")
    return base64.b64encode(made.getvalue()).decode()


async def is_empty(served: Any) -> bool:
    """Whether nothing was sent, and nothing stored."""
    names = [name async for name in served.storage.files.names()]
    return (await served.storage.queue.depth()).messages == 0 and names == []


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"Authorization": "Bearer wrong"},
        {"Authorization": "Bearer "},
        {"Authorization": "Basic !!!"},
        {"Authorization": "Basic " + base64.b64encode(b"alice").decode()},
        {"Authorization": "Bearer alice-keyé"},
    ],
)
async def test_without_a_valid_key_nothing_is_answered(
    serve, clients_file: Path, headers
):
    served = await serve(works=False, clients=clients_file)

    for path in (
        TXT2IMG,
        "/sdapi/v1/options",
        "/v1/images/generations",
        "/v1/images/edits",
    ):
        status, _ = await served.post(path, {"prompt": "a"}, headers=headers)
        assert status == 401
    for path in ("/metrics", "/jobs/1", "/sdapi/v1/progress", "/v1/models", "/nowhere"):
        assert (await served.get(path, headers=headers))[0] == 401
    assert await is_empty(served)


async def test_others_jobs_are_not_there_for_a_key(serve, clients_file: Path):
    served = await serve(clients=clients_file)
    status, found = await served.post(TXT2IMG, {"prompt": "a"}, headers=ALICE)
    assert status == 200
    job = found["info"].partition('"job": "alice/')[2].partition('"')[0]

    assert (await served.get(f"/jobs/{job}", headers=ALICE))[0] == 200
    assert (await served.get(f"/jobs/{job}/0", headers=ALICE))[0] == 200
    assert (await served.get(f"/jobs/{job}/0", headers=BOB))[0] == 404
    # While Alice's message is in the queue, so might be one of Bob's with that id.
    await until(
        lambda: served.get(f"/jobs/{job}", headers=BOB), lambda it: it[0] == 404
    )


@pytest.mark.parametrize("name", ["id", "campaign", "verify", "then", "metadata"])
async def test_a_payload_cannot_name_another_campaign_or_job(
    serve, clients_file: Path, name: str
):
    served = await serve(works=False, clients=clients_file)

    status, found = await served.post(
        TXT2IMG, {"prompt": "a", name: "bob"}, headers=ALICE
    )

    assert (status, found["detail"].partition(":")[0]) == (422, name)
    assert await is_empty(served)


@pytest.mark.parametrize(
    "source",
    [
        "images/bob/0001.png",
        "../../etc/passwd",
        "cat.png",
        "http://127.0.0.1/x.png",
        "/etc/passwd",
    ],
)
@pytest.mark.parametrize("place", ["init_images", "mask", "controlnet"])
async def test_images_by_name_or_address_are_not_read(serve, source: str, place: str):
    served = await serve(works=False)
    unit = {"model": "canny", "image": source}
    payload: JSONDict = {
        "init_images": {"prompt": "a", "init_images": [source]},
        "mask": {"prompt": "a", "init_images": [whole_picture()], "mask": source},
        "controlnet": {
            "prompt": "a",
            "alwayson_scripts": {"controlnet": {"args": [unit]}},
        },
    }[place]
    path = TXT2IMG if place == "controlnet" else "/sdapi/v1/img2img"

    status, _ = await served.post(path, payload)

    assert status == 422
    assert await is_empty(served)


@pytest.mark.parametrize(
    "path",
    [
        "/jobs/..%2F..%2Fetc",
        "/jobs/%2e%2e/0",
        "/jobs/a%00b",
        "/../../etc/passwd",
        "/jobs/" + "a" * 3_000,
    ],
)
async def test_paths_lead_nowhere(serve, path: str):
    served = await serve(works=False)
    reader, writer = await asyncio.open_connection("127.0.0.1", served.port)
    writer.write(
        f"GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode()
    )

    answer = await reader.read()

    writer.close()
    assert int(answer.split()[1]) in {400, 403, 404, 422}


async def test_a_huge_body_is_refused_before_it_is_read(serve, monkeypatch):
    monkeypatch.setattr(bodies, "MAX_BODY_BYTES", 10_000)
    served = await serve(works=False)

    for path in (TXT2IMG, "/v1/images/generations"):
        status, _ = await served.post(path, {"prompt": "a" * 20_000})
        assert status == 413
    form = aiohttp.FormData({"prompt": "a", "image": io.BytesIO(bytes(20_000))})
    async with served.session.post(
        served.url + "/v1/images/edits", data=form
    ) as response:
        assert response.status == 413
    assert await is_empty(served)


async def test_a_slow_body_is_given_up(serve, monkeypatch):
    monkeypatch.setattr(bodies, "_SECONDS", 0.05)
    served = await serve(works=False)
    reader, writer = await asyncio.open_connection("127.0.0.1", served.port)
    writer.write(
        f"POST {TXT2IMG} HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\n{{".encode()
    )

    answer = await reader.readuntil(b"\r\n")

    writer.close()
    assert answer.split()[1] == b"408"


DEEP = "[" * 500 + "]" * 500


@pytest.mark.parametrize(
    "body",
    [
        "[" * 100_000,
        "[1]",
        "{",
        '"a"',
        "1" * 10_000,
        "\x00",
        '{"a":' * 3_000_000,
        '{"prompt": ' + DEEP + "}",
        '{"alwayson_scripts": {"controlnet": {"args": ' + DEEP + "}}}",
        '{"prompt": "' + "\\u0041" * 5_000_000 + '"}',
        '{"prompt": "' + "a" * 20_000_000 + '"}',
        '{"' + "a" * 20_000_000 + '": 1}',
        "{" + ",".join(f'"a{number}": 1' for number in range(60_000)) + "}",
        '{"prompt": [' + '"AAAA",' * 90_000 + '"AAAA"]}',
    ],
    ids=lambda body: f"{body[:12]}-{len(body)}",
)
async def test_what_is_no_payload_is_refused(serve, body: str):
    served = await serve(works=False)

    async with served.session.post(
        served.url + TXT2IMG, data=io.BytesIO(body.encode())
    ) as response:
        assert response.status in {400, 413, 422}
    assert await is_empty(served)


@pytest.mark.parametrize(
    "headers",
    [
        {"Content-Type": "application/json; charset=punycode"},
        {"Content-Type": "application/json; charset=idna"},
        {"Content-Encoding": "deflate"},
        {"Content-Encoding": "gzip"},
        {"Content-Encoding": "br"},
    ],
)
@pytest.mark.parametrize("path", [TXT2IMG, "/v1/images/generations"])
async def test_a_body_is_utf8_and_not_compressed(serve, headers, path: str):
    served = await serve(works=False)
    data = zlib.compress(b"a" * 1_000)

    async with served.session.post(
        served.url + path, data=data, headers=headers, compress=None
    ) as response:
        assert response.status == 415


PART = 'Content-Disposition: form-data; name="{}"'


@pytest.mark.parametrize(
    ("head", "data", "status"),
    [
        (PART.format("a"), b"1", 400),
        (
            PART.format("prompt") + "\r\nContent-Type: text/plain; charset=punycode",
            b"\xff",
            415,
        ),
        (PART.format("prompt") + "\r\nContent-Encoding: deflate", b"\xff", 415),
        (PART.format("prompt"), b"a" * 300_000, 400),
        ("A: b\r\n" * 100_000, b"", 400),
    ],
    ids=["no image", "charset", "deflate", "long", "long header"],
)
async def test_a_form_is_read_as_browsers_write_it_and_no_other_way(
    serve, head: str, data: bytes, status: int
):
    served = await serve(works=False)
    body = b"--x\r\n" + head.encode() + b"\r\n\r\n" + data + b"\r\n--x--\r\n"
    headers = {"Content-Type": "multipart/form-data; boundary=x"}

    async with served.session.post(
        served.url + "/v1/images/edits", data=body, headers=headers
    ) as response:
        assert response.status == status


async def test_a_form_of_a_million_parts_is_refused(serve):
    served = await serve(works=False)
    part = b"--x\r\n" + PART.format("a").encode() + b"\r\n\r\n1\r\n"
    headers = {"Content-Type": "multipart/form-data; boundary=x"}

    for body in (part * 500_000 + b"--x--\r\n", b"\r\n" * 2**24, b"--x"):
        async with served.session.post(
            served.url + "/v1/images/edits", data=io.BytesIO(body), headers=headers
        ) as response:
            assert response.status == 400


async def test_large_bodies_keep_nobody_else_waiting(serve, clients_file: Path):
    served = await serve(works=False, clients=clients_file)
    body = b'{"prompt": "' + b"a" * 2**25
    large = [
        asyncio.create_task(
            served.session.post(
                served.url + TXT2IMG, data=io.BytesIO(body), headers=ALICE
            )
        )
        for _ in range(4)
    ]

    found = [await served.get("/v1/models", headers=BOB) for _ in range(20)]

    assert {status for status, _ in found} == {200}
    assert {response.status for response in await asyncio.gather(*large)} == {400}


async def test_one_client_has_so_many_requests_at_once(
    serve, clients_file: Path, monkeypatch
):
    monkeypatch.setattr(server, "_MORE_REQUESTS", 0)
    served = await serve(works=False, clients=clients_file)
    body = {"prompt": "a"}
    waiting = [
        asyncio.create_task(served.post(TXT2IMG, body, headers=ALICE)) for _ in range(8)
    ]
    await until(lambda: len(served.gateway.desk.tickets) == 8)

    assert (await served.get("/v1/models", headers=ALICE))[0] == 429
    assert (await served.get("/v1/models", headers=BOB))[0] == 200
    for task in waiting:
        task.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)


def bomb(width: int, height: int) -> bytes:
    """A PNG of so many pixels in few bytes."""
    head = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    return bombs.png((b"IHDR", head), (b"IDAT", bombs.pack(b"\0", 10)))


def cut_off() -> bytes:
    made = io.BytesIO()
    Image.effect_noise((64, 64), 50).save(made, "PNG")
    return made.getvalue()[:-200]


@pytest.mark.parametrize(
    "data",
    [
        bomb(50_000, 50_000),
        bomb(2**31 - 1, 2**31 - 1),
        cut_off(),
        b"GIF89a",
        b"%PDF-1.7",
        b"",
    ],
    ids=["bomb", "larger bomb", "cut off", "GIF", "PDF", "empty"],
)
@pytest.mark.parametrize("path", ["img2img", "png-info", "edits"])
async def test_an_image_that_is_none_or_a_bomb_is_not_stored(
    serve, data: bytes, path: str
):
    served = await serve(works=False)
    text = base64.b64encode(data).decode() or "AA=="
    if path == "edits":
        form = aiohttp.FormData({"prompt": "a"})
        form.add_field("image", io.BytesIO(data), filename="a.png")
        async with served.session.post(
            served.url + "/v1/images/edits", data=form
        ) as response:
            status = response.status
    elif path == "png-info" and data == cut_off():
        return  # whose text is read, and not its pixels
    else:
        payload = (
            {"image": text}
            if path == "png-info"
            else {"prompt": "a", "init_images": [text]}
        )
        status, _ = await served.post(f"/sdapi/v1/{path}", payload)

    assert status in {400, 422}
    assert await is_empty(served)


async def test_another_site_in_a_browser_here_gets_nothing(serve):
    served = await serve(works=False)

    for headers in (
        {"Host": "evil.example"},
        {"Sec-Fetch-Site": "cross-site"},
        {"Sec-Fetch-Site": "same-site"},
        {"Origin": "https://evil.example"},
        {"Origin": "null"},
        {"Origin": f"https://evil.example/?http://127.0.0.1:{served.port}"},
        {"Host": "[::1"},
    ):
        status, _ = await served.post(TXT2IMG, {"prompt": "a"}, headers=headers)
        assert status in {400, 403}
    assert await is_empty(served)


EVIL = "https://evil.example"
GOOD = "https://good.example"


@pytest.mark.parametrize(("origin", "status"), [(EVIL, 403), (GOOD, 200)])
async def test_a_page_with_saved_credentials_is_let_in_as_configured(
    serve, clients_file: Path, origin: str, status: int
):
    served = await serve(clients=clients_file, cors_allow_origins=(GOOD,))
    saved = aiohttp.encode_basic_auth("alice", "alice-key")
    headers = {"Authorization": saved, "Origin": origin}
    asked = {
        "Origin": origin,
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "authorization, content-type",
    }

    async with served.session.options(served.url + TXT2IMG, headers=asked) as preflight:
        allowed = preflight.headers.get("Access-Control-Allow-Origin")
    async with served.session.post(
        served.url + TXT2IMG, json={"prompt": "a"}, headers=headers
    ) as response:
        assert response.status == status
        assert response.headers.get("Access-Control-Allow-Origin") == allowed

    assert allowed == (origin if status == 200 else None)


async def test_any_page_may_be_let_in_but_without_saved_credentials(
    serve, clients_file: Path
):
    served = await serve(works=False, clients=clients_file, cors_allow_origins=("*",))
    headers = {"Origin": EVIL} | ALICE

    async with served.session.get(
        served.url + "/v1/models", headers=headers
    ) as response:
        assert response.status == 200
        assert response.headers["Access-Control-Allow-Origin"] == "*"
        assert "Access-Control-Allow-Credentials" not in response.headers


async def test_who_has_no_key_is_told_of_both_ways_to_send_one(
    serve, clients_file: Path
):
    served = await serve(works=False, clients=clients_file)

    async with served.session.get(served.url + "/v1/models") as response:
        assert response.headers["WWW-Authenticate"].split()[0] == "Basic"
        assert response.headers["WWW-Authenticate"].endswith(", Bearer")


async def test_beyond_this_machine_it_needs_keys(tmp_path):
    settings = GatewaySettings(storage=f"local:{tmp_path}", host="0.0.0.0")

    with pytest.raises(errors.SetupError, match="--clients"):
        Gateway(aio.Fleet(open_storage(settings)), settings)


@pytest.mark.parametrize(
    "text", ["[]", "a: b", "[{name: a}]", "- {name: a, sha256: zz, campaign: a}"]
)
async def test_a_file_of_clients_that_is_wrong_lets_nobody_in(tmp_path, text: str):
    (path := tmp_path / "clients.yaml").write_text(text)
    settings = GatewaySettings(storage=f"local:{tmp_path}", clients=path)

    with pytest.raises(errors.SetupError, match="clients"):
        Gateway(aio.Fleet(open_storage(settings)), settings)


async def test_who_waits_for_too_much_is_told_when_to_come_again(
    serve, clients_file: Path
):
    served = await serve(works=False, clients=clients_file)
    url = served.url + TXT2IMG
    body = {"prompt": "a", "n_iter": 8}
    waiting = asyncio.create_task(served.post(TXT2IMG, body, headers=ALICE))
    await until(lambda: served.gateway.desk.tickets)

    async with served.session.post(url, json=body, headers=ALICE) as response:
        assert response.status == 429
        assert 1 <= int(response.headers["Retry-After"]) <= 600
    others = asyncio.create_task(served.post(TXT2IMG, body, headers=BOB))
    await until(lambda: len(served.gateway.desk.tickets) == 2)
    for task in (waiting, others):
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


async def test_nothing_of_the_storage_is_in_an_answer(serve, tmp_path):
    served = await serve()
    await served.storage.files.create("models/a.safetensors", b"x", "a/b", {})

    texts = [(await served.get(path))[1].decode() for path in served.paths()]

    assert all(str(tmp_path) not in text for text in texts)
    assert len(texts) > 10
