"""The model: a path on this machine, or fetched at the start and cached.

The cache has a folder for each address and hash. A partial download stays there as NAME.part, over
broken connections and restarts; the model itself appears in one step, complete and verified.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import re
import shutil
import tarfile
from pathlib import Path

from yarl import URL

from imagefleet import errors, retry
from imagefleet.storage import protocol
from worker.files.disk_cache import DiskCache
from worker.files.download import Download
from worker.files.sources import BlobSource, HttpSource, Source
from worker.settings import WorkerSettings

log = logging.getLogger(__name__)

STORE_SCHEME = "store:"

_IS_URL = re.compile(r"https?://", re.IGNORECASE)

#: A plain name with the extension of a single file or of a packed folder.
_FILE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9 ._+-]{0,150}\.(safetensors|tar)")

#: A few minutes without a byte, on average.
STORAGE_RETRIES = retry.RetryPolicy(tries=15, longest_wait_seconds=30)


def local_path(settings: WorkerSettings) -> Path:
    """The model's path on this machine, once it is fetched.

    Raises:
        SetupError: it is neither a path nor an address to fetch a model from.
    """
    return _resolve(settings)[0]


def _resolve(settings: WorkerSettings) -> tuple[Path, str | None]:
    """The local path, and the name of the file to fetch; None: the model is a path."""
    address, sha256 = settings.model, settings.model_sha256
    is_url = _IS_URL.match(address)
    if not is_url and not address.startswith(STORE_SCHEME):
        if sha256 is not None:
            raise errors.SetupError("--model-sha256 is for a model that is fetched; this is a path")
        return Path(address).expanduser(), None
    if address.lower().startswith("http:") and sha256 is None:
        raise errors.SetupError(
            "a model could be changed on its way over plain http: set --model-sha256 or use https"
        )
    if is_url:
        # A token in the query is renewed; the model stays the same.
        identity, name = str(URL(address).with_query(None).with_user(None)), URL(address).name
    else:
        blob = address.removeprefix(STORE_SCHEME)
        try:
            protocol.check_blob_name(blob)
        except errors.JobError as error:
            raise errors.SetupError(f"the model cannot be fetched: {error.message}") from None
        identity = f"{settings.storage} {settings.container} {address}"
        name = blob.rpartition("/")[2]
    if not _FILE_NAME.fullmatch(name):
        raise errors.SetupError(
            f"the model {name[:80]!r} cannot be fetched: its name must end in .safetensors, or in"
            " .tar for a folder in diffusers format"
        )
    sha256 = sha256.lower() if sha256 else None
    key = hashlib.sha256(f"{identity}\n{sha256}".encode()).hexdigest()[:16]
    return settings.cache.expanduser() / "models" / key / name.removesuffix(".tar"), name


async def fetch(
    settings: WorkerSettings,
    blobs: protocol.BlobStore,
    retry_policy: retry.RetryPolicy = STORAGE_RETRIES,
) -> None:
    """Fetches the model unless it is on this machine; cancelled, it resumes the next time.

    Raises:
        SetupError: the address, the token or the hash is wrong; NodeError: the disk has no room for
        the model; TransientError: nothing has arrived for minutes, whatever the reason.
    """
    path, name = _resolve(settings)
    if name is None or path.exists():
        return
    address, sha256 = settings.model, settings.model_sha256
    source: Source = (
        BlobSource(blobs, address.removeprefix(STORE_SCHEME))
        if address.startswith(STORE_SCHEME)
        else HttpSource(address, requires_https=sha256 is None)
    )
    cache = DiskCache(path.parent)
    async with cache.lock():
        if path.exists():
            return
        if sha256 is None:
            log.warning(
                "%s is not verified: set --model-sha256",
                source.label,
                extra={"action": "model_unchecked"},
            )
        is_tar = name.endswith(".tar")
        # A packed folder needs its room twice.
        download = Download(cache, name, source, sha256 and sha256.lower(), copies=1 + is_tar)
        await download.run(retry_policy)
        with cache.errors():
            if is_tar:
                await asyncio.to_thread(_unpack, download.part, path, cache)
            else:
                download.part.replace(path)
            download.forget()
        log.info("the model is at %s", path, extra={"action": "model_fetched"})


def _unpack(archive: Path, path: Path, cache: DiskCache) -> None:
    """Unpacks the folder with a model_index.json: the archive's top level, or one folder in it."""
    folder = cache.folder / "unpacking"
    shutil.rmtree(folder, ignore_errors=True)
    try:
        with tarfile.open(archive, "r:") as tar:
            cache.check_room(sum(member.size for member in tar))
            # The filter refuses paths and links that lead outside, and devices.
            tar.extractall(folder, filter="data")
    except tarfile.TarError as error:
        archive.unlink()
        raise errors.SetupError(f"{path.name}.tar cannot be unpacked as a .tar: {error}") from None
    for candidate in (folder, *folder.iterdir()):
        if (candidate / "model_index.json").is_file():
            candidate.replace(path)
            shutil.rmtree(folder, ignore_errors=True)
            return
    raise errors.SetupError(
        f"{path.name}.tar has no folder in diffusers format: model_index.json is missing"
    )
