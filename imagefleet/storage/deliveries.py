"""What became of a message's earlier deliveries; this record travels in the message.

The storage counts deliveries, but not why they ended, and a worker that vanishes takes along every
job that it had only pulled. So a worker that hands a message back writes down how its delivery
ended; what the storage has counted beyond that was lost with a worker.
"""

from __future__ import annotations

import json
from typing import Annotated, Any, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from imagefleet.job.message import DELIVERIES_FIELD, message_fields
from imagefleet.storage import protocol

#: After so many lost deliveries a job is generated alone, so that the next loss tells whether the
#: job is the cause or was only there.
SUSPECT_AFTER = 2

#: A node may vanish by chance even then: so many losses alone are no chance, not even where a
#: worker lives for seconds.
CONDEMNED_AFTER = 5

Count = Annotated[int, Field(ge=0, le=1_000_000)]


class Deliveries(BaseModel):
    """The earlier deliveries of a message by how they ended."""

    model_config = ConfigDict(extra="ignore", frozen=True, hide_input_in_errors=True)

    known: Count = 0
    """Deliveries that this record covers, of those that the storage has counted."""
    failed: Count = 0
    lost: Count = 0
    """Without an outcome: the worker died or lost its lease."""
    lost_alone: Count = 0
    """Of the lost, those that were generated alone."""
    is_alone: bool = False
    """The latest one was marked as generated alone."""

    @classmethod
    def of(cls, message: protocol.Message) -> Self:
        """The deliveries before the present one. A damaged record counts as none."""
        try:
            fields = message_fields(message.body) if message.delivery_count > 1 else {}
            before = cls.model_validate(fields.get(DELIVERIES_FIELD) or {})
        except (ValidationError, ValueError, AttributeError, RecursionError):
            before = cls()
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
        return self.model_copy(update={"known": self.known + 1, "failed": self.failed + failed})

    def write_to(self, body: str) -> str | None:
        """The message's text with this record; None where it cannot hold one."""
        try:
            fields = message_fields(body)
        except (ValueError, RecursionError):
            return None
        if not isinstance(fields, dict):
            return None
        record = self.model_dump(exclude_defaults=True)
        text = _json({**fields, DELIVERIES_FIELD: record})
        return text if protocol.fits(text) else None


def _json(fields: dict[str, Any]) -> str:
    # ASCII: whatever the text holds, XML can carry it.
    return json.dumps(fields, separators=(",", ":"))
