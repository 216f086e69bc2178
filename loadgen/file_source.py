"""Jobs from a file or from standard input, in any of the formats."""

from __future__ import annotations

import abc
import gzip
import hashlib
import io
import itertools
import json
import os
import uuid
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from functools import partial
from pathlib import Path
from typing import BinaryIO, TypedDict, Unpack, cast

from imagefleet import errors
from imagefleet.job import sizes
from imagefleet.job.message import (
    FAILURE_FIELD,
    Job,
    is_signed,
    message_fields,
    read_job,
)
from imagefleet.signing import MAX_SIGNATURE_BYTES, JobSigner
from imagefleet.storage.deliveries import without_deliveries
from loadgen.formats.json_array import JsonArray
from loadgen.formats.lines import Entry, Format, FormatError, JsonLines, PromptLines
from loadgen.formats.tables import CsvRows, ParquetRows
from loadgen.rejects import Rejected, Report, is_rejected

FORMATS: Mapping[str, Format] = {
    each.name: each for each in (JsonLines(), JsonArray(), CsvRows(), PromptLines(), ParquetRows())
}

_GZIP_MAGIC = b"\x1f\x8b"

#: 96 bits: a collision among a hundred million jobs has a chance of 10^-13.
ID_BYTES = 12

OnRejected = Callable[[Rejected], None]

#: Called with the position and the message of each job.
OnBody = Callable[[int, str], None]

#: Called with the place and the job of each entry.
OnJob = Callable[[str, Job], None]


def find_format(
    path: Path,
    name: str | None = None,
    formats: Mapping[str, Format] = FORMATS,
    other_suffixes: Iterable[str] = (),
) -> Format:
    """The format *name*, or else that of the file's name, without `.gz`; or raises SetupError."""
    known = "|".join(formats)
    if name is not None:
        if name not in formats:
            raise errors.SetupError(f"--format {name[:40]}: should be {known}")
        return formats[name]
    for form in formats.values():
        if path.name.lower().removesuffix(".gz").endswith(form.suffixes):
            return form
    suffixes = sorted([*other_suffixes, *(each for f in formats.values() for each in f.suffixes)])
    raise errors.SetupError(
        f"{path}: the name must end in {', '.join(suffixes)} or one of these with .gz; or choose"
        f" --format {known}"
    )


def decompressed(file: io.BufferedReader) -> io.BufferedReader:
    """The content of a file that may be gzip, and damaged: EOFError, zlib.error or OSError."""
    if file.peek(len(_GZIP_MAGIC)).startswith(_GZIP_MAGIC):
        return cast("io.BufferedReader", gzip.GzipFile(fileobj=file))
    return file


def digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=ID_BYTES).hexdigest()


#: What shows how much of a file is read: takes it and its size, and returns it.
Wrap = Callable[[BinaryIO, int], BinaryIO]

#: That of the files which are opened in a context.
shown_by: ContextVar[Wrap] = ContextVar("shown_by", default=lambda file, _: file)


class UnchangedFile:
    """A file that is read several times; raises SetupError if it is written in between."""

    def __init__(self, path: Path, form: Format) -> None:
        self._path = path
        self._form = form
        self._version: tuple[int, ...] | None = None

    @contextmanager
    def opened(self) -> Iterator[io.BufferedReader]:
        """Its content, decompressed if its format can be; errors of reading it name it."""
        with _explained(str(self._path), self._form), self._path.open("rb") as file:
            self._check_version(file)
            shown = cast("io.BufferedReader", shown_by.get()(file, os.fstat(file.fileno()).st_size))
            yield decompressed(shown) if self._form.is_stream else shown
            self._check_version(file)

    def _check_version(self, file: io.BufferedReader) -> None:
        found = os.fstat(file.fileno())
        version = found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns
        self._version = self._version or version
        if version != self._version:
            raise errors.SetupError(
                f"{self._path} has changed while it was being read; what was sent stays"
            )


class MendedMessage(str):
    """The message of a job that had failed, as `imagefleet failed --export` notes it."""

    __slots__ = ()


class Terms(TypedDict, total=False):
    """What jobs are made of a file; a template has no use for a report."""

    count: int | None
    """The most entries; by default all."""
    report: Report | None
    """Is told of each row that is no job."""
    signer: JobSigner | None
    campaign: str | None
    """That of jobs without one."""


class _EntrySource(abc.ABC):
    """Jobs from the entries of a format."""

    identity: str
    ids: str
    """What ids are made of where a job has none: the identity, or that of an earlier content."""
    count: int | None
    _can_be_read_again = True

    def __init__(self, name: str, form: Format, terms: Terms) -> None:
        self._name = name
        self._form = form
        self.report = terms.get("report") or Report()
        self._signer = terms.get("signer")
        self._campaign = terms.get("campaign")
        self.mended = 0
        """Jobs of the messages so far that had failed, as `imagefleet failed --export` notes it."""
        self.empty = 0
        """Positions so far that hold no job, an empty line say."""

    def check(self, start: int, on_job: OnJob | None = None, on_body: OnBody | None = None) -> None:
        """Checks each entry that is to be sent, for *on_job*; or raises SetupError.

        *on_body* gets the position and the message of each, unsigned. Without *on_job*, nothing is
        checked that can be read only once.
        """
        if on_job is None and not self._can_be_read_again:
            return
        read = self._read(start, self.report.reject, on_job or (lambda *_: None))
        for position, body in enumerate(read, start):
            if body is not None and on_body is not None:
                on_body(position, body)
        if self.report.count and not self.report.skips:
            raise errors.SetupError(self.report.sentence(self._name))

    def bodies(self, start: int) -> Iterator[str | None]:
        return self._read(start, self.report.reject if self.report.skips else self._refuse)

    def _refuse(self, rejected: Rejected) -> None:
        self.report.reject(rejected)
        raise errors.SetupError(
            f"{rejected.place} is not a valid job: {rejected.reason}; the jobs before it are sent"
            " (--skip-invalid skips such jobs)"
        )

    def place(self, position: int) -> str:
        """Where the entry at *position* is in the file: its line or its row."""
        with self._opened() as stream:
            return next(iter(self._form.entries(stream, position))).place

    def examples(self, most: int) -> Iterator[str]:
        return itertools.islice((body for body in self.bodies(0) if body is not None), most)

    def _read(
        self, start: int, on_rejected: OnRejected, on_job: OnJob | None = None
    ) -> Iterator[str | None]:
        """The messages from position *start* on; with *on_job* they are only checked."""
        with self._opened() as stream:
            end = None if self.count is None else max(0, self.count - start)
            entries = itertools.islice(self._form.entries(stream, start), end)
            for number, entry in enumerate(entries, start + 1):
                problem, body = entry.problem, None
                try:
                    if entry.text:
                        body = self._message(entry, f"{self.ids}:{number}", on_job)
                except errors.JobError as error:
                    problem = error.message
                if problem:
                    on_rejected(Rejected.of(entry, problem))
                elif entry.notice:
                    self.report.notice(entry.place, entry.notice)
                self.empty += on_job is None and not (problem or entry.text)
                yield body

    def _message(self, entry: Entry, id_text: str, on_job: OnJob | None) -> str:
        text, has_failed = _without_failure(entry.text)
        job_id = digest(id_text.encode())
        job = read_job(text, job_id)
        if self._campaign is not None:
            job = job.identified(job_id, self._campaign)
        # Only checked, it has spaces for a signature: to sign takes as long as to read.
        signer, room = (None, MAX_SIGNATURE_BYTES) if on_job and self._signer else (self._signer, 0)
        # Without one, a job that somebody has signed stays as it was signed.
        is_theirs = self._signer is None and is_signed(text)
        body = without_deliveries(text) if is_theirs else job.to_message(signer)
        sizes.checked_messages([body + " " * room])
        if on_job is not None:
            on_job(entry.place, job)
        self.mended += on_job is None and has_failed
        return MendedMessage(body) if has_failed else body

    @abc.abstractmethod
    def _opened(self) -> AbstractContextManager[io.BufferedReader]:
        """The content, decompressed."""


class FileSource(_EntrySource):
    """A file of jobs; ids come from the content and the entry's number, with or without a job."""

    count: int

    def __init__(self, path: Path, form: Format = FORMATS["jsonl"], **terms: Unpack[Terms]) -> None:
        super().__init__(str(path), form, terms)
        # The same bytes are other jobs in another format.
        person = b"" if form.name == "jsonl" else form.name.encode()
        self._file = UnchangedFile(path, form)
        with self._opened() as stream:
            new_hash = partial(hashlib.blake2b, digest_size=16, person=person)
            hasher = hashlib.file_digest(stream, new_hash)
        with self._opened() as stream:
            entries = form.count(stream)
        if self._campaign is not None:
            hasher.update(f" campaign={self._campaign}".encode())
        self.identity = self.ids = hasher.hexdigest()
        count = terms.get("count")
        self.count = entries if count is None else min(count, entries)

    def describe(self) -> str:
        """How much there is; a line may hold no job."""
        return f"{self._name}: {self.count:,} {self._form.unit}{'s' * (self.count != 1)}"

    def _opened(self) -> AbstractContextManager[io.BufferedReader]:
        return self._file.opened()


class StreamSource(_EntrySource):
    """Standard input, which has no checkpoint; a job without an id takes a random one."""

    _can_be_read_again = False

    def __init__(
        self, stream: io.BufferedReader, form: Format = FORMATS["jsonl"], **terms: Unpack[Terms]
    ) -> None:
        super().__init__("standard input", form, terms)
        self._stream = stream
        self.identity = self.ids = uuid.uuid4().hex
        self.count = terms.get("count")

    def describe(self) -> str:
        """Describes nothing: how much there is shows at its end."""
        return ""

    def place(self, position: int) -> str:
        return f"{self._name}, {self._form.unit} {position + self._form.first}"

    @contextmanager
    def _opened(self) -> Iterator[io.BufferedReader]:
        with _explained(self._name, self._form):
            yield decompressed(self._stream)


def _without_failure(text: str) -> tuple[str, bool]:
    """A job as it was before somebody noted in it why it failed or was refused; whether it failed.

    `imagefleet failed --export` notes the one, `imagefleet load --rejects` the other.
    """
    if f'"{FAILURE_FIELD}"' not in text:
        return text, False  # the most common case, without parsing it
    try:
        fields = message_fields(text)
    except (ValueError, RecursionError):
        return text, False  # not JSON, which `read_job` says
    if isinstance(fields, dict) and FAILURE_FIELD in fields:
        failure = fields.pop(FAILURE_FIELD)
        return json.dumps(fields), not is_rejected(failure)
    return text, False


@contextmanager
def _explained(name: str, form: Format) -> Iterator[None]:
    """Errors of reading a file as SetupErrors that name it."""
    try:
        yield
    except (EOFError, zlib.error):
        raise errors.SetupError(
            f"{name} cannot be read: it is gzip that is damaged or incomplete"
        ) from None
    except OSError as error:
        raise errors.SetupError(f"{name} cannot be read: {error.strerror or error}") from None
    except FormatError as error:
        raise errors.SetupError(f"{name} as {form.name}: {error}") from None
