"""Counts the damaged records that readers leave out, and keeps the first reasons."""

from __future__ import annotations

from dataclasses import dataclass, field

from imagefleet.redaction import printable

#: Reasons that are kept, and those of them that a warning names.
_KEPT_REASONS = 10
_SHOWN_REASONS = 3


@dataclass(slots=True)
class Damaged:
    """What every reader of records counts: records and shards that cannot be read."""

    count: int = 0
    shards: set[str] = field(default_factory=set)
    reasons: list[str] = field(default_factory=list)

    def add(self, shard: str, reason: str) -> None:
        self.count += 1
        self.shards.add(shard)
        if len(self.reasons) < _KEPT_REASONS:
            self.reasons.append(printable(f"{shard[:200]}: {reason[:300]}"))

    def __str__(self) -> str:
        shown = self.reasons[:_SHOWN_REASONS]
        more = self.count - len(shown)
        return (
            f"damaged records are left out: {'; '.join(shown)}"
            f"{f'; and {more:,} more' if more else ''}"
        )
