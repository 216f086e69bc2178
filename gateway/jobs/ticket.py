"""One job of a client, from its request to its end."""

import time
from asyncio import Future
from dataclasses import dataclass, field, replace

from gateway.clients import Client
from imagefleet.http.refused import Refused
from imagefleet.job.message import Job, job_key
from imagefleet.records.outcomes import JobFacts
from imagefleet.storage.protocol import LeasedMessage
from imagefleet.storage.settings import Priority
from imagefleet.withdrawal import SentJob


@dataclass(eq=False)
class Ticket:
    """A job on its way to the queue, then waited for by any number of requests."""

    client: Client
    job: Job
    priority: Priority
    #: Its name and what is known of it; None until it is in the queue.
    facts: JobFacts | None = None
    ended: Future[JobFacts] = field(default_factory=Future)
    created_at: float = field(default_factory=time.monotonic)
    #: Time (monotonic seconds) at which its message was in the queue.
    sent_at: float = 0.0
    #: The message as it was sent; None before, and of a job that another gateway has sent.
    message: LeasedMessage | None = None
    waiters: int = 0
    #: It is drawn even if nobody waits: its client may ask for it later.
    is_kept: bool = False
    #: Its id follows from a key of its client's, who may ask for it again.
    is_keyed: bool = False
    #: Another gateway has sent it, or is to.
    is_foreign: bool = False
    #: How many claims to send it there were.
    attempts: int = 0
    #: Nobody wants it any more: it is withdrawn.
    is_dropped: bool = False
    #: No queue holds it any more, and no record tells of its end.
    is_lost: bool = False
    #: Why it was withdrawn.
    reason: str = "its client hung up"
    #: Its client waits for what is drawn of it.
    is_interrupted: bool = False

    @property
    def id(self) -> str:
        """The job's id; empty until it is sent."""
        return "" if self.facts is None else self.facts.id

    @property
    def key(self) -> str:
        """`campaign/id`, once it is sent."""
        return job_key(self.client.campaign, self.id)

    @property
    def is_waited_for(self) -> bool:
        return self.waiters > 0 and not self.ended.done()

    def is_sent(self, facts: JobFacts, message: LeasedMessage | None) -> None:
        """The job is in the queue, by this *message* if it is known."""
        self.facts = facts
        self.message = message or self.message
        self.sent_at = time.monotonic()

    def withdrawn(self) -> SentJob:
        """The job, which is in the queue, as one that nobody wants any more."""
        return SentJob(
            self.job.identified(self.id, self.client.campaign),
            self.priority,
            self.message,
            self.reason,
            self.is_lost,
        )

    def refuse(self, error: Exception) -> None:
        """Answers everybody who waits with an error."""
        if not self.ended.done():
            self.ended.set_exception(error)
            self.ended.exception()  # seen, even if nobody waits

    def end_without_images(self) -> None:
        """Answers that it was cancelled, unless it has ended otherwise."""
        if self.facts is not None:
            self.end(
                replace(self.facts, status="cancelled", reason=self.reason, blobs=())
            )

    def end(self, facts: JobFacts) -> None:
        if not self.ended.done():
            self.ended.set_result(facts)


def refusal(message: str) -> Refused:
    """An answer that says when to come again, for what is nobody's fault."""
    return Refused(503, message, {"Retry-After": "60"})
