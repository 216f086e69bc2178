"""Reads LoRA files into one form, keyed by the model's own layer names, and checks them.

LoRA and LoCon (also in kohya's Tucker form), LoHa, LoKr and full differences, as LyCORIS and
kohya's scripts write them, each with or without DoRA's magnitudes: any change is computed as one
dense delta. A file with anything that does not fit is refused: leaving a change out would draw
another image.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import re
import threading
from collections import Counter, OrderedDict
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import torch

from imagefleet import errors
from worker.engine import contract
from worker.engine.lora import kinds, layout, safetensors
from worker.engine.lora.layout import Network

log = logging.getLogger(__name__)

Tensors = Mapping[str, torch.Tensor]

#: Tensors whose first dimension is the rank; without any of them, alpha means nothing.
_RANKED = ("down", "hada_w1_b", "lokr_w2_b", "lokr_w1_b")


@dataclass(frozen=True, slots=True)
class WeightDelta:
    """One layer's change: weight += strength * compute(weight).

    The tensors are on the CPU in the file's type; their names depend on the kind.
    """

    tensors: Tensors
    scale: float

    def compute(self, weight: torch.Tensor) -> torch.Tensor:
        """The change at strength 1 in float32, with the shape and device of *weight*.

        *weight* is the checkpoint's own: DoRA's change depends on it.

        Raises:
            ValueError, RuntimeError, IndexError: the tensors do not fit each other or the weight.
        """
        stacked = {name: each.to(weight.device)[None] for name, each in self.tensors.items()}
        return kinds.compute(stacked, self.scale, weight[None])[0]

    @property
    def is_zero(self) -> bool:
        """Whether it changes nothing, at any strength."""
        if self.tensors.keys() & kinds.EXTRAS:
            return False  # DoRA's norms are a change of their own
        return self.scale == 0 or any(not tensor.any() for tensor in self.tensors.values())


def make_delta(tensors: Tensors, alpha: float | None, *, by_root: bool = False) -> WeightDelta:
    """The change that a layer's tensors describe, which `Layout` has checked.

    *by_root* divides alpha by the square root of the rank (rsLoRA), not by the rank.
    """
    rank = next((tensors[name].shape[0] for name in _RANKED if name in tensors), None)
    if alpha is None or rank is None:
        return WeightDelta(tensors, 1.0)
    return WeightDelta(tensors, alpha / (rank**0.5 if by_root else rank))


Identity = tuple[str, int, int]
"""Path, modification time in ns and size in bytes: a replaced file is another file."""


@dataclass(frozen=True, slots=True)
class LoraFile:
    """A LoRA's weight changes, by network and layer path."""

    identity: Identity
    deltas: Mapping[Network, Mapping[str, WeightDelta]]
    size_bytes: int

    @property
    def is_zero(self) -> bool:
        """Whether it changes nothing."""
        return all(delta.is_zero for by_path in self.deltas.values() for delta in by_path.values())


@dataclass(frozen=True, slots=True)
class _PeftConfig:
    """A network's peft configuration: alphas, for which kohya's files have tensors."""

    alpha: float | None
    alphas: Mapping[str, float]
    by_root: bool

    def alpha_of(self, path: str) -> float | None:
        """The alpha of the first pattern that is the path's end, or with ^ the whole path."""
        whole = (path, f"text_model.{path}")  # transformers 5.6 dropped the level
        for name, alpha in self.alphas.items():
            bare = name.removeprefix("^")
            if bare in whole or (bare == name and path.endswith(f".{name}")):
                return alpha
        return self.alpha


def identify(lora: contract.Lora) -> Identity:
    """Identifies the file's content.

    Raises:
        TransientError: it cannot be read, or was evicted from the disk meanwhile.
    """
    try:
        return identity_of(lora.path)
    except OSError as error:
        raise _unreadable(lora, error) from error


def identity_of(path: Path) -> Identity:
    """Identifies a file's content; raises OSError if it cannot be read."""
    status = path.stat()
    return (str(path), status.st_mtime_ns, status.st_size)


def read_lora(lora: contract.Lora, identity: Identity, layouts: layout.Layouts) -> LoraFile:
    """Reads and checks one file.

    Raises:
        UnusableFileError: it is not a LoRA, or not one for this model; names the file.
        TransientError: it could not be read.
    """
    deltas: dict[Network, dict[str, WeightDelta]] = {network: {} for network in get_args(Network)}
    with _named_errors(lora):
        content = _read(lora)
        configs = _peft_configs(lora, content.metadata)
        for (network, path), tensors, alpha in layouts.find(content).tensors(content.data):
            config = configs[network]
            strength = config.alpha_of(path) if alpha is None else alpha
            deltas[network][path] = make_delta(tensors, strength, by_root=config.by_root)
    return LoraFile(identity, deltas, content.data.nbytes)


def _read(lora: contract.Lora) -> safetensors.Content:
    try:
        return safetensors.read(lora.path)
    except OSError as error:
        raise _unreadable(lora, error) from error


def _unreadable(lora: contract.Lora, error: OSError) -> errors.TransientError:
    return errors.TransientError(
        f"the LoRA {lora.name!r} cannot be read: {error.strerror or error}"
    )


@contextlib.contextmanager
def _named_errors(lora: contract.Lora) -> Iterator[None]:
    """Raises what is wrong with a file as an UnusableFileError that names it."""
    try:
        yield
    except safetensors.MalformedError as error:
        raise errors.UnusableFileError(
            f"the LoRA {lora.name!r} is not a complete .safetensors file: {error}"
        ) from error
    except safetensors.UnknownTypeError as error:
        raise errors.UnusableFileError(
            f"the LoRA {lora.name!r} holds numbers of the type {error}, which is not supported"
        ) from error
    except layout.UnusableError as error:
        raise errors.UnusableFileError(f"the LoRA {lora.name!r} {error}") from error


def _peft_configs(lora: contract.Lora, metadata: Mapping[str, str]) -> dict[Network, _PeftConfig]:
    """Each network's peft configuration, which diffusers writes into the header."""
    configs: dict[Network, _PeftConfig] = {}
    try:
        stated: dict[str, Any] = json.loads(metadata.get("lora_adapter_metadata", "{}"))
        for network in get_args(Network):
            own = {
                key.removeprefix(f"{network}."): value
                for key, value in stated.items()
                if key.startswith(f"{network}.") or "." not in key
            }
            alpha = own.get("lora_alpha")
            configs[network] = _PeftConfig(
                alpha=None if alpha is None else _finite(alpha),
                alphas={
                    _layer_name(name): _finite(each)
                    for name, each in (own.get("alpha_pattern") or {}).items()
                },
                by_root=bool(own.get("use_rslora")),
            )
    except (ValueError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise errors.UnusableFileError(
            f"the LoRA {lora.name!r} has damaged metadata: {error}"
        ) from error
    return configs


def _finite(alpha: Any) -> float:
    if not math.isfinite(number := float(alpha)):
        raise ValueError(f"{alpha!r} is not a valid alpha")
    return number


def _layer_name(pattern: str) -> str:
    """A key of peft's alpha_pattern: formally a regular expression, in practice a layer's name.

    Never matched as an expression: a malicious one could block all threads for years.
    """
    if not re.fullmatch(r"\^?[\w.]+", pattern):
        raise ValueError(f"{pattern[:80]!r} in its alpha_pattern is not a layer's name")
    return pattern


class LoraCache:
    """An LRU cache of *cache_bytes*: each file is read once for all threads; thread-safe.

    Not cachetools: where one read fails, all the threads that wait for it must fail with it, or
    each would read the bad file again.
    """

    def __init__(self, layers: layout.Layers, cache_bytes: int) -> None:
        self.lookups: Counter[str] = Counter()
        self._layouts = layout.Layouts(layers)
        self._cache_bytes = cache_bytes
        self._files: OrderedDict[Identity, Future[LoraFile]] = OrderedDict()
        self._lock = threading.Lock()
        self._without_effect: set[Identity] = set()

    def get(self, lora: contract.Lora) -> LoraFile:
        """Reads a file, unless it is cached or another thread is reading it.

        Raises:
            UnusableFileError: it is not a LoRA, or not one for this model.
            TransientError: it could not be read.
        """
        identity = identify(lora)
        with self._lock:
            future = self._files.get(identity)
            is_new = future is None
            if future is None:
                future = self._files[identity] = Future()
            self._files.move_to_end(identity)
            self.lookups["miss" if is_new else "hit"] += 1
        if is_new:
            self._fill(future, identity, lora)
        return future.result()

    def _fill(
        self,
        future: Future[LoraFile],
        identity: Identity,
        lora: contract.Lora,
    ) -> None:
        try:
            file = read_lora(lora, identity, self._layouts)
            self._report_no_effect(lora, file)
            future.set_result(file)
        except BaseException as error:  # noqa: BLE001 - other threads wait for it
            with self._lock:
                del self._files[identity]
            future.set_exception(error)
            return
        with self._lock:
            self._evict()

    def _report_no_effect(self, lora: contract.Lora, file: LoraFile) -> None:
        """Warns of a LoRA that changes nothing, once; its images are right."""
        with self._lock:
            if not file.is_zero or file.identity in self._without_effect:
                return
            self._without_effect.add(file.identity)
            self.lookups["no_effect"] += 1
        log.warning(
            "the LoRA %r changes nothing: all its deltas are zero",
            lora.name,
            extra={"action": "lora_without_effect", "lora": lora.name},
        )

    def _evict(self) -> None:
        read = {key: future for key, future in self._files.items() if future.done()}
        total = sum(future.result().size_bytes for future in read.values())
        for identity, future in read.items():
            if total <= self._cache_bytes:
                return
            total -= future.result().size_bytes
            del self._files[identity]
