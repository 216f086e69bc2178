"""The encode and upload stages: pixels become files, files become blobs, and a job is done."""

from __future__ import annotations

import asyncio
import json
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import NoReturn

from imagefleet import errors, retry
from imagefleet.storage import protocol
from worker.cost import CostMeter
from worker.engine import contract
from worker.metrics import WorkerMetrics
from worker.node.canary import EngineFailures
from worker.node.watchdog import NodeWatchdog
from worker.settle import InFlightImage, InFlightJob, Settler
from worker.stages import encode, infotext

#: Threads that encode: a PNG takes 2 ms, so two keep up with any GPU.
ENCODERS = 2

#: Uploads in flight: storage that takes a second for each still keeps up with 16 images/s.
UPLOADS = 16

#: Encoded images that may wait, for each upload in flight.
WAITING_PER_UPLOAD = 2


@dataclass(frozen=True, slots=True)
class GeneratedImage:
    """An image as the engine returned it."""

    image: InFlightImage
    pixels: contract.Pixels


@dataclass(frozen=True, slots=True)
class _EncodedImage:
    image: InFlightImage
    file: encode.EncodedImage


class EncodeStage:
    """Encodes generated images on threads; feeds the upload stage."""

    def __init__(
        self,
        model_name: str,
        upload: UploadStage,
        settler: Settler,
        metrics: WorkerMetrics,
        failures: EngineFailures,
    ) -> None:
        self.queue: asyncio.Queue[GeneratedImage] = asyncio.Queue(ENCODERS)
        self._model_name = model_name
        self._upload = upload
        self._settler = settler
        self._metrics = metrics
        self._failures = failures
        self._threads = ThreadPoolExecutor(ENCODERS, "encode")

    async def run(self) -> NoReturn:
        while True:
            generated = await self.queue.get()
            await self._settler.attempt(
                generated.image.owner, partial(self._encode, generated), image_is_generated=True
            )

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def _encode(self, generated: GeneratedImage) -> None:
        image = generated.image
        text = infotext.parameters(image.job, image.index, image.size, self._model_name)
        loop = asyncio.get_running_loop()
        try:
            with self._metrics.stage_seconds.labels("encode").time():
                file = await loop.run_in_executor(
                    self._threads, encode.encode, generated.pixels, image.job.output, text
                )
        except errors.TransientError as error:  # an image of one colour is the engine's failure
            self._failures.add(error)
            raise
        self._failures.reset()
        await self._upload.queue.put(_EncodedImage(image, file))


class UploadStage:
    """Stores files as blobs, and acknowledges a job once all its images are stored."""

    def __init__(
        self,
        blobs: protocol.BlobStore,
        settler: Settler,
        metrics: WorkerMetrics,
        cost: CostMeter,
        watchdog: NodeWatchdog,
        *,
        retry_policy: retry.RetryPolicy,
        worker_name: str,
    ) -> None:
        self.queue: asyncio.Queue[_EncodedImage] = asyncio.Queue(WAITING_PER_UPLOAD * UPLOADS)
        self.images_written = 0
        self._stored: asyncio.Queue[InFlightJob] = asyncio.Queue(UPLOADS)
        self._blobs = blobs
        self._settler = settler
        self._metrics = metrics
        self._cost = cost
        self._watchdog = watchdog
        self._retry_policy = retry_policy
        self._worker_name = worker_name.encode("ascii", "replace").decode()

    async def run(self) -> NoReturn:
        while True:
            encoded = await self.queue.get()
            await self._settler.attempt(
                encoded.image.owner, partial(self._upload, encoded), image_is_generated=True
            )

    async def acknowledge(self) -> NoReturn:
        while True:
            entry = await self._stored.get()
            with self._metrics.stage_seconds.labels("acknowledge").time():
                await self._settler.completed(entry)

    async def _upload(self, encoded: _EncodedImage) -> None:
        image, file = encoded.image, encoded.file
        entry = image.owner
        name = image.job.blob_name(image.index)
        metadata = self._metadata(image)

        async def create() -> bool:
            entry.lease.check()
            with self._watchdog.uploading(len(file.data)):
                return await self._blobs.create(name, file.data, file.content_type, metadata)

        with self._metrics.stage_seconds.labels("upload").time():
            written = await self._retry_policy.call(create)
        if written:
            entry.images_written += 1
            self.images_written += 1
            self._metrics.images.inc()
        else:
            self._cost.lost("duplicate")
        entry.images_to_store -= 1
        if not entry.images_to_store:
            await self._stored.put(entry)

    def _metadata(self, image: InFlightImage) -> dict[str, str]:
        """The blob's metadata; Azure requires ASCII values."""
        facts = {
            "job": str(image.job.id),
            "seed": str(image.job.image_seed(image.index)),
            "worker": self._worker_name,
            "attempt": str(image.owner.lease.message.delivery_count),
            "seconds": f"{time.monotonic() - image.owner.pulled_at:.3f}",
            **self._cost.record,
        }
        if image.job.campaign:
            facts["campaign"] = image.job.campaign
        if image.job.metadata:
            facts["metadata"] = json.dumps(image.job.metadata)
        return facts
