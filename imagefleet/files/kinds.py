"""Kinds of files that workers read from the storage, a row each, for worker, loader and console."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from imagefleet import errors
from imagefleet.files import contents
from imagefleet.files.contents import Content
from imagefleet.files.safetensors import Header
from imagefleet.job.clip import CHUNK_TOKENS

Describe = Callable[[str, Header, Content], str]
"""Describes a file by its path, its header and what that holds, as lists show it."""


@dataclass(frozen=True, slots=True)
class FileKind:
    """A kind of file: its names, its place in the storage, its form and its limits."""

    name: str
    """Its word on the command line."""
    noun: str
    folder: str
    use: str
    """How stored files are used, as the end of a sentence."""
    handle: str = "{stem}"
    """What jobs or workers name a file by, from its stem, its name and its SHA-256."""
    describe: Describe = lambda _path, _header, content: content.name
    suffixes: tuple[str, ...] = (".safetensors",)
    max_bytes: int | None = None
    fetched_at_once: int = 8
    """The most files that a worker fetches at once; they are in memory meanwhile."""
    cached_bytes: int = sys.maxsize
    """The most that a worker keeps on disk, where its settings allow more."""
    needs_list: bool = False
    """Whether workers use only what the folder's manifest lists, signed or not."""
    stops_without_list: bool = False
    """Whether a worker with a trusted key stops, and fails no job, where there is no manifest."""
    lists_suffixes: bool = False
    """Whether the manifest has names with their suffix."""
    takes_unknown: bool = False
    """Whether files pass whose tensors are of no known kind."""

    @property
    def add_command(self) -> str:
        return f"imagefleet files add {self.name}"

    @property
    def flag(self) -> str:
        """The worker's setting that names a folder of them."""
        return f"--{self.name}-directory"

    def stem(self, file_name: str) -> str:
        suffix = next((each for each in self.suffixes if file_name.endswith(each)), "")
        return file_name.removesuffix(suffix)

    def listed_name(self, file_name: str) -> str:
        return file_name if self.lists_suffixes else self.stem(file_name)


def _describe_embedding(path: str, header: Header, _content: Content) -> str:
    family, vectors = describe_embedding(path, header)
    return f"{family} embedding, {vectors} vector{'s' * (vectors != 1)}"


MODEL = FileKind(
    "model",
    "model",
    "models",
    "a worker draws with it by the flags",
    "--model store:{name} --model-sha256 {sha256}",
    lambda _path, _header, content: content.family,
    suffixes=(".safetensors", ".tar"),
    stops_without_list=True,
    lists_suffixes=True,
)
#: They are checked in memory before they are stored, and eight may arrive at once.
LORA = FileKind(
    "lora",
    "LoRA",
    "loras",
    "prompts use it by the tag",
    "<lora:{stem}:1>",
    lambda _path, _header, content: f"{content.family} LoRA",
    max_bytes=2**30,
    stops_without_list=True,
)
#: SDXL's with 75 vectors has 0.6 MB; some have a preview image within. Thousands are kept.
EMBEDDING = FileKind(
    "embedding",
    "embedding",
    "embeddings",
    "prompts use it by its name",
    describe=_describe_embedding,
    max_bytes=16 * 2**20,
    cached_bytes=256 * 2**20,
    needs_list=True,
)
#: SDXL's have 2.5 GB in half precision. They are checked in memory, so they are fetched singly.
CONTROLNET = FileKind(
    "controlnet",
    "ControlNet",
    "controlnets",
    "`model` of a ControlNet in jobs names it",
    max_bytes=3 * 2**30,
    fetched_at_once=1,
)
#: ESRGAN's have 67 MB, the largest transformers some 400; not all are known by their tensors.
UPSCALER = FileKind(
    "upscaler",
    "upscaler",
    "upscalers",
    "hr_upscaler and upscaler_1 of jobs name it",
    max_bytes=2**29,
    takes_unknown=True,
)
#: T5-XXL's have 631 kB, and those of some 1,700 prompts are kept: a job's stages may be drawn on
#: the same machine, and all jobs may have one negative prompt; besides, each is mostly used once.
TEXT = FileKind(
    "text",
    "text states",
    "text-states",
    "stages without a text encoder draw from them",
    describe=lambda _path, header, _content: header.metadata.get("encoder", ""),
    max_bytes=2**22,
    cached_bytes=2**30,
)
#: Programs, whose key `worker.files.kernels` reads.
KERNELS = FileKind(
    "kernels",
    "kernels",
    "kernels",
    "workers with the same GPU load them at their start",
    "{name}",
    suffixes=(".tar.xz",),
    needs_list=True,
    lists_suffixes=True,
)

KINDS: Mapping[str, FileKind] = {
    kind.name: kind for kind in (MODEL, LORA, EMBEDDING, CONTROLNET, UPSCALER, TEXT, KERNELS)
}

BY_FOLDER: Mapping[str, FileKind] = {kind.folder: kind for kind in KINDS.values()}


def check(kind: FileKind, path: str, header: Header) -> str:
    """What a file is, as in 'SDXL LoRA'; raises SetupError if it is no usable one of the *kind*."""
    content = contents.identify(header)
    if not accepts(kind, content):
        raise errors.SetupError(refusal(path, content))
    return kind.describe(path, header, content)


def accepts(kind: FileKind, content: Content) -> bool:
    """Whether files with that content can be stored as the *kind*."""
    return content.use == kind.name or (content.use is None and kind.takes_unknown)


def refusal(what: str, content: Content) -> str:
    """The sentence that refuses a file for what it holds."""
    advice = content.advice
    if content.use is not None:
        kind = KINDS[content.use]
        advice = f"`{kind.add_command}` stores it for workers, and {kind.use}"
    return f"{what!r} is {content.name}; {advice}"


def describe_embedding(path: str, header: Header) -> tuple[str, int]:
    """The models that an embedding is for, and its number of vectors; SetupError if it is none."""
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
    if width not in contents.EMBEDDING_WIDTHS or width == 1280:  # noqa: PLR2004 - half of SDXL's
        raise errors.SetupError(
            f"{path!r} has vectors of {width:,} numbers: those of SD 1.x have 768, of SD 2.x 1,024,"
            " and SDXL's embeddings have two tensors, clip_l and clip_g"
        )
    return contents.EMBEDDING_WIDTHS[width], count
