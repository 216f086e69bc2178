"""Feature extractors: the user's files, each named with its SHA-256; only the demo's is shipped."""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Collection, Iterator
from pathlib import Path

from evaluation.score.extractors import DEMO, Extractor, TextExtractor
from evaluation.score.networks.onnx import OnnxExtractor
from imagefleet import errors

_TORCHSCRIPT = frozenset({".pt", ".pth", ".jit", ".ts", ".torchscript"})


def find_device(extractors: Collection[str | None], device: str) -> str:
    """The device of these extractors: ONNX runs on the CPU, and without torch the others fail."""
    needs_torch = any(name and not name.endswith(".onnx") for name in extractors)
    if not needs_torch or importlib.util.find_spec("torch") is None:
        return "cpu"
    from worker.engine import device as devices

    return str(devices.find_device(device))


def load_extractor(path: str | Path, device: str = "cpu") -> Extractor:
    """The extractor in a TorchScript or ONNX file, or in a folder of CLIP; `demo` needs no file.

    Raises:
        SetupError: there is none, or it cannot be used.
    """
    with _needs_extra():
        return _load(path, device)


def _load(path: str | Path, device: str) -> Extractor:
    if str(path) == DEMO:
        from evaluation.score.demo.extractor import DemoExtractor

        return DemoExtractor(device)
    place = Path(path)
    if not place.exists():
        raise errors.SetupError(f"the extractor {str(path)!r} does not exist")
    if place.is_dir():
        from evaluation.score.networks.clip import ClipExtractor

        return ClipExtractor(place, device)
    if place.suffix == ".onnx":
        return OnnxExtractor(place)
    if place.suffix in _TORCHSCRIPT:
        from evaluation.score.networks.torchscript import TorchScriptExtractor

        return TorchScriptExtractor(place, device)
    raise errors.SetupError(
        f"the extractor {str(path)!r} should be a TorchScript file (.pt), an ONNX file (.onnx) or a"
        " folder with a CLIP model of transformers or open_clip"
    )


def load_text_extractor(path: str | Path, device: str = "cpu") -> TextExtractor:
    """An extractor that takes texts, too; raises SetupError as `load_extractor`."""
    if str(path) == DEMO:
        with _needs_extra():
            from evaluation.score.demo.extractor import DemoTextExtractor

            return DemoTextExtractor(device)
    found = load_extractor(path, device)
    if not isinstance(found, TextExtractor):
        raise errors.SetupError(
            f"the extractor {str(path)!r} has no features of texts: give a folder with a CLIP model"
            " of transformers or open_clip"
        )
    return found


@contextlib.contextmanager
def _needs_extra() -> Iterator[None]:
    """Raises SetupError, with the command to run, where the extra `evaluation` is missing."""
    try:
        yield
    except ImportError as error:
        raise errors.SetupError(
            f"{error.name} is not installed; to score images: pip install '.[evaluation]'"
        ) from None
