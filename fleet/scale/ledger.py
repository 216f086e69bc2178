"""The cost of a fleet so far, kept in a file across restarts of its scaler."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from pydantic import TypeAdapter

from cli import console
from fleet.scale.decision import STOPPING_SECONDS
from imagefleet import validation
from imagefleet.errors import SetupError

#: Clocks are set by seconds all the time.
_NOTABLE_SECONDS = 300.0


@dataclass(frozen=True)
class Ledger:
    """The cost up to *at* (Unix seconds), and the replicas running and their price then.

    At *end* SaladCloud ends those that nobody has looked at since.
    """

    fleet: str
    began: float
    at: float
    running: int
    dollars: float = 0.0
    price: float | None = None
    end: float = 0.0

    def counted(self, now: float, running: int, price: float | None) -> Ledger:
        """The ledger at *now*, at the larger of the replicas running then and now.

        What ran then has stopped soon after the end, whenever somebody looks again.
        Without a price the last known one applies; before the first, the time is counted later.
        """
        price = self.price if price is None else price
        if price is None:
            return replace(self, running=max(self.running, running))
        at = max(now, self.at)
        end = max(self.at, min(at, self.end + STOPPING_SECONDS))
        seconds = max(self.running, running) * (end - self.at) + running * (at - end)
        dollars = self.dollars + seconds * price / 3600
        return replace(self, at=at, running=running, dollars=dollars, price=price)


def read(path: Path, fleet: str, now: float) -> Ledger:
    """The ledger in the file, or a new one.

    Raises:
        SetupError: it cannot be read, belongs to another fleet or is of the future, so the cost is
            unknown.
    """
    ledger = validation.read_file(
        Ledger,
        path,
        "is no ledger of a scaler, so the cost is unknown; delete it to start from zero",
    )
    if ledger is None:
        return Ledger(fleet, now, now, 0)
    if ledger.fleet != fleet:
        raise SetupError(
            f"the scaler's ledger {path} belongs to the fleet {ledger.fleet}, not {fleet}: use"
            " another --state"
        )
    if ledger.at - now > _NOTABLE_SECONDS:
        hours = (ledger.at - now) / 3600
        raise SetupError(
            f"the last entry of the scaler's ledger {path} is {hours:,.1f} hours in the future, so"
            " the cost since is unknown: set this machine's clock"
        )
    return ledger


def write(path: Path, ledger: Ledger) -> None:
    """Replaces the file atomically; raises SetupError if it cannot be written."""
    console.write_file(path, TypeAdapter(Ledger).dump_json(ledger))
