"""Jobs from a file or from standard input, in any of the formats."""

import gzip
import hashlib
import itertools
import json
import os
import shutil
import sys
import tempfile
import uuid
import weakref
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from io import BufferedReader
from pathlib import Path
from typing import TypedDict, Unpack, cast

from imagefleet.errors import JobError, SetupError
from imagefleet.job import differences, message, sizes
from imagefleet.job.message import Job
from imagefleet.keeping.rule import Keep
from imagefleet.records.ledger import HASH_BYTES, Digests, id_hash
from imagefleet.signing import MAX_SIGNATURE_BYTES, JobSigner
from imagefleet.storage.deliveries import without_deliveries
from loadgen.formats.json_array import JsonArray
from loadgen.formats.lines import Entry, Format, FormatError, JsonLines
from loadgen.formats.prompt_lines import PromptLines
from loadgen.formats.tables import CsvRows, ParquetRows
from loadgen.rejects import Rejected, Report, is_rejected

FORMATS = {
    each.name: each
    for each in (JsonLines(), JsonArray(), CsvRows(), PromptLines(), ParquetRows())
}

_GZIP_MAGIC = b"\x1f\x8b"

#: 96 bits: a collision among a hundred million jobs has a chance of 10^-13.
ID_BYTES = 12

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
            raise SetupError(f"--format {name[:40]}: should be {known}")
        return formats[name]
    for form in formats.values():
        if path.name.lower().removesuffix(".gz").endswith(form.suffixes):
            return form
    suffixes = sorted(
        [*other_suffixes, *(each for f in formats.values() for each in f.suffixes)]
    )
    raise SetupError(
        f"{path}: the name must end in {', '.join(suffixes)} or one of these with .gz; or choose"
        f" --format {known}"
    )


def decompressed(file: BufferedReader) -> BufferedReader:
    """The content of a file that may be gzip, and damaged: EOFError, zlib.error or OSError."""
    if file.peek(len(_GZIP_MAGIC)).startswith(_GZIP_MAGIC):
        return cast("BufferedReader", gzip.GzipFile(fileobj=file))
    return file


def digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=ID_BYTES).hexdigest()


class UnchangedFile:
    """A file that is read several times; raises SetupError if it is written in between."""

    def __init__(self, path: Path, form: Format, name: str = "") -> None:
        """*name*: the name in messages; by default the path."""
        self.name = name or str(path)
        self._path = path
        self._form = form
        self._version: tuple[int, ...] | None = None

    @contextmanager
    def opened(self) -> Iterator[BufferedReader]:
        """The file's content, decompressed if its format can be; reading errors name the file."""
        try:
            with self._path.open("rb") as file:
                self._check_version(file)
                yield decompressed(file) if self._form.is_stream else file
                self._check_version(file)
        except (EOFError, zlib.error):
            why = "cannot be read: it is gzip that is damaged or incomplete"
        except OSError as error:
            why = f"cannot be read: {error.strerror or error}"
        except FormatError as error:
            why = f"as {self._form.name}: {error}"
        else:
            return
        raise SetupError(f"{self.name} {why}")

    def _check_version(self, file: BufferedReader) -> None:
        found = os.fstat(file.fileno())
        version = found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns
        self._version = self._version or version
        if version != self._version:
            raise SetupError(
                f"{self.name} has changed while it was being read; what was sent stays"
            )


class MendedMessage(str):
    """The message of a job that had failed, as `imagefleet failed --export` notes it."""

    __slots__ = ()


class Terms(TypedDict, total=False):
    """Options that decide which jobs a file gives; a template has no use for a report."""

    #: The most entries; by default all.
    count: int | None
    #: Called for each row that is not a valid job.
    report: Report | None
    signer: JobSigner | None
    #: Campaign of jobs that do not name one.
    campaign: str | None
    #: Defaults of jobs that name none (`imagefleet.job.settings_table.DEFAULTS`).
    defaults: str | None
    #: Rule of jobs that do not say what to keep.
    keep: Keep | None


class FileSource:
    """A file of jobs.

    The id of a job without one comes from the file's name, the job's content, and how often that
    came before, so that rows which are added or removed later change no other.
    """

    #: The campaign of all jobs whose ids are the source's own: those of a file may be others'.
    campaign = None

    def __init__(
        self,
        path: Path,
        form: Format = FORMATS["jsonl"],
        *,
        name: str = "",
        **terms: Unpack[Terms],
    ) -> None:
        """*name*: the file's name in messages; by default its path."""
        self._form = form
        self._file = UnchangedFile(path, form, name)
        self.report = terms.get("report") or Report()
        self._signer = terms.get("signer")
        self._campaign = terms.get("campaign")
        self._defaults = terms.get("defaults")
        self._keep = terms.get("keep")
        #: Jobs of the messages so far that had failed, as `imagefleet failed --export` notes it.
        self.mended = 0
        #: Positions so far that hold no job, an empty line say.
        self.empty = 0
        #: Lines so far that a `#` begins, of a file of prompts.
        self.comments = 0
        #: Positions so far of a prompt that an earlier one has (`--unique`).
        self.repeated = 0
        #: Jobs by how they differ from AUTOMATIC1111's, as far as the file was read last.
        self.differences = Counter[str]()
        #: Basis of the ids of jobs without one.
        self._ids = digest(
            f"{path.name.removesuffix('.gz')} {self._campaign} {self._defaults}".encode()
        )
        with self._file.opened() as stream:
            entries = form.count(stream)
        count = terms.get("count")
        self.count = entries if count is None else min(count, entries)

    def describe(self) -> str:
        """The name of the file with its number of entries; some may hold no job."""
        unit = f"{self._form.unit}{'s' * (self.count != 1)}"
        return f"{self._file.name}: {self.count:,} {unit}"

    def check(self, on_job: OnJob | None = None) -> None:
        """Checks each entry, for *on_job*; or raises SetupError."""
        for _ in self._read(self.report.reject, on_job or (lambda *_: None)):
            pass
        if self.report.count and not self.report.skips:
            raise SetupError(self.report.sentence(self._file.name))

    def bodies(self) -> Iterator[str | None]:
        return self._read(self.report.reject if self.report.skips else self._refuse)

    def _refuse(self, rejected: Rejected) -> None:
        self.report.reject(rejected)
        raise SetupError(
            f"{rejected.place} is not a valid job: {rejected.reason}; --skip-invalid skips such"
        )

    def _read(
        self, on_rejected: Callable[[Rejected], None], on_job: OnJob | None = None
    ) -> Iterator[str | None]:
        """The messages; with *on_job* they are only checked."""
        repeats = Digests()
        self.differences.clear()
        self.comments = self.empty = self.repeated = 0
        with self._file.opened() as stream:
            for entry in itertools.islice(self._form.entries(stream), self.count):
                problem = entry.problem
                body = None
                try:
                    if entry.text:
                        body = self._message(entry, repeats, on_job)
                except JobError as error:
                    problem = error.message
                if problem:
                    on_rejected(Rejected.of(entry, problem))
                elif entry.notice:
                    self.report.notice(entry.place, entry.notice)
                if not (problem or entry.text):
                    self.comments += entry.is_comment
                    self.repeated += entry.is_repeat
                    self.empty += not (entry.is_comment or entry.is_repeat)
                yield body

    def _message(self, entry: Entry, repeats: Digests, on_job: OnJob | None) -> str:
        text, has_failed = _without_failure(entry.text)
        content = id_hash(text)
        repeat = int.from_bytes(repeats.get(content) or b"") + 1
        repeats.put(content + repeat.to_bytes(HASH_BYTES))
        job_id = digest(f"{self._ids} {repeat} {text}".encode(errors="surrogatepass"))
        job = message.read_job(text, job_id, defaults=self._defaults, keep=self._keep)
        if self._campaign is not None:
            job = job.identified(job_id, self._campaign)
        # Only checked, it has spaces for a signature: to sign takes as long as to read.
        signer, room = (
            (None, MAX_SIGNATURE_BYTES)
            if on_job and self._signer
            else (self._signer, 0)
        )
        # Without one, a job that somebody has signed stays as it was signed.
        is_theirs = self._signer is None and message.is_signed(text)
        if is_theirs:
            given = message.message_fields(text)
            for name, value in (("campaign", self._campaign), ("keep", self._keep)):
                if value and given.get(name) is None:
                    raise JobError(
                        f"somebody has signed it without a {name}: leave out --{name}, or give your"
                        " --signing-key"
                    )
        body = without_deliveries(text) if is_theirs else job.to_message(signer)
        sizes.checked_messages([body + " " * room])
        self.differences.update(differences.of_job(job, (job.width, job.height)))
        if on_job is not None:
            on_job(entry.place, job)
        self.mended += on_job is None and has_failed
        return MendedMessage(body) if has_failed else body


class StandardInput(FileSource):
    """Standard input, copied to a temporary file; a job without an id takes a random one."""

    def __init__(self, form: Format, **terms: Unpack[Terms]) -> None:
        with tempfile.NamedTemporaryFile(prefix="imagefleet-", delete=False) as copy:
            shutil.copyfileobj(sys.stdin.buffer, copy)
        weakref.finalize(self, os.unlink, copy.name)
        super().__init__(Path(copy.name), form, name="standard input", **terms)
        self._ids = uuid.uuid4().hex


def _without_failure(text: str) -> tuple[str, bool]:
    """A job as it was before somebody noted in it why it failed or was refused; whether it failed.

    `imagefleet failed --export` notes the one, `imagefleet load --rejects` the other.
    """
    if f'"{message.FAILURE_FIELD}"' not in text:
        return text, False  # the most common case, without parsing it
    fields = message.fields_if_any(text)
    if message.FAILURE_FIELD in fields:
        failure = fields.pop(message.FAILURE_FIELD)
        return json.dumps(fields), not is_rejected(failure)
    return text, False
