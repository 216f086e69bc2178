"""The ControlNets that an engine holds: each file is read and checked once, and copied once."""

from __future__ import annotations

import logging
import threading
import weakref
from collections import OrderedDict
from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch
from cachetools import LRUCache
from diffusers import ControlNetModel
from torch import nn

from imagefleet import errors
from worker.engine import contract
from worker.engine import errors as engine_errors
from worker.engine.control import file
from worker.engine.control.network import SlotControlNet
from worker.engine.control.request import PreparedControl
from worker.engine.files import safetensors
from worker.engine.files.safetensors import Identity, UnusableError
from worker.engine.kernels import layers

log = logging.getLogger(__name__)

#: Bytes of unused ControlNets kept on the device, if it has room; the last one may be larger.
KEPT_BYTES = 4 * 2**30

#: Read, and not on the device yet: those of the next jobs.
_MOST_READ = 3

#: Files that are refused without another look.
_MOST_REFUSED = 100


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
        self._sound: set[Identity] = set()
        self._refused: LRUCache[Identity, str] = LRUCache(_MOST_REFUSED)
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
            identity = safetensors.identify(control.path)
            if identity in self._sound:
                return identity
            with self._reading:
                if identity in self._refused:
                    raise UnusableError(self._refused[identity])
                if identity not in self._sound:
                    try:
                        self._read[identity] = self._read_file(control.path)
                    except UnusableError as error:
                        self._refused[identity] = str(error)
                        raise
                    self._sound.add(identity)
            return identity

    def get(self, identity: Identity) -> SlotControlNet:
        """A checked ControlNet, on the device once this returns.

        Raises:
            TransientError: its file is no longer there.
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
                "out of memory: %d ControlNets that no job needs now were dropped",
                len(dropped),
                extra={"action": "controlnets_dropped"},
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

    def _read_file(self, path: Path) -> ControlNetModel:
        return file.read(path, self._config, self._dtype)

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
                if safetensors.identify(path) != identity:
                    raise errors.TransientError(
                        f"the file of the ControlNet {path.stem!r} has just changed"
                    )
                original = self._read_file(path)
        nn.Module.to(original, device=self._device)
        if self._device.type == "cuda":
            original.to(memory_format=torch.channels_last)
        if self._is_compiled:
            layers.replace_group_norms(original)
        with torch.no_grad():
            network = SlotControlNet(original, pools=file.pools(path))
        if self._device.type == "cuda":
            # Other streams use it from now on.
            torch.cuda.current_stream(self._device).synchronize()
        return network
