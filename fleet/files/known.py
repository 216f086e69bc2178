"""Embeddings that a prompt names: found as a worker finds them, with the tokens that they take."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from fleet import options
from fleet.files.missing import comfyui_names
from imagefleet import errors
from imagefleet.files import kinds
from imagefleet.job import prompt as prompts
from imagefleet.job.clip import Names, sections_of
from imagefleet.storage.open import open_storage
from imagefleet.storage.settings import StorageSettings
from worker.files import check
from worker.files.library import EmbeddingLibrary, Source

Tokenise = Callable[[Sequence[str]], list[list[int]]]


@dataclass(frozen=True, slots=True)
class Known:
    """An embedding; *length* is the tokens that it takes, and *reason* why it cannot be used."""

    name: str
    family: str = ""
    length: int = 0
    sha256: str = ""
    reason: str | None = None


async def find(
    texts: Sequence[prompts.Prompt],
    tokenise: Tokenise,
    directory: Path | None,
    storage: str | None,
    family: str | None,
) -> list[Known]:
    """The embeddings that prompts name, of a folder and of a storage; raises a FleetError.

    They are in the order of their names. Those of another *family* cannot be used.
    """
    with tempfile.TemporaryDirectory(prefix="imagefleet-") as folder:
        where = storage or f"local:{folder}/none"
        settings = options.read(StorageSettings, {"storage": where})
        async with open_storage(settings) as opened:
            source = Source(opened.files, Path(folder, "cache"), kinds.EMBEDDING.cached_bytes)
            library = EmbeddingLibrary(source, directory)
            names = await library.names()
            return [await _read(library, name, family) for name in _named(texts, tokenise, names)]


def missing(text: str, known: Sequence[Known]) -> list[str]:
    """Names that are written as embeddings, in ComfyUI's way, and are none."""
    there = {each.name.lower() for each in known}
    return [name for name in dict.fromkeys(comfyui_names(text)) if name.lower() not in there]


def _named(texts: Sequence[prompts.Prompt], tokenise: Tokenise, names: Sequence[str]) -> list[str]:
    by_tokens = Names(zip(tokenise(names), names, strict=True))
    parts = [part.text for text in texts for section in sections_of(text) for part in section]
    found = (each for ids in tokenise(parts) for each in by_tokens.split(ids))
    return sorted({each[0] for each in found if isinstance(each, tuple)})


async def _read(library: EmbeddingLibrary, name: str, family: str | None) -> Known:
    try:
        path, sha256 = await library.resolve_hashed(name)
        made_for, vectors = kinds.describe_embedding(path.name, check.read_header(path))
    except (errors.JobError, errors.SetupError) as error:
        return Known(name, reason=error.message)
    reason = None
    if family is not None and made_for != family:
        reason = f"the embedding {name!r} is for {made_for}, and the model is one of {family}"
    return Known(name, made_for, vectors, sha256, reason)
