"""An ONNX file, run by onnxruntime on the CPU."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from PIL import Image

from evaluation.score import extractors
from evaluation.score.extractors import ExtractorFacts
from evaluation.score.statistics import Features
from imagefleet import errors


class OnnxExtractor:
    """The first output of the network, [n, d]; more axes are flattened."""

    def __init__(self, path: Path) -> None:
        try:
            import onnxruntime
        except ImportError:
            raise errors.SetupError(
                "onnxruntime is not installed: pip install '.[evaluation]'"
            ) from None
        self._preparation = extractors.read_preparation(path) or extractors.inception_preparation()
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
            raise errors.SetupError(f"{path} cannot be used as an ONNX extractor: {line}") from None
        self.facts = ExtractorFacts(
            path.name, "ONNX", extractors.sha256_of(path), dimensions, self._preparation
        )

    def features(self, images: Sequence[Image.Image]) -> Features:
        found = self._session.run(None, {self._input: self._preparation.array(images)})[0]
        return np.ascontiguousarray(np.reshape(found, (len(images), -1)), np.float32)
