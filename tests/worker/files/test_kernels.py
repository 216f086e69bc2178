"""Kernels of other workers: who gets which, and what is refused."""

import asyncio
import hashlib
import json
import lzma
from pathlib import Path
from typing import Any

import pytest

import polling
from imagefleet import concurrency, errors
from imagefleet.signing import SigningKey, TrustedKeys
from imagefleet.storage.open import Storage
from worker.files.kernels import KernelExchange

IMPATIENT = concurrency.RetryPolicy(
    tries=2, first_wait_seconds=0.001, longest_wait_seconds=0.001
)
NAME = "unet-512x512-16x2-per_slot-0123456789abcdef.kernels"


def of_worker(storage: Storage, **settings: Any) -> KernelExchange:
    return KernelExchange(
        storage.files, **{"shares": True, "retry_policy": IMPATIENT, **settings}
    )


def made(artifact: str) -> bytes:
    """A file of kernels."""
    header = {"made_for": "NVIDIA H200, torch 2.11.0", "inputs": [0]}
    return lzma.compress(f"{json.dumps(header)}\n{artifact}".encode())


async def found(
    exchange: KernelExchange, folder: Path, name: str = NAME
) -> bytes | None:
    """What a worker with this folder gets of a name."""
    is_there = await asyncio.wrap_future(exchange.find(name, folder / name))
    assert is_there == (folder / name).exists()
    return (folder / name).read_bytes() if is_there else None


async def compiled(exchange: KernelExchange, folder: Path, content: bytes) -> None:
    """A worker compiles, and has shared it, or not, by the end."""
    await asyncio.to_thread(folder.mkdir, exist_ok=True)
    await asyncio.to_thread((folder / NAME).write_bytes, content)
    await exchange._share(folder / NAME)


async def put(
    storage: Storage, content: bytes, name: str = NAME, **metadata: str
) -> None:
    stored = {"sha256": hashlib.sha256(content).hexdigest(), **metadata}
    assert await storage.files.create(
        f"kernels/{name}", content, "application/x", stored
    )


async def test_what_one_worker_compiles_another_fetches_and_none_replaces(
    storage: Storage, tmp_path
):
    exchange = of_worker(storage)
    assert await found(exchange, tmp_path / "before") is None
    exchange.share(tmp_path / "gone")  # it is one line in the log
    (tmp_path / NAME).write_bytes(made("first"))
    exchange.share(tmp_path / NAME)
    await polling.until(lambda: storage.files.exists(f"kernels/{NAME}"))
    await compiled(exchange, tmp_path / "late", made("second"))
    assert await found(exchange, tmp_path / "other") == made("first")


async def test_the_images_own_are_taken_without_asking_the_storage(
    storage: Storage, tmp_path, monkeypatch
):
    (tmp_path / NAME).write_bytes(b"the image's")
    monkeypatch.setattr(type(storage.files), "record", None)
    exchange = of_worker(storage, _image=tmp_path)
    assert await found(exchange, tmp_path / "worker") == b"the image's"


async def test_with_a_trusted_key_only_what_it_signed_is_loaded(
    storage: Storage, tmp_path, caplog
):
    own, stranger = (
        SigningKey.create(tmp_path / f"{name}.pem") for name in ("own", "strangers")
    )
    content = made("a program")
    sha256 = hashlib.sha256(content).hexdigest()

    def signed(key: SigningKey, name: str, of: str = sha256) -> str:
        return key.sign("kernels", {"name": name, "sha256": of})

    await put(storage, content, "plain.kernels")
    await put(
        storage, content, "forged.kernels", signature=signed(stranger, "forged.kernels")
    )
    # A signature is for one name and one content.
    await put(storage, content, "moved.kernels", signature=signed(own, "other.kernels"))
    other = signed(own, "changed.kernels", hashlib.sha256(b"another").hexdigest())
    await put(storage, content, "changed.kernels", signature=other)
    trusted = TrustedKeys.read(own.public)
    exchange = of_worker(storage, _trusted=trusted, _signing=own)
    for name in ("plain", "forged", "moved", "changed"):
        assert await found(exchange, tmp_path / "worker", f"{name}.kernels") is None
    assert caplog.text.count("is not signed with the trusted key") == 4
    await compiled(exchange, tmp_path / "first", content)
    assert await found(exchange, tmp_path / "worker") == content


@pytest.mark.parametrize("stated", [hashlib.sha256(b"another").hexdigest(), ""])
async def test_what_is_damaged_is_left_out(
    storage: Storage, tmp_path, caplog, stated: str
):
    await put(storage, b"cut off", sha256=stated)
    assert await found(of_worker(storage), tmp_path / "worker") is None
    assert caplog.text.count("it is damaged") == 1


@pytest.mark.parametrize(
    ("error", "level"),
    [
        (errors.TransientError("the line is down"), "WARNING"),
        (OSError("the disk is gone"), "WARNING"),
        (ValueError("a mistake of ours"), "ERROR"),
    ],
)
async def test_a_fetch_that_fails_is_one_line_and_the_worker_compiles(
    storage: Storage, tmp_path, monkeypatch, caplog, error: Exception, level: str
):
    async def fails(*_: object) -> None:
        raise error

    monkeypatch.setattr(type(storage.files), "record", fails)
    assert await found(of_worker(storage), tmp_path / "worker") is None
    (record,) = caplog.records
    assert record.levelname == level
    assert str(error) in caplog.text


async def test_credentials_that_create_nothing_are_tried_once(
    storage: Storage, tmp_path, monkeypatch
):
    tried = []

    async def refuses(*_: object) -> None:
        tried.append(1)
        raise errors.SetupError("these credentials may not create files")

    monkeypatch.setattr(type(storage.files), "create", refuses)
    exchange = of_worker(storage)
    await compiled(exchange, tmp_path / "worker", made("mine"))
    assert len(tried) == 1
    exchange.share(tmp_path / "worker" / NAME)
    assert not exchange.shares
