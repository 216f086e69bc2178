"""What a request waits for: its own model and priority, and nothing that cannot come."""

import asyncio
import contextlib
import hashlib
import json
from typing import Any

import openai
import pytest

from gateway.jobs import desk
from imagefleet.job.message import Job
from imagefleet.storage import presence
from imagefleet.storage.routing.models import FOLDER
from polling import until

TXT2IMG = "/sdapi/v1/txt2img"


async def queues_of(served: Any) -> list[str]:
    return [name async for name in served.storage.blobs.names(FOLDER)]


async def test_a_model_that_nobody_has_is_refused_at_once_in_each_apis_form(
    serve,
):
    served = await serve()
    await until(served.storage.models.served_now)

    status, found = await served.post(TXT2IMG, {"prompt": "a", "model": "sdxl"})
    assert (status, found.keys()) == (422, {"error", "detail", "body", "errors"})
    assert "'sdxl' does not exist" in found["detail"]
    assert "there are stand-in" in found["detail"]
    settings = {"override_settings": {"sd_model_checkpoint": "sdxl [0123456789]"}}
    assert (await served.post(TXT2IMG, {"prompt": "a", **settings}))[0] == 422
    status, found = await served.post(
        "/sdapi/v1/options", {"sd_model_checkpoint": "sdxl"}
    )
    assert (status, found["error"]) == (500, "RuntimeError")
    assert "there are stand-in" in found["errors"]
    async with openai.AsyncOpenAI(
        base_url=f"{served.url}/v1", api_key="none"
    ) as client:
        with pytest.raises(openai.NotFoundError) as refused:
            await client.images.generate(prompt="a", model="dall-e-3")
    assert refused.value.code == "model_not_found"
    assert await queues_of(served) == ["-models/stand-in"]
    assert (await served.storage.queue.depth()).messages == 0


async def test_a_model_that_a_worker_serves_or_the_storage_holds_is_drawn(
    serve,
):
    served = await serve(model_alias={"dall-e-3": "stand-in"})
    await until(served.storage.models.served_now)

    for model in ("stand-in", "dall-e-3"):
        status, _ = await served.post(TXT2IMG, {"prompt": "a", "model": model})
        assert status == 200
    await served.storage.files.create("models/other.safetensors", b"x", "a/b", {})
    served.gateway.desk.models._read_at = -10.0
    waiting = asyncio.create_task(
        served.post(TXT2IMG, {"prompt": "a", "model": "other"})
    )
    (ticket,) = await until(lambda: served.gateway.desk.tickets)
    await until(lambda: ticket.sent_at)
    waiting.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await waiting


async def test_a_clients_names_of_models_are_its_own(serve, tmp_path):
    (path := tmp_path / "clients.yaml").write_text(
        json.dumps(
            [
                {
                    "name": name,
                    "sha256": hashlib.sha256(name.encode()).hexdigest(),
                    "campaign": name,
                    "models": models,
                }
                for name, models in (("alice", {"dall-e-3": "stand-in"}), ("bob", {}))
            ]
        )
    )
    served = await serve(clients=path)
    await until(served.storage.models.served_now)

    for name, expected in (("alice", 200), ("bob", 422)):
        headers = {"Authorization": f"Bearer {name}"}
        body = {"prompt": "a", "model": "dall-e-3"}
        status, _ = await served.post(TXT2IMG, body, headers=headers)
        assert status == expected


@pytest.fixture
def one_old_job(monkeypatch) -> None:
    """What waits is older than any limit."""
    monkeypatch.setattr(desk, "_AGE_SECONDS", 0.0)


@pytest.mark.parametrize(
    ("model", "priority", "is_full"),
    [(None, "low", False), ("other", "normal", False), (None, "normal", True)],
)
async def test_only_the_queue_of_its_model_and_priority_sends_a_client_away(
    serve, one_old_job: None, model, priority, is_full: bool
):
    served = await serve(works=False, wait_seconds=1)
    body = Job(prompt="a", model=model, id="old").to_message()
    await served.storage.models.send([body], priority)
    queue = served.storage.models.of(model)[priority]
    await until(queue.depth, lambda depth: (depth.oldest_age_seconds or 0) > 1.0)

    status, _ = await served.post(TXT2IMG, {"prompt": "a"})

    assert (status == 429) == is_full


async def test_what_a_worker_has_had_is_no_sign_of_a_full_queue(
    serve, one_old_job: None
):
    served = await serve(works=False, wait_seconds=1)
    queue = served.storage.queue
    await queue.send([Job(prompt="a", id="old").to_message()])
    (message,) = await queue.receive(1, 60)
    await queue.release(message)
    await until(queue.depth, lambda depth: (depth.oldest_age_seconds or 0) > 1.0)

    depth = await queue.depth()

    assert await presence.waiting_seconds(served.storage, queue, depth, 1.0) == 0
    assert (await served.post(TXT2IMG, {"prompt": "a"}))[0] == 202
