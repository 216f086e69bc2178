"""Other checkpoints that draw parts of an engine's images: refiners, and those of second passes.

On the device are their text encoders and VAEs. Their UNets' weights are in the host's memory, until
they change places with the engine's own (`slots.weights`): so they take no room of its slots. Only
SDXL's own refiner, whose UNet is of another architecture, has that on the device as well.
"""

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from cachetools import LRUCache
from torch import Tensor
from torch.nn import Module, ModuleList

from imagefleet.errors import SetupError, TransientError
from imagefleet.files.safetensors import Identity, UnusableError
from imagefleet.telemetry import host
from worker.engine import embeddings, text
from worker.engine.checkpoint import Checkpoint
from worker.engine.control.cache import ControlNets
from worker.engine.families import table
from worker.engine.files.network_cache import MOST_CHECKED, NetworkCache
from worker.engine.files.safetensors import ReadOnce, Tensors
from worker.engine.kernels import layers
from worker.engine.networks.linear import TextEncoderLoras
from worker.engine.networks.unet import SlotUnet
from worker.engine.passes.images import ImageCoder, Vaes
from worker.engine.slots import memory

#: What two checkpoints with a UNet each may take of a GPU's memory: a slot and its image need the
#: rest. So SDXL and its refiner, of 13 GiB, have room in 20 and not in 16.
_WEIGHTS_SHARE = 0.7

#: Reads a checkpoint of another's kind into the host's memory; raises SetupError.
Read = Callable[[Path, Checkpoint], Checkpoint]


class Coders:
    """A checkpoint's text encoders, with LoRAs for one job at a time, and its VAE."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        networks = checkpoint.text_encoders
        tokenizer = checkpoint.tokenizer
        self.family = checkpoint.family
        readers = [
            text.Reader(
                networks[each.network], each.rules, embeddings.NAMES[each.network]
            )
            for each in checkpoint.family.text_encoders
        ]
        self.texts = text.Encoder(
            readers, tokenizer.bos_token_id, tokenizer.eos_token_id
        )
        self.images = ImageCoder(checkpoint.vae)
        self.loras = {
            name: TextEncoderLoras(network) for name, network in networks.items()
        }

    def forget(self) -> None:
        """Forgets what replaced weights have computed."""
        self.texts.clear()
        self.images.clear()
        for loras in self.loras.values():
            loras.forget()


class CachedCheckpoint:
    def __init__(
        self,
        checkpoint: Checkpoint,
        weights: Tensors | None = None,
        unet: SlotUnet | None = None,
    ) -> None:
        """*weights* are its UNet's in the host's memory, of the architecture of the engine's."""
        self.coders = Coders(checkpoint)
        #: The checkpoint's own UNet on the device; None if it draws in the engine's.
        self.unet = unet
        self._weights = weights or {}
        networks = [checkpoint.vae, *checkpoint.text_encoders.values()]
        networks += [checkpoint.unet] if unet is not None else []
        placed = itertools.chain.from_iterable(each.parameters() for each in networks)
        self.size_bytes = sum(
            each.nbytes for each in (*self._weights.values(), *placed)
        )

    @torch.no_grad()
    def exchange(self, unet: Module) -> None:
        """Exchanges its UNet's weights and those of *unet*; once more, and they are as before.

        Raises torch.cuda.OutOfMemoryError before anything is changed.
        """
        owns = dict(unet.named_parameters())
        largest = {own.device: own for own in sorted(owns.values(), key=_extent)}
        rooms = {device: own.new_empty(_extent(own)) for device, own in largest.items()}
        for name, own in owns.items():
            other = self._weights[name]
            room = rooms[own.device][: _extent(own)]
            kept = room.as_strided(own.shape, own.stride())
            kept.copy_(own)
            own.copy_(other)
            other.copy_(kept)


class CheckpointCache(NetworkCache[CachedCheckpoint]):
    """Cache of other checkpoints, by the identity of their file or folder."""

    def __init__(self, own: Checkpoint, read: Read, *, has_own_layers: bool) -> None:
        super().__init__("checkpoint", own.unet.device, own.unet.dtype)
        self._read = LRUCache[Identity, Any](1)  # each takes gigabytes
        self._own = own
        self._read_file = read
        self._has_own_layers = has_own_layers
        self._refiners = set[Identity]()

    def is_refiner(self, checkpoint: Identity | None) -> bool:
        """True if a checked checkpoint is SDXL's own refiner."""
        return checkpoint in self._refiners

    def stand_beside(self, own: Checkpoint) -> None:
        """Checks all files again, once the engine draws with another."""
        self._own = own
        self._problems = ReadOnce[str](MOST_CHECKED)

    def load(self, identity: Identity) -> Any:
        path = Path(identity[0])
        size = identity[2]
        if size > (host.free_memory_bytes() or size):
            raise TransientError(
                f"this machine has no memory for the checkpoint {path.stem!r} beside its own model:"
                f" {size / 2**30:.1f} GiB"
            )
        try:
            found = self._read_file(path, self._own)
            own = self._own
        except SetupError as error:
            raise UnusableError(
                f"cannot draw with this worker's model: {error.message}"
            ) from error
        is_same = found.prediction_type == own.prediction_type
        if not (is_same and found.alphas_cumprod.equal(own.alphas_cumprod)):
            raise UnusableError(
                "predicts otherwise than this worker's model, or of other noise"
            )
        texts = () if own.has_text_on_cpu else found.text_encoders.values()
        on_device: Any = ModuleList([found.vae, *texts])
        if found.family is table.REFINER:
            self._refiners.add(identity)
            on_device.append(found.unet)
            self._refuse_large(path.stem, on_device)
        on_device.checkpoint = found
        return on_device

    def _refuse_large(self, name: str, network: Module) -> None:
        """Raises TransientError if a GPU has no room for such a network beside the engine's own."""
        if self._device.type != "cuda":
            return
        own = (
            each for each in self._own.networks.values() if each.device == self._device
        )
        weights = itertools.chain(
            network.parameters(), *(each.parameters() for each in own)
        )
        taken = sum(each.nbytes for each in weights)
        if taken > _WEIGHTS_SHARE * memory.limit_bytes(self._device):
            raise TransientError(
                f"this GPU has no memory for the checkpoint {name!r} beside its own model:"
                f" {taken / 2**30:.1f} GiB for both"
            )

    def finish(self, network: Any, _path: Path) -> CachedCheckpoint:
        checkpoint: Checkpoint = network.checkpoint
        if self._has_own_layers:
            layers.replace_modules(checkpoint.vae, layers.group_norm, layers.upsampler)
        if checkpoint.family is table.REFINER:
            if self._has_own_layers:
                layers.replace_modules(checkpoint.unet, layers.group_norm)
            own_unet = SlotUnet(checkpoint.unet)
            if self._has_own_layers:
                own_unet.fold()
            return CachedCheckpoint(checkpoint, unet=own_unet)
        read = dict(checkpoint.unet.named_parameters())
        unet = {
            name: torch.empty_like(own, device="cpu", pin_memory=own.is_cuda).copy_(
                read.pop(name)
            )
            for name, own in self._own.unet.named_parameters()
        }
        checkpoint.unet.to("meta")
        return CachedCheckpoint(checkpoint, unet)


@dataclass(frozen=True)
class Caches:
    """The networks of files that jobs of one model may name; None: no job of it names any."""

    control_nets: ControlNets
    vaes: Vaes | None = None
    checkpoints: CheckpointCache | None = None

    @property
    def known(self) -> list[NetworkCache[Any]]:
        found = (self.control_nets, self.vaes, self.checkpoints)
        return [each for each in found if each is not None]


def _extent(tensor: Tensor) -> int:
    """Number of elements of its memory that a tensor spans."""
    strides = zip(tensor.shape, tensor.stride(), strict=True)
    return 1 + sum((size - 1) * stride for size, stride in strides)
