"""Packs: the pictures of one bundle of jobs in one uncompressed tar, as WebDataset reads it.

A picture is a member `ID.png`, followed by its record, `ID.json`. A dot in an id is written `%2E`,
since readers take the first dot for that of the suffix. Jobs of the bundle that ended without a
picture are in the first member, `__ends__`, which readers of data sets skip.
"""

import hashlib
import io
import re
import tarfile
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from pydantic_core import from_json

from imagefleet import errors
from imagefleet.records import columns
from imagefleet.records.record import Record

#: Azure bills an upload as several beyond 64 MiB.
MAX_PACK_BYTES = 32 * 2**20

#: Readers of data sets skip a member whose name begins and ends so.
_ENDS = "__ends__"

#: The field of a picture's JSON with its whole record as a line; the other fields are columns.
_RECORD = "record"

#: What readers raise for what is none.
_UNREADABLE = (
    errors.JobError,
    tarfile.TarError,
    ValueError,
    LookupError,
    TypeError,
    AttributeError,
)

_KEY = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9_~-]|%2E)*")
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

    records: list[Record]
    ends: list[Record]


class _File(NamedTuple):
    """A member of the tar; *at*: its time in Unix seconds."""

    name: str
    data: bytes
    at: int


def name_of(campaign: str, bundle: str, part: int) -> str:
    """The blob of a bundle's part, from 1. *bundle*: 32 hexadecimal digits that nobody guesses."""
    name = f"{campaign}/{bundle}~{part}.tar"
    if campaign_of(name) is None:
        raise ValueError(f"{name} is no name of a pack")
    return name


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
    archive = _Archive()
    if ends:
        text = b"".join(record.line() for record in ends)
        archive.add(_File(_ENDS, text, _second(ends[0])))
    records = []
    for record, data in members:
        at, (picture, beside) = _second(record), _names(record)
        offset = archive.add(_File(picture, data, at))
        place = {"pack": name, "offset": offset, "size_bytes": len(data)}
        sha256 = hashlib.sha256(data).hexdigest()
        placed = prove(record.model_copy(update={**place, "sha256": sha256}))
        archive.add(_File(beside, _sample(placed), at))
        records.append(placed)
    packed = archive.close()
    _check(name, len(packed), records, ends)
    return Pack(packed, records)


def read(name: str, data: bytes) -> Contents:
    """The records in a pack; none at all in one that is cut, malformed, or not as they say.

    Whoever may store pictures may store a pack: its records are as untrusted as any.
    """
    try:
        return _read(name, data)
    except _UNREADABLE:
        return Contents([], [])


def _read(name: str, data: bytes) -> Contents:
    archive, files = _Archive(), list(_files(data))
    offsets = [archive.add(file) for file in files]
    if archive.close() != data:  # cut, or with what readers do not see
        raise ValueError(f"{name} is not written as a pack is")
    ends: list[Record] = []
    if files[0].name == _ENDS:
        ends = [Record.read(line) for line in files.pop(0).data.splitlines()]
        offsets.pop(0)
    records = []
    pairs = zip(files[::2], files[1::2], offsets[::2], strict=True)
    for picture, beside, offset in pairs:
        record = Record.read(from_json(beside.data)[_RECORD].encode())
        is_named = _names(record) == (picture.name, beside.name)
        is_there = (record.pack, record.offset) == (name, offset)
        is_picture = record.sha256 == hashlib.sha256(picture.data).hexdigest()
        if not (is_named and is_there and is_picture):
            raise ValueError(f"{picture.name} is not what its record says")
        records.append(record)
    _check(name, len(data), records, ends)
    return Contents(records, ends)


def _check(
    name: str, size: int, records: Sequence[Record], ends: Sequence[Record]
) -> None:
    """Raises ValueError for what no pack has."""
    if size > MAX_PACK_BYTES:
        raise ValueError(f"{name} has {size:,} bytes: {MAX_PACK_BYTES:,} are allowed")
    if {record.campaign for record in (*records, *ends)} != {campaign_of(name)}:
        raise ValueError(f"{name} has a job of another campaign")
    for names in ([record.blob for record in records], [end.id for end in ends]):
        if len(set(names)) < len(names):
            raise ValueError(f"{name} has a picture or an end twice")
    if len({str(record.blob).rpartition(".")[2] for record in records}) > 1:
        raise ValueError(f"{name} has pictures of several formats")
    if not all(record.has_own_name for record in records):
        raise ValueError(f"{name} has a picture by another job's name")
    if not all(end.is_end for end in ends):
        raise ValueError(f"{name} has an end of a job that has a picture")


class _Archive:
    """Writes a tar whose bytes follow from its members alone."""

    def __init__(self) -> None:
        self._data = io.BytesIO()
        self._tar = tarfile.open(  # noqa: SIM115 - see close
            fileobj=self._data, mode="w", format=tarfile.PAX_FORMAT
        )

    def add(self, file: _File) -> int:
        """Adds a member; returns the offset of its data."""
        member = tarfile.TarInfo(file.name)
        member.size = len(file.data)
        member.mtime = file.at
        self._tar.addfile(member, io.BytesIO(file.data))
        padded = -(-member.size // tarfile.BLOCKSIZE) * tarfile.BLOCKSIZE
        return self._tar.offset - padded

    def close(self) -> bytes:
        self._tar.close()
        return self._data.getvalue()


def _files(data: bytes) -> Iterator[_File]:
    with tarfile.open(fileobj=io.BytesIO(data), mode="r:") as tar:
        for member in tar:
            content = tar.extractfile(member)
            is_plain = member.type == tarfile.REGTYPE and not member.issparse()
            if content is None or not is_plain:
                raise ValueError(f"{member.name} is no plain file")
            yield _File(member.name, content.read(), int(member.mtime))


def _names(record: Record) -> tuple[str, str]:
    """The members of a picture, and of its record."""
    folder, _, image = (record.blob or "").rpartition("/")
    stem, _, suffix = image.rpartition(".")
    key = stem.replace(".", "%2E")
    if folder != record.campaign or not _KEY.fullmatch(key) or not suffix.isalpha():
        raise ValueError(f"{record.blob} is no image of {record.campaign}")
    return f"{key}.{suffix}", f"{key}.json"


def _second(record: Record) -> int:
    return max(0, int(record.at.timestamp()))


def _sample(record: Record) -> bytes:
    """A picture's JSON: the same types in all packs, and the record as a line of text."""
    line = record.line().decode().strip()
    return columns.json_text({**columns.flat(record), _RECORD: line}).encode()
