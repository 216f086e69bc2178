"""The outcomes of a message's earlier deliveries, as a record that travels in the message.

The storage counts deliveries, but not why they ended, and a worker that vanishes takes along every
job that it had only pulled. So a worker that hands a message back writes down how its delivery
ended; what the storage has counted beyond that was lost with a worker.
"""

import contextlib
import itertools
from collections.abc import Iterable
from typing import Annotated, Self

from pydantic import BaseModel, Field, ValidationError

from imagefleet.job import sizes
from imagefleet.job.message import DELIVERIES_FIELD, fields_if_any, message_text
from imagefleet.storage.protocol import Message

#: The number of lost deliveries after which a job is generated alone, so that the next loss tells
#: whether the job is the cause or was only there.
SUSPECT_AFTER = 2

#: A node may vanish by chance even then: so many losses alone are no chance, not even where a
#: worker lives for seconds.
CONDEMNED_AFTER = 5

Count = Annotated[int, Field(ge=0, le=1_000_000)]


class Deliveries(BaseModel, extra="ignore", frozen=True, hide_input_in_errors=True):
    """The earlier deliveries of a message by how they ended."""

    #: Deliveries that this record covers, of those that the storage has counted.
    known: Count = 0
    failed: Count = 0
    #: Deliveries without an outcome: the worker died or lost its lease.
    lost: Count = 0
    #: Lost deliveries in which the job was generated alone.
    lost_alone: Count = 0
    #: The latest one was marked as generated alone.
    is_alone: bool = False

    @classmethod
    def of(cls, message: Message) -> Self:
        """The deliveries before the present one. A damaged record counts as none."""
        before = cls()
        if message.delivery_count == 1:  # or sent again after it had failed
            return before
        with contextlib.suppress(ValidationError):
            before = cls.model_validate(
                fields_if_any(message.body).get(DELIVERIES_FIELD) or {}
            )
        lost = max(0, message.delivery_count - 1 - before.known)
        return before.model_copy(
            update={
                "known": message.delivery_count - 1,
                "lost": before.lost + lost,
                "lost_alone": before.lost_alone + (before.is_alone and lost > 0),
                "is_alone": False,
            }
        )

    @property
    def is_suspect(self) -> bool:
        return self.lost >= SUSPECT_AFTER

    @property
    def is_condemned(self) -> bool:
        return self.lost_alone >= CONDEMNED_AFTER

    def marked_alone(self) -> Self:
        """The record to write before the present delivery is generated alone."""
        return self.model_copy(update={"is_alone": True})

    def ended(self, *, failed: bool) -> Self:
        """The record to write when the present delivery ends by handing the message back."""
        return self.model_copy(
            update={"known": self.known + 1, "failed": self.failed + failed}
        )

    def write_to(self, body: str) -> str | None:
        """The message's text with this record; None where it cannot hold one."""
        if not (fields := fields_if_any(body)):
            return None
        record = self.model_dump(exclude_defaults=True)
        text = message_text({**fields, DELIVERIES_FIELD: record})
        return text if sizes.fits(text) else None


def without_deliveries(body: str) -> str:
    """A message as it was sent, without the record of its deliveries."""
    if body.startswith("{") and DELIVERIES_FIELD not in body:
        return body  # the most common case, without parsing it
    fields = fields_if_any(body)
    if DELIVERIES_FIELD not in fields:
        return body
    del fields[DELIVERIES_FIELD]
    return message_text(fields)


def shown_images(numbers: Iterable[int]) -> str:
    """Numbers of images in words: `0-6, 9`."""
    # Of numbers in a row, number and place differ by the same.
    placed = itertools.groupby(
        enumerate(sorted(numbers)), key=lambda pair: pair[1] - pair[0]
    )
    runs = [[number for _, number in run] for _, run in placed]
    return ", ".join(
        f"{run[0]}" if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs
    )
