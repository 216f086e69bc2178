"""A worker's compiled kernels: found on this machine, in the image or in the storage, or compiled.

Compiling waits for them, drawing does not. Whatever goes wrong is one line in the log: the worker
then compiles, as it does without them. What it compiles it stores for others, where it may.
"""

import asyncio
import contextlib
import hashlib
import importlib.util
import os
import platform
import re
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Literal, NoReturn

import pynvml
from filelock import FileLock, Timeout

import worker
from imagefleet import concurrency, errors
from imagefleet.files import safetensors
from imagefleet.files.kinds import KERNELS
from imagefleet.signing import SigningKey, TrustedKeys, trusted_keys
from imagefleet.storage import protocol
from imagefleet.telemetry import logs
from worker import replica, tasks
from worker.engine import phases
from worker.files import manifest, model
from worker.files.disk_cache import DiskCache
from worker.files.kernels import archive
from worker.files.kernels.archive import Key
from worker.files.kernels.shared import SharedKernels
from worker.files.manifest import Manifest
from worker.settings import WorkerSettings

log = logs.EventLog(__name__)

Origin = Literal["image", "disk", "store", "compiled"]
"""The place that a worker has its kernels from."""

#: Compiling takes longer than most downloads, but not longer than those of the slowest lines.
LONGEST_WAIT_SECONDS = 60.0

#: Between two looks at whether what is to be compiled has arrived, while more is being fetched.
_LOOK_SECONDS = 0.2

#: What is compiled is shared after this time, with what its first runs have tuned.
SETTLE_SECONDS = 20.0

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
    _asked: asyncio.Event = field(default_factory=asyncio.Event)
    _compiled: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self._ready = self.folder / f"{self.key.name}.ready"
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._others: SharedKernels | None = None

    async def exchange(
        self,
        blobs: protocol.BlobStore,
        image: Path | None,
        trusted: TrustedKeys | None,
        signing: SigningKey | None,
        *,
        shares: bool,
    ) -> None:
        """Fetches as `fetch`, again before each compilation, and stores what is compiled here."""
        self._loop = asyncio.get_running_loop()
        others = await self.fetch(blobs, image, trusted)
        sharing = [self._share(others, signing)] if shares else []
        await concurrency.gather(self._keep_up(others), *sharing)

    async def fetch(
        self,
        blobs: protocol.BlobStore,
        image: Path | None = None,
        trusted: TrustedKeys | None = None,
        retry_policy: concurrency.RetryPolicy = RETRIES,
    ) -> SharedKernels:
        """Looks on the disk, in the folder *image*, and in the storage; never raises FleetError.

        With *trusted* keys, one of them must have signed the storage's list of kernels, and what
        other workers share, which is returned.
        """
        others = self._others = SharedKernels(
            blobs, self.folder, self.key, trusted, retry_policy
        )
        with self._fetching():
            # Another worker may be fetching them.
            async with DiskCache(self.folder).fetching("kernels", seconds=-1):
                origin = await self._find(others, image, trusted)
            if origin is not None:
                self._settle(origin)
            await self._fetch_shared(others)
            if self.origin is None:
                log.info(
                    f"no kernels are stored for {self.key.name}", action="no_kernels"
                )
        self._is_settled.set()
        return others

    @contextlib.contextmanager
    def compiling(self, what: str) -> Iterator[None]:
        """Waits for what is being fetched and for other workers, then the block compiles *what*.

        As far as its kernels are not there; for any thread.
        """
        with phases.timed("kernels"):
            self._await_stored(what)
        with by_one_first(self.folder, self._named(what)):
            before = self._graphs()
            yield
            if self._graphs() - before:
                self._settle("compiled")
                self._tell(self._compiled)
            self._mark()

    def is_compiled(self, what: str) -> bool:
        """True if the kernels of *what* are here, whoever compiled them."""
        return _done(self.folder, self._named(what)).exists()

    def give_up(self) -> None:
        """Fetches nothing any more, and lets no compiler wait for it."""
        with self._lock:
            self._loop = None
            self._is_settled.set()

    def _named(self, what: str) -> str:
        return repr((self.key.name, self._variant, what))

    def _tell(
        self, event: asyncio.Event, first: Callable[[], None] = lambda: None
    ) -> None:
        """Sets an event of the loop's, from any thread; nothing once that is given up."""
        with self._lock:
            if self._loop is not None:
                first()
                self._loop.call_soon_threadsafe(event.set)

    def _await_stored(self, what: str) -> None:
        """Waits for the kernels of *what*, as long as they may be on their way."""
        if not self.is_compiled(what) and not self._asked.is_set():
            self._tell(
                self._asked, self._is_settled.clear
            )  # another may have compiled it since
        ends_at = time.monotonic() + LONGEST_WAIT_SECONDS
        while not self.is_compiled(what) and not self._is_settled.wait(_LOOK_SECONDS):
            if time.monotonic() > ends_at:
                self._is_settled.set()  # once is enough for what hangs
                log.info(
                    f"compiling {what}: stored kernels have not arrived",
                    action="kernels_late",
                )

    async def _keep_up(self, others: SharedKernels) -> NoReturn:
        """Fetches what has appeared, whenever something is about to be compiled."""
        while True:
            await self._asked.wait()
            self._asked.clear()  # before, so that what is asked meanwhile is looked for again
            with self._fetching():
                await self._fetch_shared(others)
            if not self._asked.is_set():
                self._is_settled.set()

    async def _fetch_shared(self, others: SharedKernels) -> None:
        if await others.fetch() and self.origin != "compiled":
            self._settle("store")

    async def _share(self, others: SharedKernels, signing: SigningKey | None) -> None:
        """Stores what is compiled, once nothing is for a while; ends where it may not."""
        while True:
            await self._compiled.wait()
            while self._compiled.is_set():
                self._compiled.clear()
                await asyncio.sleep(SETTLE_SECONDS)
            try:
                await others.share(signing)
            except errors.FleetError as error:
                log.info(
                    f"kernels are not shared: {error}", action="kernels_not_shared"
                )
                if isinstance(error, errors.SetupError):
                    return
            except Exception:
                log.exception("kernels are not shared", action="kernels_not_shared")
                raise

    @contextlib.contextmanager
    def _fetching(self) -> Iterator[None]:
        """Logs what keeps stored kernels from here, so that the worker compiles."""
        try:
            yield
        except errors.FleetError as error:
            log.warning(
                f"stored kernels cannot be used: {error}", action="kernels_failed"
            )
        except Exception:
            log.exception("the stored kernels cannot be used", action="kernels_failed")
            raise

    async def _find(
        self, stored: SharedKernels, image: Path | None, trusted: TrustedKeys | None
    ) -> Origin | None:
        if self._ready.exists():
            return "disk"
        name = f"{self.key.name}{archive.SUFFIX}"
        if image is not None and (image / name).exists():
            try:
                await asyncio.to_thread(stored.unpack, image / name, "image")
            except archive.UnusableArchiveError as error:
                log.warning(
                    f"the image's kernels are left out: {error.message}",
                    action="kernels_damaged",
                )
            else:
                self._mark()
                return "image"
        listed = Manifest.stored(stored.blobs, KERNELS, trusted)
        try:
            found = await stored.retry_policy.call(lambda: listed.sha256(name))
        except errors.MissingFileError:
            return None
        if found is None:
            return None
        await stored.get(name, found, f"{KERNELS.folder}/{manifest.NAME}")
        self._mark()
        return "store"

    def _mark(self) -> None:
        """Tells later workers that they need not fetch anything."""
        with contextlib.suppress(OSError):  # they then look again
            self._ready.touch()

    def _graphs(self) -> set[Path]:
        """All that were compiled, here or by other workers of this machine."""
        fetched = self._others.unpacked if self._others else set()
        found = set(self.folder.glob("fxgraph/*/*/*"))
        return found - {self.folder / name for name in list(fetched)}

    def _settle(self, origin: Origin) -> None:
        if origin == self.origin:
            return
        log.info(
            f"kernels={origin} for {self.key.name}",
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
    *,
    may_share: bool = True,
) -> AsyncIterator[KernelCache | None]:
    """A worker's kernels, fetched during the block once its model is here; None as `open_cache`.

    Those that it compiles are stored for others if it *may_share* them and others would take them.
    """
    found = await asyncio.to_thread(open_cache, settings, on_origin)
    if found is None:
        yield None
        return
    trusted, key_file = trusted_keys(settings.trusted_key), settings.signing_key
    signing = SigningKey.read(key_file) if key_file is not None and may_share else None
    shares = may_share and (signing is not None or trusted is None)
    exchange = found.exchange(blobs, settings.kernels, trusted, signing, shares=shares)
    try:
        async with tasks.background(exchange, "exchange kernels"):
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
    except (
        OSError,
        safetensors.MalformedError,
    ):  # the engine says what is wrong with the model
        return None
    except errors.FleetError as error:
        log.warning(
            f"kernels are not kept in --cache: {error}", action="kernels_failed"
        )
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


@contextlib.contextmanager
def by_one_first(folder: Path, what: str) -> Iterator[None]:
    """Runs the block, which compiles *what* into *folder*, in one process before any other.

    The system frees the lock of a worker that dies; the next one then compiles.
    """
    done = _done(folder, what)
    lock = FileLock(done.with_suffix(".lock"))
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not done.exists():
            try:
                lock.acquire(blocking=False)
            except Timeout:
                log.info(
                    "waiting for another worker's kernels", action="compile_awaited"
                )
                lock.acquire()
    except OSError as error:
        log.warning(
            f"compiling without waiting for other workers: {error}", action="no_lock"
        )
    try:
        if done.exists():
            lock.release()  # all others go on at once
        yield
        with contextlib.suppress(OSError):
            done.touch()
    finally:
        lock.release()


def _done(folder: Path, what: str) -> Path:
    """The file that says that *what* is compiled; in an archive, it comes with the kernels."""
    name = hashlib.blake2b(what.encode(), digest_size=12).hexdigest()
    return folder / f"imagefleet-{name}{archive.DONE_SUFFIX}"


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
        digest.update(
            f"{path.relative_to(folder).as_posix()}\n".encode() + path.read_bytes()
        )
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
    values = dict(
        re.findall(r"^(__version__|cuda)\b[^=\n]*= '([^'\n]+)'", text, re.MULTILINE)
    )
    return values["__version__"].partition("+")[0], values.get("cuda")


def _version(package: str) -> str:
    try:
        return metadata.version(package).partition("+")[0]
    except metadata.PackageNotFoundError:
        return "none"
