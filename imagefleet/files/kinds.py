"""Kinds of files that workers read from the storage, a row each, for worker, loader and console."""

import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import PurePath

from imagefleet.errors import SetupError
from imagefleet.files import contents, embedding, lora
from imagefleet.files.contents import Content
from imagefleet.files.safetensors import Header, UnusableError

#: Describes a file as lists show it, by its header and what that holds; raises UnusableError.
Describe = Callable[[Header, Content], str]


@dataclass(frozen=True, slots=True)
class FileKind:
    """A kind of file: its names, its place in the storage, its form and its limits."""

    #: Word for the kind on the command line.
    name: str
    noun: str
    folder: str
    #: Clause that ends a sentence: the way in which jobs or workers use stored files.
    use: str
    #: Format of the words by which jobs or workers name a file: of its stem, name and SHA-256.
    handle: str = "{stem}"
    describe: Describe = lambda _header, content: content.name
    suffixes: tuple[str, ...] = (".safetensors",)
    max_bytes: int | None = None
    #: The most files that a worker fetches at once; they are in memory meanwhile.
    fetched_at_once: int = 8
    #: The most that a worker keeps on disk, where its settings allow more.
    cached_bytes: int = sys.maxsize
    #: True if workers use only what the folder's manifest lists, signed or not.
    needs_list: bool = False
    #: True if a worker with a trusted key stops, and fails no job, where there is no manifest.
    stops_without_list: bool = False
    #: True if the manifest has names with their suffix.
    lists_suffixes: bool = False
    #: True if `files make` makes them, under names that follow from their content.
    is_made: bool = False
    #: True if files pass whose tensors are of no known kind.
    takes_unknown: bool = False
    #: False for files that are no safetensors, of which only the size and the hash are checked.
    has_header: bool = True
    #: True if SDXL's refiner passes, which draws no image from the beginning.
    takes_refiner: bool = False

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


def _describe_embedding(header: Header, _content: Content) -> str:
    family, vectors = embedding.describe(header.shapes, header.integers)
    return f"{family} embedding, {vectors} vector{'s' * (vectors != 1)}"


def _describe_lora(header: Header, content: Content) -> str:
    peft_type = lora.peft_type(lora.peft_configs(header.metadata))
    if peft_type is not None:
        return f"{content.family} {peft_type} adapter"
    lora.read(header.shapes, header.integers)
    return f"{content.family} LoRA"


MODEL = FileKind(
    "model",
    "model",
    "models",
    "a worker draws with it by the flags",
    "--model store:{name} --model-sha256 {sha256}",
    lambda _header, content: content.family,
    suffixes=(".safetensors", ".tar"),
    stops_without_list=True,
    lists_suffixes=True,
)
#: What jobs may name beside their own model.
OTHER_MODEL = replace(
    MODEL,
    use="jobs with SDXL name it as refiner_checkpoint",
    handle="{stem}",
    takes_refiner=True,
)
#: They are in memory before they are stored, and eight may arrive at once.
LORA = FileKind(
    "lora",
    "LoRA",
    "loras",
    "prompts use it by the tag",
    "<lora:{stem}:1>",
    _describe_lora,
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
#: SDXL's have 2.5 GB in half precision. They are in memory meanwhile, so they are fetched singly.
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
#: They have 168 MB in half precision, in full 335.
VAE = FileKind(
    "vae",
    "VAE",
    "vaes",
    "sd_vae of jobs names it",
    max_bytes=2**29,
    fetched_at_once=2,
)
#: YOLO's have 6 to 100 MB.
DETECTOR = FileKind(
    "detector",
    "detector",
    "detectors",
    "ad_model of ADetailer's units in jobs names it",
    suffixes=(".onnx",),
    max_bytes=2**28,
    fetched_at_once=2,
    has_header=False,
)
#: Suffix of networks in ONNX.
ONNX = ".onnx"

#: CLIP's have 0.6 to 4 GB, heads on its embedding some kB.
JUDGE = FileKind(
    "judge",
    "judge",
    "judges",
    "keep of jobs names its score",
    suffixes=(".safetensors", ONNX),
    max_bytes=2**32,
    fetched_at_once=1,
    lists_suffixes=True,
    takes_unknown=True,
)
#: T5-XXL's have 631 kB, and those of some 1,700 prompts are kept: a job's stages may be drawn on
#: the same machine, and all jobs may have one negative prompt; besides, each is mostly used once.
TEXT = FileKind(
    "text",
    "text states",
    "text-states",
    "stages without a text encoder draw from them",
    describe=lambda header, _content: header.metadata.get("encoder", ""),
    max_bytes=2**22,
    cached_bytes=2**30,
    is_made=True,
)
#: Programs, whose names say what they are for: see `worker.engine.kernels.package`.
KERNELS = FileKind(
    "kernels",
    "kernels",
    "kernels",
    "workers with the same GPU load them in place of compiling",
    "{name}",
    suffixes=(".kernels",),
    max_bytes=2**28,
    needs_list=True,
    lists_suffixes=True,
    is_made=True,
)

KINDS = {
    kind.name: kind
    for kind in (
        MODEL,
        LORA,
        EMBEDDING,
        CONTROLNET,
        UPSCALER,
        VAE,
        DETECTOR,
        JUDGE,
        TEXT,
        KERNELS,
    )
}


def check(kind: FileKind, path: str, header: Header) -> str:
    """Describes a file, as in 'SDXL LoRA'; SetupError if it is no usable one of the *kind*."""
    content = contents.identify(header)
    if not accepts(kind, content):
        raise SetupError(refusal(path, content))
    try:
        return kind.describe(header, content)
    except UnusableError as error:
        raise SetupError(
            f"the {kind.noun} {kind.stem(PurePath(path).name)!r} {error}"
        ) from None


def accepts(kind: FileKind, content: Content) -> bool:
    if content is contents.REFINER:
        return kind.takes_refiner
    return content.use == kind.name or (content.use is None and kind.takes_unknown)


def refusal(what: str, content: Content) -> str:
    advice = content.advice
    if content.use is not None:
        kind = KINDS[content.use]
        advice = f"`{kind.add_command}` stores it for workers, and {kind.use}"
    return f"{what!r} is {content.name}; {advice}"
