"""JSON: an array of jobs, or a single job; and the captions of COCO."""

import json
from collections.abc import Iterator
from typing import Any, BinaryIO

from loadgen.formats.lines import Entry, Format, FormatError

#: The largest file, decompressed: it is read as a whole, which takes some five times its size.
MAX_BYTES = 256 * 2**20
_CHUNK_BYTES = 2**18


class JsonArray(Format):
    """The elements of an array, or the one job that the file is."""

    name = "json"
    suffixes = (".json",)
    unit = "job"
    _otherwise = "it holds neither an array of jobs nor a job"

    def entries(self, stream: BinaryIO) -> Iterator[Entry]:
        elements = self._elements(_read(stream))
        if not isinstance(elements, list):
            raise FormatError(self._otherwise)
        for number, element in enumerate(elements, 1):
            yield Entry(f"{self.unit} {number}", json.dumps(element))

    def _elements(self, whole: Any) -> Any:
        return [whole] if isinstance(whole, dict) else whole


def _read(stream: BinaryIO) -> Any:
    """The value of a file, an empty array for an empty file; raises FormatError for no JSON."""
    data = bytearray()
    while chunk := stream.read(_CHUNK_BYTES):
        data += chunk
        if len(data) > MAX_BYTES:
            raise FormatError(
                f"it has more than {MAX_BYTES:,} bytes, too much for one value of JSON: write one"
                " element per line (`jq -c '.[]'` does), for --format jsonl"
            )
    try:
        text = data.decode("utf-8-sig")
        return json.loads(text) if text.strip() else []
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise FormatError(f"it is not UTF-8, in line {line}") from None
    except RecursionError:
        raise FormatError("its values are nested too deeply") from None
    except json.JSONDecodeError as error:
        is_lines = error.msg == "Extra data"
        hint = "; for one job per line: --format jsonl" if is_lines else ""
        raise FormatError(
            f"it is not valid JSON: {error.msg} in line {error.lineno}{hint}"
        ) from None
