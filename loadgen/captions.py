"""Captions from a file: text, JSON lines, or COCO's annotations; one at a time, in flat memory."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

from imagefleet import errors
from imagefleet.records import sweep
from loadgen.file_source import OnRead, explained, ignore, version_of
from loadgen.formats import files
from loadgen.formats.entry import Entry, FormatError
from loadgen.formats.json_array import members
from loadgen.formats.lines import JsonLines, PromptLines

FORMATS = ("coco", "jsonl", "txt")

#: The format that a file's name tells, without `.gz`.
SUFFIXES = {".txt": "txt", ".jsonl": "jsonl", ".ndjson": "jsonl", ".json": "coco"}

#: The keys that may hold the caption of a JSON line; the first of them that is there.
KEYS = ("caption", "prompt", "text")

_COCO_ARRAY = "annotations"

_SURROGATE = re.compile("[\ud800-\udfff]")

#: Words that AUTOMATIC1111 takes for operators in capitals only; to CLIP both are the same.
_OPERATORS = re.compile(r"\b(AND|BREAK)\b")

#: What would be emphasis, a tag, and what would be the weight of the prompt as a whole.
_SIGN = re.compile(r"[()\[\]\\]")
_TAG = re.compile(r"<(?=\w+:)")
_OWN_WEIGHT = re.compile(r":\s*[+-]?[\d.]+\s*$")


class CaptionFile:
    """A file of captions, the first *count* of them.

    *one_per_image*: of COCO's annotations, the first of each image. The file is read once to count
    and hash what it holds.

    Raises:
        SetupError: it cannot be read, or has a line or an annotation without a caption, or none.
    """

    def __init__(
        self,
        path: Path,
        *,
        form: str | None = None,
        count: int | None = None,
        one_per_image: bool = False,
        on_read: OnRead = ignore,
    ) -> None:
        self.path = path
        self._form = form or _format(path)
        if self._form not in FORMATS:
            known = "|".join(FORMATS)
            raise errors.SetupError(f"--format {self._form[:40]}: should be {known}")
        if one_per_image and self._form != "coco":
            raise errors.SetupError("--one-per-image is for COCO's annotations: --format coco")
        self._count = count
        self._one_per_image = one_per_image
        with explained(str(path), self._form), path.open("rb") as file:
            self._version = version_of(file)
        self.facts = sweep.digest(self.read(on_read=on_read))
        if not self.facts.count:
            raise errors.SetupError(f"{path} holds no captions")

    def read(self, start: int = 0, on_read: OnRead = ignore) -> Iterator[str]:
        """The captions from number *start* on; *on_read* gets the bytes of the file read so far."""
        with explained(str(self.path), self._form), self.path.open("rb") as file:
            if version_of(file) != self._version:
                raise errors.SetupError(f"{self.path} has changed since its captions were counted")
            stream = files.decompressed(file, lambda _: on_read(file.tell()))
            yield from itertools.islice(self._captions(stream), start, self._count)

    def _captions(self, stream: BinaryIO) -> Iterator[str]:
        seen: set[object] = set()
        for place, value in _values(self._entries(stream)):
            caption, image = value, None
            if isinstance(value, dict):
                keys = KEYS[:1] if self._form == "coco" else KEYS
                caption = next((value[key] for key in keys if key in value), None)
                image = value.get("image_id")
            # Without the line breaks that the captions' hash is by.
            text = " ".join(caption.split()) if isinstance(caption, str) else ""
            if not text:
                raise FormatError(f"{place}: there is no caption, a text under {KEYS[0]!r}")
            if _SURROGATE.search(text):
                raise FormatError(f"{place}: the caption has half of a surrogate pair")
            if self._one_per_image:
                if not isinstance(image, int | str):
                    raise FormatError(f"{place}: there is no image_id")
                if image in seen:
                    continue
                seen.add(image)
            yield text

    def _entries(self, stream: BinaryIO) -> Iterable[Entry]:
        if self._form == "coco":
            return members(stream, _COCO_ARRAY)
        form = JsonLines() if self._form == "jsonl" else PromptLines()
        return form.entries(stream, 0)


def prompt_of(caption: str) -> str:
    """The prompt that draws a caption's words as they are: its signs are words, not syntax."""
    prompt = _SIGN.sub(r"\\\g<0>", caption)
    prompt = _TAG.sub(r"<\\", prompt)  # a lone backslash is no letter
    prompt = _OPERATORS.sub(lambda found: found[0].lower(), prompt)
    return prompt + "\\" if _OWN_WEIGHT.search(prompt) else prompt


def _format(path: Path) -> str:
    suffix = Path(path.name.lower().removesuffix(files.GZIP_SUFFIX)).suffix
    if suffix not in SUFFIXES:
        raise errors.SetupError(
            f"{path}: the name must end in {', '.join(SUFFIXES)} or one of these with .gz; or"
            f" choose --format {'|'.join(FORMATS)}"
        )
    return SUFFIXES[suffix]


def _values(entries: Iterable[Entry]) -> Iterator[tuple[str, Any]]:
    for entry in entries:
        if entry.problem:
            raise FormatError(f"{entry.place}: {entry.problem}")
        if not entry.text:
            continue
        try:
            yield entry.place, json.loads(entry.text)
        except (ValueError, RecursionError):
            raise FormatError(f"{entry.place}: it is not valid JSON") from None
