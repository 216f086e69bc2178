"""The encode and upload stages: pixels become files, files become blobs."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import NoReturn

from imagefleet import concurrency, errors, retry
from imagefleet.job.message import DUPLICATES, Output, text_for_image
from imagefleet.records.record import MAX_NAME_CHARACTERS, Embedding, Record
from imagefleet.storage import protocol
from imagefleet.telemetry import logs
from worker.cost import CostMeter
from worker.engine import contract
from worker.jobs.in_flight import InFlightImage
from worker.metrics import WorkerMetrics
from worker.node.suspects import Suspects, file_name
from worker.node.watchdog import NodeWatchdog
from worker.settle import Settler
from worker.stages import encode

#: Threads that encode: a PNG takes 2 ms, so two keep up with any GPU.
ENCODERS = 2

#: Images that wait for these threads, so that tiny ones share their way there and back.
ENCODING = 16

#: Uploads in flight: storage that takes a second for each still keeps up with 16 images/s.
UPLOADS = 16

#: Encoded images that may wait, for each upload in flight.
WAITING_PER_UPLOAD = 2


log = logging.getLogger(__name__)

#: Limits the warnings of an outage, in which every upload in flight fails again and again.
_outage_warning = logs.Occasion()


def _log_outage(error: errors.TransientError) -> None:
    if _outage_warning.is_due():
        log.warning("the storage does not answer: %s", error, extra={"action": "storage_outage"})


#: Storage that is down for a few minutes costs no generated image; leases are renewed meanwhile.
STORAGE_RETRIES = retry.RetryPolicy(
    tries=15, longest_wait_seconds=30, waits_for_access=True, on_retry=_log_outage
)


@dataclass(frozen=True, slots=True)
class GeneratedImage:
    """An image as the engine returned it."""

    image: InFlightImage
    pixels: contract.Pixels


@dataclass(frozen=True, slots=True)
class _EncodedImage:
    image: InFlightImage
    file: encode.EncodedImage


_Drawn = tuple[GeneratedImage, Output, str, str]
"""What `_encoded` takes."""


@dataclass(slots=True, eq=False)
class EncodeStage:
    """Encodes generated images on threads; feeds the upload stage."""

    model_name: str
    model_hash: Future[str | None]
    upload: UploadStage
    settler: Settler
    metrics: WorkerMetrics
    watchdog: NodeWatchdog
    queue: asyncio.Queue[GeneratedImage] = field(
        default_factory=lambda: asyncio.Queue(ENCODERS), init=False
    )
    _threads: ThreadPoolExecutor = field(
        default_factory=lambda: ThreadPoolExecutor(ENCODERS, "encode"), init=False
    )
    _files: concurrency.Batches[_Drawn, encode.EncodedImage] = field(init=False)

    def __post_init__(self) -> None:
        self._files = concurrency.Batches(
            concurrency.one_by_one(lambda drawn: _encoded(*drawn)),
            self._threads,
            most=1,
            at_once=ENCODERS,
        )

    async def run(self) -> NoReturn:
        while True:
            generated = await self.queue.get()
            await self.settler.attempt(
                generated.image.owner, partial(self._encode, generated), generated.image
            )

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def _parameters(self, image: InFlightImage) -> str:
        """The image's text; waits for the hashes in it, which were begun before it was drawn."""
        if image.job.only_upscales:
            return encode.of_enlarged(image.job, image.owner.source_parameters)
        model = await _result(self.model_hash)
        loras = {name: await _result(each) for name, each in image.owner.lora_hashes.items()}
        return encode.parameters(
            image.job,
            image.index,
            image.size,
            self.model_name,
            model_hash=model,
            lora_hashes={name: each for name, each in loras.items() if each},
            embedding_hashes={each.name: each.sha256 for each in image.embeddings},
            is_cut_out=image.owner.overlay is not None and image.owner.overlay.box is not None,
        )

    async def _encode(self, generated: GeneratedImage) -> None:
        image = generated.image
        text = await self._parameters(image)
        job = text_for_image(image.owner.lease.message.body, image.job)
        try:
            with self.metrics.stage_seconds["encode"].time():
                file = await self._files((generated, image.job.output, text, job))
        except errors.TransientError as error:  # an image of one colour is the engine's failure
            if not image.owner.failures:
                self.watchdog.image_failed(error)
            raise
        self.watchdog.image_succeeded()
        await self.upload.queue.put(_EncodedImage(image, file))


@dataclass(slots=True, eq=False)
class UploadStage:
    """Stores files as blobs."""

    blobs: protocol.BlobStore
    settler: Settler
    metrics: WorkerMetrics
    cost: CostMeter
    watchdog: NodeWatchdog
    retry_policy: retry.RetryPolicy
    worker_name: str
    model_name: str
    suspects: Suspects
    images_written: int = 0
    queue: asyncio.Queue[_EncodedImage] = field(
        default_factory=lambda: asyncio.Queue(WAITING_PER_UPLOAD * UPLOADS), init=False
    )

    async def run(self) -> NoReturn:
        while True:
            encoded = await self.queue.get()
            await self.settler.attempt(
                encoded.image.owner, partial(self._upload, encoded), encoded.image
            )

    async def _upload(self, encoded: _EncodedImage) -> None:
        with encoded.image.owner.uploading():
            await self._store(encoded)
        await self.settler.image_stored(encoded.image)

    async def _store(self, encoded: _EncodedImage) -> None:
        image, file = encoded.image, encoded.file
        entry = image.owner
        name = image.job.blob_name(image.index)
        metadata = self._metadata(image)

        is_in_doubt = False
        is_surely_own = True

        def doubt() -> None:
            nonlocal is_surely_own
            is_surely_own = False

        async def create() -> bool:
            nonlocal is_in_doubt
            entry.lease.check()
            try:
                with self.watchdog.uploading(len(file.data)):
                    if await self.blobs.create(
                        name, file.data, file.content_type, metadata, on_doubt=doubt
                    ):
                        return True
            except errors.TransientError as error:
                is_in_doubt = is_in_doubt or error.outcome_is_unknown
                raise
            # A name taken after a reply was lost is most likely taken by this very image.
            doubt()
            return is_in_doubt

        self.suspects.storing(name, image.generated_at)
        with self.metrics.stage_seconds["upload"].time():
            written = await self.retry_policy.call(create)
        if image.job.verify:
            self.cost.lost("second_drawing")
        elif written:
            # In doubt another worker may have a record of it, too.
            records = entry.records if is_surely_own else entry.again
            records.append(self._record(encoded, name))
            entry.images_written += 1
            self.images_written += 1
            self.metrics.images.inc()
            self.metrics.model_images.labels(self.model_name).inc()
            if image.job.stages > 1:
                self.metrics.chain_images.labels(str(image.job.stage)).inc()
        else:
            self.suspects.not_stored(name)
            self.cost.lost("duplicate")
            entry.again.append(self._record(encoded, name))
            await self._keep_aside(name, encoded, metadata)

    async def _keep_aside(
        self, name: str, encoded: _EncodedImage, metadata: dict[str, str]
    ) -> None:
        """Stores a duplicate, so that what took its name first can be compared with it."""
        suffix = name.rpartition(".")[2]
        aside = f"{DUPLICATES}{name}/{file_name(self.worker_name)}.{suffix}"
        file, lease = encoded.file, encoded.image.owner.lease

        async def create() -> bool:
            lease.check()
            return await self.blobs.create(aside, file.data, file.content_type, metadata)

        await self.retry_policy.call(create)

    def _record(self, encoded: _EncodedImage, name: str) -> Record:
        image = encoded.image
        width, height = image.final_size
        return self.settler.record(
            image.owner,
            "completed",
            blob=name,
            size_bytes=len(encoded.file.data),
            index=image.index,
            completes=False if image.job.images > 1 else None,
            seed=image.job.image_seed(image.index),
            model=self.model_name[:MAX_NAME_CHARACTERS],
            width=width,
            height=height,
            embeddings=tuple(Embedding(each.name, each.sha256) for each in image.embeddings),
            seconds=round(time.monotonic() - image.owner.pulled_at, 3),
        )

    def _metadata(self, image: InFlightImage) -> dict[str, str]:
        """The blob's metadata; Azure requires ASCII values."""
        facts = {
            "job": str(image.job.id),
            "seed": str(image.job.image_seed(image.index)),
            "worker": self.worker_name.encode("ascii", "replace").decode(),
            "attempt": str(image.owner.lease.message.delivery_count),
            "seconds": f"{time.monotonic() - image.owner.pulled_at:.3f}",
            **self.cost.record,
        }
        if image.job.images > 1:
            facts["images"] = str(image.job.images)
        if image.job.stages > 1:
            facts |= {"stage": str(image.job.stage), "stages": str(image.job.stages)}
        if image.job.campaign:
            facts["campaign"] = image.job.campaign
        if image.job.metadata:
            facts["metadata"] = json.dumps(image.job.metadata)
        return facts


def _encoded(
    generated: GeneratedImage, output: Output, parameters: str, job: str
) -> encode.EncodedImage:
    pixels, overlay = generated.pixels, generated.image.owner.overlay
    if overlay is not None:
        encode.refuse_one_colour(pixels)  # the engine's own
        pixels = overlay.put_over(pixels)
    return encode.encode(pixels, output, parameters, job)


async def _result(hashed: Future[str | None]) -> str | None:
    if hashed.done():  # as it is from a worker's second image on
        return hashed.result()
    # Shielded: other images wait for the same.
    return await asyncio.shield(asyncio.wrap_future(hashed))
