"""Feature extractors: the user's files, each named with its SHA-256; only the demo's is shipped."""

import contextlib
import importlib.util
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

import numpy as np
from PIL import Image

from evaluation.score import extractors
from evaluation.score.extractors import (
    DEMO,
    Extractor,
    ExtractorFacts,
    TextExtractor,
)
from evaluation.score.preparation import Preparation, read_preparation
from evaluation.score.statistics import Features
from imagefleet.errors import SetupError

_TORCHSCRIPT = frozenset({".pt", ".pth", ".jit", ".ts", ".torchscript"})


@contextlib.contextmanager
def needs_extra() -> Iterator[None]:
    """Raises SetupError, with the command to run, where the extra `evaluation` is missing."""
    try:
        yield
    except ImportError as error:
        raise SetupError(
            f"{error.name} is not installed; to judge images: pip install '.[evaluation]'"
        ) from None


def find_device(names: Collection[str | None], device: str) -> str:
    """The device of these extractors: ONNX runs on the CPU, and without torch the others fail."""
    needs_torch = any(name and not name.endswith(".onnx") for name in names)
    if not needs_torch or importlib.util.find_spec("torch") is None:
        return "cpu"
    from worker.engine import device as devices

    return str(devices.find_device(device))


@needs_extra()
def load_extractor(path: str | Path, device: str = "cpu") -> Extractor:
    """The extractor in a TorchScript or ONNX file or a folder; raises SetupError if it is none."""
    if str(path) == DEMO:
        from evaluation.score.demo.extractor import DemoExtractor

        return DemoExtractor(device)
    place = Path(path)
    if not place.exists():
        raise SetupError(f"the extractor {str(path)!r} does not exist")
    if place.is_dir():
        from evaluation.score.networks.clip import ClipExtractor

        return ClipExtractor(place, device)
    if place.suffix == ".onnx":
        return OnnxExtractor(place)
    if place.suffix in _TORCHSCRIPT:
        from evaluation.score.networks.torchscript import TorchScriptExtractor

        return TorchScriptExtractor(place, device)
    raise SetupError(
        f"the extractor {str(path)!r} should be a TorchScript file (.pt), an ONNX file (.onnx) or a"
        " folder with a CLIP model of transformers"
    )


@needs_extra()
def load_text_extractor(path: str | Path, device: str = "cpu") -> TextExtractor:
    """An extractor that takes texts, too; raises SetupError as `load_extractor`."""
    if str(path) == DEMO:
        from evaluation.score.demo.extractor import DemoTextExtractor

        return DemoTextExtractor(device)
    found = load_extractor(path, device)
    if not isinstance(found, TextExtractor):
        raise SetupError(
            f"the extractor {str(path)!r} has no features of texts: give a folder with a CLIP model"
            " of transformers"
        )
    return found


class OnnxExtractor:
    """An ONNX file, run by onnxruntime on the CPU: its first output, more axes flattened."""

    def __init__(self, path: Path) -> None:
        import onnxruntime

        self._preparation = read_preparation(path) or Preparation()
        options = onnxruntime.SessionOptions()
        # Several processes share the machine, and several threads might round differently.
        options.intra_op_num_threads = options.inter_op_num_threads = 1
        try:
            self._session = onnxruntime.InferenceSession(
                str(path), options, providers=["CPUExecutionProvider"]
            )
            self._input = self._session.get_inputs()[0].name
            size = self._preparation.size
            dimensions = self.features([Image.new("RGB", (size, size))]).shape[1]
        except Exception as error:  # noqa: BLE001 - onnxruntime's own errors share no class
            line = str(error).strip().splitlines()[0]
            raise SetupError(
                f"{path} cannot be used as an ONNX extractor: {line}"
            ) from None
        self.facts = ExtractorFacts(
            path.name, "ONNX", extractors.sha256_of(path), dimensions, self._preparation
        )

    def features(self, images: Sequence[Image.Image]) -> Features:
        found = self._session.run(None, {self._input: self._preparation.array(images)})[
            0
        ]
        return np.ascontiguousarray(np.reshape(found, (len(images), -1)), np.float32)
