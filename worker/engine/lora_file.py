"""Reads LoRA files: checked against the model, layer by layer, and kept in memory for a while.

Three spellings of the same thing are in use: kohya's (`lora_unet_..._to_q.lora_down.weight`),
diffusers' (`unet....to_q.lora.down.weight`, and older ones) and peft's (`....lora_A.weight`). A
file is read into one form, keyed by the model's own layer names; whatever is left over shows that
it was made for another model.
"""

from __future__ import annotations

import json
import re
import struct
import threading
from collections import OrderedDict
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from safetensors import SafetensorError
from safetensors.torch import load
from torch import nn

from jobs import errors
from worker.engine import contract

#: LoRAs of SD1.5 have 1 to 300 MB; the name comes from a stranger, and the file is read whole.
_MAX_FILE_BYTES = 1024**3

Network = Literal["unet", "text_encoder"]
Identity = tuple[str, int, int]
"""Path, modification time and size: a file that was replaced is another file."""

#: Settings of peft that change what the weights mean.
_UNSUPPORTED_SETTINGS = ("alpha_pattern", "use_dora", "use_rslora")

_PARTS = (
    (
        "down",
        re.compile(r"(.+?)(?:\.lora_down|\.lora_A|\.lora(?:_linear_layer)?\.down|_lora\.down)"),
    ),
    ("up", re.compile(r"(.+?)(?:\.lora_up|\.lora_B|\.lora(?:_linear_layer)?\.up|_lora\.up)")),
)


@dataclass(frozen=True, slots=True)
class Delta:
    """One layer's change: weight += strength * scale * up @ down.

    down [rank, inputs, *kernel], up [outputs, rank, *1], on the CPU, in the file's own type.
    """

    down: torch.Tensor
    up: torch.Tensor
    scale: float

    @property
    def rank(self) -> int:
        return len(self.down)


@dataclass(frozen=True, slots=True)
class LoraFile:
    """A LoRA, ready to be applied: its changes by the names of the layers they change."""

    identity: Identity
    deltas: Mapping[Network, Mapping[str, Delta]]
    size_bytes: int


class Layers:
    """The layers of a model that LoRAs can change, under every name that files give them."""

    def __init__(self, unet: nn.Module, text_encoder: nn.Module) -> None:
        self.shapes: dict[tuple[Network, str], torch.Size] = {}
        self._by_name: dict[str, tuple[Network, str]] = {}
        for path, shape in _shapes(unet):
            self.shapes["unet", path] = shape
            for name in {path, path.removesuffix(".0")}:  # `to_out.0` was once `to_out`
                self._name("unet", path, name, f"unet.{name}")
            self._name("unet", path, "lora_unet_" + path.replace(".", "_"))
        for path, shape in _shapes(text_encoder):
            self.shapes["text_encoder", path] = shape
            # transformers 5.6 dropped the level; files have it, or not.
            short = path.removeprefix("text_model.")
            old = re.sub(r"\b(?:([qkv])_proj|(out)_proj)$", r"to_\1\2", short)
            for name in {short, old, f"text_model.{short}", f"text_model.{old}"}:
                flat = name.replace(".", "_")
                self._name("text_encoder", path, f"text_encoder.{name}")
                self._name("text_encoder", path, f"lora_te_{flat}", f"lora_te1_{flat}")

    def _name(self, network: Network, path: str, *names: str) -> None:
        for name in names:
            self._by_name[name] = (network, path)

    def find(self, name: str) -> tuple[Network, str] | None:
        """The network and the path of a layer, by the name that a LoRA file gives it."""
        plain = name.removeprefix("base_model.model.").replace(".processor.", ".")
        return self._by_name.get(plain)


def _shapes(network: nn.Module) -> list[tuple[str, torch.Size]]:
    return [
        (path, module.weight.shape)
        for path, module in network.named_modules()
        if isinstance(module, nn.Linear | nn.Conv2d)
    ]


class LoraCache:
    """LoRA files in memory, the least recently used ones dropped; called from several threads."""

    def __init__(self, layers: Layers, cache_bytes: int) -> None:
        self._layers = layers
        self._cache_bytes = cache_bytes
        self._files: OrderedDict[Identity, Future[LoraFile]] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, lora: contract.Lora) -> LoraFile:
        """Reads a file once, however many ask for it at the same time.

        Raises:
            MissingFileError: there is no such file.
            UnusableFileError: it is no LoRA, or none for this model.
            TransientError: it could not be read.
        """
        identity = _identify(lora)
        with self._lock:
            future = self._files.get(identity)
            is_new = future is None
            if future is None:
                future = self._files[identity] = Future()
            self._files.move_to_end(identity)
        if is_new:
            self._fill(future, identity, lora)
        return future.result()

    def _fill(self, future: Future[LoraFile], identity: Identity, lora: contract.Lora) -> None:
        try:
            future.set_result(read_lora(lora, identity, self._layers))
        except BaseException as error:  # noqa: BLE001 - whatever it is, others wait for it
            with self._lock:
                del self._files[identity]
            future.set_exception(error)
            return
        with self._lock:
            self._evict()

    def _evict(self) -> None:
        read = {key: future for key, future in self._files.items() if future.done()}
        total = sum(future.result().size_bytes for future in read.values())
        for identity, future in read.items():
            if total <= self._cache_bytes:
                return
            total -= future.result().size_bytes
            del self._files[identity]


def _identify(lora: contract.Lora) -> Identity:
    try:
        status = lora.path.stat()
    except (FileNotFoundError, NotADirectoryError):
        status = None
    except OSError as error:
        raise errors.TransientError(f"the LoRA {lora.name!r} cannot be read: {error}") from error
    if status is None or not lora.path.is_file():
        raise errors.MissingFileError(f"the LoRA {lora.name!r} does not exist")
    if status.st_size > _MAX_FILE_BYTES:
        raise errors.UnusableFileError(
            f"the LoRA {lora.name!r} is {status.st_size:,} bytes; {_MAX_FILE_BYTES:,} are allowed"
        )
    return (str(lora.path), status.st_mtime_ns, status.st_size)


def read_lora(lora: contract.Lora, identity: Identity, layers: Layers) -> LoraFile:
    """Reads and checks one file.

    Raises:
        UnusableFileError: it is no LoRA, or none for this model; names the file.
        TransientError: it could not be read.
    """
    tensors, metadata = _read_tensors(lora)
    parts: dict[tuple[Network, str], dict[str, torch.Tensor]] = {}
    for key, tensor in tensors.items():
        layer, part = _split(key)
        place = layers.find(layer)
        if place is None:
            raise errors.UnusableFileError(
                f"the LoRA {lora.name!r} does not fit this model: nothing here answers to its"
                f" {key!r} (made for another model, or of another kind than LoRA and LoCon)"
            )
        if not tensor.is_floating_point() or not tensor.float().isfinite().all():
            raise errors.UnusableFileError(
                f"the LoRA {lora.name!r} is damaged: {key!r} holds NaN, infinity or no numbers"
            )
        parts.setdefault(place, {})[part] = tensor
    deltas: dict[Network, dict[str, Delta]] = {"unet": {}, "text_encoder": {}}
    for (network, path), found in parts.items():
        delta = _delta(found, layers.shapes[network, path], metadata.get(network))
        if delta is None:
            shapes = ", ".join(f"{part} {list(tensor.shape)}" for part, tensor in found.items())
            raise errors.UnusableFileError(
                f"the LoRA {lora.name!r} does not fit this model: for {network} {path}, of shape"
                f" {list(layers.shapes[network, path])}, it has {shapes}"
            )
        deltas[network][path] = delta
    return LoraFile(identity, deltas, sum(tensor.nbytes for tensor in tensors.values()))


def _split(key: str) -> tuple[str, str]:
    """The layer's name and the part of it: down, up or alpha; or no part, where it is foreign."""
    if key.endswith(".alpha"):
        return key.removesuffix(".alpha"), "alpha"
    name = re.sub(r"(\.default)?\.weight$", "", key)
    for part, pattern in _PARTS:
        match = pattern.fullmatch(name)
        if match:
            return match[1], part
    return "", ""


def _delta(
    found: Mapping[str, torch.Tensor], shape: torch.Size, network_alpha: float | None
) -> Delta | None:
    down, up, alpha = found.get("down"), found.get("up"), found.get("alpha")
    if down is None or up is None or down.ndim < 2 or up.ndim < 2:  # noqa: PLR2004 - matrices
        return None
    outputs, inputs, *kernel = shape
    rank = len(down)
    wanted_down = torch.Size((rank, inputs, *kernel))
    wanted_up = torch.Size((outputs, rank, *[1] * len(kernel)))
    fits_down = down.shape[:2] == wanted_down[:2] and down.numel() == wanted_down.numel()
    fits_up = up.shape[:2] == wanted_up[:2] and up.numel() == wanted_up.numel()
    if not (rank and fits_down and fits_up) or (alpha is not None and alpha.numel() != 1):
        return None
    strength = alpha.item() if alpha is not None else network_alpha
    scale = 1.0 if strength is None else strength / rank
    # Some trainers write a 1x1 convolution as a matrix.
    return Delta(down.reshape(wanted_down), up.reshape(wanted_up), scale)


def _read_tensors(
    lora: contract.Lora,
) -> tuple[dict[str, torch.Tensor], dict[Network, float]]:
    """The file's tensors, and each network's alpha where the file states one for all its layers.

    Read whole, not mapped: a file that is cut short while it is mapped kills the process.
    """
    try:
        content = lora.path.read_bytes()
        tensors = load(content)
    except OSError as error:
        raise errors.TransientError(f"the LoRA {lora.name!r} cannot be read: {error}") from error
    except SafetensorError as error:
        raise errors.UnusableFileError(
            f"the LoRA {lora.name!r} is no complete .safetensors file: {error}"
        ) from error
    if not tensors:
        raise errors.UnusableFileError(f"the LoRA {lora.name!r} holds no weights")
    (header_bytes,) = struct.unpack_from("<Q", content)
    header = json.loads(content[8 : 8 + header_bytes])
    return tensors, _network_alphas(lora, header.get("__metadata__", {}))


def _network_alphas(lora: contract.Lora, metadata: Mapping[str, str]) -> dict[Network, float]:
    """The alphas of peft: diffusers keeps them in the header, where kohya's are tensors."""
    try:
        config: dict[str, Any] = json.loads(metadata.get("lora_adapter_metadata", "{}"))
        alphas: dict[Network, float] = {}
        for network in get_args(Network):
            own = {
                key.removeprefix(f"{network}."): value
                for key, value in config.items()
                if key.startswith(f"{network}.") or "." not in key
            }
            if any(own.get(name) for name in _UNSUPPORTED_SETTINGS):
                raise errors.UnusableFileError(
                    f"the LoRA {lora.name!r} uses one of {', '.join(_UNSUPPORTED_SETTINGS)}, which"
                    " is not supported"
                )
            if own.get("lora_alpha") is not None:
                alphas[network] = float(own["lora_alpha"])
    except (ValueError, TypeError, AttributeError) as error:
        raise errors.UnusableFileError(
            f"the LoRA {lora.name!r} has damaged metadata: {error}"
        ) from error
    return alphas
