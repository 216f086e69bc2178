"""Which layers a LoRA file's tensors change; files that one program wrote share a layout.

To place and check hundreds of tensors takes Python longer than to read them all, and Python does so
on one core only, which it shares with the engine's own thread.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from worker.engine.lora import kinds, names, safetensors
from worker.engine.lora.names import LayerId
from worker.engine.lora.safetensors import Place

#: The most characters of a tensor's name in a message.
_SHOWN_CHARACTERS = 200

#: Layouts that are kept, and the longest header of such a file.
_MAX_LAYOUTS = 64
_MAX_KEPT_CHARACTERS = 1024**2


class UnusableError(Exception):
    """What is wrong with a file, as a sentence that lacks its subject."""


class _UnfitError(Exception):
    """What does not fit the model."""


@dataclass(frozen=True, slots=True)
class _Layer:
    """A layer's tensors as views: name, type, size, stride and the first number's place."""

    views: Sequence[tuple[str, torch.dtype, tuple[int, ...], tuple[int, ...], int]]
    copies: Mapping[str, Place]
    """Places of tensors that are not aligned."""
    alpha: tuple[torch.dtype, int] | None
    """The place among all alphas of this type."""


class Layout:
    """What the tensors of a file mean to a model."""

    def __init__(self, places: Mapping[str, Place], layers: names.Layers) -> None:
        """*places* by the tensors' names in the file.

        Raises:
            UnusableError: see there.
        """
        self._places = places
        self._runs = list(_runs(places))
        by_layer = _by_layer(places, layers)
        compute = functools.cache(_compute_without_numbers)  # most layers are alike
        for layer, found in by_layer.items():
            _check_shapes(layer, found, layers.shapes[layer], compute)
        alphas: dict[torch.dtype, list[int]] = {}
        self._layers = {layer: _as_views(found, alphas) for layer, found in by_layer.items()}
        self._alphas = {dtype: torch.tensor(at) for dtype, at in alphas.items()}

    def tensors(
        self, data: torch.Tensor
    ) -> Iterator[tuple[LayerId, dict[str, torch.Tensor], float | None]]:
        """Each layer's tensors as views of a file's *data*, but for its alpha, which is read.

        Raises:
            UnusableError: see there.
        """
        self._check_numbers(data)
        numbers = {run.dtype: _as_numbers(data, run.dtype) for run in self._runs}
        alphas = {dtype: numbers[dtype][at].tolist() for dtype, at in self._alphas.items()}
        for layer, found in self._layers.items():
            views = {
                name: numbers[dtype].as_strided(size, stride, at)
                for name, dtype, size, stride, at in found.views
            }
            for name, place in found.copies.items():
                views[name] = place.of(data)
            alpha = None
            if "alpha" in views:
                alpha = float(views.pop("alpha").item())
            elif found.alpha is not None:
                dtype, number = found.alpha
                alpha = alphas[dtype][number]
            yield layer, views, alpha

    def _check_numbers(self, data: torch.Tensor) -> None:
        for run in self._runs:
            if not _is_finite(run.of(data)):
                for name, place in self._places.items():
                    if not _is_finite(place.of(data)):
                        raise _damaged(name)


class Layouts:
    """The layouts of a model's LoRA files; thread-safe."""

    def __init__(self, layers: names.Layers) -> None:
        self.layers = layers
        self._found = functools.lru_cache(_MAX_LAYOUTS)(self._make)

    def find(self, content: safetensors.Content) -> Layout:
        """The layout of a file.

        Raises:
            MalformedError, UnknownTypeError, UnusableError: see there.
        """
        find = self._found if len(content.header) <= _MAX_KEPT_CHARACTERS else self._make
        try:
            return find(content.header, len(content.data))
        except _UnfitError as error:
            places = safetensors.places(content.header, len(content.data))
            shapes = {name: place.shape for name, place in places.items()}
            model = names.made_for(shapes, content.metadata)
            origin = f" (it was made for {model})" if model else ""
            raise UnusableError(f"does not fit this model{origin}: {error}") from error

    def _make(self, header: str, data_bytes: int) -> Layout:
        places = safetensors.places(header, data_bytes)
        if not places:
            raise UnusableError("holds no weights")
        return Layout(places, self.layers)


def _damaged(key: str) -> UnusableError:
    return UnusableError(f"is damaged: {_short(key)} holds NaN, infinity or integers")


def _short(key: str) -> str:
    """A tensor's name for a message: whoever made the file may have made it megabytes long."""
    return repr(key if len(key) <= _SHOWN_CHARACTERS else f"{key[:_SHOWN_CHARACTERS]}...")


def _by_layer(places: Mapping[str, Place], layers: names.Layers) -> dict[LayerId, dict[str, Place]]:
    """Each layer's tensors by their names in a change."""
    by_layer: dict[LayerId, dict[str, Place]] = {}
    for key, place in places.items():
        if (known := layers.place(key)) is None:
            if kind := names.unsupported_kind(key):
                raise UnusableError(f"is {kind} ({_short(key)}), which is not supported")
            raise _UnfitError(f"unknown key {_short(key)}")
        if not place.dtype.is_floating_point:
            raise _damaged(key)
        layer, part = known
        if part in by_layer.setdefault(layer, {}):
            raise _UnfitError(f"it has {_short(key)} twice, under two names")
        by_layer[layer][part] = place
    return by_layer


def _check_shapes(
    layer: LayerId,
    found: Mapping[str, Place],
    weight: torch.Size,
    compute: Callable[[frozenset[tuple[str, tuple[int, ...]]], torch.Size], None],
) -> None:
    try:
        compute(frozenset((name, place.shape) for name, place in found.items()), weight)
    except (ValueError, RuntimeError, IndexError) as error:
        network, path = layer
        tensors = ", ".join(f"{name} {list(place.shape)}" for name, place in found.items())
        raise _UnfitError(
            f"for {network} {path}, of shape {list(weight)}, it has {tensors}"
        ) from error


def _compute_without_numbers(
    shapes: frozenset[tuple[str, tuple[int, ...]]], weight: torch.Size
) -> None:
    """Raises what `kinds.compute` does for tensors of these shapes that do not fit."""
    # On the meta device nothing is computed.
    tensors = {name: torch.empty((1, *shape), device="meta") for name, shape in shapes}
    if not kinds.is_known(frozenset(tensors)):
        raise ValueError("the tensors are of no known kind")
    if not all(tensor.numel() for tensor in tensors.values()):
        raise ValueError("a tensor is empty")
    if "alpha" in tensors and tensors["alpha"].numel() != 1:
        raise ValueError("alpha is not one number")
    kinds.compute(tensors, 1.0, torch.empty((1, *weight), device="meta"))


def _as_views(found: Mapping[str, Place], alphas: dict[torch.dtype, list[int]]) -> _Layer:
    """Adds the place of the layer's alpha to *alphas*."""
    views, copies, alpha = [], {}, None
    for name, place in found.items():
        at, rest = divmod(place.begin, place.dtype.itemsize)
        if rest:
            copies[name] = place
        elif name == "alpha":
            numbers = alphas.setdefault(place.dtype, [])
            alpha = (place.dtype, len(numbers))
            numbers.append(at)
        else:
            stride = torch.empty(place.shape, device="meta").stride()
            views.append((name, place.dtype, place.shape, stride, at))
    return _Layer(views, copies, alpha)


def _runs(places: Mapping[str, Place]) -> Iterator[Place]:
    """Tensors of one type that follow each other in the file, as one each."""
    in_order = sorted(places.values(), key=lambda place: (place.begin, place.end))
    run: list[Place] = []
    for place, following in itertools.zip_longest(in_order, in_order[1:]):
        run.append(place)
        if following is None or (following.dtype, following.begin) != (place.dtype, place.end):
            begin, end = run[0].begin, place.end
            yield Place(place.dtype, ((end - begin) // place.dtype.itemsize,), begin, end)
            run.clear()


def _as_numbers(data: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return data[: len(data) - len(data) % dtype.itemsize].view(dtype)


def _is_finite(tensor: torch.Tensor) -> bool:
    if tensor.dtype.itemsize == 1:
        tensor = tensor.float()  # torch finds no extremes of 8-bit numbers
    # NaN counts as the smallest and as the largest.
    smallest, largest = torch.aminmax(tensor)
    return bool(smallest.isfinite()) and bool(largest.isfinite())
