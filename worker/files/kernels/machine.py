"""The key of this machine: its GPU and driver, the installed versions, and a checkpoint's UNet."""

from __future__ import annotations

import hashlib
import importlib.util
import platform
import re
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path

import pynvml

import worker
from imagefleet.files import safetensors
from worker import replica
from worker.files.kernels.archive import Key

#: UNet weights in a single file; in diffusers format they have a folder of their own.
_UNET_PREFIX = "model.diffusion_model."

_HASH_CHARACTERS = 8


def find_key(model: Path, device: str) -> Key | None:
    """This machine's key for a checkpoint; None if nothing is compiled. Blocks on the driver."""
    torch = _torch_versions()
    if device == "cpu" or torch is None or torch[1] is None:
        return None

    def ask() -> tuple[str, str, str]:
        handle = replica.card_handle(device)
        major, minor = pynvml.nvmlDeviceGetCudaComputeCapability(handle)
        driver = str(pynvml.nvmlSystemGetDriverVersion())
        return str(pynvml.nvmlDeviceGetName(handle)), f"{major}.{minor}", driver

    answer = replica.ask_driver(ask)
    if isinstance(answer, Exception):
        return None
    gpu, capability, driver = answer
    return Key(
        gpu=gpu,
        capability=capability,
        driver=driver.partition(".")[0],
        cuda=torch[1],
        torch=torch[0],
        triton=_version("triton"),
        diffusers=_version("diffusers"),
        python=".".join(platform.python_version_tuple()[:2]) + f"-{platform.machine()}",
        engine=hash_sources(Path(worker.__file__).parent / "engine"),
        unet=hash_unet(model),
    )


def hash_sources(folder: Path) -> str:
    """A hash of all Python files below *folder*: any of them may change what is compiled."""
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*.py")):
        digest.update(f"{path.relative_to(folder).as_posix()}\n".encode() + path.read_bytes())
    return digest.hexdigest()[:_HASH_CHARACTERS]


def hash_unet(model: Path) -> str:
    """The same in either format of a checkpoint; raises OSError, MalformedError."""
    if model.is_dir():
        # One precision of several, as far as there are.
        files = sorted((model / "unet").glob("*.safetensors"))
        plain = [path for path in files if ".fp16." not in path.name]
        shapes = [shape for path in plain or files for shape in _shapes(path)]
    else:
        shapes = list(_shapes(model, _UNET_PREFIX))
    return hashlib.sha256(repr(sorted(shapes)).encode()).hexdigest()[:_HASH_CHARACTERS]


def _shapes(path: Path, prefix: str = "") -> Iterable[tuple[int, ...]]:
    with path.open("rb") as file:
        shapes = safetensors.read_header(file).shapes
    return (shape for name, shape in shapes.items() if name.startswith(prefix))


def _torch_versions() -> tuple[str, str | None] | None:
    """Versions of torch and its CUDA, from its text: importing it takes seconds."""
    found = importlib.util.find_spec("torch")
    if found is None or found.origin is None:
        return None
    text = (Path(found.origin).parent / "version.py").read_text(encoding="utf-8")
    values = dict(re.findall(r"^(__version__|cuda)\b[^=\n]*= '([^'\n]+)'", text, re.MULTILINE))
    return values["__version__"].partition("+")[0], values.get("cuda")


def _version(package: str) -> str:
    try:
        return metadata.version(package).partition("+")[0]
    except metadata.PackageNotFoundError:
        return "none"
