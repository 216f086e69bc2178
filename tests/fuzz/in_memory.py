"""A path to bytes that are in no file."""

from pathlib import Path


class InMemory:
    """Reads as a `Path` does."""

    def __init__(self, data: bytes, name: str) -> None:
        self._data = data
        self.name = name
        self.suffix = Path(name).suffix
        self.parent = Path()

    def __str__(self) -> str:
        return self.name

    def read_bytes(self) -> bytes:
        return self._data

    def read_text(self, encoding: str = "utf-8") -> str:
        return self._data.decode(encoding)
