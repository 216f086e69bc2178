"""Prompts to embeddings: chunks of 75 tokens, encoded one by one and concatenated."""

import contextlib
import threading
from collections import Counter
from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from cachetools import LRUCache
from torch import Tensor
from transformers import CLIPTextModel, CLIPTokenizer

from imagefleet.errors import JobError
from imagefleet.files.embedding import CLIP_L
from imagefleet.job import clip
from imagefleet.job.clip import CHUNK_TOKENS, Chunk, Names
from imagefleet.job.prompt import Prompt, State, Subprompt, weighted_parts
from worker.engine.embeddings import Embedding

#: Tokens of an encoded chunk: start, the chunk, and end tokens as padding.
CONTEXT_TOKENS = CHUNK_TOKENS + 2

#: Prompt chunks in the context of ordinary calls. A prompt of one chunk is repeated, which changes
#: nothing in a softmax: no token needs a mask, which takes a third of cross-attention's time.
PLAIN_CHUNKS = 2

PLAIN_TOKENS = PLAIN_CHUNKS * CONTEXT_TOKENS

#: Contexts of longer prompts, which share calls with each other by these: only cross-attention
#: depends on the context, so a call takes 1 %, 4 % and 13 % more operations than a plain one,
#: whatever its prompts' length. Of 4, of 10 and of the most chunks, in multiples of 8 for masks.
LONG_TOKENS = (312, 776, 2464)

#: Chunks per call of the text encoder: bounds its memory whatever the prompts' length.
_CHUNKS_PER_CALL = 32

#: Memory for encoded text: some 570 chunks of SD1.5 in float16: room for all campaigns' negative
#: prompts, at 1 % of a small card's memory. Prompts are mostly new and only pass through.
_CACHE_BYTES = 64 * 1024**2


@dataclass(frozen=True)
class Context:
    """The UNet's cross-attention context: vectors [rows, tokens, width], padded to the longest row.

    mask [rows, tokens] is false for padding; on the CPU.
    """

    vectors: Tensor
    mask: Tensor
    #: [rows, width] of each prompt's first chunk, from an encoder that has it.
    pooled: Tensor | None = None


@dataclass(frozen=True)
class Rules:
    """Rules by which a model family reads a text encoder; the defaults are SD1's."""

    #: The token that fills a chunk; None repeats the end.
    padding: int | None = None
    #: The layer that is read, counted from the last one as 1; None: as `clip_skip` says.
    layer: int | None = None
    #: The last layer's norm follows.
    is_normalised: bool = True
    #: The vector of the end token, projected, is read too.
    has_pooled: bool = False


class Reader(NamedTuple):
    network: CLIPTextModel
    rules: Rules = Rules()
    #: Name of this encoder's vectors in embedding files for several text encoders.
    name: str = CLIP_L


class _Encoded(NamedTuple):
    """A chunk's vectors [77, width], and its pooled one [width], if any."""

    vectors: Tensor
    pooled: Tensor | None


class PromptRow(NamedTuple):
    """The UNet's row for a prompt, or for one that AND joins: its texts, cut into chunks."""

    subprompt: Subprompt
    texts: Mapping[str, tuple[Chunk, ...]]
    #: Chunks that each text fills, with its last vector again and again: the longest's of what AND
    #: joins, as AUTOMATIC1111 does (`prompt_parser.reconstruct_multicond_batch`).
    length: int

    def at(self, call: int) -> int:
        """The number of a call's text."""
        return [*self.texts].index(self.subprompt.at(call).text)


#: Names of embeddings, and their index by tokens.
_IndexedNames = tuple[Collection[str], Names[str]]


class Tokenizer:
    """Cuts prompts into chunks; thread-safe."""

    def __init__(self, tokenizer: CLIPTokenizer) -> None:
        self._tokenizer = tokenizer
        self._comma: int | None = tokenizer.get_vocab().get(",</w>")
        # The Rust tokenizer raises "Already borrowed" when two threads use it at once.
        self._lock = threading.Lock()
        # Of a fleet's embeddings, some thousands at most, which rarely change.
        self._names: _IndexedNames = ((), Names(()))

    def chunks(
        self, prompt: State | str, embeddings: Sequence[Embedding] = ()
    ) -> tuple[Chunk, ...]:
        """A text's chunks, at least one, with the vectors of what it names of *embeddings*.

        Raises JobError if it is too long, or a weight in it is not a number or too large.
        """
        ids = self._tokenise([each.name for each in embeddings])
        names = Names(zip(ids, embeddings, strict=True))
        return clip.cut_into_chunks(prompt, self._tokenise, self._comma, names)

    def rows(
        self, prompt: Prompt | str, embeddings: Sequence[Embedding] = ()
    ) -> list[PromptRow]:
        """A prompt's rows in a call: of what AND joins from the last on; raises as `chunks`."""
        if isinstance(prompt, Prompt):
            subprompts = prompt.subprompts
        else:
            subprompts = (Subprompt((State(0, prompt, weighted_parts(prompt)),)),)
        rows = []
        for subprompt in reversed(subprompts):
            counts = Counter(state.text for state in subprompt.states)
            states = {state.text: state for state in subprompt.states}
            apart = [self.chunks(state, embeddings) for state in states.values()]
            cut = clip.level(apart, [*counts.values()])
            chunks = dict(zip(states, cut, strict=True))
            rows.append(PromptRow(subprompt, chunks, len(cut[0])))
        length = max(row.length for row in rows)
        return [row._replace(length=length) for row in rows]

    def find_names(
        self, prompts: Iterable[Prompt | str], names: Collection[str]
    ) -> tuple[str, ...]:
        """Embedding *names* that occur in the prompts, in order.

        Quick if *names* is the same object as the last time. Raises JobError if a weight in a
        prompt is not a number or too large.
        """
        known, index = self._names
        if known is not names:
            index = Names(zip(self._tokenise([*names]), names, strict=True))
            self._names = names, index
        return tuple(dict.fromkeys(index.found_in(prompts, self._tokenise)))

    def _tokenise(self, texts: Sequence[str]) -> Sequence[Sequence[int]]:
        if not texts:
            return []
        cleaned = [clip.cleaned(each) for each in texts]
        with self._lock:
            encoded = self._tokenizer(cleaned, add_special_tokens=False, verbose=False)
        ids: list[list[int]] = encoded["input_ids"]
        return ids


def _key(chunk: Chunk) -> Hashable:
    """Identifies a chunk, without its embeddings' vectors: the cache must not keep them."""
    if not (chunk.inserts or chunk.company):
        return chunk
    inserts = tuple((each.at, each.embedding.sha256) for each in chunk.inserts)
    company = tuple((_key(each), count) for each, count in chunk.company)
    return chunk.tokens, chunk.weights, inserts, company


@contextlib.contextmanager
def _inserted(reader: Reader, chunks: Sequence[Chunk]) -> Iterator[None]:
    """The chunks' embeddings in the places of their tokens' vectors."""

    def insert(_module: object, _ids: object, found: Tensor) -> Tensor:
        """*found* are the tokens' vectors, [chunks, 77, width]."""
        found = found.clone()
        for row, chunk in zip(found, chunks, strict=True):
            for insert in chunk.inserts:
                assert isinstance(insert.embedding, Embedding)  # noqa: S101 - of this engine
                begin = 1 + insert.at  # after the start token
                row[begin : begin + insert.embedding.length] = insert.embedding.vectors[
                    reader.name
                ]
        return found

    hook = reader.network.get_input_embeddings().register_forward_hook(insert)
    try:
        yield
    finally:
        hook.remove()


@dataclass(eq=False)
class Encoder:
    """A model's text encoders as one, their vectors side by side; not thread-safe.

    An LRU cache of so many bytes for each holds their output on the device.
    """

    #: The pooled vectors are the last one's.
    _readers: Sequence[Reader]
    #: The tokens that begin and end a chunk.
    _start: int
    _end: int
    cache_bytes: int = _CACHE_BYTES

    def __post_init__(self) -> None:
        self._cache = LRUCache[Hashable, _Encoded](
            self.cache_bytes * len(self._readers),
            getsizeof=lambda encoded: encoded.vectors.nbytes,
        )

    def encode(
        self,
        prompts: Sequence[Sequence[Chunk]],
        clip_skip: int,
        loras: Hashable = (),
        filled: Sequence[int] | None = None,
    ) -> Context:
        """Encodes prompts of any length; *loras* identifies what is merged into the text encoder.

        *filled*: chunks that each fills with its last vector, if more than its own
        (`PromptRow.length`).
        Raises JobError if the weights in a prompt cancel each other out.
        """
        distinct = dict.fromkeys(chunk for prompt in prompts for chunk in prompt)
        encoded = self._look_up(distinct, clip_skip, loras)
        rows = []
        for prompt, length in zip(prompts, filled or map(len, prompts), strict=True):
            vectors = [encoded[chunk].vectors for chunk in prompt]
            missing = (length - len(vectors)) * CONTEXT_TOKENS
            last = vectors[-1][-1:]
            rows.append(torch.cat([*vectors, last.expand(missing, -1)]))
        lengths = torch.tensor(list(map(len, rows)))
        firsts = [encoded[prompt[0]].pooled for prompt in prompts]
        pooled = [each for each in firsts if each is not None]
        stacked = torch.stack(pooled) if pooled else None
        mask = torch.arange(int(lengths.max())) < lengths[:, None]
        return Context(
            torch.nn.utils.rnn.pad_sequence(rows, batch_first=True), mask, stacked
        )

    def encode_ahead(self, chunks: Iterable[Chunk], clip_skip: int) -> None:
        """Encodes chunks together, for `encode` to find in the cache; raises as there."""
        self._look_up(dict.fromkeys(chunks), clip_skip, ())

    def clear(self) -> None:
        self._cache.clear()

    def _look_up(
        self, chunks: Iterable[Chunk], clip_skip: int, loras: Hashable
    ) -> dict[Chunk, _Encoded]:
        encoded = {}
        missing = []
        for chunk in chunks:
            cached = self._cache.get((_key(chunk), clip_skip, loras))
            if cached is None:
                missing.append(chunk)
            else:
                encoded[chunk] = cached
        for part in _in_calls(missing):
            found = [
                self._weighted(reader, part, clip_skip) for reader in self._readers
            ]
            pooled = found[-1].pooled
            for row, chunk in enumerate(part):
                # A view would keep the whole call's vectors in memory.
                vectors = torch.cat([each.vectors[row] for each in found], dim=-1)
                each = _Encoded(
                    vectors, None if pooled is None else pooled[row].clone()
                )
                encoded[chunk] = self._cache[_key(chunk), clip_skip, loras] = each
        return encoded

    def _read(self, reader: Reader, part: Sequence[Chunk], clip_skip: int) -> _Encoded:
        """Chunks' vectors [chunks, 77, width], and pooled ones [chunks, width], if any."""
        network = reader.network
        rules = reader.rules
        padding = self._end if rules.padding is None else rules.padding
        rows = [
            (self._start, *chunk.tokens, self._end, *[padding] * _missing(chunk))
            for chunk in part
        ]
        inserts = any(chunk.inserts for chunk in part)
        with _inserted(reader, part) if inserts else contextlib.nullcontext():
            output = network(
                torch.tensor(rows, device=network.device), output_hidden_states=True
            )
        pooled: Tensor | None = output.text_embeds if rules.has_pooled else None
        vectors: Tensor = output.hidden_states[-(rules.layer or clip_skip)]
        if rules.is_normalised:
            # The module tree lost its `text_model` level in transformers 5.6.
            vectors = getattr(network, "text_model", network).final_layer_norm(vectors)
        return _Encoded(vectors, pooled)

    def _weighted(
        self, reader: Reader, part: Sequence[Chunk], clip_skip: int
    ) -> _Encoded:
        """Applies the chunks' weights; the mean of each chunk, or of its company, is kept."""
        vectors, pooled = self._read(reader, part, clip_skip)
        if not any(chunk.company or set(chunk.weights) - {1.0} for chunk in part):
            return _Encoded(vectors, pooled)
        weighted, means = _weigh(part, vectors)
        for company in dict.fromkeys(chunk.company for chunk in part if chunk.company):
            chunks, counts = zip(*company, strict=True)
            read = [
                _weigh(each, self._read(reader, each, clip_skip).vectors)[1]
                for each in _in_calls(chunks)
            ]
            share = means.new_tensor(counts) / sum(counts)
            means[[chunk.company == company for chunk in part]] = share @ torch.cat(
                read
            )
        weighted = (weighted * (means[:, 0] / means[:, 1])[:, None, None]).to(
            vectors.dtype
        )
        if vectors.isfinite().all() and not weighted.isfinite().all():
            raise JobError("the weights in the prompt cancel each other out")
        return _Encoded(weighted, pooled)


def _in_calls(chunks: Sequence[Chunk]) -> Iterator[Sequence[Chunk]]:
    for at in range(0, len(chunks), _CHUNKS_PER_CALL):
        yield chunks[at : at + _CHUNKS_PER_CALL]


def _missing(chunk: Chunk) -> int:
    return CHUNK_TOKENS - len(chunk.tokens)


def _weigh(part: Sequence[Chunk], vectors: Tensor) -> tuple[Tensor, Tensor]:
    """Vectors [chunks, 77, width] with weights, and means [chunks, 2] without and with these."""
    rows = [(1.0, *chunk.weights, 1.0, *[1.0] * _missing(chunk)) for chunk in part]
    plain = vectors.float()
    weighted = plain * torch.tensor(rows, device=vectors.device)[:, :, None]
    return weighted, torch.stack(
        [plain.mean(dim=(1, 2)), weighted.mean(dim=(1, 2))], dim=1
    )
