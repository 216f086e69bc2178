"""GPU kernels and compilation: attention, group norm, upsampling, CUDA graphs."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn


def replace_modules(network: nn.Module, find: Callable[[nn.Module], nn.Module | None]) -> None:
    """Replaces each submodule by what *find* returns for it; None keeps the module."""
    for parent in list(network.modules()):
        for name, child in list(parent.named_children()):
            if (replacement := find(child)) is not None:
                setattr(parent, name, replacement)
