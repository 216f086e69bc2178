"""A TorchScript file, such as the `inception-2015-12-05.pt` that clean-fid and StyleGAN use."""

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from evaluation.score import extractors
from evaluation.score.extractors import ExtractorFacts
from evaluation.score.preparation import Preparation, read_preparation
from evaluation.score.statistics import Features
from imagefleet.errors import SetupError


class TorchScriptExtractor:
    """Images [n, 3, size, size] in, features [n, d] out; more axes are flattened."""

    def __init__(self, path: Path, device: str) -> None:
        self._device = device
        self._network, preparation = self._load(path)
        self._preparation = preparation
        blank = Image.new("RGB", (preparation.size, preparation.size))
        try:
            dimensions = self.features([blank]).shape[1]
        except (RuntimeError, ValueError, TypeError, AttributeError) as error:
            line = str(error).strip().splitlines()[-1]
            raise SetupError(
                f"{path}: the network fails on one image of {preparation.size} pixels ({line});"
                f" {path.name}.json beside it can name another size"
            ) from None
        self.facts = ExtractorFacts(
            path.name,
            "TorchScript",
            extractors.sha256_of(path),
            dimensions,
            preparation,
        )

    def _load(self, path: Path) -> tuple[Any, Preparation]:
        stated = read_preparation(path)
        try:
            with warnings.catch_warnings():
                # TorchScript is what the published weights of Inception come as.
                warnings.simplefilter("ignore", DeprecationWarning)
                network = torch.jit.load(str(path), map_location=self._device).eval()  # type: ignore[no-untyped-call]
        except (RuntimeError, ValueError, OSError) as error:
            line = str(error).strip().splitlines()[0]
            raise SetupError(f"{path} is no TorchScript file: {line}") from None
        if stated is None and hasattr(network, "layers"):
            # As a whole, that file resizes without antialiasing; clean-fid takes this part of it.
            network = network.layers
        return network, stated or Preparation()

    @torch.inference_mode()
    def features(self, images: Sequence[Image.Image]) -> Features:
        prepared = torch.from_numpy(self._preparation.array(images)).to(self._device)
        found = self._network(prepared).flatten(1).float().cpu().numpy()
        if found.shape[0] != len(images):
            raise ValueError(
                f"{len(images)} images gave {found.shape[0]} rows of features"
            )
        return np.ascontiguousarray(found, np.float32)
