"""Formats of one job per line: JSON lines, and text with a prompt per line."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from typing import BinaryIO

from loadgen.formats.entry import Entry, lines

#: Begins a comment in a file of prompts.
COMMENT = "#"


class JsonLines:
    """One JSON object per line; empty lines are skipped."""

    name = "jsonl"
    unit = "line"
    is_stream = True

    def count(self, stream: BinaryIO) -> int:
        return sum(1 for _ in lines(stream))

    def entries(self, stream: BinaryIO, start: int) -> Iterator[Entry]:
        for number, line in enumerate(itertools.islice(lines(stream), start, None), start + 1):
            place = f"line {number}"
            try:
                text = line.decode("utf-8-sig" if number == 1 else "utf-8").strip()
            except UnicodeDecodeError:
                yield Entry(place, problem="not UTF-8")
            else:
                yield Entry(place, self._job(text))

    def _job(self, text: str) -> str:
        return text


class PromptLines(JsonLines):
    """One prompt per line; empty lines and comments are skipped."""

    name = "txt"

    def _job(self, text: str) -> str:
        if not text or text.startswith(COMMENT):
            return ""
        return json.dumps({"prompt": text}, ensure_ascii=False)
