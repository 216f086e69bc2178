"""The ControlNets that an engine holds: each file is read and checked once, and copied once.

A file in diffusers' names or in those of the original release (`control_model.`) has no
configuration that could be relied on: a ControlNet is a copy of a UNet's first half, so the
checkpoint's own UNet says what it must look like. SDXL's smaller ones leave attentions out, which
their tensors tell.
"""

from __future__ import annotations

import inspect
import itertools
import re
import threading
import weakref
from collections import OrderedDict
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from cachetools import LRUCache
from diffusers import ControlNetModel
from diffusers.loaders.single_file_utils import convert_controlnet_checkpoint
from torch import nn

from imagefleet.files.safetensors import Identity, identify
from imagefleet.telemetry import logs
from worker.engine import contract
from worker.engine import errors as engine_errors
from worker.engine.control.network import SlotControlNet
from worker.engine.files import safetensors
from worker.engine.files.safetensors import ReadOnce, UnusableError
from worker.engine.kernels import layers
from worker.engine.passes.begin import PreparedControl

log = logs.EventLog(__name__)

#: Bytes of unused ControlNets kept on the device, if it has room; the last one may be larger.
KEPT_BYTES = 4 * 2**30

#: Files that are not read again to be checked.
_MOST_CHECKED = 1000

#: Read, and not on the device yet: those of the next jobs.
_MOST_READ = 3


Weights = Mapping[str, torch.Tensor]

#: Prefix of the original release; whole checkpoints with a ControlNet have other tensors beside.
_PREFIX = "control_model."

#: A tensor that every ControlNet has, in diffusers' names and the original ones.
_HINT, _ORIGINAL_HINT = "controlnet_cond_embedding.conv_in.weight", "input_hint_block.0.weight"

#: Prefixes of SDXL's tensors by their original names, which diffusers' conversion leaves out.
_ADDED = {"label_emb.0.0.": "add_embedding.linear_1.", "label_emb.0.2.": "add_embedding.linear_2."}

#: Numbers of a prompt's vectors, by the family that a UNet is of.
_MADE_FOR = {768: "Stable Diffusion 1.x", 1024: "Stable Diffusion 2.x", 2048: "SDXL"}

_CROSS_ATTENTION = "attn2.to_k.weight"
_ATTENTION = re.compile(r"down_blocks\.(\d+)\.attentions\.0\.(?:transformer_blocks\.(\d+)\.)?")

#: What the conversion raises for names that are no ControlNet's.
_CONVERSION_ERRORS = (KeyError, ValueError, IndexError, TypeError, AttributeError, RuntimeError)


class ControlNets:
    """An LRU cache by the identity of files; thread-safe.

    Lanes hold those that they use; what is on the device beyond these is kept for the next jobs.
    """

    def __init__(self, unet: Any, *, is_compiled: bool) -> None:
        """*unet* is the checkpoint's, on its device."""
        self.kept_bytes: float = KEPT_BYTES
        """The most bytes of ControlNets on the device that no lane uses."""
        self.held_bytes = 0
        """Bytes of all ControlNets that are on the device."""
        self._config = dict(unet.config)
        self._device: torch.device = unet.device
        self._dtype: torch.dtype = unet.dtype
        self._is_compiled = is_compiled
        self._problems = ReadOnce[str](_MOST_CHECKED)  # "" for sound ones
        self._read: LRUCache[Identity, ControlNetModel] = LRUCache(_MOST_READ)
        # One at a time: each takes gigabytes meanwhile.
        self._reading = threading.Lock()
        self._kept: OrderedDict[Identity, SlotControlNet] = OrderedDict()
        self._alive: weakref.WeakValueDictionary[Identity, SlotControlNet] = (
            weakref.WeakValueDictionary()
        )
        self._lock = threading.Lock()
        self._hints: weakref.WeakKeyDictionary[PreparedControl, torch.Tensor] = (
            weakref.WeakKeyDictionary()
        )

    def check(self, control: contract.Control) -> Identity:
        """The identity of a file that this checkpoint can use; from several threads.

        Raises as `safetensors.named`.
        """
        with safetensors.named(f"the ControlNet {control.name!r}"):
            identity = identify(control.path)
            if problem := self._problems.get(identity, lambda: self._find_problem(identity)):
                raise UnusableError(problem)
            return identity

    def _find_problem(self, identity: Identity) -> str:
        with self._reading:
            try:
                self._read[identity] = _load(identity, self._config, self._dtype)
            except UnusableError as error:
                return str(error)
        return ""

    def get(self, identity: Identity) -> SlotControlNet:
        """A checked ControlNet, on the device once this returns.

        Raises:
            UnsettledFileError: its file is another by now.
            torch.cuda.OutOfMemoryError: see `keep_only`.
        """
        with self._lock:
            network = self._alive.get(identity)
            if network is None:
                network = self._alive[identity] = self._place(identity)
                weakref.finalize(network, self._count).atexit = False
                self._count()
            self._kept[identity] = network
            self._kept.move_to_end(identity)
            total = sum(each.size_bytes for each in self._kept.values())
            while total > self.kept_bytes and len(self._kept) > 1:
                total -= self._kept.popitem(last=False)[1].size_bytes
            return network

    def embed(self, control: PreparedControl) -> torch.Tensor:
        """A request's embedded image; remembered for the other images of its job."""
        if (hint := self._hints.get(control)) is None:
            network = self.get(control.identity)
            hint = self._hints[control] = network.embed(control.pixels)
            if self._device.type == "cuda":
                # Meanwhile another thread may drop the network.
                torch.cuda.current_stream(self._device).synchronize()
        return hint

    def keep_only(self, needed: Collection[Identity]) -> bool:
        """Frees those that no lane uses, but the *needed* ones; True if there were any."""
        with self._lock:
            before = set(self._alive)
            for identity in self._kept.keys() - set(needed):
                del self._kept[identity]
            dropped = before - set(self._alive)
        if dropped:
            log.info(
                f"out of memory: {len(dropped)} ControlNets that no job needs now were dropped",
                action="controlnets_dropped",
            )
        return bool(dropped)

    def close(self) -> None:
        """Frees all memory."""
        with self._lock:
            self._kept.clear()
            self._read.clear()
            self._hints.clear()

    def _count(self) -> None:
        self.held_bytes = sum(each.size_bytes for each in list(self._alive.values()))

    def _place(self, identity: Identity) -> SlotControlNet:
        try:
            return self._copy(identity)
        except Exception as error:
            if not engine_errors.is_out_of_memory(error) or not self._kept:
                raise
        # Outside the handler, where the error's traceback no longer holds any tensors.
        self._kept.clear()
        torch.cuda.empty_cache()
        return self._copy(identity)

    def _copy(self, identity: Identity) -> SlotControlNet:
        path = Path(identity[0])
        with safetensors.named(f"the ControlNet {path.stem!r}"), self._reading:
            original = self._read.pop(identity, None)
            if original is None:
                original = _load(identity, self._config, self._dtype)
        nn.Module.to(original, device=self._device)
        if self._device.type == "cuda":
            original.to(memory_format=torch.channels_last)
        if self._is_compiled:
            layers.replace_group_norms(original)
        with torch.no_grad():
            network = SlotControlNet(original, pools=_pools(path))
        if self._device.type == "cuda":
            # Other streams use it from now on.
            torch.cuda.current_stream(self._device).synchronize()
        return network


def _pools(path: Path) -> bool:
    """Whether its outputs are averaged over the image: "shuffle" ones, which only the name tells.

    As in sd-webui-controlnet.
    """
    return "shuffle" in path.stem.lower()


def _load(
    identity: Identity, unet_config: Mapping[str, Any], dtype: torch.dtype
) -> ControlNetModel:
    """Reads and checks one file, for a UNet of that configuration; on the CPU, in *dtype*."""
    found = _in_diffusers_names(safetensors.tensors_of(Path(identity[0]), identity), unet_config)
    _check_family(found, unet_config)
    with torch.device("meta"):
        network = ControlNetModel(**_config(found, unet_config))
    network.load_state_dict(_fitting(found, network.state_dict(), dtype), assign=True)
    return network.requires_grad_(requires_grad=False).eval()


def _in_diffusers_names(
    tensors: Weights, unet_config: Mapping[str, Any]
) -> dict[str, torch.Tensor]:
    own = {
        each.removeprefix(_PREFIX): tensor
        for each, tensor in tensors.items()
        if each.startswith(_PREFIX)
    } or dict(tensors)
    if _HINT in own:
        return own
    if _ORIGINAL_HINT not in own or "time_embed.0.weight" not in own:
        raise UnusableError("is not a ControlNet")
    try:
        converted = convert_controlnet_checkpoint(own, unet_config)
    except _CONVERSION_ERRORS as error:
        raise UnusableError(f"is damaged: its tensors cannot be named ({error!r})") from error
    for original, ours in _ADDED.items():
        for part in ("weight", "bias"):
            converted[ours + part] = own.get(original + part)
    return {each: tensor for each, tensor in converted.items() if tensor is not None}


def _check_family(tensors: Weights, unet_config: Mapping[str, Any]) -> None:
    own = unet_config["cross_attention_dim"]
    widths = {each.shape[-1] for key, each in tensors.items() if key.endswith(_CROSS_ATTENTION)}
    has_added = "add_embedding.linear_1.weight" in tensors
    takes_added = unet_config.get("addition_embed_type") is not None
    if has_added == takes_added and widths <= {own}:
        return
    width = max(widths, default=0)
    made_for = "SDXL" if has_added else _MADE_FOR.get(width, "another model")
    if width:
        made_for += f", whose prompts have vectors of {width:,} numbers"
    raise UnusableError(
        f"was made for {made_for}; this model's prompts have vectors of {own:,} numbers"
    )


def _config(tensors: Weights, unet_config: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of ControlNetModel."""
    known = inspect.signature(ControlNetModel.__init__).parameters
    config = {key: value for key, value in unet_config.items() if key in known}
    # It sees the latents alone, with inpainting checkpoints as well.
    config["in_channels"] = unet_config["out_channels"]
    hint = tensors[_HINT]
    # Every second layer halves the image and has more channels.
    names = (f"controlnet_cond_embedding.blocks.{at}.weight" for at in itertools.count(1, 2))
    wider = [tensors[name].shape[0] for name in itertools.takewhile(tensors.__contains__, names)]
    config["conditioning_channels"] = hint.shape[1] if hint.dim() > 1 else 0
    config["conditioning_embedding_out_channels"] = (hint.shape[0], *wider)
    if unet_config.get("addition_embed_type") is not None:
        config |= _sizes(tensors.keys(), unet_config)
    return config


def _sizes(names: Collection[str], unet_config: Mapping[str, Any]) -> dict[str, Any]:
    """Options that say which of SDXL's attentions a ControlNet has."""
    depths: dict[int, int] = {}
    for name in names:
        if match := _ATTENTION.match(name):
            block, depth = int(match[1]), int(match[2] or -1) + 1
            depths[block] = max(depths.get(block, 0), depth)
    types, layers = unet_config["down_block_types"], unet_config["transformer_layers_per_block"]
    layers = [layers] * len(types) if isinstance(layers, int) else layers
    attends = any(each.startswith("mid_block.attentions.") for each in names)
    return {
        "down_block_types": [
            own_type if block in depths else "DownBlock2D" for block, own_type in enumerate(types)
        ],
        "mid_block_type": unet_config["mid_block_type"] if attends else "UNetMidBlock2D",
        "transformer_layers_per_block": [
            depths.get(block, layer) for block, layer in enumerate(layers)
        ],
    }


def _fitting(tensors: Weights, wanted: Weights, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """The tensors in *dtype*, which are as many and as large as *wanted*."""
    missing, others = sorted(wanted.keys() - tensors.keys()), sorted(tensors.keys() - wanted.keys())
    if missing:
        raise UnusableError(f"lacks {len(missing)} of its tensors, for example {missing[0]}")
    if others:
        example = repr(others[0][:80])
        raise UnusableError(
            f"has {len(others)} tensors that are no ControlNet's, for example {example}"
        )
    found = {}
    for key, like in wanted.items():
        tensor = tensors[key]
        # Projections are linear layers in some files, and 1x1 convolutions in others.
        if tensor.shape != like.shape and tensor.squeeze().shape == like.squeeze().shape:
            tensor = tensor.reshape(like.shape)
        if tensor.shape != like.shape or not tensor.is_floating_point():
            raise UnusableError(
                f"does not fit this model: {key} is {tensor.dtype} of {list(tensor.shape)}, and"
                f" should have the shape {list(like.shape)}"
            )
        found[key] = tensor.to(dtype)
    safetensors.refuse_damaged(found)
    return found
