"""The stages of a prepared image: generate, encode, upload.

Prepared requests go to the engine's thread, its images to threads that encode, and their files to
the storage.
"""

import asyncio
import itertools
import time
from collections import Counter
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NoReturn

from imagefleet import concurrency, errors
from imagefleet.job.message import Output, text_for_image
from imagefleet.job.names import duplicate_name
from imagefleet.job.passes.first import VaeDecoder
from imagefleet.job.sizes import metadata_header
from imagefleet.pricing import families
from imagefleet.records.record import MAX_NAME_CHARACTERS, Embedding, Record, of_job
from imagefleet.telemetry import logs
from worker.engine import contract
from worker.gpu_thread import Delivery
from worker.inputs.img2img import Overlay
from worker.jobs import stored
from worker.jobs.in_flight import InFlightImage, InFlightJob
from worker.node.checks import NodeChecks
from worker.pull import Puller
from worker.settle import Settler
from worker.stages import encode
from worker.stages.encode import EncodedImage

#: Threads that encode: a PNG takes 2 ms, so two keep up with any GPU.
ENCODERS = 2

#: Images that wait for these threads, so that tiny ones share their way there and back.
ENCODING = 16

#: Uploads in flight: storage that takes half a second for each still keeps up with 64 images/s.
UPLOADS = 32

#: Encoded images that may wait, for each upload in flight.
WAITING_PER_UPLOAD = 2


log = logs.EventLog(__name__)

#: Limits the warnings of an outage, in which every upload in flight fails again and again.
_outage_warning = logs.Occasion()


def _log_outage(error: errors.TransientError) -> None:
    if _outage_warning.is_due():
        log.warning(f"the storage does not answer: {error}", action="storage_outage")


#: Storage that is down for a few minutes costs no generated image; leases are renewed meanwhile.
STORAGE_RETRIES = concurrency.RetryPolicy(
    tries=15, longest_wait_seconds=30, waits_for_access=True, on_retry=_log_outage
)


@dataclass(eq=False)
class UploadStage:
    """Stores files as blobs."""

    settler: Settler
    checks: NodeChecks

    def __post_init__(self) -> None:
        most = WAITING_PER_UPLOAD * UPLOADS
        self.queue: asyncio.Queue[tuple[InFlightImage, EncodedImage]] = asyncio.Queue(
            most
        )

    async def run(self) -> NoReturn:
        while True:
            image, file = await self.queue.get()
            entry = image.owner
            store = partial(
                self.settler.attempt, entry, partial(self._upload, image, file), image
            )
            # Whose the first image's name is, theirs are those of the others. In an outage few of
            # them wait elsewhere than in the queue, where they hold up the engine.
            if image.index and len(entry.waiting) >= UPLOADS:
                await entry.uploads_end()
            if image.index and entry.is_first_awaited:
                entry.waiting.append(store)
            else:
                await store()

    async def _upload(self, image: InFlightImage, file: EncodedImage) -> None:
        entry = image.owner
        if image.index and 0 not in entry.stored:
            self.settler.cost.lost("failed")
            await self.settler.less_to_store(entry, 1)
            return
        with entry.uploading():
            await self._store(image, file)
        await self.settler.image_stored(image)
        if not image.index:
            await entry.first_ended()

    async def _store(self, image: InFlightImage, file: EncodedImage) -> None:
        entry = image.owner
        name = image.job.blob_name(image.index)
        metadata = self._proven(name, self._metadata(image, file))
        doubt = asyncio.Event()

        async def create(is_in_doubt: bool) -> bool:
            entry.lease.check()
            with self.checks.watchdog.uploading(len(file.data)):
                if await self.settler.storage.blobs.create(
                    name, file.data, file.content_type, metadata, on_doubt=doubt.set
                ):
                    return True
            # A name taken after a reply was lost is most likely taken by this very image.
            doubt.set()
            return is_in_doubt

        self.checks.suspects.storing(name, image.generated_at)
        with self.settler.metrics.stage_seconds["upload"].time():
            written = await self.settler.retry_policy.call_in_doubt(create)
        sha256: str | None = file.sha256
        if doubt.is_set():
            try:
                sha256 = await self._sha256_of_taken(image, is_in_doubt=written)
            except errors.FleetError:
                self.checks.suspects.not_stored(name)
                raise
        if image.job.verify:
            self.settler.cost.lost("second_drawing")
        elif written:
            # In doubt another worker may have a record of it, too.
            records = entry.again if doubt.is_set() else entry.records
            records.append(self._record(image, file, name, sha256))
            entry.image_written(self.settler.metrics, self.settler.model_name)
        else:
            self.checks.suspects.not_stored(name)
            self.settler.cost.lost("duplicate")
            entry.again.append(self._record(image, file, name, sha256))
            await self._keep_aside(image, file, name, metadata)

    async def _sha256_of_taken(
        self, image: InFlightImage, *, is_in_doubt: bool
    ) -> str | None:
        """The SHA-256 of the file that has an image's name; None if it is not known.

        *is_in_doubt*: it is this very image, perhaps. Raises NameTakenError if it is another job's.
        """
        entry, job = image.owner, image.job
        look = partial(stored.look_up, self.settler.storage.blobs, job, image.index)
        if (found := await self.settler.retry_policy.call(look)) is None:
            raise errors.TransientError(
                "an image that had its name was removed meanwhile"
            )
        is_first = (
            entry.lease.message.delivery_count == 1 and not entry.deliveries.is_unsure
        )
        if found is stored.NOT_READ and is_first and not is_in_doubt:
            raise stored.taken_unseen(job, image.index)
        return stored.sha256_in(found)

    async def _keep_aside(
        self,
        image: InFlightImage,
        file: EncodedImage,
        name: str,
        metadata: dict[str, str],
    ) -> None:
        """Stores a duplicate, so that what took its name first can be compared with it."""
        aside = duplicate_name(name, self.settler.settings.name)
        blobs, proven = self.settler.storage.blobs, self._proven(aside, metadata)

        async def create() -> bool:
            image.owner.lease.check()
            return await blobs.create(aside, file.data, file.content_type, proven)

        await self.settler.retry_policy.call(create)

    def _proven(self, blob: str, metadata: dict[str, str]) -> dict[str, str]:
        prover = self.settler.storage.prover
        return metadata if prover is None else prover.proven(blob, metadata)

    def _record(
        self, image: InFlightImage, file: EncodedImage, name: str, sha256: str | None
    ) -> Record:
        """The record of an image; *sha256* is of the file that is stored, as far as it is known."""
        width, height = image.final_size
        return self.settler.record(
            image.owner,
            "completed",
            **of_job(image.job),
            blob=name,
            size_bytes=len(file.data),
            sha256=sha256,
            index=image.index,
            completes=False if image.job.images > 1 else None,
            seed=image.job.image_seed(image.index),
            model=self.settler.model_name[:MAX_NAME_CHARACTERS],
            width=width,
            height=height,
            embeddings=tuple(
                Embedding(each.name, each.sha256) for each in image.embeddings
            ),
            seconds=round(time.monotonic() - image.owner.pulled_at, 3),
        )

    def _metadata(self, image: InFlightImage, file: EncodedImage) -> dict[str, str]:
        """The blob's metadata; Azure requires ASCII values."""
        facts = {
            "job": str(image.job.id),
            "digest": image.job.stage_digest,
            "sha256": file.sha256,
            "seed": str(image.job.image_seed(image.index)),
            "worker": self.settler.settings.name.encode("ascii", "replace").decode(),
            "attempt": str(image.owner.lease.message.delivery_count),
            "seconds": f"{time.monotonic() - image.owner.pulled_at:.3f}",
            **self.settler.cost.record,
        }
        if image.job.images > 1:
            facts["images"] = str(image.job.images)
        if image.job.stages > 1:
            facts |= {"stage": str(image.job.stage), "stages": str(image.job.stages)}
        if image.job.campaign:
            facts["campaign"] = image.job.campaign
        if image.job.metadata:
            facts["metadata"] = metadata_header(image.job.metadata)
        return facts


@dataclass(eq=False)
class EncodeStage:
    """Encodes generated images on threads; feeds the upload stage."""

    model_hash: Future[str | None]
    upload: UploadStage

    def __post_init__(self) -> None:
        self.queue: asyncio.Queue[tuple[InFlightImage, contract.Pixels]] = (
            asyncio.Queue(ENCODERS)
        )
        self._threads = ThreadPoolExecutor(ENCODERS, "encode")
        self._files = concurrency.Batches(
            concurrency.one_by_one(_encoded), self._threads, most=1, at_once=ENCODERS
        )

    async def run(self) -> NoReturn:
        while True:
            image, pixels = await self.queue.get()
            work = partial(self._encode, image, pixels)
            await self.upload.settler.attempt(image.owner, work, image)

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def _parameters(self, image: InFlightImage) -> str:
        """The image's text; waits for the hashes in it, which were begun before it was drawn."""
        if image.job.only_upscales:
            return encode.of_enlarged(image.job, image.owner.source_parameters)
        settings = self.upload.settler.settings
        usual: VaeDecoder | None = "TAESD" if settings.taesd else None
        loras = {
            name: await _result(each) for name, each in image.owner.lora_hashes.items()
        }
        return encode.parameters(
            image.job,
            image.index,
            image.size,
            self.upload.settler.model_name,
            model_hash=await _result(self.model_hash),
            vae=settings.vae and Path(settings.vae).name.removesuffix(".safetensors"),
            model_hashes={
                name: await _result(each)
                for name, each in image.owner.model_hashes.items()
            },
            lora_hashes={name: each for name, each in loras.items() if each},
            embedding_hashes={each.name: each.sha256 for each in image.embeddings},
            is_cut_out=image.owner.overlay is not None
            and image.owner.overlay.box is not None,
            decoder=image.job.sd_vae_decode_method or usual,
        )

    async def _encode(self, image: InFlightImage, pixels: contract.Pixels) -> None:
        text = await self._parameters(image)
        job = text_for_image(image.owner.lease.message.body, image.job)
        try:
            with self.upload.settler.metrics.stage_seconds["encode"].time():
                drawn = pixels, image.owner.overlay, image.job.output, text, job
                file = await self._files(drawn)
        except (
            errors.TransientError
        ) as error:  # an image of one colour is the engine's failure
            if not image.owner.failures:
                self.upload.checks.watchdog.image_failed(error)
            raise
        self.upload.checks.watchdog.image_succeeded()
        await self.upload.queue.put((image, file))


@dataclass(eq=False)
class GenerateStage:
    """Matches the engine's tickets with images; the engine's thread does the waiting."""

    engine: contract.Engine
    encode: EncodeStage
    puller: Puller

    def __post_init__(self) -> None:
        self.settler, self.engine_thread = (
            self.puller.settler,
            self.puller.engine_thread,
        )
        self.nothing_at_engine = asyncio.Event()
        self._tickets = itertools.count()
        self._at_engine: dict[int, InFlightImage] = {}
        self._family = families.find(self.engine.family)
        self.nothing_at_engine.set()
        self.engine_thread.is_cancelled = self._is_cancelled

    def is_cancelled(self, entry: InFlightJob) -> bool:
        """Whether the campaign of a job has been cancelled since it was sent."""
        return entry.is_of(self.settler.cancelled_campaigns)

    async def leave_out(self, entry: InFlightJob, images: int) -> None:
        """Draws so many images of a job no more; those that are begun are stored."""
        entry.is_cancelled = entry.is_cancelled or self.is_cancelled(entry)
        self.puller.not_ahead(entry, images)
        await self.settler.less_to_store(entry, images)

    async def submit(
        self, image: InFlightImage, request: contract.PreparedRequest
    ) -> bool:
        """Waits until the engine's thread accepts the request; False: the worker drains."""
        ticket = next(self._tickets)
        self._at_engine[ticket] = image
        self.nothing_at_engine.clear()
        if await self.engine_thread.submit(ticket, request):
            image.owner.images_to_submit -= 1
            return True
        self._take(ticket)
        return False

    def stop_accepting(self) -> list[InFlightJob]:
        """Returns the jobs in flight of which the engine has begun nothing.

        Of the others, the images that it has begun are stored; the rest is left to another worker.
        """
        waiting: Counter[InFlightJob] = Counter()
        for ticket in self.engine_thread.stop_accepting():
            waiting[(image := self._take(ticket)).owner] += 1
            image.owner.is_first_awaited &= (
                image.index > 0
            )  # none of the others is begun before it
        for entry in self.settler.in_flight:
            left = waiting[entry] + entry.images_to_submit
            entry.is_put_off = entry.is_put_off or left > 0
            entry.images_to_store -= left
            entry.images_to_submit = 0
        return [
            entry
            for entry in self.settler.in_flight
            if not (entry.images_to_store or entry.has_ended)
        ]

    async def run(self) -> NoReturn:
        while True:
            delivery = await self.engine_thread.finished()
            image = self._take(delivery.finished.ticket)
            image.generated_at = delivery.finished_at
            entry = image.owner
            if isinstance(delivery.finished.outcome, errors.JobCancelled):  # not begun
                await self.settler.attempt(entry, partial(self.leave_out, entry, 1))
                if not image.index:
                    await entry.first_ended()
                continue
            passes = image.job.passes(*image.size, enlarges=self._family.enlarges)
            self.encode.upload.checks.watchdog.image_generated(
                self.engine.family, passes
            )
            waited = self.settler.metrics.stage_seconds["wait_gpu"]
            waited.observe(max(0.0, delivery.admitted_at - image.ready_at))
            generated = self.settler.metrics.stage_seconds["generate"]
            generated.observe(delivery.finished_at - delivery.admitted_at)
            self.puller.not_ahead(entry, 1)
            await self.settler.attempt(
                entry, partial(self._pass_on, image, delivery), image
            )

    def _is_cancelled(self, ticket: int) -> bool:
        """Whether an image is not to be begun; on the engine's thread."""
        image = self._at_engine.get(ticket)
        if image is None:
            return False
        entry = image.owner
        return entry.settled or entry.is_stopping or self.is_cancelled(entry)

    def _take(self, ticket: int) -> InFlightImage:
        """The image of a ticket that has left the engine."""
        image = self._at_engine.pop(ticket)
        if not self._at_engine:
            self.nothing_at_engine.set()
        return image

    async def _pass_on(self, image: InFlightImage, delivery: Delivery) -> None:
        outcome = delivery.finished.outcome
        if isinstance(outcome, errors.FleetError):
            if not image.owner.failures:  # one bad job is not a broken node
                self.encode.upload.checks.watchdog.image_failed(outcome)
            raise outcome
        await self.encode.queue.put((image, outcome))


def _encoded(
    drawn: tuple[contract.Pixels, Overlay | None, Output, str, str],
) -> EncodedImage:
    pixels, overlay, output, parameters, job = drawn
    if overlay is not None:
        encode.refuse_one_colour(pixels)  # the engine's own
        pixels = overlay.put_over(pixels)
    return encode.encode(pixels, output, parameters, job)


async def _result(hashed: Future[str | None]) -> str | None:
    if hashed.done():  # as it is from a worker's second image on
        return hashed.result()
    # Shielded: other images wait for the same.
    return await asyncio.shield(asyncio.wrap_future(hashed))
