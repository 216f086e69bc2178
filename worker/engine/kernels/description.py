"""A call without the numbers of its tensors: what another process needs to compile it.

The same call has the same description in every process and on every node, so a package that was
compiled from one is found by the hash of it. Whatever the compiler can see is in it: the modules'
settings, the kernels that they were given, and each tensor's type, shape, strides and alignment.
"""

import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from io import BytesIO
from typing import Any

import torch
from diffusers.configuration_utils import FrozenDict
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.nn import Module, Parameter

#: Compiled kernels read whole words of so many bytes, where the tensors that they were compiled for
#: begin at one.
_ALIGNED_BYTES = 16

#: A plain function, and its arguments.
Call = tuple[Callable[..., Any], Sequence[Any]]


@dataclass(frozen=True)
class Description:
    """A call in bytes, and the tensors that it has, each once, in the order of the bytes."""

    content: bytes
    tensors: Sequence[Tensor]

    @classmethod
    def of(cls, call: Call) -> "Description":
        writer = _Writer()
        writer.dump(call)
        return cls(writer.file.getvalue(), writer.tensors)


def imitate(content: bytes) -> tuple[Call, list[Tensor]]:
    """The call that was described, with fake tensors, and these in their order."""
    reader = _Reader(BytesIO(content))
    call: Call = reader.load()
    return call, reader.tensors


class _Writer(pickle._Pickler):  # noqa: SLF001
    """Writes the same bytes for the same values, whichever objects hold them.

    That takes Python's own pickler: the faster one passes plain values by. What is equal is written
    each time that it is met, whether or not it happens to be one object.
    """

    def __init__(self) -> None:
        self.file = BytesIO()
        self.tensors: list[Tensor] = []
        self._places: dict[int, int] = {}
        super().__init__(self.file, protocol=4)

    def persistent_id(self, value: object) -> tuple[object, ...] | None:
        if not isinstance(value, Tensor):
            return None
        place = self._places.setdefault(id(value), len(self.tensors))
        if place == len(self.tensors):
            self.tensors.append(value)
        return (place, isinstance(value, Parameter), *layout(value))

    def reducer_override(self, value: object) -> Any:
        if isinstance(value, set):
            return set, (sorted(value),)
        if isinstance(value, FrozenDict):
            # Where a network was read from is none of it.
            kept = {key: each for key, each in value.items() if key[0] != "_"}
            return FrozenDict, (dict(sorted(kept.items())),)
        return NotImplemented

    def memoize(self, value: object) -> None:
        if isinstance(value, (Module, dict, list, type, Callable)):  # type: ignore[arg-type]
            super().memoize(value)  # type: ignore[misc]  # it is there


class _Reader(pickle.Unpickler):
    def __init__(self, file: BytesIO) -> None:
        self.tensors: list[Tensor] = []
        self._mode = FakeTensorMode()
        super().__init__(file)

    def persistent_load(self, described: Any) -> Tensor:
        place: int
        place, is_parameter, *described_layout = described
        if place == len(self.tensors):
            fake = self._imitate(*described_layout)
            if is_parameter:
                fake = Parameter(fake, requires_grad=False)
            self.tensors.append(fake)
        return self.tensors[place]

    def _imitate(
        self,
        dtype: torch.dtype,
        shape: tuple[int, ...],
        strides: tuple[int, ...],
        offset: int,
        device: str,
    ) -> Tensor:
        last = sum(
            (side - 1) * stride for side, stride in zip(shape, strides, strict=True)
        )
        with self._mode:
            storage = torch.empty(offset + last + 1, dtype=dtype, device=device)
            return storage.as_strided(shape, strides, offset)


def layout(tensor: Tensor) -> tuple[object, ...]:
    """The type, shape, strides and device of a tensor, and its numbers after an aligned one."""
    offset = tensor.data_ptr() % _ALIGNED_BYTES // tensor.element_size()
    return (
        tensor.dtype,
        tuple(tensor.shape),
        tensor.stride(),
        offset,
        tensor.device.type,
    )
