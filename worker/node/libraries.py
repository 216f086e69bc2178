"""Whether the libraries of the extra `worker` are installed."""

from __future__ import annotations

import importlib.util

from imagefleet import errors

_LIBRARIES = "torch diffusers transformers peft safetensors numpy PIL isal pynvml"


def require() -> None:
    """Raises SetupError, with the command to run, where only the console is installed."""
    for name in _LIBRARIES.split():
        if importlib.util.find_spec(name) is None:
            raise errors.SetupError(
                f"{name} is not installed; to generate images: pip install '.[worker]'"
            )
