"""`--model store:NAME` with a trusted key: its hash comes from the signed list of models."""

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from header_files import file_of
from imagefleet import concurrency, errors
from imagefleet.signing import SigningKey
from imagefleet.storage.open import Storage
from worker.files import manifest, model
from worker.settings import WorkerSettings

CONTENT = file_of()
SHA256 = hashlib.sha256(CONTENT).hexdigest()
IMPATIENT = concurrency.RetryPolicy(
    tries=2, first_wait_seconds=0.001, longest_wait_seconds=0.001
)


@pytest.fixture
def settings(
    worker_settings: Callable[..., WorkerSettings], key: SigningKey
) -> WorkerSettings:
    return worker_settings(model="store:dreams.safetensors", trusted_key=key.public)


async def put(storage: Storage, content: bytes | None, data: bytes = CONTENT) -> None:
    await storage.files.create("models/dreams.safetensors", data, "application/x", {})
    if content is not None:
        await storage.files.create(
            "models/manifest.json", content, "application/json", {}
        )


async def fetch(settings: WorkerSettings, storage: Storage) -> Path:
    return model.local_path(await model.fetch(settings, storage.files, IMPATIENT))


async def test_a_listed_model_is_fetched_and_verified(
    storage: Storage, settings: WorkerSettings, key: SigningKey
):
    await put(storage, manifest.encode("models", {"dreams.safetensors": SHA256}, key))
    assert (await fetch(settings, storage)).read_bytes() == CONTENT


async def test_another_file_under_the_models_name_is_refused(
    storage: Storage, settings: WorkerSettings, key: SigningKey
):
    content = manifest.encode("models", {"dreams.safetensors": SHA256}, key)
    await put(storage, content, file_of(data=b"planted"))
    with pytest.raises(errors.SetupError, match="SHA-256"):
        await fetch(settings, storage)


async def test_a_file_fetched_before_there_was_a_key_is_not_taken_for_the_model(
    storage: Storage, settings: WorkerSettings, key: SigningKey
):
    without_key = settings.model_copy(update={"trusted_key": None})
    await put(storage, manifest.encode("models", {"dreams.safetensors": "0" * 64}, key))
    assert (await fetch(without_key, storage)).is_file()
    with pytest.raises(errors.SetupError, match="SHA-256"):
        await fetch(settings, storage)


@pytest.mark.parametrize("case", ["no list", "plain", "not listed", "a list of LoRAs"])
async def test_without_a_signed_list_that_has_the_model_the_operator_must_act(
    storage: Storage, settings: WorkerSettings, key: SigningKey, case: str
):
    listed = {"dreams.safetensors": SHA256}
    content: Any = {
        "no list": None,
        "plain": manifest.encode("models", listed, None),
        "not listed": manifest.encode("models", {}, key),
        "a list of LoRAs": manifest.encode("loras", listed, key),
    }[case]
    await put(storage, content)
    with pytest.raises(
        errors.SetupError, match=r"models/manifest\.json.*`imagefleet files add model`"
    ):
        await fetch(settings, storage)


async def test_a_hash_in_the_settings_needs_no_list(
    storage: Storage, settings: WorkerSettings
):
    await put(storage, None)
    given = settings.model_copy(update={"model_sha256": SHA256})
    assert (await fetch(given, storage)).read_bytes() == CONTENT
