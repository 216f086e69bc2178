"""Packs: the pictures of one bundle of jobs in one uncompressed tar, as WebDataset reads it.

A picture is a member `ID.png`, followed by its columns, `ID.json`. A dot in an id is written `%2E`,
since readers take the first dot for that of the suffix. The first member, `__records__`, which
readers of data sets skip, has the records of all pictures, and of the jobs that ended without one.
"""

import hashlib
import re
import tarfile
from collections.abc import Callable, Sequence
from io import BytesIO
from tarfile import TarError, TarInfo
from typing import NamedTuple

from imagefleet.errors import JobError
from imagefleet.job.message import SUFFIXES
from imagefleet.records import columns
from imagefleet.records.record import Record
from imagefleet.storage.protocol import BlobStore

#: Azure bills an upload as several beyond 64 MiB.
MAX_PACK_BYTES = 32 * 2**20

#: The member with the records; readers of data sets skip one whose name begins and ends so.
HEAD = "__records__"

#: Read at once of a pack's start: more than the records of 64 pictures take.
_HEAD_BYTES = 256 * 2**10

#: The longest offset, and a proof, which are not known before a pack is laid out.
_NO_PLACE = {"offset": MAX_PACK_BYTES, "proof": "-" * 22}

_NAME = re.compile(r"([^/]+)/[0-9a-f]{32}~[1-9][0-9]{0,5}\.tar")


class Member(NamedTuple):
    """A picture and its record, which names it as if it were stored by itself."""

    record: Record
    data: bytes


class Pack(NamedTuple):
    """The bytes of a pack, and its pictures' records with the place of each in them."""

    data: bytes
    records: list[Record]


class Contents(NamedTuple):
    """The records in a pack: of its pictures, and of the jobs that ended without one."""

    records: Sequence[Record] = ()
    ends: Sequence[Record] = ()


def name_of(campaign: str, bundle: str, part: int) -> str:
    """The blob of a bundle's part, from 1. *bundle*: 32 hexadecimal digits that nobody guesses."""
    name = f"{campaign}/{bundle}~{part}.tar"
    if campaign_of(name) is None:
        raise ValueError(f"{name} is no name of a pack")
    return name


def key_of(blob: str) -> str:
    """The key of a picture in a pack: its name without the suffix, and without dots."""
    return blob.rpartition("/")[2].rpartition(".")[0].replace(".", "%2E")


def campaign_of(name: str) -> str | None:
    """The campaign of a pack's blob; None for another blob."""
    match = _NAME.fullmatch(name)
    return match[1] if match else None


def write(
    name: str,
    members: Sequence[Member],
    ends: Sequence[Record] = (),
    prove: Callable[[Record], Record] = lambda record: record,
) -> Pack:
    """Makes a pack, whose bytes follow from the arguments alone.

    *name*: its blob's. *prove* is given each picture's record with its place, and adds the proof.
    Raises ValueError for pictures of several formats, which readers of data sets refuse, and for a
    pack larger than `MAX_PACK_BYTES`.
    """
    samples = (columns.sample(member.record) for member in members)
    texts = [columns.json_text(sample).encode() for sample in samples]
    return _laid_out(name, members, texts, ends, prove)


def read(name: str, data: bytes) -> Contents:
    """The records in a whole pack; none of one that is cut, malformed, or not as its records say.

    Whoever may store pictures may store a pack: its records are as untrusted as any.
    """
    try:
        with tarfile.open(fileobj=BytesIO(data), mode="r:") as tar:
            places = [(tar_file.offset_data, tar_file.size) for tar_file in tar]
        parts = [data[offset : offset + size] for offset, size in places]
        found = _records_in(name, parts[0])
        members = list(map(Member, found.records, parts[1::2]))
        made = _laid_out(name, members, parts[2::2], found.ends, lambda record: record)
    except (ValueError, LookupError, TarError):
        return Contents()
    return found if made == (data, found.records) else Contents()


async def head(packs: BlobStore, name: str) -> Contents | None:
    """The records in a stored pack, by its start; their pictures are not looked at.

    None if there is no such blob.
    """
    part = await packs.read_part(name, 0, _HEAD_BYTES)
    if part is None:
        return None
    try:
        size = TarInfo.frombuf(part.data[: tarfile.BLOCKSIZE], "ascii", "strict").size
        end = min(tarfile.BLOCKSIZE + size, MAX_PACK_BYTES)
        if end > len(part.data):
            part = await packs.read_part(name, 0, end) or part
        return _records_in(name, part.data[tarfile.BLOCKSIZE : end])
    except (ValueError, TarError):
        return Contents()


def _laid_out(
    name: str,
    members: Sequence[Member],
    samples: Sequence[bytes],
    ends: Sequence[Record],
    prove: Callable[[Record], Record],
) -> Pack:
    records = [
        record.model_copy(
            update={
                "pack": name,
                "size_bytes": len(data),
                "sha256": hashlib.sha256(data).hexdigest(),
            }
        )
        for record, data in members
    ]
    _check(name, records, ends)
    drafts = [record.model_copy(update=_NO_PLACE) for record in records]
    room = sum(len(record.line()) for record in (*drafts, *ends))
    packed = BytesIO()
    offsets = []
    with tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as tar:

        def add(file: str, data: bytes, record: Record) -> None:
            member = TarInfo(file)
            member.size = len(data)
            member.mtime = int(record.at.timestamp())
            tar.addfile(member, BytesIO(data))

        add(HEAD, bytes(room), (*records, *ends)[0])
        for (record, data), sample in zip(members, samples, strict=True):
            file = str(record.blob).rpartition("/")[2]
            key = key_of(file)
            suffix = file.rpartition(".")[2]
            add(f"{key}.{suffix}", data, record)
            offsets.append(tar.offset - len(data) - (-len(data) % tarfile.BLOCKSIZE))
            add(f"{key}.json", sample, record)
    placed = [
        prove(record.model_copy(update={"offset": offset}))
        for record, offset in zip(records, offsets, strict=True)
    ]
    lines = b"".join(record.line() for record in (*placed, *ends))
    packed.seek(tarfile.BLOCKSIZE)
    packed.write(lines.ljust(room, b"\n"))
    if len(packed.getbuffer()) > MAX_PACK_BYTES:
        raise ValueError(f"{name} would have more than {MAX_PACK_BYTES:,} bytes")
    return Pack(packed.getvalue(), placed)


def _records_in(name: str, lines: bytes) -> Contents:
    """The records in the first member of a pack; raises ValueError for what is none."""
    try:
        found = list(map(Record.read, lines.strip().split(b"\n")))
    except JobError as error:
        raise ValueError(error.message) from None
    records = [record for record in found if record.pack == name]
    ends = [record for record in found if record.pack is None]
    _check(name, records, ends)
    return Contents(records, ends)


def _check(name: str, records: Sequence[Record], ends: Sequence[Record]) -> None:
    """Raises ValueError for what no pack has."""
    suffixes = {str(record.blob).rpartition(".")[2] for record in records}
    names = [*(record.blob for record in records), *(end.id for end in ends)]
    if not (
        {record.campaign for record in (*records, *ends)} == {campaign_of(name)}
        and len(suffixes) <= 1
        and suffixes <= {*SUFFIXES.values()}
        and len({*names}) == len(names)
        and all(record.has_own_name and record.sha256 for record in records)
        and all(end.is_end for end in ends)
    ):
        raise ValueError(
            f"{name} is to have jobs of one campaign, each once, and pictures of one format"
        )
