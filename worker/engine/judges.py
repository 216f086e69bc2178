"""CLIP and heads on its embedding, as they are published: the scores of images by their prompts.

`clip` is a CLIPModel of transformers (`openai/clip-vit-large-patch14`, say). A head is known by its
tensors: `layers.N.weight`, linear layers one after the other, is an aesthetic predictor
(`sac+logos+ava1-l14-linearMSE`), `concept_embeds` Stable Diffusion's safety checker.
"""

import functools
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_model
from torch import Tensor
from torch.nn.functional import linear, normalize
from transformers import CLIPConfig, CLIPModel, CLIPTokenizer

from imagefleet.errors import JobError, TransientError
from imagefleet.files import safetensors
from imagefleet.files.safetensors import Identity, whole
from imagefleet.job import clip
from worker.engine.device import find_device

#: A score of CLIP is so many times the cosine, 0 at least (Hessel et al., 2021, without its 2.5).
_SCALE = 100.0

#: Width of an attention head of CLIP.
_HEAD = 64

#: Added to all concepts of the safety checker where a special one is found.
_ADJUSTMENT = 0.01

#: A head's tensors; the safety checker has a vision model beside them, which is CLIP's own.
_OF_HEAD = re.compile(r"layers\.\d+\..*|(concept|special_care)_embeds.*")

#: A head's tensors by their names.
Head = Mapping[str, Tensor]

_EMBEDDINGS = "vision_model.embeddings."


def image_features(model: Any, images: Tensor) -> Any:
    """CLIP's embeddings [n, d] of images [n, 3, side, side]."""
    return model.visual_projection(model.vision_model(images).pooler_output).float()


def text_features(model: Any, ids: Tensor) -> Any:
    """CLIP's embeddings [n, d] of tokens [n, length]."""
    return model.text_projection(model.text_model(ids).pooler_output).float()


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
    )
    return np.array(found["input_ids"], np.int64)


@torch.inference_mode()
def scores(
    device: str,
    model: Any,
    heads: Mapping[str, Head | None],
    images: NDArray[np.float32],
    tokens: NDArray[np.int64],
) -> dict[str, list[float]]:
    """Each judge's scores of images [n, 3, side, side], as CLIP takes them, by their prompts.

    *model*: CLIP, wherever it is. *heads* by the judges' names; None: CLIP is the judge. It is for
    the engine's thread, and reads no file. Raises JobError for a head that does not fit.
    """
    model = _placed(model, find_device(device))
    pixels = torch.from_numpy(images).to(model.device, model.dtype)
    seen = normalize(image_features(model, pixels))
    found = {}
    for name in heads:
        if heads[name] is None:
            ids = torch.from_numpy(tokens).to(model.device)
            named = normalize(text_features(model, ids))
            found[name] = _SCALE * (seen * named).sum(1).clip(0)
    # Waits for the GPU once all that it has to do is with it.
    seen = seen.cpu()
    for name, head in heads.items():
        if head is not None:
            try:
                found[name] = _of_head(head, seen)
            except (LookupError, RuntimeError):  # of its tensors' shapes
                raise JobError(
                    f"the judge {name} is a head of another CLIP, or gives no image one score"
                ) from None
    return {name: values.tolist() for name, values in found.items()}


@functools.lru_cache(1)
def _placed(model: Any, device: torch.device) -> Any:
    """The model on a device: once, as to look at each of its tensors takes milliseconds."""
    return model.to(device, torch.float32 if device.type == "cpu" else torch.float16)


@functools.lru_cache(1)
def read_clip(identity: Identity) -> Any:
    """The CLIP model of a file, on the CPU; raises JobError for another file."""
    path = Path(identity[0])
    with whole(identity):
        model: Any = CLIPModel(_configuration(path))
        try:
            # Older files have the numbers of places, too, which say nothing.
            missing, _ = load_model(model, path, strict=False)
        except (OSError, SafetensorError) as error:
            raise TransientError(f"{path.name} cannot be read: {error}") from None
        except RuntimeError as error:
            missing = {str(error)}
    if missing:
        raise JobError(f"the judge {path.stem} is no CLIP model: {min(missing)}")
    return model.eval()


@functools.lru_cache(8)
def read_head(identity: Identity) -> Head:
    """The tensors of a head's file, on the CPU; raises JobError for another file."""
    path = Path(identity[0])
    try:
        with whole(identity), safe_open(path, "pt") as file:
            names = filter(_OF_HEAD.fullmatch, file.keys())
            tensors = {name: file.get_tensor(name).float() for name in names}
    except (OSError, SafetensorError) as error:
        raise TransientError(f"{path.name} cannot be read: {error}") from None
    if not tensors:
        raise JobError(
            f"the judge {path.stem} is of no known kind: CLIP, linear layers"
            " (layers.N.weight), or Stable Diffusion's safety checker (concept_embeds)"
        )
    return tensors


def _of_head(tensors: Head, seen: Tensor) -> Tensor:
    """Scores [n] of embeddings of images, [n, d] of length 1.

    The safety checker's is 100 times how far an image is from the nearest concept's threshold; 0 or
    more is safe.
    """
    if "concept_embeds" not in tensors:
        for layer in sorted({int(name.split(".")[1]) for name in tensors}):
            name = f"layers.{layer}"
            seen = linear(seen, tensors[f"{name}.weight"], tensors.get(f"{name}.bias"))
        return seen.view(len(seen))

    def above(kind: str) -> Tensor:
        concepts = normalize(tensors[f"{kind}_embeds"])
        return (seen @ concepts.T - tensors[f"{kind}_embeds_weights"]).amax(1)

    is_special = above("special_care") > 0
    return -_SCALE * (above("concept") + _ADJUSTMENT * is_special)


def _configuration(path: Path) -> CLIPConfig:
    """The configuration of a CLIP model, by the shapes of its tensors."""
    try:
        with path.open("rb") as file:
            shapes = safetensors.read_header(file).shapes
        patches, _ = shapes[f"{_EMBEDDINGS}position_embedding.weight"]
        *_, patch = shapes[f"{_EMBEDDINGS}patch_embedding.weight"]
        vision = {
            "image_size": patch * round((patches - 1) ** 0.5),
            "patch_size": patch,
        }
        return CLIPConfig(
            text_config=_tower("text_model", shapes),
            vision_config=_tower("vision_model", shapes) | vision,
            projection_dim=shapes["visual_projection.weight"][0],
        )
    except (safetensors.MalformedError, KeyError, ValueError):
        raise JobError(
            f"the judge {path.stem} is no CLIP model in transformers' names"
        ) from None


def _tower(name: str, shapes: Mapping[str, Sequence[int]]) -> dict[str, int]:
    wide, width = shapes[f"{name}.encoder.layers.0.mlp.fc1.weight"]
    return {
        "hidden_size": width,
        "intermediate_size": wide,
        "num_hidden_layers": len(
            re.findall(rf"{name}\S*mlp\.fc1\.weight", " ".join(shapes))
        ),
        "num_attention_heads": width // _HEAD,
    }
