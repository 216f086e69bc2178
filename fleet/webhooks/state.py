"""What has been delivered, in a file: a service that was killed goes on there."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path
from typing import Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from fleet.webhooks.events import Event
from imagefleet import errors


class Waiting(BaseModel):
    """An event that is not delivered yet; times in Unix seconds."""

    model_config = ConfigDict(extra="forbid")

    event: Event
    since: float
    attempts: int = 0
    due_at: float


class State(BaseModel):
    """The position in the records, and the events before it that still wait.

    *delivered* are events behind the position: those of the records that are being worked on.
    """

    model_config = ConfigDict(extra="forbid")

    address: str
    campaign: str | None = None
    position: dict[str, int] = Field(default_factory=dict)
    delivered: set[str] = Field(default_factory=set)
    waiting: dict[str, Waiting] = Field(default_factory=dict)
    """By the id of the event."""
    open_campaigns: set[str] = Field(default_factory=set)
    """Campaigns with records since their last end."""
    ended: dict[str, str] = Field(default_factory=dict)
    """The id of each campaign's last end."""
    gone_at: datetime | None = None
    """The time at which the receiver answered that it wants no more webhooks."""

    @classmethod
    def read(cls, path: Path, address: str, campaign: str | None) -> Self:
        """The state in a file, or that of a first start.

        Raises:
            SetupError: it cannot be read, or is that of another receiver or campaign.
        """
        try:
            text = path.read_bytes()
        except FileNotFoundError:
            return cls(address=address, campaign=campaign)
        except OSError as error:
            raise errors.SetupError(f"cannot read {path}: {error.strerror or error}") from None
        try:
            found = cls.model_validate_json(text)
        except ValidationError:
            raise errors.SetupError(
                f"{path} is not a state of `imagefleet webhooks`: give another --state, or delete"
                " it to send everything again"
            ) from None
        if (found.address, found.campaign) != (address, campaign):
            of_campaign = f"the campaign {found.campaign}" if found.campaign else "all campaigns"
            raise errors.SetupError(
                f"{path} is the state for {found.address} and {of_campaign}: give another --state"
            )
        return found
