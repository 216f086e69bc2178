"""A folder with a CLIP model as transformers or open_clip saves it."""

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
from evaluation.score.networks import open_clip
from evaluation.score.statistics import Features
from imagefleet import errors
from imagefleet.job.clip import TOKENIZER

_PREPROCESSOR = "preprocessor_config.json"

_WHITE = 255.0


class ClipExtractor:
    """CLIP's features of images and of texts in the space that both share."""

    def __init__(self, folder: Path, device: str) -> None:
        weights = next((name for name in _LOADERS if (folder / name).is_file()), None)
        if weights is None:
            raise errors.SetupError(
                f"the extractor {folder} has neither {' nor '.join(_LOADERS)}: it should be a"
                " folder with a CLIP model of transformers or open_clip"
            )
        self._device = device
        try:
            self._model, self._tokenizer, self._preparation = _LOADERS[weights](folder)
        except (
            *(OSError, ValueError, KeyError, TypeError, RuntimeError, ImportError),
            SafetensorError,
        ) as error:
            line = str(error).strip().splitlines()[0]
            raise errors.SetupError(
                f"the CLIP model in {folder} cannot be read: {line}"
            ) from None
        self._model.eval().to(device)
        configuration = self._model.config
        self._most_tokens = configuration.text_config.max_position_embeddings
        self.facts = ExtractorFacts(
            folder.name,
            "CLIP",
            extractors.sha256_of(folder / weights),
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


def _of_transformers(folder: Path) -> tuple[Any, Any, Preparation]:
    model: Any = CLIPModel.from_pretrained(
        folder, local_files_only=True, use_safetensors=True
    )
    tokenizer: Any = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    stated: dict[str, Any] = {}
    if (folder / _PREPROCESSOR).is_file():
        stated = json.loads((folder / _PREPROCESSOR).read_text(encoding="utf-8"))
    usual = open_clip.Preprocessing()
    mean, std = stated.get("image_mean", usual.mean), stated.get("image_std", usual.std)
    return model, tokenizer, _preparation(model, mean, std)


def _of_open_clip(folder: Path) -> tuple[Any, Any, Preparation]:
    model, stated = open_clip.load(folder)
    return (
        model,
        AutoTokenizer.from_pretrained(TOKENIZER),
        _preparation(model, stated.mean, stated.std),
    )


#: By the file with the weights. Where a folder has both, they are the same.
_LOADERS = {"model.safetensors": _of_transformers, open_clip.WEIGHTS: _of_open_clip}


def _preparation(
    model: Any, mean: Sequence[float], std: Sequence[float]
) -> Preparation:
    size = model.config.vision_config.image_size
    return Preparation(size, _of_white(mean), _of_white(std), "clip")


def _of_white(values: Sequence[float]) -> tuple[float, float, float]:
    red, green, blue = (_WHITE * float(each) for each in values)
    return red, green, blue
