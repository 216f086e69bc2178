"""Textual inversion embeddings in a prompt, found as AUTOMATIC1111 finds them. No torch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar


class Embedding(Protocol):
    """An embedding as chunks know it; those of the same file are equal."""

    @property
    def sha256(self) -> str:
        """The SHA-256 of the embedding's file."""

    @property
    def length(self) -> int:
        """The number of its vectors, each of which takes the place of a token."""

    def __hash__(self) -> int: ...


@dataclass(frozen=True, slots=True)
class Insert:
    """The vectors of an embedding in a chunk, from its token number *at* on."""

    at: int
    embedding: Embedding


T = TypeVar("T")


class Names(Generic[T]):
    """What names stand for, by the token ids of each name.

    So capitals do not matter, and a name that is the beginning of a word is none. Of names that
    begin alike the longest is found, by its tokens, and of names with the same tokens the first.
    """

    def __init__(self, named: Iterable[tuple[Sequence[int], T]]) -> None:
        self._by_first: dict[int, list[tuple[tuple[int, ...], T]]] = {}
        for ids, value in named:
            if ids:
                self._by_first.setdefault(ids[0], []).append((tuple(ids), value))
        for same_start in self._by_first.values():
            same_start.sort(key=lambda each: len(each[0]), reverse=True)

    def split(self, ids: Sequence[int]) -> Iterator[int | tuple[T]]:
        """The tokens of a text, with what a name stands for, in a tuple, in place of its tokens."""
        at = 0
        while at < len(ids):
            for name, value in self._by_first.get(ids[at], ()):
                if tuple(ids[at : at + len(name)]) == name:
                    yield (value,)
                    at += len(name)
                    break
            else:
                yield ids[at]
                at += 1
