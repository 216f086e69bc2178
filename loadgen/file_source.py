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
from functools import partial
from pathlib import Path
from typing import cast

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

FORMATS: Mapping[str, Format] = {
    each.name: each for each in (JsonLines(), JsonArray(), CsvRows(), PromptLines(), ParquetRows())
}

_GZIP_MAGIC = b"\x1f\x8b"

#: 96 bits: a collision among a hundred million jobs has a chance of 10^-13.
ID_BYTES = 12
MAX_REPORTED = 10

#: Called with the place of an invalid entry, and why it is none.
OnInvalid = Callable[[str, str], None]

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
            yield decompressed(file) if self._form.is_stream else file
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


class _EntrySource(abc.ABC):
    """Jobs from the entries of a format: signed by *signer*, of *campaign* where a job has none."""

    identity: str
    ids: str
    """What ids are made of where a job has none: the identity, or that of an earlier content."""
    count: int | None
    _can_be_read_again = True

    def __init__(
        self,
        name: str,
        form: Format,
        on_invalid: OnInvalid | None,
        signer: JobSigner | None,
        campaign: str | None,
    ) -> None:
        self._name = name
        self._form = form
        self._on_invalid = on_invalid
        self._signer = signer
        self._campaign = campaign
        self.mended = 0
        """Jobs of the messages so far that had failed, as `imagefleet failed --export` notes it."""

    def check(self, start: int, on_job: OnJob | None = None, on_body: OnBody | None = None) -> None:
        """Checks each entry that is to be sent, for *on_job*; a SetupError has the first ten.

        *on_body* gets the position and the message of each, unsigned. Without *on_job*, nothing is
        checked that can be read only once.
        """
        if on_job is None and not self._can_be_read_again:
            return
        skips: OnInvalid | None = self._on_invalid
        if skips is not None and on_job is None:
            skips = lambda *_: None  # noqa: E731 - told as they are sent
        invalid: list[str] = []

        def note(place: str, reason: str) -> None:
            invalid.append(f"{place}: {reason}")

        read = self._read(start, skips or note, on_job or (lambda *_: None))
        for position, body in enumerate(read, start):
            if body is not None and on_body is not None:
                on_body(position, body)
            if len(invalid) == MAX_REPORTED:
                break
        if invalid:
            raise errors.SetupError(
                f"{self._name} has invalid jobs; nothing was sent. Correct them or skip them with"
                " --skip-invalid:\n" + "\n".join(invalid)
            )

    def bodies(self, start: int) -> Iterator[str | None]:
        return self._read(start, self._on_invalid or _refuse)

    def place(self, position: int) -> str:
        """Where the entry at *position* is in the file: its line or its row."""
        with self._opened() as stream:
            return next(iter(self._form.entries(stream, position))).place

    def examples(self, most: int) -> Iterator[str]:
        return itertools.islice((body for body in self.bodies(0) if body is not None), most)

    def _read(
        self, start: int, on_invalid: OnInvalid, on_job: OnJob | None = None
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
                    on_invalid(entry.place, problem)
                yield body

    def _message(self, entry: Entry, id_text: str, on_job: OnJob | None) -> str:
        text = _without_failure(entry.text)
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
        self.mended += on_job is None and text is not entry.text
        return body if text is entry.text else MendedMessage(body)

    @abc.abstractmethod
    def _opened(self) -> AbstractContextManager[io.BufferedReader]:
        """The content, decompressed."""


class FileSource(_EntrySource):
    """A file of jobs; ids come from the content and the entry's number, with or without a job."""

    count: int

    def __init__(
        self,
        path: Path,
        form: Format = FORMATS["jsonl"],
        *,
        count: int | None = None,
        on_invalid: OnInvalid | None = None,
        signer: JobSigner | None = None,
        campaign: str | None = None,
    ) -> None:
        super().__init__(str(path), form, on_invalid, signer, campaign)
        # The same bytes are other jobs in another format.
        person = b"" if form.name == "jsonl" else form.name.encode()
        self._file = UnchangedFile(path, form)
        with self._opened() as stream:
            new_hash = partial(hashlib.blake2b, digest_size=16, person=person)
            hasher = hashlib.file_digest(stream, new_hash)
        with self._opened() as stream:
            entries = form.count(stream)
        if campaign is not None:
            hasher.update(f" campaign={campaign}".encode())
        self.identity = self.ids = hasher.hexdigest()
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
        self,
        stream: io.BufferedReader,
        form: Format = FORMATS["jsonl"],
        *,
        count: int | None = None,
        on_invalid: OnInvalid | None = None,
        signer: JobSigner | None = None,
        campaign: str | None = None,
    ) -> None:
        super().__init__("standard input", form, on_invalid, signer, campaign)
        self._stream = stream
        self.identity = self.ids = uuid.uuid4().hex
        self.count = count

    def describe(self) -> str:
        """Describes nothing: how much there is shows at its end."""
        return ""

    @contextmanager
    def _opened(self) -> Iterator[io.BufferedReader]:
        with _explained(self._name, self._form):
            yield decompressed(self._stream)


def _without_failure(text: str) -> str:
    """A job as it was before `imagefleet failed --export` noted its failure in it."""
    if f'"{FAILURE_FIELD}"' not in text:
        return text  # the most common case, without parsing it
    try:
        fields = message_fields(text)
    except (ValueError, RecursionError):
        return text  # not JSON, which `read_job` says
    if isinstance(fields, dict) and FAILURE_FIELD in fields:
        del fields[FAILURE_FIELD]
        return json.dumps(fields)
    return text


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


def _refuse(place: str, reason: str) -> None:
    raise errors.SetupError(
        f"{place} is not a valid job: {reason}; the jobs before it are sent (--skip-invalid skips"
        " such jobs)"
    )
