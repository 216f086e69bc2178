"""Imports spandrel where there is no torchvision, too.

spandrel asks for torchvision, which has to be built for the very torch that is installed. Only two
of its architectures use it, and neither enlarges images.
"""

from __future__ import annotations

import contextlib
import importlib.util
import sys
import threading
from collections.abc import Iterator
from types import ModuleType
from typing import Any

#: What those two import from torchvision's module of functions.
_FUNCTIONS = ("InterpolationMode", "normalize", "rotate")

_MODULES = ("torchvision", "torchvision.transforms", "torchvision.transforms.functional")

_lock = threading.Lock()


def spandrel() -> Any:
    """The library; slow the first time.

    Raises:
        ImportError: it is not installed.
    """
    with _lock, _without_torchvision():
        import spandrel

        return spandrel


@contextlib.contextmanager
def _without_torchvision() -> Iterator[None]:
    """Empty modules in its place if it is missing, taken away again before others look for it."""
    if "spandrel" in sys.modules or importlib.util.find_spec("torchvision") is not None:
        yield
        return
    stand_ins = {name: ModuleType(name) for name in _MODULES}
    for function in _FUNCTIONS:
        setattr(stand_ins[_MODULES[-1]], function, None)
    sys.modules.update(stand_ins)
    try:
        yield
    finally:
        for name in stand_ins:
            del sys.modules[name]
