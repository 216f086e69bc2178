"""The model: a path on this machine, or fetched at the start and cached.

The cache has a folder for each address and hash. A partial download stays there as NAME.part, over
broken connections and restarts; the model itself appears in one step, complete and verified.
"""

import asyncio
import errno
import shutil
import tarfile
from pathlib import Path, PurePosixPath
from tarfile import TarError, TarFile, TarInfo

from imagefleet.concurrency import RetryPolicy
from imagefleet.errors import MissingFileError, SetupError
from imagefleet.files import kinds, safetensors
from imagefleet.files.kinds import FileKind
from imagefleet.signing import trusted_keys
from imagefleet.storage.protocol import BlobStore
from imagefleet.telemetry.logs import log
from worker.files import addresses, check
from worker.files.addresses import STORE_SCHEME, Address
from worker.files.disk_cache import SUFFIX, DiskCache
from worker.files.download import BlobSource, Download, HttpSource, OnProgress, Source
from worker.files.manifest import Manifest
from worker.settings import WorkerSettings

#: A few minutes without a byte, on average.
STORAGE_RETRIES = RetryPolicy(tries=15, longest_wait_seconds=30)

_UNPACKING = "unpacking"


def local_path(settings: WorkerSettings) -> Path:
    """The model's path on this machine, once it is fetched; raises as `addresses.of_model`."""
    address = addresses.of_model(settings)
    if address is None:
        return Path(settings.model).expanduser()
    folder = _folder(settings, address)
    return find_fetched(folder, address) or folder / address.stem


def name_of(settings: WorkerSettings) -> str:
    """The name by which jobs ask for the model, there yet or not: its file's, without suffix."""
    path = local_path(settings)
    is_file = path.is_file() or (path.suffix == SUFFIX and not path.is_dir())
    return path.stem if is_file else path.resolve().name


def has_known_name(settings: WorkerSettings) -> bool:
    """False for an address of which only the server tells the file's name, until it is fetched."""
    address = addresses.of_model(settings)
    if address is None or address.file_name is not None:
        return True
    return find_fetched(_folder(settings, address), address) is not None


async def fetch(
    settings: WorkerSettings,
    blobs: BlobStore,
    retry_policy: RetryPolicy = STORAGE_RETRIES,
    *,
    wanted: FileKind = kinds.MODEL,
) -> WorkerSettings:
    """Fetches the model unless it is on this machine; cancelled, it resumes the next time.

    Returns the settings with its hash, if a signed manifest gives that.

    Raises:
        SetupError: the address, the token, the hash or the kind of file is wrong, or a trusted key
        has not signed the hash; NodeError: the disk has no room for the model; TransientError:
        nothing has arrived for minutes, whatever the reason.
    """
    settings = await _pinned(settings, blobs, retry_policy)
    address = addresses.of_model(settings)
    if address is None:
        return settings
    folder = _folder(settings, address)
    if found := find_fetched(folder, address):
        if is_whole(found):
            return settings
        log.warning(
            f"fetching {found} again: it is cut off or damaged", action="model_dropped"
        )
        with DiskCache(folder).errors():
            shutil.rmtree(found) if found.is_dir() else found.unlink(missing_ok=True)
    if settings.model_sha256 is None:
        log.warning(
            f"{_source(address, None, blobs).label} is not verified: set --model-sha256,"
            " or for several models --trusted-key with a signed list of them",
            action="model_unchecked",
        )
    await fetch_to(
        folder, address, settings.model_sha256, blobs, retry_policy, wanted=wanted
    )
    return settings


async def _pinned(
    settings: WorkerSettings,
    blobs: BlobStore,
    retry_policy: RetryPolicy,
) -> WorkerSettings:
    """The settings with the hash that a signed manifest gives, where the model's is to be known."""
    trusted = trusted_keys(settings.trusted_key)
    is_stored = settings.model.startswith(STORE_SCHEME)
    if trusted is None or settings.model_sha256 is not None or not is_stored:
        return settings
    listed = Manifest.stored(blobs, kinds.MODEL, trusted)
    name = settings.model.removeprefix(STORE_SCHEME)
    try:
        sha256 = await retry_policy.call(lambda: listed.sha256(name))
    except MissingFileError as error:
        raise SetupError(error.message) from None
    return settings.model_copy(update={"model_sha256": sha256})


async def fetch_to(
    folder: Path,
    address: Address,
    sha256: str | None,
    blobs: BlobStore | None,
    retry_policy: RetryPolicy = STORAGE_RETRIES,
    *,
    wanted: FileKind,
    on_progress: OnProgress = lambda _so_far, _total: None,
) -> Path:
    """Downloads a file of the *wanted* kind into *folder*, one process at a time; returns its path.

    A .tar is unpacked. Another kind is refused as soon as its first bytes tell. Raises as `fetch`.
    """
    cache = DiskCache(folder)
    name = address.file_name or "model"
    async with cache.fetching(name, seconds=-1):
        if found := find_fetched(folder, address):
            return found
        source = _source(address, sha256, blobs)
        download = Download(
            cache,
            name,
            source,
            sha256 and sha256.lower(),
            copies=1 + name.endswith(".tar"),  # a packed folder needs its room twice
            check=lambda part, is_whole: _check_part(
                part, source.label, wanted, is_whole=is_whole
            ),
            on_progress=on_progress,
        )
        await download.run(retry_policy)
        with cache.errors():
            is_tar = check.is_tar(download.part)
            suffix = ".tar" if is_tar else SUFFIX
            # The checkpoint's name is the server's, where that is safe.
            final = address.file_name or download.file_name or ""
            if not addresses.FILE_NAME.fullmatch(final) or not final.endswith(suffix):
                final = f"{address.stem}{suffix}"
            path = folder / final.removesuffix(".tar")
            if is_tar:
                await asyncio.to_thread(_unpack, download.part, path, cache)
            else:
                download.part.replace(path)
            download.forget()
        log.info(f"{path} is fetched", action="model_fetched")
        return path


def find_fetched(folder: Path, address: Address) -> Path | None:
    """The file or folder that `fetch_to` left in *folder*."""
    if address.file_name is not None:
        path = folder / address.file_name.removesuffix(".tar")
        return path if path.exists() else None
    for path in (
        sorted(folder.iterdir()) if folder.is_dir() else ()
    ):  # its name is the server's
        if path.suffix == SUFFIX or (path.is_dir() and path.name != _UNPACKING):
            return path
    return None


def is_whole(path: Path) -> bool:
    """False if a power failure, or whoever copied it, left only a part of a model."""
    files = path.rglob(f"*{SUFFIX}") if path.is_dir() else [path]
    try:
        for file in files:
            check.read_header(file)
    except SetupError:
        return False
    return not path.is_dir() or (path / "model_index.json").is_file()


def _folder(settings: WorkerSettings, address: Address) -> Path:
    sha256 = settings.model_sha256
    name = address.folder_name(sha256 and sha256.lower())
    return settings.cache.expanduser() / "models" / name


def _source(address: Address, sha256: str | None, blobs: BlobStore | None) -> Source:
    if blobs is not None and address.blob is not None:
        return BlobSource(blobs, address.blob)
    return HttpSource(address.text, requires_https=sha256 is None)


def _check_part(part: Path, label: str, wanted: FileKind, *, is_whole: bool) -> None:
    """Raises SetupError if what has arrived so far cannot become a file of that kind."""
    if check.is_tar(part):
        if ".tar" not in wanted.suffixes:
            raise SetupError(
                f"{label!r} is a .tar archive, no file of {wanted.folder}/"
            )
        return
    try:
        kinds.check(wanted, label, check.read_header(part, label, is_whole=is_whole))
    except safetensors.TruncatedError:
        return


def _extract(tar: TarFile, member: TarInfo, folder: Path) -> None:
    """Extracts a file or a folder; raises TarError for anything else, and for what leads outside.

    Links are refused: several in a row lead out of the folder past the checks of older Pythons.
    """
    shown = repr(member.name[:80])
    name = PurePosixPath(member.name)
    if name.is_absolute() or ".." in name.parts:
        raise TarError(f"{shown} leads outside")
    if member.issym() or member.islnk():
        raise TarError(f"{shown} is a link; `tar --dereference` packs the file instead")
    if not member.isfile() and not member.isdir():
        raise TarError(f"{shown} is neither a file nor a folder")
    target = folder / name
    try:
        (target if member.isdir() else target.parent).mkdir(parents=True, exist_ok=True)
        source = tar.extractfile(member)
        if source is not None:
            with source, target.open("xb") as file:
                shutil.copyfileobj(source, file)
    except (FileExistsError, IsADirectoryError, NotADirectoryError, ValueError):
        raise TarError(f"{shown} is no name, or there twice") from None
    except OSError as error:
        if error.errno == errno.ENAMETOOLONG:
            raise TarError(f"{shown}... is too long") from None
        raise


def _unpack(archive: Path, path: Path, cache: DiskCache) -> None:
    """Unpacks the folder with a model_index.json: the archive's top level, or one folder in it."""
    folder = cache.folder / _UNPACKING
    shutil.rmtree(folder, ignore_errors=True)
    try:
        with tarfile.open(archive, "r:") as tar:
            for member in tar:
                _extract(tar, member, folder)
    except TarError as error:
        archive.unlink()
        raise SetupError(
            f"{path.name}.tar cannot be unpacked as a .tar: {error}"
        ) from None
    for candidate in (folder, *folder.iterdir()):
        if (candidate / "model_index.json").is_file():
            candidate.replace(path)
            shutil.rmtree(folder, ignore_errors=True)
            return
    raise SetupError(
        f"{path.name}.tar has no folder in diffusers format: model_index.json is missing"
    )
