"""Checks `--model` in milliseconds: before torch, the network and the weights.

The engine checks what only the weights tell.
"""

import contextlib
import json
import re
import stat
from collections.abc import Mapping
from pathlib import Path

from imagefleet import yaml_file
from imagefleet.errors import SetupError, UnsettledFileError
from imagefleet.files import contents, kinds, safetensors
from imagefleet.validation import JSONObject
from worker.files import addresses
from worker.settings import WorkerSettings

#: Bytes that are enough to tell a file's format: a tar's magic comes last.
_HEAD_BYTES = 512

#: How pickles begin: torch's are in zip files since 2020.
_PICKLE = rb"PK\x03\x04|\x80[\x02-\x05]"

#: How other files begin that are taken for a checkpoint, and what they are.
_OTHERS = {
    rb"\x1f\x8b": "compressed: unpack it first",
    rb"(\xef\xbb\xbf)?\s*<": "a web page, not a checkpoint: take the address of the file itself,"
    " with a token if the site asks for a login",
    rb"(\xef\xbb\xbf)?\s*[{\[]": "JSON, not a checkpoint: perhaps a server's error message",
    rb"version https://git-lfs": "a Git LFS pointer, not the file itself: run `git lfs pull` in its"
    " repository",
}

#: AUTOMATIC1111's configuration of a checkpoint; those in use have 2 KB.
_MAX_YAML_BYTES = 2**16
_MAX_JSON_BYTES = 2**20

_PARTS = ("unet", "vae", "text_encoder")

#: Pipelines in diffusers format by the start of their class, the longest first.
_PIPELINES = (
    ("StableDiffusionXLInstructPix2Pix", "a checkpoint that edits pictures"),
    ("StableDiffusion3", "a Stable Diffusion 3 checkpoint"),
    ("StableDiffusionInstructPix2Pix", "a checkpoint that edits pictures"),
    ("StableDiffusionDepth", "a depth-to-image checkpoint"),
)

#: The stages of DeepFloyd IF, by the class of their pipeline, and their family's title.
_CASCADE = {
    "IFPipeline": "DeepFloyd IF",
    "IFSuperResolutionPipeline": "DeepFloyd IF super-resolution",
}

#: Transformers of flows by the class of their pipeline: the distilled one, and the guided one.
_FLOWS = {"Flux2KleinPipeline": (contents.KLEIN, contents.KLEIN_BASE)}

#: What folders that are no Stable Diffusion's must have: text encoders may be elsewhere.
_PARTS_BY_PIPELINE: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys(_CASCADE, ("unet",)),
    **dict.fromkeys(_FLOWS, ("transformer", "vae")),
}

#: Starts of the classes of a folder's scheduler that have other noise than Stable Diffusion's.
_OTHER_NOISE = ("EDM", "FlowMatch")

#: What the UNet predicts, by AUTOMATIC1111's words: in the configuration of SD1 or SD2, and by the
#: class of the scaling in SDXL's.
_PARAMETERIZATIONS = {"eps": "epsilon", "v": "v_prediction"}
_SCALINGS = {"EpsScaling": "epsilon", "VScaling": "v_prediction"}

#: Suffixes of a VAE beside a single file. AUTOMATIC1111 decodes with it; here a checkpoint is one
#: file, wherever it is sent.
_VAE_SUFFIXES = (".vae.pt", ".vae.ckpt", ".vae.safetensors")

#: The text width of the refiner, which has the second text encoder alone.
_REFINER_WIDTH = 1280

_ONLY_THESE = (
    "imagefleet generates with checkpoints of Stable Diffusion 1.x, 2.x and SDXL, with its x4"
    " upscaler, with FLUX.2-klein-4B, and with stages of DeepFloyd IF"
)


class CutOffError(SetupError):
    """The file ends before its last tensor does."""


def check(settings: WorkerSettings) -> None:
    """Raises SetupError if the worker could never load its model; no network is used."""
    if settings.config is not None and not settings.config.expanduser().is_dir():
        raise SetupError(f"--config {str(settings.config)!r} is not a folder")
    if addresses.of_model(settings) is None:
        path = Path(settings.model).expanduser()
        try:
            check_path(path)
        except CutOffError:
            with contextlib.suppress(UnsettledFileError):  # the engine waits for it
                safetensors.rested(path)
                raise


def check_path(path: Path, kind: kinds.FileKind = kinds.MODEL) -> None:
    """Raises SetupError unless *path* is a checkpoint that the engine can load, of this *kind*."""
    if re.match(r"\w{2,}:/", str(path)):  # it is not quoted, as it may hold a token
        raise SetupError(
            "the model is an address where a path is needed, or one of another kind than https://"
        )
    try:
        mode = path.stat().st_mode
        if stat.S_ISDIR(mode):
            _check_folder(path, kind)
        elif path.suffix.lower() in addresses.PICKLE_SUFFIXES:
            raise SetupError(f"{str(path)!r} is {addresses.pickle_advice(str(path))}")
        else:
            kinds.check(kind, str(path), read_header(path))
            for suffix in _VAE_SUFFIXES:
                if (vae := path.with_suffix(suffix)).is_file():
                    raise SetupError(
                        f"{str(vae)!r} lies beside the checkpoint: AUTOMATIC1111 decodes with it."
                        " Move it away; --vae gives it to a worker (see 'A VAE of its own' in"
                        " docs/models.md)"
                    )
    except FileNotFoundError:
        advice = addresses.hub_advice(str(path))
        raise SetupError(
            f"the model {str(path)!r} does not exist"
            + (f"; {advice}" if advice else "")
        ) from None
    except OSError as error:
        raise SetupError(
            f"the model {str(path)!r} cannot be read: {error.strerror or error}"
        ) from error


def family(path: Path) -> str:
    """A checkpoint's family by its title, as in 'SD 1.x'; raises as `read_header`."""
    if not path.is_dir():
        return contents.named(contents.identify(read_header(path)), path.stem).family
    index = _read_json(path / "model_index.json")
    pipeline = str(index.get("_class_name", ""))
    if pipeline in _CASCADE:
        return _CASCADE[pipeline]
    if pipeline in _FLOWS:
        is_guided = not index.get("is_distilled", False)
        return _FLOWS[pipeline][is_guided].family
    return _family_of_unet(_read_json(path / "unet" / "config.json"))


def _family_of_unet(unet: JSONObject) -> str:
    width = unet.get("cross_attention_dim")
    if width == _REFINER_WIDTH:
        return contents.REFINER.family
    if _is_sdxl(unet):
        return contents.SDXL.family
    if unet.get("num_class_embeds") is not None:
        return contents.X4_UPSCALER.family
    by_width = {"1024": contents.SD2, "2048": contents.SDXL}
    return by_width.get(str(width), contents.SD1).family


def _is_sdxl(unet: JSONObject) -> bool:
    """Tells SDXL by the configuration of its UNet, which takes the image's size."""
    return unet.get("addition_embed_type") is not None


def read_header(
    path: Path, name: str = "", *, is_whole: bool = True
) -> safetensors.Header:
    """The header of a safetensors file; *name* is what messages call it, by default its path.

    Raises:
        SetupError: it is none, or is cut off; TruncatedError: its header is, and the file is not
        *is_whole* yet.
    """
    name = name or str(path)
    size = path.stat().st_size
    if other := _what_else(path, name):
        raise SetupError(f"{name!r} is {other}")
    with path.open("rb") as file:
        try:
            header = safetensors.read_header(file)
        except safetensors.TruncatedError:
            if not is_whole:
                raise
            expected = ""
        except safetensors.MalformedError:
            raise SetupError(
                f"{name!r} is damaged: its header is not one of a safetensors file"
            ) from None
        else:
            if not is_whole or size >= header.file_bytes:
                return header
            expected = f" of {header.file_bytes:,}"
    raise CutOffError(
        f"{name!r} is cut off: it has {size:,}{expected} bytes; download or copy it again"
    )


def is_tar(path: Path) -> bool:
    """True for bytes that begin a .tar, or an empty one, of zeros alone."""
    head = _head(path)
    is_empty_archive = len(head) == _HEAD_BYTES and not any(head)
    return is_empty_archive or head[257:262] == b"ustar"


def _what_else(path: Path, name: str) -> str | None:
    """Names the kind of a file that is no checkpoint, and the remedy; follows 'it is'."""
    head = _head(path)
    if is_tar(path):
        return "a .tar archive: unpack it with tar -xf, and name the folder in it"
    if (
        head[8:9] == b"{"
        and int.from_bytes(head[:8], "little") <= safetensors.MAX_HEADER_BYTES
    ):
        return None
    if re.match(_PICKLE, head):
        return addresses.pickle_advice(name)
    unknown = "not a readable .safetensors file (it does not begin like one)"
    return next(
        (what for start, what in _OTHERS.items() if re.match(start, head)), unknown
    )


def _head(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(_HEAD_BYTES)


def prediction_type(path: Path) -> str | None:
    """Prediction type of a single file's UNet, by a .yaml beside it or its header; None: unknown.

    Raises SetupError if the .yaml cannot be read.
    """
    if not path.is_file():
        return None
    beside = path.with_suffix(".yaml")
    found = None
    if beside.is_file():
        # As AUTOMATIC1111 reads it: `parameterization`, or SDXL's class of the scaling.
        try:
            content = yaml_file.parse(_read(beside, _MAX_YAML_BYTES))
        except (OSError, ValueError):
            raise SetupError(
                f"{str(beside)!r} beside the checkpoint is not a readable configuration"
            ) from None
        stated = _value(content, "model.params.parameterization")
        scaling = _value(
            content, "model.params.denoiser_config.params.scaling_config.target"
        )
        found = _PARAMETERIZATIONS.get(stated) or _SCALINGS.get(
            scaling.rpartition(".")[2]
        )
    return found or contents.prediction_type(read_header(path))


def _value(content: object, keys: str) -> str:
    """The text at these *keys*, with dots between; '' if there is none."""
    for key in keys.split("."):
        content = content.get(key) if isinstance(content, dict) else None
    return content if isinstance(content, str) else ""


def _check_folder(folder: Path, kind: kinds.FileKind) -> None:
    pipeline = str(_read_json(folder / "model_index.json").get("_class_name", ""))
    own_parts = _PARTS_BY_PIPELINE.get(pipeline, ())
    for part in own_parts:
        _check_part(folder / part)
    if own_parts:
        return
    unet = _read_json(folder / "unet" / "config.json")
    is_refiner = unet.get("cross_attention_dim") == _REFINER_WIDTH
    noise = str(
        _read_json(folder / "scheduler" / "scheduler_config.json").get(
            "_class_name", ""
        )
    )
    other = next(
        (name for start, name in _PIPELINES if pipeline.startswith(start)), None
    )
    if pipeline and not pipeline.startswith("StableDiffusion"):
        other = f"a checkpoint of {pipeline[:60]}"
    elif is_refiner and not kinds.accepts(kind, contents.REFINER):
        other = contents.REFINER.name
    elif noise.startswith(_OTHER_NOISE):
        other = f"a checkpoint of other noise ({noise[:60]})"
    if other is not None:
        raise SetupError(f"{str(folder)!r} is {other}; {_ONLY_THESE}")
    if not any((folder / part).is_dir() for part in _PARTS):
        raise SetupError(_not_a_checkpoint(folder))
    for part in (*_PARTS, "text_encoder_2") if _is_sdxl(unet) else _PARTS:
        if part != "text_encoder" or not is_refiner:
            _check_part(folder / part)


def _check_part(folder: Path) -> None:
    if not (folder / "config.json").is_file():
        raise SetupError(
            f"{str(folder.parent)!r} is not a checkpoint in diffusers format: it has no"
            f" {folder.name}/config.json"
        )
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        pickles = [each.name for each in folder.iterdir() if _is_pickle(each)]
        raise SetupError(
            f"{str(folder)!r} has no .safetensors file"
            + (
                f", only {pickles[0]}, a pickle, and pickles are never loaded"
                if pickles
                else ""
            )
            + ": download the folder's .safetensors files as well"
        )
    for file in files:
        read_header(file)


def _not_a_checkpoint(folder: Path) -> str:
    """Advice for a folder without a checkpoint in diffusers format: the file to name instead."""
    files = sorted(folder.glob("*.safetensors"))
    start = f"{str(folder)!r} is not a checkpoint in diffusers format"
    found = [contents.identify(read_header(file)) for file in files]
    for file, content in zip(files, found, strict=True):
        if kinds.accepts(kinds.MODEL, content):
            return f"{start}; it has the file of one: --model {file}"
    if files:
        return f"{start}; {kinds.refusal(files[0].name, found[0])}"
    if pickle := next(
        (each for each in sorted(folder.iterdir()) if _is_pickle(each)), None
    ):
        return f"{start}; {pickle.name} is {addresses.pickle_advice(str(pickle))}"
    return f"{start}: it has no unet/config.json"


def _is_pickle(path: Path) -> bool:
    return path.suffix.lower() in addresses.PICKLE_SUFFIXES


def _read_json(path: Path) -> JSONObject:
    try:
        content = json.loads(_read(path, _MAX_JSON_BYTES))
    except FileNotFoundError:
        return {}
    except (ValueError, RecursionError):
        raise SetupError(f"{str(path)!r} is not JSON") from None
    return content if isinstance(content, dict) else {}


def _read(path: Path, max_bytes: int) -> bytes:
    with path.open("rb") as file:
        content = file.read(max_bytes + 1)
    if len(content) > max_bytes:
        raise ValueError(f"more than {max_bytes} bytes")
    return content
