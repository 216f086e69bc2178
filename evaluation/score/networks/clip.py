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
from evaluation.score.extractors import ExtractorFacts, Preparation
from evaluation.score.statistics import Features
from imagefleet.errors import SetupError

_WEIGHTS = "model.safetensors"
_PREPROCESSOR = "preprocessor_config.json"

#: What CLIP's own models take, out of 1, where the folder does not say otherwise.
_MEAN = (0.48145466, 0.4578275, 0.40821073)
_STD = (0.26862954, 0.26130258, 0.27577711)

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


def _preparation(folder: Path, model: Any) -> Preparation:
    stated = {}
    if (folder / _PREPROCESSOR).is_file():
        stated = json.loads((folder / _PREPROCESSOR).read_text(encoding="utf-8"))
    size = model.config.vision_config.image_size
    mean = stated.get("image_mean", _MEAN)
    std = stated.get("image_std", _STD)
    return Preparation(size, _of_white(mean), _of_white(std), "clip")


def _of_white(values: Sequence[float]) -> tuple[float, float, float]:
    red, green, blue = (_WHITE * float(value) for value in values)
    return red, green, blue
