"""A storage account in memory, with Azure's documented limits, and what became of its jobs."""

import gzip
import heapq
import itertools
import json
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime

from azure.core import exceptions

#: Azure's scalability targets: of one queue (messages of 1 KiB), and of one account.
QUEUE_OPERATIONS_PER_SECOND = 2_000.0
ACCOUNT_REQUESTS_PER_SECOND = 20_000.0

#: So many seconds' worth may come at once before requests are refused.
BURST_SECONDS = 1.0

CAMPAIGN = "simulation"

#: Of the reference's images.
STEPS = 15

#: The reference run's stored 3.62 TB by its images: PNGs of 512x512.
IMAGE_BYTES = 390_000

_ENQUEUED_AT = datetime(2026, 1, 1, tzinfo=UTC)


def refusal(status: int, code: str) -> exceptions.HttpResponseError:
    """The SDK's error for an answer with that status and error code."""
    error = exceptions.HttpResponseError(message=code)
    error.status_code = status
    error.error_code = code  # type: ignore[attr-defined]
    return error


class Limit:
    """So many requests a second; what is over it is answered with 503."""

    def __init__(self, per_second: float) -> None:
        self.per_second = per_second
        self.accepted = self.refused = 0
        self._left = per_second * BURST_SECONDS
        self._at = 0.0

    def take(self, now: float) -> bool:
        room = self.per_second * BURST_SECONDS
        self._left = min(room, self._left + (now - self._at) * self.per_second)
        self._at = now
        if self._left < 1:
            self.refused += 1
            return False
        self._left -= 1
        self.accepted += 1
        return True


@dataclass(slots=True)
class Stored:
    """One message of a queue."""

    id: str
    body: str
    receipt: int = 0
    deliveries: int = 0


@dataclass(slots=True)
class Queue:
    """One queue of the account: leases end, and only the newest receipt counts."""

    name: str
    limit: Limit
    #: All that were sent, or leased from *source*, and not deleted.
    messages: dict[str, Stored] = field(default_factory=dict)
    #: Jobs that wait, made when they are leased: ten million need no memory.
    source: Iterator[Stored] = field(default_factory=lambda: iter(()))
    redeliveries: int = 0
    metadata: dict[str, str] = field(default_factory=dict)
    _visible: list[tuple[float, int, str, int]] = field(default_factory=list)
    _order: Iterator[int] = field(default_factory=itertools.count)

    def send(self, body: str, now: float) -> None:
        message = Stored(f"m{next(self._order)}", body)
        self.messages[message.id] = message
        self._show_at(message, now)

    def receive(self, most: int, seconds: float, now: float) -> list[Stored]:
        found: list[Stored] = []
        while len(found) < most and self._visible and self._visible[0][0] <= now:
            _, _, name, receipt = heapq.heappop(self._visible)
            known = self.messages.get(name)
            if known is not None and known.receipt == receipt:
                found.append(known)
        for message in itertools.islice(self.source, most - len(found)):
            self.messages[message.id] = message
            found.append(message)
        for message in found:
            message.deliveries += 1
            self.redeliveries += message.deliveries > 1
            self._renew(message, now + seconds)
        return found

    def update(self, name: str, receipt: str, body: str | None, until: float) -> Stored:
        message = self._of(name, receipt)
        if body is not None:
            message.body = body
        self._renew(message, until)
        return message

    def delete(self, name: str, receipt: str) -> Stored:
        message = self._of(name, receipt)
        del self.messages[name]
        return message

    def _of(self, name: str, receipt: str) -> Stored:
        message = self.messages.get(name)
        if message is None:
            raise refusal(404, "MessageNotFound")
        if str(message.receipt) != receipt:
            raise refusal(400, "PopReceiptMismatch")
        return message

    def _renew(self, message: Stored, visible_at: float) -> None:
        message.receipt += 1
        self._show_at(message, visible_at)

    def _show_at(self, message: Stored, at: float) -> None:
        heapq.heappush(
            self._visible, (at, next(self._order), message.id, message.receipt)
        )


@dataclass(slots=True)
class Blob:
    """A blob, of which only its size and its job's digest are kept, unless it is small."""

    size: int
    content: bytearray | None = None
    digest: str | None = None


class Account:
    """The queues and containers, and a count of what users would see."""

    def __init__(
        self,
        clock: Callable[[], float],
        queue_limit: float = QUEUE_OPERATIONS_PER_SECOND,
        account_limit: float = ACCOUNT_REQUESTS_PER_SECOND,
    ) -> None:
        self.clock = clock
        self.requests = Limit(account_limit)
        self.queues: dict[str, Queue] = {}
        self.containers: dict[str, dict[str, Blob]] = {}
        self.images = 0
        #: Jobs whose messages were deleted although no image is stored.
        self.lost: list[str] = []
        self.overwritten = 0
        #: Images of jobs that had one; nobody is shown them.
        self.set_aside = 0
        self._queue_limit = queue_limit

    def queue(self, name: str) -> Queue:
        if name not in self.queues:
            self.queues[name] = Queue(name, Limit(self._queue_limit))
        return self.queues[name]

    def container(self, name: str) -> dict[str, Blob]:
        return self.containers.setdefault(name, {})

    @property
    def job_queues(self) -> list[Queue]:
        """Without those of failed jobs."""
        return [
            each for each in self.queues.values() if not each.name.endswith("-poison")
        ]

    @property
    def queue_operations(self) -> int:
        return sum(each.limit.accepted for each in self.queues.values())

    @property
    def refused(self) -> int:
        return self.requests.refused + sum(
            each.limit.refused for each in self.queues.values()
        )

    @property
    def redeliveries(self) -> int:
        return sum(each.redeliveries for each in self.job_queues)

    def accept(self, queue: Queue | None = None) -> None:
        """Raises 503 where a request is over a limit."""
        now = self.clock()
        # What a queue refuses is not counted by its account.
        if (queue is not None and not queue.limit.take(now)) or not self.requests.take(
            now
        ):
            raise refusal(503, "ServerBusy")

    def put(
        self, container: str, name: str, size: int, *, overwrite: bool = False
    ) -> None:
        """Raises 409 where the name is taken."""
        blobs = self.container(container)
        if name in blobs:
            if not overwrite:
                raise refusal(409, "BlobAlreadyExists")
            self.overwritten += name.startswith(f"{CAMPAIGN}/")
        elif name.startswith(f"{CAMPAIGN}/"):
            self.images += 1
        elif not name.startswith("-"):
            raise ValueError(f"the simulation knows no blob {name!r}")
        else:
            self.set_aside += name.startswith("-duplicates/")
        blobs[name] = Blob(size)

    def deleted(self, message: Stored, images: str) -> None:
        """A job's message is gone: its image must be there, or the job among the failed ones."""
        image = f"{CAMPAIGN}/{message.id}.png"
        if image not in self.container(images) and not self._has_failed(message.id):
            self.lost.append(message.id)

    def _has_failed(self, job: str) -> bool:
        """True if the job is among the failed ones."""
        return any(
            f'"{job}"' in failed.body.replace("\\", "")
            for queue in self.queues.values()
            if queue.name.endswith("-poison")
            for failed in queue.messages.values()
        )

    def recorded_twice(self, container: str) -> int:
        """Images of which `imagefleet results` would show two lines."""
        seen: Counter[str] = Counter()
        for name, blob in self.container(container).items():
            if name.endswith(".images.jsonl.gz") and blob.content:
                for line in gzip.decompress(bytes(blob.content)).splitlines():
                    record = json.loads(line)
                    if "blob" in record:
                        seen[record["blob"]] += 1
        return sum(count - 1 for count in seen.values())


def jobs(prefix: str, count: int | None = None) -> Iterator[Stored]:
    """The jobs of a campaign, in its order; without *count* they never end."""
    for number in itertools.count() if count is None else range(count):
        name = f"{prefix}{number}"
        fields = f'"id":"{name}","campaign":"{CAMPAIGN}","steps":{STEPS}'
        yield Stored(name, f'{{"prompt":"a house",{fields}}}')
