"""What a storm did, and what is left of it."""

import sys
from collections import Counter
from dataclasses import dataclass, field

from browsing import visible
from bundled import stored_images
from imagefleet.records import reader
from imagefleet.storage import dead_letter
from imagefleet.storage.open import Storage
from storm_jobs import STOPPED, StormJob, drawings, images_of, is_bad
from storm_worker import is_image_of


@dataclass(slots=True)
class Tally:
    """What the storm did, and what is left of it."""

    storage: str
    jobs: int
    seconds: float = 0.0
    kills: int = 0
    freezes: int = 0
    terms: int = 0
    other_kills: int = 0  # of load, replay, cancel and scale
    sent_twice: int = 0  # by the killed loads
    faults: int = 0
    redeliveries: int = 0
    duplicates_suppressed: int = 0
    images_generated: int = 0
    images_wasted: int = 0
    lost: int = 0
    visible_duplicates: int = 0
    wrong_images: int = 0
    good_jobs_failed: int = 0
    bad_jobs_missing: int = 0
    images_without_record: int = 0
    records_without_image: int = 0  # and second records of one image
    failed_jobs_without_record: int = 0
    names_taken: int = 0  # jobs that failed for it
    untruths: list[str] = field(default_factory=list)  # of ids that clash
    cancelled_jobs: int = 0
    stopped_jobs_lost: int = 0  # neither drawn nor cancelled
    miscounted_jobs: int = 0  # as completed, by their records
    workers_ended_by_themselves: int = 0
    scaler_errors: list[str] = field(default_factory=list)

    @property
    def is_clean(self) -> bool:
        return not (
            self.lost
            or self.visible_duplicates
            or self.wrong_images
            or self.good_jobs_failed
            or self.bad_jobs_missing
            or self.images_without_record
            or self.records_without_image
            or self.failed_jobs_without_record
            or self.stopped_jobs_lost
            or self.miscounted_jobs
            or self.workers_ended_by_themselves
            or self.untruths
            or self.scaler_errors
        )


async def count_up(
    tally: Tally, storage: Storage, stopped: list[StormJob], events: str
) -> None:
    """Counts what the workers did, by their *events*, and what became of the cancelled campaign."""
    images = 0
    async for image in stored_images(storage, "default"):
        images += 1
        tally.redeliveries += image.attempts - 1
    for campaign in ("default", STOPPED):
        await compare_records(tally, storage, campaign)
    drawn = [each async for each in reader.images(storage, STOPPED)]
    done = {each.id for each in drawn if each.stage == each.stages}
    cancelled = {each.id async for each in reader.ended(storage, STOPPED)}
    tally.cancelled_jobs = len(cancelled)
    ids = {str(job["id"]) for job in stopped}
    tally.stopped_jobs_lost = len(ids - done - cancelled)
    counted = Counter(line.split()[0] for line in events.splitlines())
    tally.images_generated = counted["drawn"]
    tally.images_wasted = counted["drawn"] - images - len(drawn)
    tally.duplicates_suppressed = counted["duplicate"]


async def compare_outcomes(
    tally: Tally, storage: Storage, jobs: list[StormJob]
) -> None:
    """Compares what is stored and what failed with the jobs, whose ids are all different."""
    good_jobs = [job for job in jobs if not is_bad(job)]
    good = {name for job in jobs for name in images_of(job)}
    bad = {str(job["id"]) for job in jobs if is_bad(job)}
    drawn_as = drawings(jobs)
    stored = Counter[str]()
    in_packs = Counter[str]()
    async for image in stored_images(storage, "default"):
        # A failed job that was replayed is by itself, though another message may have drawn it.
        (stored if image.pack is None else in_packs)[image.name] += 1
        for drawing in drawn_as[image.name].values():
            tally.wrong_images += not is_image_of(*drawing, image.data)
    doubled = stored.total() - len(stored) + in_packs.total() - len(in_packs)
    stored |= in_packs
    failed: dict[str, str] = {}
    async for message in visible(storage.poison):
        record = dead_letter.FailedJob.parse(message.body)
        failed[record.id if record else message.id] = (
            record.reason if record else "no record"
        )
    for job in failed.keys() - bad:
        sys.stderr.write(f"the good job {job} failed: {failed[job]}\n")
    tally.lost = len(good - stored.keys())
    tally.visible_duplicates = doubled + len(stored.keys() - good)
    tally.good_jobs_failed = len(failed.keys() - bad)
    tally.bad_jobs_missing = len(bad - failed.keys())
    ended = {each.id async for each in reader.ended(storage, "default")}
    tally.failed_jobs_without_record = len(set(failed) - ended)
    completed = (await reader.counts(storage, "default")).completed
    tally.miscounted_jobs = abs(completed - len(good_jobs))


async def compare_records(tally: Tally, storage: Storage, campaign: str) -> None:
    """Each image has one record and each record an image."""
    stored = {image.name async for image in stored_images(storage, campaign)}
    recorded = Counter(
        [str(each.blob) async for each in reader.images(storage, campaign)]
    )
    tally.images_without_record += len(stored - recorded.keys())
    tally.records_without_image += recorded.total() - len(stored & recorded.keys())
