"""Draws jobs with an engine's settings into a folder, as files that say how they were drawn."""

import asyncio
import contextlib
import tempfile
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from cli import console
from evaluation.gate.sides import GPU_ONLY, Engine
from imagefleet.errors import (
    FleetError,
    JobError,
    MissingFileError,
    SetupError,
    TransientError,
)
from imagefleet.job.message import Job, text_for_image
from imagefleet.storage.open import open_storage
from imagefleet.storage.settings import StorageSettings
from worker.engine import contract, load
from worker.engine import device as devices
from worker.engine.contract import ImageRequest, Pixels
from worker.inputs.img2img import Overlay
from worker.inputs.reader import JobFiles
from worker.settings import WorkerSettings
from worker.stages import encode, infotext
from worker.stages.requests import PREPARERS, RequestReader


@dataclass(frozen=True)
class Setup:
    """Model and device of both sides, and the folders of the files that prompts name."""

    model: Path
    device: str
    lora_directory: Path | None
    embedding_directory: Path | None


@dataclass(frozen=True)
class _Image:
    """One image of a job."""

    job: Job
    #: The job with the settings that the model wants.
    drawn: Job
    index: int
    request: ImageRequest
    overlay: Overlay | None


def check(sides: Iterable[Engine], device: str) -> None:
    """Raises SetupError, before anything is drawn, for a setting without effect on this device."""
    if devices.find_device(device).type == "cpu":
        words = {word for side in sides for word in side.text.split(",")}
        if without_effect := ", ".join(sorted(GPU_ONLY & words)):
            raise SetupError(
                f"{without_effect} changes nothing on a CPU: compare on a GPU"
            )


def draw(
    jobs: Sequence[Job],
    side: Engine,
    setup: Setup,
    folder: Path,
    on_image: Callable[[], None],
) -> None:
    """Draws all images of the *jobs* into *folder*; raises SetupError if the model cannot."""
    engine = load.load_engine(
        load.EngineSettings(setup.model, setup.device, **side.settings)
    )
    try:
        images = asyncio.run(_images(jobs, setup, engine))
        for image, pixels in _drawn(images, engine):
            with _naming(image.job):
                _write(image, pixels, engine.model_name, folder)
            on_image()
    finally:
        engine.close()


def _drawn(
    images: Sequence[_Image], engine: contract.Engine
) -> Iterator[tuple[_Image, Pixels]]:
    """The images as they are finished; the engine is kept full."""
    with ThreadPoolExecutor(PREPARERS, "prepare") as threads:
        to_prepare = iter(images)
        waiting = deque(enumerate(images))
        preparing = deque(
            threads.submit(engine.prepare, image.request)
            for image in islice(to_prepare, 2 * engine.capacity)
        )
        while waiting or engine.busy:
            while waiting and engine.free:
                ticket, image = waiting.popleft()
                with _naming(image.job):
                    engine.admit(ticket, preparing.popleft().result())
                if (following := next(to_prepare, None)) is not None:
                    preparing.append(threads.submit(engine.prepare, following.request))
            for finished in engine.tick():
                image = images[finished.ticket]
                with _naming(image.job):
                    if isinstance(finished.outcome, FleetError):
                        raise finished.outcome
                if not finished.is_estimate:
                    yield image, finished.outcome


def _write(image: _Image, pixels: Pixels, model: str, folder: Path) -> None:
    job = image.job
    request = image.request
    overlay = image.overlay
    if overlay is not None:
        pixels = overlay.put_over(pixels)
    size = request.width, request.height
    is_cut_out = overlay is not None and overlay.box is not None
    text = infotext.parameters(
        image.drawn, image.index, size, model, is_cut_out=is_cut_out
    )
    encoded = encode.encode(
        pixels, job.output, text, text_for_image(job.to_message(), job)
    )
    name = job.blob_name(image.index).partition("/")[2]
    console.write_file(folder / name, encoded.data)


async def _images(
    jobs: Sequence[Job], setup: Setup, engine: contract.Engine
) -> list[_Image]:
    """All images of all jobs, with the files that their prompts name."""
    with (
        tempfile.TemporaryDirectory(prefix="imagefleet-gate-") as empty,
        ThreadPoolExecutor(1) as thread,
    ):
        own = StorageSettings(storage=f"local:{empty}/storage")
        async with open_storage(own) as storage:
            await storage.create()
            settings = WorkerSettings(
                model=str(setup.model),
                lora_directory=setup.lora_directory,
                embedding_directory=setup.embedding_directory,
                cache=Path(empty),
            )
            reader = RequestReader(engine, JobFiles(storage, settings), thread)
            images = []
            for job in jobs:
                with _naming(job):
                    drawn = reader.fit(job)
                    found = await reader.read_rested(drawn)
                overlay = found.inputs.overlay
                images += [
                    _Image(job, drawn, at, each, overlay)
                    for at, each in enumerate(found.requests)
                ]
            return images


@contextlib.contextmanager
def _naming(job: Job) -> Iterator[None]:
    """Errors of a job as SetupErrors that name it."""
    try:
        yield
    except (JobError, TransientError) as error:
        hint = ""
        if isinstance(error, MissingFileError):
            hint = " (--lora-directory and --embedding-directory name their folders)"
        raise SetupError(
            f"job {job.id} cannot be drawn: {error.message}{hint}"
        ) from error
