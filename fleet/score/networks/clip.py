"""A folder with a CLIP model as transformers saves it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from transformers import AutoTokenizer, CLIPModel

from fleet.score import extractors
from fleet.score.extractors import ExtractorFacts
from fleet.score.resize import Preparation
from fleet.score.statistics import Features
from imagefleet import errors

WEIGHTS = "model.safetensors"
_PREPROCESSOR = "preprocessor_config.json"

_WHITE = 255.0

#: OpenAI's, which the models of others keep; out of 1.
_MEAN = (0.48145466, 0.4578275, 0.40821073)
_STD = (0.26862954, 0.26130258, 0.27577711)


class ClipExtractor:
    """CLIP's features of images and of texts in the space that both share."""

    def __init__(self, folder: Path, device: str) -> None:
        if not (folder / WEIGHTS).is_file():
            raise errors.SetupError(
                f"the extractor {folder} has no {WEIGHTS}: it should be a folder with a CLIP model"
                " of transformers"
            )
        self._device = device
        try:
            self._model: Any = CLIPModel.from_pretrained(
                folder, local_files_only=True, use_safetensors=True
            )
            self._tokenizer: Any = AutoTokenizer.from_pretrained(folder, local_files_only=True)
            configuration = self._model.config
            self._preparation = _preparation(folder, configuration.vision_config.image_size)
        except (OSError, ValueError, KeyError, TypeError, RuntimeError, ImportError) as error:
            line = str(error).strip().splitlines()[0]
            raise errors.SetupError(f"the CLIP model in {folder} cannot be read: {line}") from None
        self._model.eval().to(device)
        self._most_tokens = configuration.text_config.max_position_embeddings
        self.facts = ExtractorFacts(
            folder.name,
            "CLIP",
            extractors.sha256_of(folder / WEIGHTS),
            configuration.projection_dim,
            self._preparation,
        )

    @torch.inference_mode()
    def features(self, images: Sequence[Image.Image]) -> Features:
        prepared = torch.from_numpy(self._preparation.array(images)).to(self._device)
        pooled = self._model.vision_model(pixel_values=prepared).pooler_output
        return _array(self._model.visual_projection(pooled))

    @torch.inference_mode()
    def text_features(self, texts: Sequence[str]) -> Features:
        tokens = self._tokenizer(
            list(texts),
            padding="max_length",
            truncation=True,
            max_length=self._most_tokens,
            return_tensors="pt",
        ).to(self._device)
        pooled = self._model.text_model(
            input_ids=tokens["input_ids"], attention_mask=tokens["attention_mask"]
        ).pooler_output
        return _array(self._model.text_projection(pooled))


def _array(found: torch.Tensor) -> Features:
    return np.ascontiguousarray(found.float().cpu().numpy(), np.float32)


def _preparation(folder: Path, size: int) -> Preparation:
    """As the folder states it; CLIP's own where it does not."""
    stated: dict[str, Any] = {}
    if (folder / _PREPROCESSOR).is_file():
        stated = json.loads((folder / _PREPROCESSOR).read_text(encoding="utf-8"))
    mean, std = (
        tuple(_WHITE * float(each) for each in stated.get(name, usual))
        for name, usual in (("image_mean", _MEAN), ("image_std", _STD))
    )
    return Preparation(size, _three(mean), _three(std), "clip")


def _three(values: tuple[float, ...]) -> tuple[float, float, float]:
    red, green, blue = values
    return red, green, blue
