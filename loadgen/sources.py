"""Sources of jobs: a template, a file of JSON lines, standard input."""

from __future__ import annotations

import hashlib
import itertools
import os
import sys
import uuid
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import BinaryIO

from pydantic import ValidationError

from imagefleet import errors, validation
from imagefleet.job.message import (
    DEFAULT_CAMPAIGN,
    SIGNATURE_FIELD,
    Job,
    is_signed,
    read_job,
    without_deliveries,
)
from imagefleet.signing import SIGNATURE_CHARACTERS, SigningKey
from imagefleet.storage import protocol
from loadgen import template
from loadgen.pattern import Draw, Patterns

LINE_SUFFIXES = frozenset({".jsonl", ".ndjson"})

#: 96 bits: a collision among a hundred million jobs has a chance of 10^-13.
_ID_BYTES = 12

#: Invalid lines that an error names.
MAX_REPORTED = 10

#: First jobs of a template that are checked before sending, besides each entry of each list.
_SAMPLE_JOBS = 200

OnInvalid = Callable[[int, str], None]

#: Makes a message of a line's text and its place, from which an id is derived.
ReadLine = Callable[[str, str], str]

#: Called with the bytes read so far.
OnRead = Callable[[int], None]

#: A file is read in lines; a call for each would take longer than the line.
_BYTES_BETWEEN_CALLS = 1_000_000

#: What a signature adds to a message.
SIGNATURE_BYTES = len(f',"{SIGNATURE_FIELD}":""') + SIGNATURE_CHARACTERS


def _ignore(read_bytes: int) -> None:
    """For callers that show no progress."""


class TemplateSource:
    """Jobs from a template: job n is a function of the file's content, the seed and n."""

    def __init__(
        self,
        path: Path,
        *,
        count: int | None = None,
        seed: int | None = None,
        key: SigningKey | None = None,
    ) -> None:
        self._path = path
        self._key = key
        read, content = template.read_template(path)
        jobs = read.count if count is None else count
        if jobs is None:
            raise errors.SetupError(f"{path} has no number of jobs: add `count:` or --count")
        self.count = jobs
        self._seed = read.seed if seed is None else seed
        self.identity = _digest(f"{content} seed={self._seed}".encode())
        self._id_of = hashlib.blake2b(self.identity.encode(), digest_size=_ID_BYTES)
        self._fixed = dict(read.job)
        self.campaign = str(self._fixed.get("campaign") or DEFAULT_CAMPAIGN)
        metadata = self._fixed.pop("metadata", None)
        self._metadata = dict(metadata) if isinstance(metadata, dict) else {}
        self._patterns = Patterns(read.lists)
        try:
            self._prompt = self._patterns.slot(read.prompt, "prompt")
            self._negative_prompt = self._patterns.slot(read.negative_prompt, "negative_prompt")
            self._templated = {
                key: self._patterns.slot([template.Choice(text=value)], f"job.metadata.{key}")
                for key, value in self._metadata.items()
                if isinstance(value, str)
            }
        except errors.SetupError as error:
            raise errors.SetupError(f"{path}: {error.message}") from None

    def check(self, start: int, _on_read: OnRead = _ignore) -> None:
        """Checks every entry of every list once, and the first jobs."""
        for turn in range(self._patterns.longest):
            self._body(0, self._patterns.draw_in_turn(turn))
        for _ in itertools.islice(self.bodies(start), _SAMPLE_JOBS):
            pass

    def bodies(self, start: int) -> Iterator[str]:
        for index in range(start, self.count):
            yield self.body(index)

    def body(self, index: int) -> str:
        """Message *index*, independent of those before it.

        Raises:
            SetupError: the template generates an invalid job.
        """
        return self._body(index, self._patterns.draw(self._seed, index))

    def _body(self, index: int, draws: list[Draw]) -> str:
        render = self._patterns.render
        id_of = self._id_of.copy()
        id_of.update(index.to_bytes(8))
        fields: dict[str, object] = {
            **self._fixed,
            "prompt": render(self._prompt, draws),
            "negative_prompt": render(self._negative_prompt, draws),
            "id": id_of.hexdigest(),
        }
        if self._metadata:
            drawn = {key: render(slot, draws) for key, slot in self._templated.items()}
            fields["metadata"] = {**self._metadata, **drawn}
        try:
            body = Job.model_validate(fields).to_message(self._key)
            protocol.checked_messages([body])
        except ValidationError as error:
            raise self._invalid(fields, validation.sentence(error, Job.model_fields)) from None
        except errors.JobError as error:
            raise self._invalid(fields, error.message) from None
        return body

    def _invalid(self, fields: dict[str, object], reason: str) -> errors.SetupError:
        prompt = str(fields["prompt"])[:100]
        return errors.SetupError(
            f"{self._path} generates invalid jobs: {reason} (the prompt is {prompt!r})"
        )


class JsonLinesSource:
    """A file with one job per line; empty lines are skipped.

    A job without an id takes one from the file's digest and the line's number (from 1).
    """

    def __init__(
        self,
        path: Path,
        *,
        count: int | None = None,
        on_invalid: OnInvalid | None = None,
        on_read: OnRead = _ignore,
        key: SigningKey | None = None,
    ) -> None:
        self._path = path
        self._key = key
        self._on_invalid = on_invalid
        hasher = hashlib.blake2b(digest_size=16)
        lines = 0
        try:
            with path.open("rb") as file:
                self._version = _version(file)
                for line in _reported(file, on_read):
                    hasher.update(line)
                    lines += 1
        except OSError as error:
            raise errors.SetupError(f"{path} cannot be read: {error.strerror}") from None
        self.identity = hasher.hexdigest()
        self.count = lines if count is None else min(count, lines)

    def check(self, start: int, on_read: OnRead = _ignore) -> None:
        """Checks each line that is to be sent, unless invalid ones are skipped."""
        if self._on_invalid is not None:
            return
        invalid: list[str] = []

        def note(line: int, reason: str) -> None:
            invalid.append(f"line {line}: {reason}")

        for _ in self._read(start, note, partial(_checked, key=self._key), on_read):
            if len(invalid) == MAX_REPORTED:
                break
        if invalid:
            raise errors.SetupError(
                f"{self._path} has invalid jobs; nothing was sent. Correct them or skip them with"
                " --skip-invalid:\n" + "\n".join(invalid)
            )

    def bodies(self, start: int) -> Iterator[str | None]:
        return self._read(start, self._on_invalid or _refuse, partial(_message, key=self._key))

    def _read(
        self, start: int, on_invalid: OnInvalid, read: ReadLine, on_read: OnRead = _ignore
    ) -> Iterator[str | None]:
        with self._path.open("rb") as file:
            self._check_version(file)
            lines = itertools.islice(_reported(file, on_read), start, self.count)
            yield from _read_lines(lines, self.identity, start + 1, on_invalid, read)
            self._check_version(file)

    def _check_version(self, file: BinaryIO) -> None:
        if _version(file) != self._version:
            raise errors.SetupError(
                f"{self._path} has changed while it was being loaded: what was sent stays;"
                " --restart begins with its first job"
            )


class StreamSource:
    """Standard input, one job per line; it cannot be read twice, so it has no checkpoint.

    A job without an id takes a random one: the same stream again gives new jobs.
    """

    def __init__(
        self,
        stream: BinaryIO,
        *,
        count: int | None = None,
        on_invalid: OnInvalid | None = None,
        key: SigningKey | None = None,
    ) -> None:
        self._stream = stream
        self._key = key
        self._on_invalid = on_invalid or _refuse
        self.identity = uuid.uuid4().hex
        self.count = count

    def check(self, start: int, on_read: OnRead = _ignore) -> None:
        """Nothing: a line that was read is gone."""

    def bodies(self, start: int) -> Iterator[str | None]:
        lines = itertools.islice(self._stream, start, self.count)
        read = partial(_message, key=self._key)
        return _read_lines(lines, self.identity, start + 1, self._on_invalid, read)


def _version(file: BinaryIO) -> tuple[int, int, int, int]:
    status = os.fstat(file.fileno())
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


def _reported(lines: Iterable[bytes], on_read: OnRead) -> Iterator[bytes]:
    """*lines*, with calls of *on_read* in between."""
    read_bytes = reported_bytes = 0
    for line in lines:
        read_bytes += len(line)
        if read_bytes - reported_bytes >= _BYTES_BETWEEN_CALLS:
            reported_bytes = read_bytes
            on_read(read_bytes)
        yield line
    on_read(read_bytes)


def _read_lines(
    lines: Iterable[bytes], identity: str, first: int, on_invalid: OnInvalid, read: ReadLine
) -> Iterator[str | None]:
    for number, line in enumerate(lines, first):
        try:
            text = line.decode("utf-8-sig" if number == 1 else "utf-8").strip()
            yield read(text, f"{identity}:{number}") if text else None
        except UnicodeDecodeError:
            on_invalid(number, "not UTF-8")
            yield None
        except errors.JobError as error:
            on_invalid(number, error.message)
            yield None


def _message(text: str, place: str, key: SigningKey | None) -> str:
    job = read_job(text, _digest(place.encode()))
    # Without a key, a line that somebody has signed stays as it was signed.
    is_theirs = key is None and is_signed(text)
    body = without_deliveries(text) if is_theirs else job.to_message(key)
    protocol.checked_messages([body])
    return body


def _checked(text: str, place: str, key: SigningKey | None) -> str:
    """As `_message`, but spaces take the signature's place: to sign takes as long as to read."""
    body = _message(text, place, None)
    if key is not None:
        protocol.checked_messages([body + " " * SIGNATURE_BYTES])
    return body


def _refuse(line: int, reason: str) -> None:
    raise errors.SetupError(
        f"line {line} is not a valid job: {reason}; the lines before it are sent"
        " (--skip-invalid skips such lines)"
    )


def _digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=_ID_BYTES).hexdigest()


#: Messages by position, None for a position without one; the same identity means the same messages.
Source = TemplateSource | JsonLinesSource | StreamSource


def open_source(
    name: str,
    *,
    count: int | None = None,
    seed: int | None = None,
    on_invalid: OnInvalid | None = None,
    on_read: OnRead = _ignore,
    key: SigningKey | None = None,
) -> Source:
    """The source for a file's name, of jobs signed with *key*; `-` is standard input.

    *on_invalid* is called with the number of each invalid line, which is skipped; without it, the
    first invalid line is an error. *on_read*: a file's jobs are counted before this returns.

    Raises:
        SetupError: the file cannot be read or has an unknown suffix.
    """
    path = Path(name)
    if path.suffix in template.SUFFIXES:
        if on_invalid is not None:
            raise errors.SetupError("--skip-invalid is for files of jobs, not for templates")
        return TemplateSource(path, count=count, seed=seed, key=key)
    if seed is not None:
        raise errors.SetupError("--seed is for templates, not for files of jobs")
    if name == "-":
        return StreamSource(sys.stdin.buffer, count=count, on_invalid=on_invalid, key=key)
    if path.suffix in LINE_SUFFIXES:
        return JsonLinesSource(path, count=count, on_invalid=on_invalid, on_read=on_read, key=key)
    raise errors.SetupError(
        f"{name}: the name must end in {', '.join(sorted(template.SUFFIXES | LINE_SUFFIXES))},"
        " or be - for standard input"
    )
