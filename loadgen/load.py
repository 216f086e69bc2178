"""One load: a source, and the queue that it fills with the jobs that the ledger does not know."""

import functools
import secrets
import time
from collections.abc import (
    Callable,
    Collection,
    Mapping,
)
from dataclasses import dataclass

from imagefleet import concurrency
from imagefleet.cancelled import CancelledCampaigns
from imagefleet.errors import SetupError
from imagefleet.records.ledger import Ledgers, listed
from imagefleet.storage import bundle, enqueue
from imagefleet.storage.open import Storage
from imagefleet.storage.protocol import OnProgress
from imagefleet.storage.settings import Priority
from imagefleet.submit import BulkSender, Progress, keep_noting
from loadgen.campaigns import LoadedCampaigns, Sample, changes_of, shown
from loadgen.settings import LoadSettings
from loadgen.sources import JobSource

#: The folder, among the packs, of the blob whose name is the secret of bundles' names: workers read
#: packs by their names, and only who may list them finds it. A load that begins again has the same.
_SECRETS = "-load/"


@dataclass(frozen=True, slots=True)
class Summary:
    """The result of one load. *confirmed* counts positions of the source."""

    storage: str
    #: The queue of jobs without a model.
    queue: str
    #: Jobs that were sent, second drawings too, by their queue: that of their model.
    queues: Mapping[str, int]
    sent: int
    new: int
    changed: int
    #: Jobs that were sent before; they are sent again with `--restart` alone.
    as_before: int
    confirmed: int
    total: int
    finished: bool
    seconds: float
    jobs_per_second: float
    #: Messages in addition to the jobs (`--verify-share`).
    second_drawings: int


class Load:
    """Fills a job queue with a source's jobs, but for those that were sent before."""

    def __init__(
        self,
        storage: Storage,
        source: JobSource,
        settings: LoadSettings,
        *,
        restart: bool = False,
        new_only: bool = False,
        on_notice: Callable[[str], None] = lambda _: None,
        priority: Priority = "normal",
        models: Collection[str] = (),
    ) -> None:
        """*on_notice*: called with notices. *models*: those that workers have from elsewhere.

        *restart* sends all jobs, also those that were sent before. Jobs that were sent with another
        content are refused; *new_only* leaves them out.
        """
        self._storage = storage
        self._queue = storage.queues[priority]
        self._source = source
        self._on_notice = on_notice
        self._restart = restart
        self._cancelled = CancelledCampaigns(storage.files, storage.queue.name)
        self._campaigns = LoadedCampaigns(
            self._cancelled,
            Ledgers(storage),
            on_notice,
            only=source.campaign,
            sends_again=restart,
            skips_changed=new_only,
        )
        signer = settings.keys().signer(storage.scope)
        sample = Sample(settings.second_drawings, secrets.token_hex(16), signer)
        self._to = enqueue.JobSender(storage, priority, elsewhere=models)
        batches, jobs = settings.batches
        self._sender = BulkSender(
            self._to.send,
            source.bodies(),
            concurrency=batches,
            batch=jobs,
            bundle_jobs=settings.bundle_jobs(source.count),
            rate=settings.rate,
            choose=self._campaigns.choose,
            second_drawing=sample.second_drawing,
        )

    def check(self) -> None:
        """Raises SetupError for invalid jobs, with their places; slow for a long file."""
        self._source.check()

    def stop(self) -> None:
        self._sender.stop()

    async def run(self, on_confirmed: OnProgress) -> Summary:
        """Sends what is left, or raises FleetError; *on_confirmed* gets the positions stored."""
        began = time.monotonic()
        progress = Progress(0, 0, finished=True)
        try:
            if self._source.count:
                progress = await self._send(on_confirmed)
        finally:
            await self._campaigns.note()
        seconds = time.monotonic() - began
        found = self._campaigns.counts
        if found["changed"] or found["as_before"]:
            self._on_notice(shown(found))
        return Summary(
            storage=self._storage.url,
            queue=self._queue.name,
            queues=dict(
                sorted(self._to.sent_to.items(), key=lambda each: (-each[1], each[0]))
            ),
            sent=progress.sent,
            new=found["new"],
            changed=found["changed"],
            as_before=found["as_before"],
            confirmed=progress.confirmed,
            total=self._source.count,
            finished=progress.finished,
            seconds=round(seconds, 3),
            jobs_per_second=round(progress.sent / max(seconds, 1e-6), 1),
            second_drawings=progress.second_drawings,
        )

    async def _send(self, on_confirmed: OnProgress) -> Progress:
        try:
            await self._queue.check()
        except SetupError as error:
            if not self._restart and await self._was_sent():
                raise SetupError(
                    f"some of these jobs were sent before, but {error.message}; --restart sends"
                    " all of them"
                ) from None
        await self._storage.create()
        await self._cancelled.refresh()
        if self._sender.bundle_jobs > 1:
            await self._name_bundles()

        def confirm(progress: Progress) -> None:
            self._campaigns.confirm(progress.confirmed)
            on_confirmed(progress.confirmed)

        await self._campaigns.begin()
        watching = self._cancelled.watch()
        async with concurrency.beside(watching, keep_noting(self._campaigns.note)):
            return await self._sender.run(confirm)

    async def _name_bundles(self) -> None:
        """Names bundles by the storage's secret; without access to it, sends jobs one by one."""
        try:
            secret = await _secret(self._storage)
        except SetupError as error:
            self._sender.bundle_jobs = 1
            self._on_notice(f"jobs are sent without bundles: {error.message}")
        else:
            self._sender.bundle_name = functools.partial(bundle.name_by, secret)

    async def _was_sent(self) -> bool:
        """True if the ledger has any of the jobs; False if it cannot be read."""
        try:
            if not await listed(self._storage):
                return False
            found = await changes_of(self._storage, self._source)
        except SetupError:
            return False  # which is said where they are noted
        return found["changed"] + found["as_before"] > 0


async def _secret(storage: Storage) -> str:
    """The secret that the names of bundles follow from; makes one if there is none."""
    found = [record async for record in storage.packs.records(_SECRETS)]
    if not found:
        name = f"{_SECRETS}{secrets.token_hex(16)}"
        await storage.packs.create(name, b"", "text/plain", {})
        # Of two loads that made one at the same time, both take the first.
        found = [record async for record in storage.packs.records(_SECRETS)]
    first = min(found, key=lambda record: (record.created_at, record.name))
    return first.name.removeprefix(_SECRETS)
