"""Networks of files that jobs name: each is read and checked once, and copied once."""

import threading
import weakref
from collections import OrderedDict
from collections.abc import Collection
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

import torch
from cachetools import LRUCache
from torch.nn import Module

from imagefleet.files.safetensors import Identity, UnusableError, identify
from imagefleet.telemetry.logs import log
from worker.engine import errors as engine_errors
from worker.engine.families import reading
from worker.engine.files import safetensors
from worker.engine.files.safetensors import ReadOnce, Tensors

#: Bytes of unused networks kept on the device, if it has room; the last one may be larger.
KEPT_BYTES = 4 * 2**30

#: Files that are not read again to be checked.
MOST_CHECKED = 1000

#: Read, and not on the device yet: those of the next jobs.
_MOST_READ = 3


class Held(Protocol):
    """A network on the device, which weak references may name."""

    size_bytes: int


Network = TypeVar("Network", bound=Held)


class NetworkCache(Generic[Network]):
    """An LRU cache by the identity of files; thread-safe.

    Jobs hold those that they use; what is on the device beyond these is kept for the next ones.
    """

    def __init__(self, noun: str, device: torch.device, dtype: torch.dtype) -> None:
        """*noun* is what a file should be, such as "ControlNet"."""
        #: The most bytes of networks on the device that no job uses.
        self.kept_bytes: float = KEPT_BYTES
        #: Bytes of all networks that are on the device.
        self.held_bytes = 0
        self._noun = noun
        self._device = device
        self._dtype = dtype
        self._problems = ReadOnce[str](MOST_CHECKED)  # "" for sound ones
        self._read = LRUCache[Identity, Any](_MOST_READ)
        # One at a time: each takes gigabytes meanwhile.
        self._reading = threading.Lock()
        self._kept = OrderedDict[Identity, Network]()
        self._alive = weakref.WeakValueDictionary[Identity, Network]()
        self._lock = threading.Lock()

    def load(self, identity: Identity) -> Any:
        """Reads and checks one file; the network on the CPU. Raises UnusableError, OSError."""
        raise NotImplementedError

    def finish(self, network: Any, path: Path) -> Network:
        """Makes what computes of a network that was copied to the device."""
        raise NotImplementedError

    def check_file(self, name: str, path: Path) -> Identity:
        """The identity of a usable file; from several threads. Raises as `safetensors.named`."""
        with safetensors.named(f"the {self._noun} {name!r}"):
            identity = identify(path)
            if problem := self._problems.get(
                identity, lambda: self._find_problem(identity)
            ):
                raise UnusableError(problem)
            return identity

    def get(self, identity: Identity) -> Network:
        """A checked network, on the device once this returns.

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

    def keep_only(self, needed: Collection[Identity]) -> bool:
        """Frees those that no job uses, but the *needed* ones; True if there were any."""
        with self._lock:
            before = set(self._alive)
            for identity in self._kept.keys() - set(needed):
                del self._kept[identity]
            dropped = before - set(self._alive)
        if dropped:
            log.info(
                f"out of memory: {len(dropped)} networks that no job needs now were dropped",
                action="networks_dropped",
            )
        return bool(dropped)

    def close(self) -> None:
        with self._lock:
            self._kept.clear()
            self._read.clear()

    def _find_problem(self, identity: Identity) -> str:
        with self._reading:
            try:
                self._read[identity] = self.load(identity)
            except UnusableError as error:
                return str(error)
        return ""

    def _count(self) -> None:
        self.held_bytes = sum(each.size_bytes for each in list(self._alive.values()))

    def _place(self, identity: Identity) -> Network:
        try:
            return self._copy(identity)
        except Exception as error:
            if not engine_errors.is_out_of_memory(error) or not self._kept:
                raise
        # Outside the handler, where the error's traceback no longer holds any tensors.
        self._kept.clear()
        torch.cuda.empty_cache()
        return self._copy(identity)

    def _copy(self, identity: Identity) -> Network:
        path = Path(identity[0])
        with safetensors.named(f"the {self._noun} {path.stem!r}"), self._reading:
            original = self._read.pop(identity, None)
            if original is None:
                original = self.load(identity)
        Module.to(original, device=self._device)
        if self._device.type == "cuda":
            original.to(memory_format=torch.channels_last)
        network = self.finish(original, path)
        self._synchronize()  # other streams use it from now on
        return network

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()


def assign(network: Module, tensors: Tensors, dtype: torch.dtype) -> None:
    """Gives a network built without memory all of a file's tensors; raises UnusableError."""
    wanted = network.state_dict()
    found = {}
    for key, tensor in tensors.items():
        if not tensor.is_floating_point():
            raise UnusableError(f"does not fit this model: {key} is {tensor.dtype}")
        like = wanted.get(key, tensor)
        # Projections are linear layers in some files, and 1x1 convolutions in others.
        is_alike = tensor.squeeze().shape == like.squeeze().shape
        found[key] = (tensor.reshape(like.shape) if is_alike else tensor).to(dtype)
    try:
        network.load_state_dict(found, assign=True)
    except RuntimeError as error:
        raise UnusableError(
            f"does not fit this model: {reading.brief(error)}"
        ) from error
    safetensors.refuse_damaged(found)
    network.requires_grad_(requires_grad=False).eval()
