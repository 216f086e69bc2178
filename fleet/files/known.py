"""Embeddings that a prompt names: found as a worker finds them, with the tokens that they take."""

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from cli import options
from fleet.files.missing import aliases, comfyui_names, stored
from imagefleet import errors
from imagefleet.files import embedding, kinds
from imagefleet.files.safetensors import UnusableError
from imagefleet.job import prompt as prompts
from imagefleet.job.clip import Names, Tokenise
from imagefleet.signing import NO_KEYS
from imagefleet.storage.open import open_storage
from imagefleet.storage.settings import StorageSettings
from worker.files import check
from worker.files.library import EmbeddingLibrary, Source


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
) -> tuple[list[Known], set[str] | None]:
    """The embeddings of a folder and a storage that prompts name, by name; raises a FleetError.

    And the names by which prompts find the LoRAs in the storage, if there is one.
    """
    with tempfile.TemporaryDirectory(prefix="imagefleet-") as folder:
        where = storage or f"local:{folder}/none"
        settings = options.read(StorageSettings, {"storage": where})
        async with open_storage(settings) as opened:
            source = Source(
                opened.files, Path(folder, "cache"), kinds.EMBEDDING.cached_bytes
            )
            library = EmbeddingLibrary(source, directory)
            names = await library.names()
            by_tokens = Names(zip(tokenise(names), names, strict=True))
            found = sorted(set(by_tokens.found_in(texts, tokenise)))
            loras = await stored(opened, kinds.LORA) if storage else None
            if loras is not None:
                loras |= await aliases(opened, NO_KEYS, loras)
            return [await _read(library, name) for name in found], loras


def missing(text: str, known: Sequence[Known]) -> list[str]:
    """Names that are written as embeddings, in ComfyUI's way, and are none."""
    there = {each.name.lower() for each in known}
    return [
        name for name in dict.fromkeys(comfyui_names(text)) if name.lower() not in there
    ]


async def _read(library: EmbeddingLibrary, name: str) -> Known:
    try:
        path, sha256 = await library.resolve_hashed(name)
        header = check.read_header(path)
        made_for, vectors = embedding.describe(header.shapes, header.integers)
    except (errors.JobError, errors.SetupError) as error:
        return Known(name, reason=error.message)
    except UnusableError as error:
        return Known(name, reason=f"the embedding {name!r} {error}")
    return Known(name, made_for, vectors, sha256)
