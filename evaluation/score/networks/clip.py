"""A folder with a CLIP model as transformers saves it."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from safetensors import SafetensorError
from transformers import AutoTokenizer, CLIPModel

from evaluation.score import extractors
from evaluation.score.extractors import ExtractorFacts
from evaluation.score.preparation import Preparation
from evaluation.score.statistics import Features
from imagefleet.errors import SetupError
from worker.engine.judges import image_features, text_features
from worker.judges.preparation import CLIP_MEAN, CLIP_STD

_WEIGHTS = "model.safetensors"
_PREPROCESSOR = "preprocessor_config.json"

_WHITE = 255.0


class ClipExtractor:
    """CLIP's features of images and of texts in the space that both share."""

    def __init__(self, folder: Path, device: str) -> None:
        if not (folder / _WEIGHTS).is_file():
            raise SetupError(
                f"the extractor {folder} has no {_WEIGHTS}: it should be a folder with a CLIP model"
                " as transformers saves it"
            )
        self._device = device
        try:
            self._model = CLIPModel.from_pretrained(
                folder, local_files_only=True, use_safetensors=True
            )
            self._tokenizer = AutoTokenizer.from_pretrained(
                folder, local_files_only=True
            )
            self._preparation = _preparation(folder, self._model)
        except (
            OSError,
            ValueError,
            KeyError,
            TypeError,
            RuntimeError,
            ImportError,
            SafetensorError,
        ) as error:
            line = str(error).strip().splitlines()[0]
            raise SetupError(
                f"the CLIP model in {folder} cannot be read: {line}"
            ) from None
        self._model.eval().to(device)
        configuration = self._model.config
        self._most_tokens = configuration.text_config.max_position_embeddings
        self.facts = ExtractorFacts(
            folder.name,
            "CLIP",
            extractors.sha256_of(folder / _WEIGHTS),
            configuration.projection_dim,
            self._preparation,
        )

    @torch.inference_mode()
    def features(self, images: Sequence[Image.Image]) -> Features:
        prepared = torch.from_numpy(self._preparation.array(images)).to(self._device)
        return _array(image_features(self._model, prepared))

    @torch.inference_mode()
    def text_features(self, texts: Sequence[str]) -> Features:
        tokens = self._tokenizer(
            list(texts),
            padding="max_length",
            truncation=True,
            max_length=self._most_tokens,
            return_tensors="pt",
        ).to(self._device)
        # What pads a text stands after it, where CLIP does not look.
        return _array(text_features(self._model, tokens["input_ids"]))


def _array(found: torch.Tensor) -> Features:
    return np.ascontiguousarray(found.cpu().numpy())


def _preparation(folder: Path, model: Any) -> Preparation:
    """As CLIP's own models take images, where the folder does not say otherwise."""
    beside = folder / _PREPROCESSOR
    stated = json.loads(beside.read_bytes()) if beside.is_file() else {}
    mean, std = (
        tuple(_WHITE * each for each in stated[name]) if name in stated else usual
        for name, usual in (("image_mean", CLIP_MEAN), ("image_std", CLIP_STD))
    )
    return Preparation(model.config.vision_config.image_size, mean, std, "clip")
