"""Verifies an export offline: each picture against its record, its job and the signatures.

An export comes from a stranger: its files are read where they are, in memory that does not grow
with them, and nothing is written.
"""

import hashlib
import itertools
import json
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import datetime
from io import BufferedReader
from pathlib import Path
from tarfile import TarError, TarFile, TarInfo
from typing import NamedTuple

from cli.console import Move
from fleet.export.formats import Sample
from fleet.export.plan import MANIFEST, Manifest, Shard
from imagefleet import validation
from imagefleet.caption import caption_of
from imagefleet.errors import JobError, SetupError
from imagefleet.files import pack, picture
from imagefleet.job.message import MAX_IMAGE_BYTES, Job, is_signed, read_job
from imagefleet.records import columns
from imagefleet.records.record import Record, of_job
from imagefleet.signing import TrustedJobs, TrustedKeys
from imagefleet.validation import JSONDict

#: Faults that are named; the others are counted.
MOST_NAMED = 1_000

#: More than the manifest of ten million pictures takes, the records of a shard, and one text.
_MAX_MANIFEST_BYTES = 64 * 2**20
_MAX_RECORDS_BYTES = 256 * 2**20
_MAX_TEXT_BYTES = 2**20

#: A picture, its columns and its caption.
_MOST_FILES = 3


@dataclass(frozen=True)
class Fault:
    """What is wrong with a file of the export, or with one picture in it."""

    file: str
    picture: str | None
    why: str


@dataclass
class Verdict:
    """The result of a verification."""

    #: True if the manifest is signed with a trusted key.
    is_sealed: bool = False
    pictures: int = 0
    #: Pictures whose jobs are signed with a trusted key.
    signed_jobs: int = 0
    #: Pictures whose files do not hold their jobs, which only their records tell.
    without_job: int = 0
    fault_count: int = 0
    faults: list[Fault] = field(default_factory=list)

    def add(self, file: str, picture: str | None, why: str) -> None:
        self.fault_count += 1
        if len(self.faults) < MOST_NAMED:
            self.faults.append(Fault(file, picture, why))


class _FaultError(Exception):
    """A file or a picture is not as it should be; says why."""


class _Place(NamedTuple):
    """A member of a tar: its name, and where its content is."""

    name: str
    offset: int
    size: int


class _Header(TarInfo):
    """A header as exports have them: no links, and names alone in headers of their own."""

    def _proc_member(self, tar: TarFile) -> TarInfo:
        is_name = self.type == tarfile.XHDTYPE and self.size <= _MAX_TEXT_BYTES
        if not (is_name or self.type == tarfile.REGTYPE):
            raise _FaultError(f"its member {self.name!r} is a link, or no file")
        found: TarInfo = super()._proc_member(tar)  # type: ignore[misc]
        return found


@dataclass
class Verifier:
    """Verifies the export in *folder*; without *keys* it compares no signature with a key."""

    folder: Path
    keys: TrustedKeys | None
    on_picture: Move

    def run(self) -> Verdict:
        """Looks at each picture; raises SetupError if there is no export."""
        self.verdict = Verdict()
        self._jobs = None if self.keys is None else TrustedJobs(self.keys, None)
        path = self.folder / MANIFEST
        if path.exists() and not (
            path.is_file() and path.stat().st_size <= _MAX_MANIFEST_BYTES
        ):
            raise SetupError(f"{path} is no manifest")
        manifest = validation.read_file(
            Manifest, path, "is no manifest of this version"
        )
        shards = dict.fromkeys(sorted(each.name for each in self.folder.glob("*.tar")))
        if manifest is None and not shards:
            raise SetupError(f"{self.folder} has no {MANIFEST}, and no packs")
        self._loras = {}
        if manifest is not None:
            self._check_signature(manifest)
            self._loras = manifest.loras
            listed = {shard.file: shard for shard in manifest.shards}
            for name in shards.keys() - listed.keys():
                self.verdict.add(name, None, f"is not in {MANIFEST}")
            shards = {**listed}
        for name, shard in shards.items():
            try:
                self._verify(name, shard)
            except (_FaultError, OSError, TarError) as error:
                self.verdict.add(name, None, str(error))
        return self.verdict

    def _check_signature(self, manifest: Manifest) -> None:
        if manifest.signature is None:
            return
        try:
            keys = self.keys or TrustedKeys.read(manifest.signature.key)
            is_valid = manifest.is_signed_with(keys)
        except ValueError:
            is_valid = False
        self.verdict.is_sealed = is_valid and self.keys is not None
        if not is_valid:
            why = "its signature is not valid: it was changed, or another key signed it"
            self.verdict.add(MANIFEST, None, why)

    def _verify(self, name: str, shard: Shard | None) -> None:
        """Verifies a tar: each of its pictures, then the file as a whole."""
        path = self.folder / name
        if path.name != name or path.is_symlink() or not path.is_file():
            raise _FaultError("is no file in the folder of the export")
        verdict = self.verdict
        faults = verdict.fault_count
        pictures = verdict.pictures
        with path.open("rb") as file:
            sha256 = hashlib.file_digest(file, "sha256").hexdigest()
            is_listed = shard is not None and shard.sha256 == sha256
            self._look(name, file, is_sealed=verdict.is_sealed and is_listed)
        if shard is None or verdict.fault_count > faults:
            return
        if not is_listed:
            raise _FaultError(f"has another SHA-256 than {MANIFEST} tells")
        if verdict.pictures - pictures != shard.images:
            raise _FaultError(f"has not the {shard.images:,} pictures of {MANIFEST}")

    def _look(self, name: str, file: BufferedReader, *, is_sealed: bool) -> None:
        heads = [place for place in _places(file) if place.name == pack.HEAD]
        records = _by_key(
            b"".join(_read(file, each, _MAX_RECORDS_BYTES) for each in heads)
        )
        groups = itertools.groupby(
            (place for place in _places(file) if place.name != pack.HEAD),
            lambda place: place.name.partition(".")[0],
        )
        for key, group in groups:
            self.verdict.pictures += 1
            files = list(itertools.islice(group, _MOST_FILES + 1))
            try:
                if (line := records.pop(key, None)) is None:
                    raise _FaultError("has no record")  # noqa: TRY301 - told as all others
                self._check(key, Record.read(line), files, file, is_sealed=is_sealed)
            except (_FaultError, JobError) as fault:
                self.verdict.add(name, key, str(fault))
            self.on_picture()
        for key in records:
            self.verdict.add(name, key, "its picture is missing")

    def _check(
        self,
        key: str,
        record: Record,
        files: list[_Place],
        file: BufferedReader,
        *,
        is_sealed: bool,
    ) -> None:
        """Raises _FaultError or JobError if a picture is not the one that its record is of."""
        parts = [place.name.partition(".")[2] for place in files]
        suffix = str(record.blob).rpartition(".")[2]
        if parts not in ([suffix, "json"], [suffix, "txt", "json"]):
            raise _FaultError(f"has the files {parts}, not {suffix} and json")
        data, *texts, row = (
            _read(
                file, place, MAX_IMAGE_BYTES if place is files[0] else _MAX_TEXT_BYTES
            )
            for place in files
        )
        if hashlib.sha256(data).hexdigest() != record.sha256:
            raise _FaultError("its file has another SHA-256 than its record")
        _check_columns(Sample(key, record, b""), row)
        if texts not in ([], [caption_of(record).encode()]):
            raise _FaultError("its text is another caption than that of its record")
        self._check_hashes(data)
        message = picture.message_in(data)
        if message is None:
            self.verdict.without_job += 1
        else:
            _check_job(record, read_job(message, "none"))
        if self._jobs is None:
            return
        if message is not None and is_signed(message):
            read_job(message, "none", self._jobs)
            self.verdict.signed_jobs += 1
        elif not is_sealed:
            raise _FaultError("neither its job nor the manifest is signed")

    def _check_hashes(self, data: bytes) -> None:
        """Raises _FaultError if a picture was drawn with another LoRA than the fleet's."""
        try:
            with picture.opened(data) as image:
                found = picture.lora_hashes(image)
        except picture.DamagedImageError as error:
            raise _FaultError(f"its file {error}") from None
        for name, sha256 in found.items():
            if (known := self._loras.get(name, sha256)) != sha256:
                raise _FaultError(
                    f"was drawn with another LoRA {name}: its hash is {sha256}, and that of the"
                    f" fleet's {known}"
                )


def _places(file: BufferedReader) -> Iterator[_Place]:
    """The members of a tar; nothing of it is unpacked, and nothing remembered."""
    file.seek(0)
    with tarfile.open(fileobj=file, mode="r:", tarinfo=_Header) as tar:
        for member in tar:
            if "/" in member.name or "\\" in member.name:
                raise _FaultError(f"its member {member.name!r} is in another folder")
            yield _Place(member.name, member.offset_data, member.size)
            tar.members.clear()  # type: ignore[attr-defined]


def _by_key(lines: bytes) -> dict[str, bytes]:
    """Lines of records by the keys of their pictures: a shard's has it, a pack's the name."""
    found = {}
    for line in filter(None, lines.split(b"\n")):
        fields = _object(line)
        key = str(fields.get("key", pack.key_of(str(fields.get("blob", "")))))
        if key in found:
            raise _FaultError(f"has several records of {key!r}")
        if key:  # or it is the end of a job without a picture
            found[key] = line
    return found


def _read(file: BufferedReader, place: _Place, most: int) -> bytes:
    if place.size > most:
        raise _FaultError(f"its {place.name!r} has {place.size:,} bytes, over {most:,}")
    file.seek(place.offset)
    return file.read(place.size)


def _object(text: bytes) -> JSONDict:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise _FaultError("its columns or records are not JSON")
    return found


def _check_columns(sample: Sample, text: bytes) -> None:
    """Raises _FaultError if the columns beside a picture are not those of its record."""
    told = _object(text)
    known = columns.sample(sample.record)
    if "url" in told:  # the address alone is not the record's
        row = sample.row(lambda _: str(told["url"]))
        row["sha256"] = sample.record.sha256  # which its file was compared with
        known = json.loads(json.dumps(row, default=datetime.isoformat))
    for name in known.keys() | told.keys():
        if told.get(name, ...) != known.get(name, ...):
            raise _FaultError(f"its column {name} is another than that of its record")


def _check_job(record: Record, job: Job) -> None:
    """Raises _FaultError if a record tells something else than the job in its picture."""
    known = {
        **of_job(job),
        "blob": job.blob_name(record.index),
        "seed": job.image_seed(record.index),
        "model": job.model or record.model,
    }
    for name, value in known.items():
        if getattr(record, name) != value:
            raise _FaultError(f"its record has another {name} than the job in its file")
