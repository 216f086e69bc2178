"""The upload stage: stores files as blobs, each name once, and adds their records to the job."""

import asyncio
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from typing import NoReturn

from imagefleet import concurrency
from imagefleet.errors import FleetError, TransientError
from imagefleet.files.pack import Member
from imagefleet.job.names import duplicate_name
from imagefleet.records.record import MAX_NAME_CHARACTERS, Record, of_job
from imagefleet.storage.protocol import Metadata
from imagefleet.telemetry import logs
from imagefleet.telemetry.logs import log
from worker.jobs import stored
from worker.jobs.in_flight import EncodedImage, InFlightImage
from worker.node.watchdog import NodeWatchdog
from worker.settle import Settler
from worker.stages.record import with_proof

#: Uploads in flight: storage that takes half a second for each still keeps up with 64 images/s.
UPLOADS = 32

#: Encoded images that may wait, for each upload in flight.
WAITING_PER_UPLOAD = 2


#: Limits the warnings of an outage, in which every upload in flight fails again and again.
_outage_warning = logs.Occasion()


def _log_outage(error: TransientError) -> None:
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
    watchdog: NodeWatchdog

    def __post_init__(self) -> None:
        self.queue: asyncio.Queue[tuple[InFlightImage, EncodedImage]] = asyncio.Queue(
            WAITING_PER_UPLOAD * UPLOADS
        )
        self.settler.bundles.on_upload_failed = self.watchdog.upload_failed

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
        if entry.bundle is not None:
            entry.bundle.images[entry] = Member(self._record(image, file), file.data)
        else:
            with entry.uploading():
                await self._store(image, file)
        entry.stored.add(image.index)
        await self.settler.less_to_store(entry, 1)
        if not image.index:
            await entry.first_ended()

    async def _store(self, image: InFlightImage, file: EncodedImage) -> None:
        entry = image.owner
        settler = self.settler
        storage = settler.storage
        record = self._record(image, file)
        name = record.spot.blob
        metadata = with_proof(
            storage.prover, name, record.blob_metadata() | settler.cost.record
        )
        doubt = asyncio.Event()

        async def create(is_in_doubt: bool) -> bool:
            entry.lease.check()
            try:
                if await storage.blobs.create(
                    name, file.data, file.content_type, metadata, on_doubt=doubt.set
                ):
                    return True
            except FleetError:
                self.watchdog.upload_failed()
                raise
            # A name taken after a reply was lost is most likely taken by this very image.
            doubt.set()
            return is_in_doubt

        with settler.metrics.stage_seconds["upload"].time():
            written = await settler.retry_policy.call_in_doubt(create)
        sha256: str | None = file.sha256
        if doubt.is_set():
            # Of the file that has its name: this very image's, perhaps, or another job's.
            look = partial(stored.look_up, storage.blobs, image.job, image.index)
            if (found := await settler.retry_policy.call(look)) is None:
                raise TransientError("an image that had its name was removed meanwhile")
            is_unread = found.metadata is stored.NOT_READ
            if is_unread and not (entry.is_redelivered or written):
                raise stored.taken_unseen(image.job, image.index)
            sha256 = stored.sha256_in(found.metadata)
        record = record.model_copy(
            update={
                "sha256": sha256,
                "at": storage.blobs.clock.now(),
                "seconds": entry.seconds_since_pulled,
            }
        )
        if image.job.verify:
            settler.cost.lost("second_drawing")
        elif written:
            # In doubt another worker may have a record of it, too.
            records = entry.again if doubt.is_set() else entry.records
            records.append(record)
            entry.image_written(settler.metrics, settler.model_name)
        else:
            settler.cost.lost("duplicate")
            entry.again.append(record)
            await self._keep_aside(image, file, name, metadata)

    async def _keep_aside(
        self,
        image: InFlightImage,
        file: EncodedImage,
        name: str,
        metadata: Metadata,
    ) -> None:
        """Stores a duplicate, so that what took its name first can be compared with it."""
        aside = duplicate_name(name, self.settler.settings.name)
        storage = self.settler.storage
        proven = with_proof(storage.prover, aside, metadata)

        async def create() -> bool:
            image.owner.lease.check()
            return await storage.blobs.create(
                aside, file.data, file.content_type, proven
            )

        await self.settler.retry_policy.call(create)

    def _record(self, image: InFlightImage, file: EncodedImage) -> Record:
        width, height = file.size
        images = image.owner.kept or image.job.images
        return self.settler.record(
            image.owner,
            "completed",
            **of_job(image.job) | {"images": images} | image.facts,
            blob=image.job.blob_name(image.index),
            size_bytes=len(file.data),
            sha256=file.sha256,
            index=image.index,
            completes=False if images > 1 else None,
            seed=image.job.image_seed(image.drawn_index),
            model=self.settler.model_name[:MAX_NAME_CHARACTERS],
            width=width,
            height=height,
            mark=file.mark,
            embeddings=tuple(map(attrgetter("name", "sha256"), image.embeddings)),
            seconds=image.owner.seconds_since_pulled,
        )
