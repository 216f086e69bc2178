"""`imagefleet embedding`: textual inversion embeddings in the storage, which prompts name."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING

import typer

from fleet import console, options
from fleet.files.lora import Name, Source
from fleet.files.model import CACHE, Cache, Manifest, Sha256, described
from imagefleet import errors
from imagefleet.job.prompt import CHUNK_TOKENS
from imagefleet.storage.settings import SignerSettings, StorageSettings

if TYPE_CHECKING:
    from fleet.files.transfer import Stored
    from worker.files.safetensors import Header

FOLDER = "embeddings"

app = typer.Typer(
    no_args_is_help=True,
    help="Textual inversion embeddings in the storage, for the prompts of all jobs.",
)


@app.command("add")
@options.from_settings(SignerSettings)
def add_command(
    settings: SignerSettings,
    source: Source,
    name: Name = None,
    sha256: Sha256 = None,
    manifest: Manifest = False,
    cache: Cache = CACHE,
    as_json: options.AsJson = False,
) -> None:
    """Puts a textual inversion embedding into the storage and prints its name for prompts.

    It is for one family of models (SD 1.x, SD 2.x or SDXL), as its vectors are. Its hash is listed
    in embeddings/manifest.json, by which workers know which words name an embedding: within five
    minutes they use it.

    imagefleet embedding add EasyNegative.safetensors

    imagefleet embedding add 'https://civitai.com/api/download/models/9208' --name EasyNegative
    """
    from worker.files import embeddings, kinds

    async def add() -> tuple[Stored, str, str, int]:
        from fleet.files import named, transfer

        keys = settings.keys()
        async with transfer.local_file(source, sha256, kinds.EMBEDDING, cache) as path:
            kind, vectors = describe(str(path), transfer.check_kind(path, kinds.EMBEDDING))
            named.check_size(path, embeddings.MAX_BYTES, "an embedding")
            word = named.name_of(name, path)
            # Signing what others have listed needs --manifest.
            create = manifest or not keys.signing
            stored, _ = await named.store(
                settings, FOLDER, word, path, f"{kind} embedding", keys=keys, create=create
            )
            return stored, word, kind, vectors

    stored, word, kind, vectors = console.run(add())
    if as_json:
        console.print_json({**asdict(stored), "name": word, "kind": kind, "vectors": vectors})
        return
    console.print_note(
        f"{stored.outcome}:"
        f" {console.counted(vectors, 'vector')} for {kind}, SHA-256 {stored.sha256},"
        f" {described(settings, FOLDER)}; prompts use it by its name"
    )
    console.print_plain(word)


@app.command("list")
@options.from_settings(StorageSettings)
def list_command(settings: StorageSettings, as_json: options.AsJson = False) -> None:
    """Lists the embeddings in the storage.

    imagefleet embedding list
    """
    from fleet.files import listing

    if_empty = "no embeddings in the storage: `imagefleet embedding add` stores one"
    listing.show(settings, FOLDER, ".safetensors", if_empty=if_empty, as_json=as_json)


def describe(path: str, header: Header) -> tuple[str, int]:
    """The models that an embedding is for, and its number of vectors.

    Raises:
        SetupError: its tensors are not those of an embedding.
    """
    from worker.files import kinds

    shapes = [shape if len(shape) > 1 else (1, *shape) for shape in header.shapes.values()]
    counts = {shape[0] for shape in shapes}
    widths = {shape[-1] for shape in shapes}
    is_for_two = widths == {768, 1280}
    are_vectors = all(len(shape) == 2 for shape in shapes)  # noqa: PLR2004 - [vectors, width]
    if not are_vectors or len(shapes) != 1 + is_for_two or len(counts) != 1:
        shown = "; ".join(
            f"{name[:40]} {list(shape)}" for name, shape in list(header.shapes.items())[:3]
        )
        raise errors.SetupError(
            f"{path!r} holds the tensors {shown}: an embedding has one, [vectors, width], or for"
            " SDXL two, clip_l and clip_g"
        )
    (count,) = counts
    if not 0 < count <= CHUNK_TOKENS:
        raise errors.SetupError(
            f"{path!r} has {count:,} vectors; a chunk of a prompt holds {CHUNK_TOKENS}"
        )
    if is_for_two:
        return "SDXL", count
    (width,) = widths
    if width not in kinds.EMBEDDING_WIDTHS or width == 1280:  # noqa: PLR2004 - half of SDXL's
        raise errors.SetupError(
            f"{path!r} has vectors of {width:,} numbers: those of SD 1.x have 768, of SD 2.x 1,024,"
            " and SDXL's embeddings have two tensors, clip_l and clip_g"
        )
    return kinds.EMBEDDING_WIDTHS[width], count
