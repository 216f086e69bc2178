"""What a thief does with the tokens of the role `worker`, by Azure's API and without our code."""

import re
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from azure.core.credentials import AzureSasCredential
from azure.core.exceptions import HttpResponseError
from azure.storage.blob import BlobBlock, PublicAccess
from azure.storage.blob.aio import BlobServiceClient, ContainerClient
from azure.storage.queue.aio import QueueClient, QueueServiceClient

from browsing import visible
from fleet.keys import mint
from imagefleet.storage.azure.account import read_address
from imagefleet.storage.azure.roles import ROLES, Role, name_of
from imagefleet.storage.open import Storage, open_storage
from imagefleet.storage.settings import StorageSettings
from imagefleet.validation import JSONDict
from thief import OPTIONS, Thief, stealing

SECURITY = Path(__file__).parents[3] / "SECURITY.md"

DOCUMENT = (
    "| **can** lease and delete jobs, rewrite the text of those it leased, add records to the"
    " poison queue, and store images under free names |"
)

JOB = '{"prompt": "a fox", "id": "victim"}'

FILES = {"loras/fox.safetensors": b"weights", "models/sd.safetensors": b"weights"}
RECORDS = "-records/spring/w.images.jsonl.gz"
IMAGES = {"spring/fox.png": b"pixels", "autumn/owl.png": b"pixels"}


@pytest.fixture
async def owner(azurite_settings: StorageSettings) -> AsyncIterator[Storage]:
    async with open_storage(azurite_settings) as storage:
        await storage.create()
        await storage.queue.send([JOB])
        await storage.poison.send(["a failed job"])
        for name, data in FILES.items():
            await storage.files.create(name, data, "text/plain", {})
        for name, data in IMAGES.items():
            await storage.blobs.create(name, data, "image/png", {"job": "x"})
        await storage.blobs.append(RECORDS, b"whole;", 0)
        yield storage


Deed = Callable[[Thief], Awaitable[Any]]


def _queue_deeds(of: Callable[[Thief], QueueClient]) -> dict[str, Deed]:
    return {
        "add": lambda thief: of(thief).send_message(JOB),
        "clear": lambda thief: of(thief).clear_messages(),
        "delete queue": lambda thief: of(thief).delete_queue(),
        "create queue": lambda thief: of(thief).create_queue(),
        "set metadata": lambda thief: of(thief).set_queue_metadata({"a": "b"}),
        "read policies": lambda thief: of(thief).get_queue_access_policy(),
        "write policies": lambda thief: of(thief).set_queue_access_policy({}),
        "peek": lambda thief: of(thief).peek_messages(),
        "count": lambda thief: of(thief).get_queue_properties(),
        "receive": lambda thief: of(thief).receive_message(),
        "delete message": lambda thief: of(thief).delete_message("x", "x"),
        "rewrite message": lambda thief: of(thief).update_message(
            "x", "x", content="x"
        ),
    }


def _container_deeds(
    of: Callable[[Thief], ContainerClient], name: str
) -> dict[str, Deed]:
    def blob(thief: Thief) -> Any:
        return of(thief).get_blob_client(name)

    return {
        "overwrite": lambda thief: blob(thief).upload_blob(b"x", overwrite=True),
        "delete": lambda thief: blob(thief).delete_blob(),
        "read": lambda thief: blob(thief).download_blob(),
        "read metadata": lambda thief: blob(thief).get_blob_properties(),
        "write metadata": lambda thief: blob(thief).set_blob_metadata({"job": "y"}),
        "write headers": lambda thief: blob(thief).set_http_headers(None),
        "change tier": lambda thief: blob(thief).set_standard_blob_tier("Archive"),
        "lease": lambda thief: blob(thief).acquire_lease(),
        "stage block": lambda thief: blob(thief).stage_block("MDAwMA==", b"x"),
        "commit blocks": lambda thief: blob(thief).commit_block_list(
            [BlobBlock("MDAwMA==")]
        ),
        "snapshot": lambda thief: blob(thief).create_snapshot(),
        "append": lambda thief: blob(thief).append_block(b"x"),
        "replace with another kind": lambda thief: blob(thief).create_append_blob(),
        "list": lambda thief: anext(aiter(of(thief).list_blobs())),
        "read container": lambda thief: of(thief).get_container_properties(),
        "delete container": lambda thief: of(thief).delete_container(),
        "create container": lambda thief: of(thief).create_container(),
        "make container public": lambda thief: of(thief).set_container_access_policy(
            {}, public_access=PublicAccess.CONTAINER
        ),
        "read policies": lambda thief: of(thief).get_container_access_policy(),
    }


#: What a worker does as well. With `c` a token may take a snapshot, which changes no image;
#: with `a` append to records, which no image is. Azure, unlike Azurite, also lets it stage blocks,
#: which it can commit under a new name alone.
ALLOWED = {
    *(
        (queue, what)
        for queue in ("jobs", "jobs-high", "jobs-low")
        for what in ("peek", "count", "receive", "delete message", "rewrite message")
    ),
    ("poison", "add"),
    ("images", "snapshot"),
    ("images", "append"),
    ("files", "read"),
    ("files", "read metadata"),
}

DEEDS: dict[tuple[str, str], Deed] = {
    (place, what): deed
    for place, deeds in {
        "jobs": _queue_deeds(lambda thief: thief.jobs),
        "jobs-high": _queue_deeds(lambda thief: thief.high),
        "jobs-low": _queue_deeds(lambda thief: thief.low),
        "poison": _queue_deeds(lambda thief: thief.poison),
        "images": _container_deeds(lambda thief: thief.images, "autumn/owl.png"),
        "files": {
            **_container_deeds(lambda thief: thief.files, "loras/fox.safetensors"),
            "create a LoRA": lambda thief: thief.files.upload_blob(
                "loras/owl.safetensors", b"x"
            ),
            "create a model": lambda thief: thief.files.upload_blob(
                "models/x.safetensors", b"x"
            ),
            "create a manifest": lambda thief: thief.files.upload_blob(
                "loras/manifest.json", b"x"
            ),
            "copy": lambda thief: thief.files.get_blob_client(
                "loras/manifest.json"
            ).start_copy_from_url(thief.images.get_blob_client("spring/fox.png").url),
        },
    }.items()
    for what, deed in deeds.items()
}


#: These need the account's key, whatever a token's letters.
NEVER = {
    "delete queue",
    "create queue",
    "set metadata",
    "clear",
    "read policies",
    "write policies",
    "make container public",
    "read container",
    "delete container",
    "create container",
}


async def refused(
    thief: Thief, deeds: Mapping[tuple[str, str], Deed]
) -> set[tuple[str, str]]:
    """The deeds that the permissions of the tokens do not allow."""
    found = set()
    for deed, attempt in deeds.items():
        try:
            await attempt(thief)
        except HttpResponseError as error:
            if error.error_code == "AuthorizationPermissionMismatch":
                found.add(deed)
    return found


async def state(owner: Storage) -> JSONDict:
    """All messages, images and files."""
    return {
        "jobs": [each.body async for each in visible(owner.queue)],
        "poison": [each.body async for each in visible(owner.poison)],
        "images": {
            each.name: (await owner.blobs.read(each.name), dict(each.metadata))
            async for each in owner.blobs.records()
        },
        "files": {
            each: await owner.files.read(each) async for each in owner.files.names()
        },
    }


async def test_a_thief_is_refused_all_that_a_worker_does_not_do(
    azurite_settings: StorageSettings, owner: Storage
):
    before = await state(owner)
    others = {deed: attempt for deed, attempt in DEEDS.items() if deed not in ALLOWED}
    async with stealing(azurite_settings, ROLES["worker"]) as thief:
        assert await refused(thief, others) == set(others)
        assert await state(owner) == before
        assert not await refused(thief, {deed: DEEDS[deed] for deed in ALLOWED})
    assert (await state(owner))["images"] == before["images"]


async def test_it_is_for_their_letters_that_the_tokens_are_refused(
    azurite_settings: StorageSettings, owner: Storage
):
    """Azurite judges tokens as Azure does: with every letter the same deeds are allowed."""
    everything = Role(
        "all", "x", queue="raup", poison="raup", blob="racwdl", files="racwdl"
    )
    async with stealing(azurite_settings, everything) as thief:
        never = {deed for deed in DEEDS if deed[1] in NEVER}
        assert await refused(thief, DEEDS) == never


async def test_a_token_is_good_for_nothing_but_its_own_resource(
    azurite_settings: StorageSettings, owner: Storage
):
    settings = azurite_settings
    minted = mint.Minter(settings).mint(ROLES["worker"], timedelta(hours=1))
    address = read_address(minted.storage)
    before = await state(owner)
    answers = []

    async def attempt(request: Awaitable[Any]) -> None:
        with pytest.raises(HttpResponseError) as caught:
            await request
        answers.append(caught.value.status_code)

    for resource, token in minted.fields.items():
        credential = AzureSasCredential(token)
        queues = {*settings.queues_of(None).values(), settings.poison_queue, "another"}
        for name in queues - {name_of(settings, resource)}:
            async with address.queue_client(name, credential, **OPTIONS) as queue:
                for deed in (queue.receive_message(), queue.send_message(JOB)):
                    await attempt(deed)
        containers = {settings.container, settings.files_container, "another"}
        for name in containers - {name_of(settings, resource)}:
            async with address.container_client(
                name, credential, **OPTIONS
            ) as container:
                await attempt(container.upload_blob("loras/manifest.json", b"x"))
                for known in (*IMAGES, *FILES):
                    await attempt(container.download_blob(known))
        blob_url, queue_url = re.findall(r"Endpoint=([^;]+)", minted.storage)
        async with (
            BlobServiceClient(blob_url, credential, **OPTIONS) as blobs,
            QueueServiceClient(queue_url, credential, **OPTIONS) as queues_of_account,
        ):
            await attempt(anext(aiter(blobs.list_containers())))
            await attempt(anext(aiter(queues_of_account.list_queues())))
    assert set(answers) == {403}
    assert await state(owner) == before


async def test_what_a_thief_can_still_do_is_what_the_document_lists(
    azurite_settings: StorageSettings, owner: Storage
):
    """Azure's permissions cannot tell these from a worker's work."""
    async with stealing(azurite_settings, ROLES["worker"]) as thief:
        job = await thief.jobs.receive_message()
        assert job is not None
        await thief.jobs.update_message(
            job, visibility_timeout=0, content="another job"
        )
        assert (await state(owner))["jobs"] == ["another job"]
        again = await thief.jobs.receive_message()
        assert again is not None
        await thief.jobs.delete_message(again)
        await thief.poison.send_message("a forged record")
        await thief.images.upload_blob("default/victim.png", b"x")
        false = {"worker": "an honest one"}
        await thief.images.upload_blob("-checks/default/a.png", b"x", metadata=false)
        await thief.images.get_blob_client(RECORDS).append_block(b"forged")
        lora = await thief.files.download_blob("loras/fox.safetensors")
        assert await lora.readall() == FILES["loras/fox.safetensors"]
    after = await state(owner)
    assert after["jobs"] == []
    assert after["poison"] == ["a failed job", "a forged record"]
    assert after["images"].keys() - IMAGES.keys() == {
        RECORDS,
        "default/victim.png",
        "-checks/default/a.png",
    }
    assert after["images"][RECORDS] == (b"whole;forged", {})
    assert DOCUMENT in SECURITY.read_text()
