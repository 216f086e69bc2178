"""Computes the features of chunks of images, in several processes; each chunk is kept once done."""

import asyncio
import hashlib
import multiprocessing
import signal
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cached_property
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from evaluation.score import chunks, extractors, metrics, plan
from evaluation.score.extractors import Extractor, ExtractorFacts, TextExtractor
from evaluation.score.networks import load
from evaluation.score.plan import Chunk, ImageRow
from evaluation.score.statistics import Features
from imagefleet import concurrency
from imagefleet.errors import FleetError, UnusableFileError
from imagefleet.files import picture
from imagefleet.records import pictures
from imagefleet.storage.open import Storage, open_storage
from imagefleet.storage.settings import StorageSettings
from imagefleet.submit import RETRIES

#: Images in each call of a network, and images read at once.
_BATCH = 32

Item = TypeVar("Item")

OnImages = Callable[[int], None]


@dataclass(frozen=True)
class NetworkPair:
    """The extractors as they were named; each process loads them once, when it asks for them."""

    extractor: str | None
    clip: str | None
    device: str

    @cached_property
    def loaded(self) -> tuple[Extractor | None, TextExtractor | None]:
        """The extractors of FID and KID, and of CLIP and CMMD; raises SetupError."""
        extractor = clip = None
        if self.extractor is not None:
            extractor = load.load_extractor(self.extractor, self.device)
        if self.clip is not None:
            clip = load.load_text_extractor(self.clip, self.device)
        if "torch" in sys.modules:  # ONNX needs none
            one_thread()
        return extractor, clip

    @property
    def facts(self) -> tuple[ExtractorFacts | None, ExtractorFacts | None]:
        extractor, clip = self.loaded
        return extractor.facts if extractor else None, clip.facts if clip else None

    def __getstate__(self) -> dict[str, Any]:
        """The names alone: another process loads the networks itself."""
        return {name: each for name, each in vars(self).items() if name != "loaded"}


@dataclass(frozen=True)
class FeatureTask:
    """Work of one process: chunks, and the networks that compute their features."""

    settings: StorageSettings
    chunks: Sequence[Chunk]
    networks: NetworkPair


def one_thread() -> None:
    """Other numbers of threads, and other kernels, would round differently."""
    import torch

    torch.set_num_threads(1)
    torch.backends.cudnn.deterministic = True
    torch.backends.cudnn.benchmark = False


def digest(rows: Sequence[ImageRow], facts: Sequence[ExtractorFacts | None]) -> str:
    """Identifies a chunk's images and the networks that compute their features."""
    parts = [plan.digest(rows), str(_BATCH), *(str(each) for each in facts)]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


@dataclass
class Done:
    """Images computed, and those found computed already."""

    images: int = 0
    kept: int = 0


def extract(work: FeatureTask, processes: int, on_images: OnImages, done: Done) -> None:
    """Computes what *work* lacks; raises FleetError if a process failed, and keeps what is done."""
    left = []
    for chunk in work.chunks:
        rows = chunk.rows()
        # Of an image without a SHA-256, another in as many bytes may be there now.
        if all(row.sha256 for row in rows) and chunks.is_done(
            chunk, digest(rows, work.networks.facts)
        ):
            on_images(len(rows))
            done.kept += len(rows)
        else:
            left.append(chunk)

    def count(images: int) -> None:
        done.images += images
        on_images(images)

    if processes == 1 or len(left) < 2:  # noqa: PLR2004 - one chunk needs no other process
        asyncio.run(_extract(replace(work, chunks=left), count))
        return
    shares = [left[first::processes] for first in range(min(processes, len(left)))]
    _in_processes([replace(work, chunks=share) for share in shares], count)


def _in_processes(works: Sequence[FeatureTask], on_images: OnImages) -> None:
    context = multiprocessing.get_context(
        "spawn"
    )  # torch's threads do not outlive a fork
    children = {}
    try:
        for work in works:
            here, there = context.Pipe(duplex=False)
            child = context.Process(target=_child, args=(work, there), daemon=True)
            child.start()
            there.close()
            children[here] = child
        running = set(children)
        while running:
            for connection in wait(running):
                assert isinstance(connection, Connection)  # noqa: S101 - nothing else is waited for
                try:
                    said = connection.recv()
                except EOFError:
                    running.remove(connection)
                    _check_ended(children[connection])
                    continue
                if isinstance(said, FleetError):
                    raise said
                on_images(said)
    finally:
        for child in children.values():
            child.terminate()
            child.join()


def _check_ended(child: BaseProcess) -> None:
    child.join()
    if child.exitcode:
        raise FleetError(
            f"a scoring process ended with exit code {child.exitcode} (-9: out of memory?); the"
            " same command goes on, perhaps with fewer --processes"
        )


def _child(work: FeatureTask, connection: Connection) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends it
    try:
        asyncio.run(_extract(work, connection.send))
    except BrokenPipeError:
        return  # the parent was killed
    except FleetError as error:
        connection.send(error)


async def _extract(work: FeatureTask, on_images: OnImages) -> None:
    async with open_storage(work.settings) as storage:
        # Each thread that computes would keep some hundred MB of its own.
        with ThreadPoolExecutor(max_workers=1) as thread:
            for chunk in work.chunks:
                rows = chunk.rows()
                note, arrays = await _compute(work, chunk, rows, storage, thread)
                await asyncio.to_thread(chunks.write, chunk, note, arrays)
                on_images(len(rows))


async def _compute(
    work: FeatureTask,
    chunk: Chunk,
    rows: Sequence[ImageRow],
    storage: Storage,
    thread: ThreadPoolExecutor,
) -> tuple[chunks.Note, dict[str, Features]]:
    """Batch by batch; the next one is read while the networks compute."""
    starts = range(0, len(rows), _BATCH)
    batches = [rows[first : first + _BATCH] for first in starts]
    parts: dict[str, list[Features]] = {"features": [], "clip": []}
    scores = []
    left_out = []
    loop = asyncio.get_running_loop()
    reading = asyncio.ensure_future(_read(chunk, batches[0], storage))
    try:
        for number, batch in enumerate(batches):
            read = await reading
            if number + 1 < len(batches):
                reading = asyncio.ensure_future(
                    _read(chunk, batches[number + 1], storage)
                )
            scored = await loop.run_in_executor(thread, _score, work, batch, read)
            for kind, features in scored.arrays.items():
                parts[kind].append(features)
            scores += scored.scores
            left_out += scored.left_out
    finally:
        reading.cancel()
    arrays = {kind: np.concatenate(each) for kind, each in parts.items() if each}
    images = len(rows) - len(left_out)
    note = chunks.Note(
        digest=digest(rows, work.networks.facts),
        images=images,
        left_out=tuple(left_out),
        scores=tuple(scores),
    )
    return note, arrays


@dataclass(frozen=True)
class _Scored:
    arrays: dict[str, Features]
    scores: list[float]
    left_out: list[str]


def _score(
    work: FeatureTask, batch: Sequence[ImageRow], read: Sequence[bytes | None]
) -> _Scored:
    """Decodes a batch and computes what is asked for of the images that are whole."""
    images = []
    captions = []
    left_out = []
    for row, data in zip(batch, read, strict=True):
        image = picture.decode(data) if data is not None and row.is_of(data) else None
        if image is None:
            left_out.append(row.name)
        else:
            images.append(image)
            captions.append(row.caption)
    found = _Scored({}, [], left_out)
    extractor, clip = work.networks.loaded
    if not images:
        return found
    filled = _filled(images)
    if extractor:
        found.arrays["features"] = extractors.finite(extractor, filled)[: len(images)]
    if clip:
        seen = found.arrays["clip"] = extractors.finite(clip, filled)[: len(images)]
        if any(captions):
            texts = clip.text_features(_filled(captions))[: len(images)]
            found.scores.extend(metrics.clip_score(seen, texts).tolist())
    return found


def _filled(items: list[Item]) -> list[Item]:
    """Fills a batch up by its last item: torch keeps kernels and memory for each size it meets."""
    return items + [items[-1]] * (_BATCH - len(items))


async def _read(
    chunk: Chunk, rows: Sequence[ImageRow], storage: Storage
) -> list[bytes | None]:
    if chunk.folder is not None:
        paths = [chunk.folder / row.name for row in rows]
        return await asyncio.to_thread(lambda: [_read_file(path) for path in paths])
    return list(await concurrency.gather(*(_read_blob(row, storage) for row in rows)))


def _read_file(path: Path) -> bytes | None:
    """None if it is gone."""
    try:
        return path.read_bytes()
    except OSError:
        return None


async def _read_blob(row: ImageRow, storage: Storage) -> bytes | None:
    """None for what is missing."""
    try:
        return await RETRIES.call(lambda: pictures.read(storage, row.spot))
    except UnusableFileError:  # larger than any image
        return None
