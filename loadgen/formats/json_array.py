"""JSON: an array of jobs, read piece by piece, or a single job."""

import codecs
import itertools
import json
import re
from collections.abc import Iterator
from typing import BinaryIO

from loadgen.formats.lines import MAX_JOB_LENGTH, Entry, Format, FormatError

_CHUNK_BYTES = 2**18

_SPACE = re.compile(r"[ \t\r\n]*")

_decode = json.JSONDecoder().raw_decode


class JsonArray(Format):
    """The elements of an array, of any length, in the memory of one."""

    name = "json"
    suffixes = (".json",)
    unit = "job"

    def entries(self, stream: BinaryIO, start: int) -> Iterator[Entry]:
        return itertools.islice(_jobs(_Text(stream)), start, None)


class _Text:
    """The text that is not read yet, and its line."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream
        self._decoder = codecs.getincrementaldecoder("utf-8-sig")()
        self._text = ""
        self._at = 0
        self._is_whole = False
        self.line = 1

    def peek(self) -> str:
        """The next character that is no white space; empty at the end."""
        while True:
            if space := _SPACE.match(self._text, self._at):
                self._move_to(space.end())
            if self._at < len(self._text):
                return self._text[self._at]
            if not self._read_more():
                return ""

    def take(self, one: str, other: str = "") -> str:
        """Passes over the next character, which is *one* or *other*, or raises FormatError."""
        found = self.peek()
        if not found or found not in one + other:
            expected = f"{one!r} or {other!r}" if other else repr(one)
            raise FormatError(
                f"it is not valid JSON: no {expected} in line {self.line}"
            )
        self._move_to(self._at + 1)
        return found

    def value(self) -> str:
        """The text of the next JSON value; what follows is left."""
        self.peek()
        while True:
            try:
                _, end = _decode(self._text, self._at)
            except RecursionError:
                raise FormatError(f"line {self.line}: nested too deeply") from None
            except json.JSONDecodeError as error:
                if len(self._text) - self._at > MAX_JOB_LENGTH:
                    raise FormatError(
                        f"in line {self.line} begins a job of more than {MAX_JOB_LENGTH:,}"
                        f" characters, or one that is not valid JSON: {error.msg}"
                    ) from None
                if self._read_more():
                    continue
                line = (
                    self.line + error.lineno - 1 - self._text.count("\n", 0, self._at)
                )
                raise FormatError(
                    f"it is not valid JSON: {error.msg} in line {line}"
                ) from None
            # A number may go on in what is not read yet.
            if end < len(self._text) or not self._read_more():
                text = self._text[self._at : end]
                self._move_to(end)
                return text

    def _move_to(self, at: int) -> None:
        self.line += self._text.count("\n", self._at, at)
        self._at = at

    def _read_more(self) -> bool:
        """False at the end of the stream."""
        if self._is_whole:
            return False
        data = self._stream.read(_CHUNK_BYTES)
        self._is_whole = not data
        try:
            text = self._decoder.decode(data, final=self._is_whole)
        except UnicodeDecodeError:
            raise FormatError(f"it is not UTF-8, after line {self.line}") from None
        self._text = self._text[self._at :] + text
        self._at = 0
        return True


class CocoCaptions(Format):
    """The elements of the array `annotations` of an object, as COCO has its captions."""

    name = "coco"
    suffixes = (".json",)
    unit = "annotation"

    def entries(self, stream: BinaryIO, start: int) -> Iterator[Entry]:
        return itertools.islice(_annotations(_Text(stream)), start, None)


def _annotations(text: _Text) -> Iterator[Entry]:
    if text.peek() != "{":
        raise FormatError("it is no object with the array 'annotations'")
    is_found, separator = False, text.take("{")
    while separator != "}":
        key = json.loads(text.value())
        text.take(":")
        if text.peek() != "[":
            text.value()
        else:
            is_found = is_found or key == "annotations"
            yield from (each for each in _array(text, key) if key == "annotations")
        separator = text.take(",", "}")
    if not is_found:
        raise FormatError("it has no array 'annotations'")


def _array(text: _Text, what: str) -> Iterator[Entry]:
    """Each element of the array that begins here, with its number and its line."""
    separator = text.take("[")
    if text.peek() == "]":
        separator = text.take("]")
    for number in itertools.count(1):
        if separator == "]":
            return
        text.peek()
        line = text.line
        yield Entry(f"{what} {number}, line {line}", text.value(), line=line)
        separator = text.take(",", "]")


def _jobs(text: _Text) -> Iterator[Entry]:
    first = text.peek()
    if first == "{":
        line = text.line
        yield Entry(f"job 1, line {line}", text.value(), line=line)
    elif first == "[":
        yield from _array(text, "job")
    elif first:
        raise FormatError("it holds neither an array of jobs nor a job")
    if text.peek():
        hint = "; for one job per line: --format jsonl" if first == "{" else ""
        raise FormatError(f"it goes on after its end, in line {text.line}{hint}")
