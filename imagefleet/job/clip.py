"""A prompt's words for CLIP: its tokenizer, chunks of 75 tokens, and embeddings in them. No torch.

The tokenizer is part of the package, since a single-file checkpoint carries none. The files are
OpenAI's vocabulary, as open-clip has it;
`demo_model/training/demo_world/make_tokenizer.py` writes them.
Embeddings (textual inversion) are found as AUTOMATIC1111 finds them.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Generic, NamedTuple, Protocol, TypeVar

import ftfy

from imagefleet.errors import JobError
from imagefleet.job.prompt import Prompt, Sections, State, weighted_parts

#: CLIP's tokenizer in the format of transformers: vocab.json and merges.txt.
TOKENIZER = Path(__file__).with_name("clip_tokenizer")

#: A text encoder with a vocabulary of another size needs a tokenizer of its own.
VOCABULARY_SIZE = 49_408

CHUNK_TOKENS = 75

#: A phrase that begins so near to a chunk's end moves to the next one, if it does not fit.
COMMA_BACKTRACK = 20

#: 2,400 tokens. Without a limit, one prompt of 64 KiB could fill the GPU.
MAX_CHUNKS = 32

#: Those of all texts of an edited prompt, which a job holds on the device: of SDXL 80 MB.
_MOST_CHUNKS = 256

#: The token ids of each text, without start and end tokens.
Tokenise = Callable[[Sequence[str]], Sequence[Sequence[int]]]


def tokenizer_of(folder: Path, vocabulary_size: int) -> Path:
    """A checkpoint's tokenizer: its own, else CLIP's where it fits. It may not exist."""
    own = folder / "tokenizer"
    has_own = any((own / name).is_file() for name in ("vocab.json", "tokenizer.json"))
    return TOKENIZER if vocabulary_size == VOCABULARY_SIZE and not has_own else own


#: Text to leave as it is: ASCII without control characters and HTML's names of characters.
_CLEAN = re.compile(r"[\t\n\f\r !-%'-~]*")

#: Characters that ftfy reads at once: names within names (`&amp;quot;`) take it quadratic time.
_CLEANED_AT_ONCE = 2_000


def cleaned(text: str) -> str:
    """A prompt's words as AUTOMATIC1111's tokenizers clean them, with ftfy.

    It straightens quotes, makes wide signs and ligatures the usual ones, drops control characters,
    repairs what was decoded wrongly, and reads HTML's names of characters (`&amp;`).
    """
    if _CLEAN.fullmatch(text):
        return text
    return ftfy.fix_text(text, max_decode_length=_CLEANED_AT_ONCE)


class Embedding(Protocol):
    """An embedding as chunks know it; those of the same file are equal."""

    @property
    def sha256(self) -> str:
        """The SHA-256 of the embedding's file."""

    @property
    def length(self) -> int:
        """The number of its vectors, each of which takes the place of a token."""

    def __hash__(self) -> int: ...


class Insert(NamedTuple):
    """The vectors of an embedding in a chunk, from its token number *at* on."""

    at: int
    embedding: Embedding


T_co = TypeVar("T_co", covariant=True)


class Names(Generic[T_co]):
    """Finds names in a text by their token ids, as AUTOMATIC1111 does, and gives their values.

    Capitals do not matter. The longest name is found, by its tokens, and of equals the first.
    """

    def __init__(self, named: Iterable[tuple[Sequence[int], T_co]]) -> None:
        self._by_first: dict[int, list[tuple[tuple[int, ...], T_co]]] = {}
        for ids, value in named:
            if ids:
                self._by_first.setdefault(ids[0], []).append((tuple(ids), value))
        for same_start in self._by_first.values():
            same_start.sort(key=lambda each: len(each[0]), reverse=True)

    def split(self, ids: Sequence[int]) -> Iterator[int | tuple[T_co]]:
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

    def found_in(
        self, prompts: Iterable[Prompt | str], tokenise: Tokenise
    ) -> Iterator[T_co]:
        """The values that prompts name, in order; raises as `sections_of`."""
        sections = [section for prompt in prompts for section in sections_of(prompt)]
        for ids in tokenise([part.text for section in sections for part in section]):
            yield from (
                each[0] for each in self.split(ids) if not isinstance(each, int)
            )


class Chunk(NamedTuple):
    """Up to 75 tokens and the weight of each; the text encoder pads it."""

    #: `PLACEHOLDER` for each vector of an embedding.
    tokens: tuple[int, ...] = ()
    weights: tuple[float, ...] = ()
    #: The embeddings, in order; also some in the padding.
    inserts: tuple[Insert, ...] = ()
    #: Chunks at this place of an edited prompt's texts, with the number of entries each has: the
    #: text encoder keeps the mean of all.
    company: tuple[tuple[Chunk, int], ...] = ()


#: Those of a prompt or, if it is edited, of one of its texts.
Chunks = tuple[Chunk, ...]

#: The token in whose place a vector of an embedding comes: AUTOMATIC1111's.
PLACEHOLDER = 0


class _Place(NamedTuple):
    """A token's place in a chunk; *embedding* is the one whose first vector is there."""

    token: int
    weight: float
    embedding: Embedding | None = None


_NO_NAMES: Names[Embedding] = Names(())


def sections_of(prompt: Prompt | State | str) -> Sections:
    """The sections of a prompt in all its steps, or of a text without LoRA tags."""
    return weighted_parts(prompt) if isinstance(prompt, str) else prompt.sections


def cut_into_chunks(
    prompt: State | str,
    tokenise: Tokenise,
    comma: int | None,
    embeddings: Names[Embedding] = _NO_NAMES,
) -> Chunks:
    """Cuts a prompt's words (text: without LoRA tags) into chunks, or raises JobError."""
    sections = sections_of(prompt)
    ids = iter(tokenise([part.text for section in sections for part in section]))
    chunks = []
    for section in sections:
        phrases = [
            _places(found, part.weight)
            for part in section
            for found in embeddings.split(next(ids))
        ]
        chunks.extend(_cut_section(phrases, comma) or [Chunk()])
    # BREAK ends its chunk, even an empty one, but starts none at the end of the prompt.
    if len(sections) > 1 and not chunks[-1].tokens:
        chunks.pop()
    _refuse_more(len(chunks))
    return tuple(chunks)


def level(cut: Sequence[Chunks], counts: Sequence[int]) -> list[Chunks]:
    """The chunks of an edited prompt's texts, of so many entries each, as if encoded together.

    So AUTOMATIC1111 does: shorter ones end with empty chunks, and the means that weights keep are
    of all. Raises JobError for too many chunks.
    """
    if len(cut) == 1:
        return list(cut)
    _refuse_more(max(map(len, cut)) * len(cut), "in all its steps ", _MOST_CHUNKS)
    columns = []
    for place in itertools.zip_longest(*cut, fillvalue=Chunk()):
        is_weighted = any(weight != 1 for chunk in place for weight in chunk.weights)
        company = tuple(zip(place, counts, strict=True)) if is_weighted else ()
        columns.append([chunk._replace(company=company) for chunk in place])
    return list(zip(*columns, strict=True))


def _refuse_more(chunks: int, about: str = "", most: int = MAX_CHUNKS) -> None:
    if chunks > most:
        raise JobError(
            f"the prompt has {about}{chunks:,} chunks of {CHUNK_TOKENS} tokens; {most} at most"
        )


def _places(found: int | tuple[Embedding], weight: float) -> list[_Place]:
    """The places of a token, or of an embedding, which are not to be parted."""
    if isinstance(found, int):
        return [_Place(found, weight)]
    (embedding,) = found
    rest = [_Place(PLACEHOLDER, weight)] * (embedding.length - 1)
    return [_Place(PLACEHOLDER, weight, embedding), *rest]


def _cut_section(phrases: Iterable[list[_Place]], comma: int | None) -> list[Chunk]:
    """Cuts a section where AUTOMATIC1111 does.

    Of the words behind a comma that move to the next chunk, an embedding stays behind, in place of
    the padding, and leaves its placeholders to the next chunk, which are words there ('!').
    """
    chunks = []
    chunk: list[_Place] = []
    last_comma = None
    for phrase in phrases:
        is_comma = phrase[0].token == comma
        if len(chunk) == CHUNK_TOKENS:
            end = CHUNK_TOKENS
            if (
                last_comma is not None
                and not is_comma
                and end - last_comma <= COMMA_BACKTRACK
            ):
                end = last_comma + 1
            chunks.append(_chunk(chunk, end))
            chunk = [place._replace(embedding=None) for place in chunk[end:]]
            last_comma = None
        if len(chunk) + len(phrase) > CHUNK_TOKENS:
            chunks.append(_chunk(chunk))
            chunk = []
            last_comma = None
        if is_comma:
            last_comma = len(chunk)
        chunk += phrase
    if chunk:
        chunks.append(_chunk(chunk))
    return chunks


def _chunk(places: Sequence[_Place], end: int = CHUNK_TOKENS) -> Chunk:
    """A chunk of the places before *end*, with the embeddings of all."""
    kept = places[:end]
    return Chunk(
        tuple(place.token for place in kept),
        tuple(place.weight for place in kept),
        tuple(
            Insert(at, place.embedding)
            for at, place in enumerate(places)
            if place.embedding is not None
        ),
    )
