"""The format of a shard: gzip members of JSON lines, each followed by an empty one with totals.

`zcat` reads it. The totals lie in the extra field of the empty member's header, so that the end of
a shard tells what is in it.
"""

from __future__ import annotations

import re
import struct
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, NamedTuple

from imagefleet.job.message import RECORDS

#: `again` are images whose names were taken; most of them have a record in `images`.
Kind = Literal["again", "images", "jobs", "replaced", "sent"]

#: The most bytes in a member's lines. Azure appends 4 MiB at once; a record has 200 KiB at most.
MAX_MEMBER_BYTES = 3 * 2**20

_NAME = re.compile(
    rf"{re.escape(RECORDS)}(?P<campaign>[^/]+)/[^/]+\.(?P<kind>again|images|jobs|replaced|sent)\.jsonl\.gz"
)

#: An empty gzip member whose header has one extra field, `IF`: lines, and completed jobs.
_TOTALS = struct.Struct("<4s4xxB H2sHQQ 2s8x")
_GZIP_WITH_EXTRA = b"\x1f\x8b\x08\x04"
_UNKNOWN_SYSTEM = 255
_SUBFIELD = b"IF"
_EMPTY_BLOCK = b"\x03\x00"

TOTALS_BYTES = _TOTALS.size

#: How the empty members begin.
_BEFORE_TOTALS = struct.pack("<4s5xB H2sH", _GZIP_WITH_EXTRA, _UNKNOWN_SYSTEM, 20, _SUBFIELD, 16)

#: zlib's parameter for a gzip member.
_GZIP = 31


class Totals(NamedTuple):
    """What a shard holds: its records, and the jobs that are complete with one of them."""

    records: int
    jobs: int


NOTHING = Totals(0, 0)


class ShardName(NamedTuple):
    """What a shard's name says."""

    campaign: str
    kind: Kind

    @classmethod
    def read(cls, blob: str) -> ShardName | None:
        """The name's parts; None for a blob that is no shard."""
        match = _NAME.fullmatch(blob)
        return cls(match["campaign"], match["kind"]) if match else None  # type: ignore[arg-type]


def folder(campaign: str) -> str:
    """The folder of a campaign's shards."""
    return f"{RECORDS}{campaign}/"


def encode(lines: Iterable[bytes], totals: Totals) -> bytes:
    """What to append: *lines*, and the *totals* of the shard with them."""
    compressor = zlib.compressobj(6, wbits=_GZIP)
    data = compressor.compress(b"".join(lines)) + compressor.flush()
    return data + _TOTALS.pack(
        *(_GZIP_WITH_EXTRA, _UNKNOWN_SYSTEM, 20, _SUBFIELD, 16, *totals, _EMPTY_BLOCK)
    )


def totals(end: bytes) -> Totals | None:
    """The totals in a shard's last `TOTALS_BYTES`; None if it ends otherwise."""
    if len(end) != TOTALS_BYTES:
        return None
    start, system, length, subfield, size, records, jobs, block = _TOTALS.unpack(end)
    expected = (_GZIP_WITH_EXTRA, _UNKNOWN_SYSTEM, 20, _SUBFIELD, 16, _EMPTY_BLOCK)
    if (start, system, length, subfield, size, block) != expected or jobs > records:
        return None
    return Totals(records, jobs)


def first_member(end: bytes) -> int:
    """The start of the first whole member of lines in a shard's end, after some totals."""
    found = end.find(_BEFORE_TOTALS)
    return found + TOTALS_BYTES if found >= 0 else len(end)


@dataclass(slots=True)
class Decoder:
    """Reads a shard from its parts; `position` is the end of the last whole member."""

    position: int = 0
    is_damaged: bool = False
    _member: zlib._Decompress | None = None
    _member_bytes: int = 0
    _text: bytes = b""

    def lines(self, data: bytes) -> list[bytes]:
        """The lines of the members that *data*, the next bytes of the shard, completes.

        Where it is damaged, they end, and `is_damaged` is set.
        """
        found: list[bytes] = []
        while data and not self.is_damaged:
            if self._member is None:
                self._member, self._member_bytes, self._text = zlib.decompressobj(_GZIP), 0, b""
            try:
                self._text += self._member.decompress(data, MAX_MEMBER_BYTES + 1)
            except zlib.error:
                self.is_damaged = True
                break
            self.is_damaged = len(self._text) > MAX_MEMBER_BYTES
            self._member_bytes += len(data) - len(self._member.unused_data)
            data = self._member.unused_data
            if self._member.eof:
                self._member = None
                self.position += self._member_bytes
                found += self._text.removesuffix(b"\n").split(b"\n") if self._text else []
        return found
