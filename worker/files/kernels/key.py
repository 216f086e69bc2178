"""What compiled kernels are good for. Those with another key are never loaded."""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass

_LABEL = re.compile(r"[^a-z0-9.]+")


@dataclass(frozen=True, slots=True)
class Key:
    """All that kernels depend on, as text.

    Sizes, slots and precision are none of it: kernels for several are kept together, and torch
    finds those it needs.
    """

    gpu: str
    capability: str
    driver: str
    cuda: str
    torch: str
    triton: str
    diffusers: str
    python: str
    engine: str
    """A hash of the engine's source."""
    unet: str
    """A hash of the shapes of the UNet's weights, the same for all fine-tunes of a model."""

    @property
    def name(self) -> str:
        """The key as a file name without its suffix."""
        return "-".join(
            (
                _label(self.gpu.removeprefix("NVIDIA ")),
                f"sm{self.capability.replace('.', '')}",
                f"driver{self.driver}",
                f"cuda{self.cuda}",
                f"torch{self.torch}",
                f"triton{self.triton}",
                f"diffusers{self.diffusers}",
                f"py{self.python}",
                f"engine{self.engine}",
                f"unet{self.unet}",
            )
        )

    def differences(self, other: Key) -> list[str]:
        """The values in which *other* is another key, as in 'torch 2.11.0'."""
        mine, theirs = asdict(self), asdict(other)
        return [f"{name} {theirs[name]}" for name in mine if mine[name] != theirs[name]]


def _label(text: str) -> str:
    return _LABEL.sub("-", text.lower()).strip("-")
