"""A worker's compiled kernels: found on this machine, in the image or in the storage, or compiled.

Compiling waits for them, drawing does not. Whatever goes wrong is one line in the log: the worker
then compiles, as it does without them.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import importlib.util
import os
import platform
import re
import tempfile
import threading
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Literal

import pynvml
from filelock import FileLock, Timeout

import worker
from imagefleet import concurrency, errors
from imagefleet.files import safetensors
from imagefleet.files.kinds import KERNELS
from imagefleet.signing import TrustedKeys, trusted_keys
from imagefleet.storage import protocol
from imagefleet.telemetry import logs
from worker import replica, tasks
from worker.files import manifest, model
from worker.files.disk_cache import DiskCache
from worker.files.download import BlobSource, Download
from worker.files.kernels import archive
from worker.files.kernels.archive import Key
from worker.files.manifest import Manifest
from worker.settings import WorkerSettings

log = logs.EventLog(__name__)

Origin = Literal["image", "disk", "store", "compiled"]
"""The place that a worker has its kernels from."""

#: Compiling takes longer than most downloads, but not longer than those of the slowest lines.
LONGEST_WAIT_SECONDS = 60.0

#: Fewer than for a model: without it, the worker compiles.
RETRIES = concurrency.RetryPolicy(tries=3, give_up_seconds=30)

#: Torch's and Triton's variables for their folders.
TORCH_FOLDER, TRITON_FOLDER = "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"

#: UNet weights in a single file; in diffusers format they have a folder of their own.
_UNET_PREFIX = "model.diffusion_model."

_HASH_CHARACTERS = 8


@dataclass(eq=False)
class KernelCache:
    """The folder with the kernels of one key, which this machine's workers share.

    *on_origin* is told where the kernels are from as soon as that is known. Workers of another
    *variant* compile others, and are not waited for.
    """

    folder: Path
    key: Key
    _on_origin: Callable[[Origin], None] = lambda _: None
    _variant: object = None
    origin: Origin | None = None
    _is_settled: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        self._ready = self.folder / f"{self.key.name}.ready"

    async def fetch(
        self,
        blobs: protocol.BlobStore,
        image: Path | None = None,
        trusted: TrustedKeys | None = None,
        retry_policy: concurrency.RetryPolicy = RETRIES,
    ) -> None:
        """Looks on the disk, in the folder *image*, and in the storage; never raises FleetError.

        With *trusted* keys, one of them must have signed the storage's list of kernels.
        """
        try:
            async with DiskCache(self.folder).lock():  # another worker may be fetching them
                origin = await self._find(blobs, image, trusted, retry_policy)
            if origin is not None:
                self._settle(origin)
        except errors.FleetError as error:
            log.warning(f"stored kernels cannot be used: {error}", action="kernels_failed")
        except Exception:
            log.exception("the stored kernels cannot be used", action="kernels_failed")
            raise
        finally:
            self.give_up()

    @contextlib.contextmanager
    def compiling(self, what: str) -> Iterator[None]:
        """Waits for what is being fetched and for other workers, then the block compiles *what*.

        As far as its kernels are not there; for any thread.
        """
        if not self._is_settled.wait(LONGEST_WAIT_SECONDS):
            self._is_settled.set()  # once is enough
            log.info(f"compiling {what}: stored kernels have not arrived", action="kernels_late")
        with by_one_first(self.folder, repr((self.key.name, self._variant, what))):
            before = self._graphs()
            yield
            if self._graphs() - before:
                self._settle("compiled")
            self._mark()

    def give_up(self) -> None:
        """Fetches nothing any more, and lets no compiler wait for it."""
        self._is_settled.set()

    async def _find(
        self,
        blobs: protocol.BlobStore,
        image: Path | None,
        trusted: TrustedKeys | None,
        retry_policy: concurrency.RetryPolicy,
    ) -> Origin | None:
        if self._ready.exists():
            return "disk"
        name = f"{self.key.name}{archive.SUFFIX}"
        if image is not None and (image / name).exists():
            try:
                await self._unpack(image / name)
            except archive.UnusableArchiveError as error:
                log.warning(
                    f"the image's kernels are left out: {error.message}", action="kernels_damaged"
                )
            else:
                return "image"
        sha256 = await retry_policy.call(lambda: find_sha256(blobs, name, trusted))
        if sha256 is None:
            log.info(f"no kernels are stored for {self.key.name}", action="no_kernels")
            return None
        download = Download(
            DiskCache(self.folder),
            name,
            BlobSource(blobs, name, KERNELS.folder),
            sha256,
            copies=1,
            check=lambda _part, _is_whole: None,
            stated_in=f"{KERNELS.folder}/{manifest.NAME}",
        )
        await download.run(retry_policy)
        try:
            await self._unpack(download.part)
        finally:
            download.forget()
        return "store"

    async def _unpack(self, path: Path) -> None:
        await asyncio.to_thread(archive.unpack, path, self.folder, self.key)
        self._mark()

    def _mark(self) -> None:
        """Tells later workers that they need not fetch anything."""
        with contextlib.suppress(OSError):  # they then look again
            self._ready.touch()

    def _graphs(self) -> set[Path]:
        return set(self.folder.glob("fxgraph/*/*/*"))

    def _settle(self, origin: Origin) -> None:
        if origin == self.origin:
            return
        advice = (
            ": `imagefleet files make kernels` and `files add kernels` spare other workers that"
            if origin == "compiled"
            else ""
        )
        log.info(
            f"kernels={origin} for {self.key.name}{advice}",
            action="kernels",
            kernels=origin,
            key=self.key.name,
        )
        self.origin = origin
        self._on_origin(origin)


@contextlib.asynccontextmanager
async def fetching(
    settings: WorkerSettings,
    blobs: protocol.BlobStore,
    on_origin: Callable[[Origin], None] = lambda _: None,
) -> AsyncIterator[KernelCache | None]:
    """A worker's kernels, fetched during the block once its model is here; None as `open_cache`."""
    found = await asyncio.to_thread(open_cache, settings, on_origin)
    if found is None:
        yield None
        return
    trusted = trusted_keys(settings.trusted_key)
    fetch = found.fetch(blobs, settings.kernels, trusted)
    try:
        async with tasks.background(fetch, "fetch kernels"):
            yield found
    finally:
        found.give_up()


def open_cache(
    settings: WorkerSettings, on_origin: Callable[[Origin], None] = lambda _: None
) -> KernelCache | None:
    """A worker's kernels; None where nothing is compiled or can be kept. Blocks on the driver."""
    if settings.compile == "off":
        return None
    try:
        key = find_key(model.local_path(settings), settings.device)
        if key is None:
            return None
        variant = settings.precision, settings.fp16_accumulate
        return KernelCache(use_folder(settings.cache, key), key, on_origin, variant)
    except (OSError, safetensors.MalformedError):  # the engine says what is wrong with the model
        return None
    except errors.FleetError as error:
        log.warning(f"kernels are not kept in --cache: {error}", action="kernels_failed")
        return None


def use_folder(cache: Path, key: Key) -> Path:
    """Has torch and Triton keep the kernels of *key* in a folder of their own, and returns it.

    Where their variables name folders already, they keep those. Raises as `DiskCache.errors`.
    """
    folder = Path(os.environ.get(TORCH_FOLDER, ""))
    # Torch sets the variable itself once imported, to a temporary folder.
    temporary = Path(tempfile.gettempdir())
    is_torchs = folder.parent == temporary and folder.name.startswith("torchinductor_")
    if is_torchs or folder == Path():
        folder = cache.expanduser().absolute() / "kernels" / key.name
    with DiskCache(folder).errors():
        folder.mkdir(parents=True, exist_ok=True)
    os.environ[TORCH_FOLDER] = str(folder)
    os.environ.setdefault(TRITON_FOLDER, str(folder / "triton"))
    return folder


async def find_sha256(
    blobs: protocol.BlobStore, name: str, trusted: TrustedKeys | None
) -> str | None:
    """The hash that the storage's list states, or None; raises as `Manifest.sha256`."""
    try:
        return await Manifest.stored(blobs, KERNELS, trusted).sha256(name)
    except errors.MissingFileError:
        return None


@contextlib.contextmanager
def by_one_first(folder: Path, what: str) -> Iterator[None]:
    """Runs the block, which compiles *what* into *folder*, in one process before any other.

    The system frees the lock of a worker that dies; the next one then compiles.
    """
    name = hashlib.blake2b(what.encode(), digest_size=12).hexdigest()
    done = folder / f"imagefleet-{name}.compiled"
    lock = FileLock(folder / f"imagefleet-{name}.lock")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not done.exists():
            try:
                lock.acquire(blocking=False)
            except Timeout:
                log.info("waiting for another worker's kernels", action="compile_awaited")
                lock.acquire()
    except OSError as error:
        log.warning(f"compiling without waiting for other workers: {error}", action="no_lock")
    try:
        if done.exists():
            lock.release()  # all others go on at once
        yield
        with contextlib.suppress(OSError):
            done.touch()
    finally:
        lock.release()


def find_key(model: Path, device: str) -> Key | None:
    """This machine's key for a checkpoint; None if nothing is compiled. Blocks on the driver."""
    torch = _torch_versions()
    if device == "cpu" or torch is None or torch[1] is None:
        return None

    def ask() -> tuple[str, str, str]:
        handle = replica.card_handle(device)
        major, minor = pynvml.nvmlDeviceGetCudaComputeCapability(handle)
        driver = str(pynvml.nvmlSystemGetDriverVersion())
        return str(pynvml.nvmlDeviceGetName(handle)), f"{major}.{minor}", driver

    answer = replica.ask_driver(ask)
    if isinstance(answer, Exception):
        return None
    gpu, capability, driver = answer
    return Key(
        gpu=gpu,
        capability=capability,
        driver=driver.partition(".")[0],
        cuda=torch[1],
        torch=torch[0],
        triton=_version("triton"),
        diffusers=_version("diffusers"),
        python=".".join(platform.python_version_tuple()[:2]) + f"-{platform.machine()}",
        engine=hash_sources(Path(worker.__file__).parent / "engine"),
        unet=hash_unet(model),
    )


def hash_sources(folder: Path) -> str:
    """A hash of all Python files below *folder*: any of them may change what is compiled."""
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*.py")):
        digest.update(f"{path.relative_to(folder).as_posix()}\n".encode() + path.read_bytes())
    return digest.hexdigest()[:_HASH_CHARACTERS]


def hash_unet(model: Path) -> str:
    """The same in either format of a checkpoint; raises OSError, MalformedError."""
    if model.is_dir():
        # One precision of several, as far as there are.
        files = sorted((model / "unet").glob("*.safetensors"))
        plain = [path for path in files if ".fp16." not in path.name]
        shapes = [shape for path in plain or files for shape in _shapes(path)]
    else:
        shapes = list(_shapes(model, _UNET_PREFIX))
    return hashlib.sha256(repr(sorted(shapes)).encode()).hexdigest()[:_HASH_CHARACTERS]


def _shapes(path: Path, prefix: str = "") -> Iterable[tuple[int, ...]]:
    with path.open("rb") as file:
        shapes = safetensors.read_header(file).shapes
    return (shape for name, shape in shapes.items() if name.startswith(prefix))


def _torch_versions() -> tuple[str, str | None] | None:
    """Versions of torch and its CUDA, from its text: importing it takes seconds."""
    found = importlib.util.find_spec("torch")
    if found is None or found.origin is None:
        return None
    text = (Path(found.origin).parent / "version.py").read_text(encoding="utf-8")
    values = dict(re.findall(r"^(__version__|cuda)\b[^=\n]*= '([^'\n]+)'", text, re.MULTILINE))
    return values["__version__"].partition("+")[0], values.get("cuda")


def _version(package: str) -> str:
    try:
        return metadata.version(package).partition("+")[0]
    except metadata.PackageNotFoundError:
        return "none"
