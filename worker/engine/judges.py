"""CLIP and heads on its embedding, as they are published: the scores of images by their prompts.

`clip` is a CLIPModel of transformers (`openai/clip-vit-large-patch14`, say). A head is known by its
tensors: `layers.N.weight`, linear layers one after the other, is an aesthetic predictor
(`sac+logos+ava1-l14-linearMSE`), `concept_embeds` Stable Diffusion's safety checker.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.nn import functional
from transformers import CLIPConfig, CLIPModel, CLIPTokenizer

from imagefleet.errors import JobError, TransientError
from imagefleet.files import safetensors
from imagefleet.job import clip
from worker.engine.device import find_device

#: A score of CLIP is so many times the cosine, 0 at least (Hessel et al., 2021, without its 2.5).
_SCALE = 100.0

#: Width of an attention head of CLIP.
_HEAD = 64

#: Added to all concepts of the safety checker where a special one is found.
_ADJUSTMENT = 0.01

_LAYER = re.compile(r"layers\.(\d+)\.weight")

_EMBEDDINGS = "vision_model.embeddings."

#: Scores [n] of embeddings of images, [n, d] of length 1.
Head = Callable[[Tensor], Tensor]


@functools.cache
def _tokenizer() -> Any:
    return CLIPTokenizer.from_pretrained(clip.TOKENIZER, local_files_only=True)


def tokens(texts: Sequence[str]) -> NDArray[np.int64]:
    """CLIP's tokens of texts, [n, 77]; the end of a longer one is cut off."""
    found = _tokenizer()(
        list(texts),
        padding="max_length",
        truncation=True,
        max_length=clip.CHUNK_TOKENS + 2,
        return_tensors="np",
    )
    return np.asarray(found["input_ids"], np.int64)


class Networks:
    """The networks of one device, each loaded once; `scores` is for the engine's thread."""

    def __init__(self, device: str) -> None:
        self._device = find_device(device)
        is_cpu = self._device.type == "cpu"
        self._dtype = torch.float32 if is_cpu else torch.float16
        self._clip = functools.lru_cache(1)(self._load_clip)
        self._head = functools.lru_cache(8)(self._load_head)

    @torch.inference_mode()
    def scores(
        self,
        clip_path: Path,
        path: Path,
        images: NDArray[np.float32],
        tokens: NDArray[np.int64],
    ) -> list[float]:
        """The score of each image [n, 3, side, side], as CLIP takes it, and of its prompt's tokens.

        *path*: of CLIP itself, or of a head. Raises JobError for a file that is no such network.
        """
        model = self._clip(clip_path)
        prepared = torch.from_numpy(images).to(self._device, self._dtype)
        pooled = model.vision_model(pixel_values=prepared).pooler_output
        seen = functional.normalize(model.visual_projection(pooled).float(), dim=1)
        if path != clip_path:
            return _listed(self._head(path)(seen))
        texts, places = np.unique(tokens, axis=0, return_inverse=True)
        ids = torch.from_numpy(texts).to(self._device)
        pooled = model.text_model(input_ids=ids).pooler_output
        named = functional.normalize(model.text_projection(pooled).float(), dim=1)
        own = named[torch.from_numpy(places.ravel()).to(self._device)]
        return _listed(_SCALE * (seen * own).sum(1).clip(0))

    def _load_clip(self, path: Path) -> Any:
        tensors = self._tensors(path)
        try:
            model: Any = CLIPModel(_configuration(path))
            # Older files have the numbers of places, which say nothing.
            own = {
                name: tensor
                for name, tensor in tensors.items()
                if not name.endswith("position_ids")
            }
            model.load_state_dict(own)
            return model.to(self._device, self._dtype).eval()
        except (IndexError, KeyError, RuntimeError, ValueError) as error:
            line = str(error).strip().splitlines()[0]
            raise JobError(
                f"the judge {path.stem!r} is no CLIP model: {line}"
            ) from None

    def _load_head(self, path: Path) -> Head:
        tensors = {
            name: tensor.to(self._device).float()
            for name, tensor in self._tensors(path).items()
        }
        if "concept_embeds" in tensors:
            return functools.partial(_safety, tensors)
        layers = sorted(
            int(match[1]) for name in tensors if (match := _LAYER.fullmatch(name))
        )
        if not layers:
            raise JobError(
                f"the judge {path.stem!r} is of no known kind: CLIP, linear layers"
                " (layers.N.weight), or Stable Diffusion's safety checker (concept_embeds)"
            )
        return functools.partial(_linear, tensors, layers)

    def _tensors(self, path: Path) -> dict[str, Tensor]:
        try:
            with safe_open(path, framework="pt") as file:
                names = list(file.keys())
                if "concept_embeds" in names:  # beside a vision model, CLIP's own
                    names = [name for name in names if "_embeds" in name]
                return {name: file.get_tensor(name) for name in names}
        except (OSError, SafetensorError) as error:
            raise TransientError(f"{path.name} cannot be read: {error}") from None


def _linear(
    tensors: Mapping[str, Tensor], layers: Sequence[int], seen: Tensor
) -> Tensor:
    for layer in layers:
        bias = tensors.get(f"layers.{layer}.bias")
        seen = functional.linear(seen, tensors[f"layers.{layer}.weight"], bias)
    return seen.flatten()


def _safety(tensors: Mapping[str, Tensor], seen: Tensor) -> Tensor:
    """100 times how far an image is from the nearest concept's threshold; 0 or more is safe."""

    def above(kind: str) -> Tensor:
        concepts = functional.normalize(tensors[f"{kind}_embeds"], dim=1)
        return (seen @ concepts.T - tensors[f"{kind}_embeds_weights"]).amax(1)

    is_special = above("special_care") > 0
    return -_SCALE * (above("concept") + _ADJUSTMENT * is_special)


@functools.lru_cache(8)
def _shapes(path: Path) -> Mapping[str, tuple[int, ...]]:
    try:
        with path.open("rb") as file:
            return safetensors.read_header(file).shapes
    except safetensors.MalformedError:
        raise JobError(f"{path.name} is no safetensors file") from None


def side(path: Path) -> int:
    """Pixels of a side of the images that a CLIP model takes; raises JobError for another file."""
    shapes = _shapes(path)
    patches = shapes.get(f"{_EMBEDDINGS}position_embedding.weight")
    patch = shapes.get(f"{_EMBEDDINGS}patch_embedding.weight")
    if patches is None or patch is None:
        raise JobError("the judge 'clip' is no CLIP model in transformers' names")
    return int(patch[-1] * round((patches[0] - 1) ** 0.5))


def _configuration(path: Path) -> CLIPConfig:
    """The configuration of a CLIP model, by the shapes of its tensors."""
    shapes = _shapes(path)

    def part(name: str) -> dict[str, int]:
        layer = re.compile(rf"{name}\.encoder\.layers\.\d+\.mlp\.fc1\.weight")
        layers = [each for each in shapes if layer.fullmatch(each)]
        wide, width = shapes[layers[0]]
        return {
            "hidden_size": width,
            "intermediate_size": wide,
            "num_hidden_layers": len(layers),
            "num_attention_heads": max(1, width // _HEAD),
        }

    words, _ = shapes["text_model.embeddings.token_embedding.weight"]
    places, _ = shapes["text_model.embeddings.position_embedding.weight"]
    projection, _ = shapes["visual_projection.weight"]
    patch = shapes[f"{_EMBEDDINGS}patch_embedding.weight"][-1]
    text = {"vocab_size": words, "max_position_embeddings": places}
    vision = {"image_size": side(path), "patch_size": patch}
    return CLIPConfig(
        text_config={**part("text_model"), **text, "eos_token_id": words - 1},
        vision_config={**part("vision_model"), **vision},
        projection_dim=projection,
    )


def _listed(scores: Tensor) -> list[float]:
    return [float(score) for score in scores.cpu()]
