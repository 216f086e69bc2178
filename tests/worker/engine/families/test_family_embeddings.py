"""Images with textual inversion embeddings are those of diffusers, for each family."""

import hashlib
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from diffusers_pipelines import draw_in_diffusers
from drawing import ROUNDING, difference, make_request
from imagefleet import errors
from worker.engine import contract

pytestmark = pytest.mark.slow


NAMES = {"text_encoder": "clip_l", "text_encoder_2": "clip_g"}


def written(path: Path, tensors: dict[str, torch.Tensor]) -> contract.Embedding:
    save_file(tensors, path)
    return contract.Embedding(
        "easynegative", path, hashlib.sha256(path.read_bytes()).hexdigest()
    )


@pytest.mark.parametrize("family", ["sd1", "sd2", "sdxl"])
def test_images_with_an_embedding_are_those_of_diffusers(
    family: str,
    draw_family,
    family_pipeline,
    tmp_path,
):
    pipeline = family_pipeline.__wrapped__(family)  # not the one that other tests share
    generator = torch.Generator().manual_seed(1)
    tensors = {}
    for network, name in NAMES.items():
        encoder = getattr(pipeline, network, None)
        if encoder is None:
            continue
        width = encoder.get_input_embeddings().weight.shape[1]
        tensors[name] = torch.randn((3, width), generator=generator)
        tokenizer = getattr(pipeline, network.replace("text_encoder", "tokenizer"))
        token = {"easynegative": tensors[name]}
        pipeline.load_textual_inversion(
            token, text_encoder=encoder, tokenizer=tokenizer
        )
    embedding = written(tmp_path / "e.safetensors", tensors)
    settings = {
        "prompt": "a red house",
        "negative_prompt": "easynegative, blurry",
        "steps": 2,
    }
    request = make_request(**settings, embeddings=(embedding,))
    image = draw_family(family, request)
    assert difference(image, draw_in_diffusers(pipeline, request)) <= ROUNDING
    other = draw_family(family, make_request(**settings))
    assert difference(image, other) > ROUNDING, "or the test shows nothing"


def test_an_embedding_for_another_family_is_refused_by_name(family_engine, tmp_path):
    engine = family_engine("sdxl")
    for_sd1 = written(tmp_path / "e.safetensors", {"emb_params": torch.ones(2, 768)})
    with pytest.raises(errors.UnusableFileError, match=r"'easynegative'.* for SD 1"):
        engine.prepare(make_request(prompt="easynegative", embeddings=(for_sd1,)))
