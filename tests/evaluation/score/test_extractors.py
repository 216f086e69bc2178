"""Extractors: the user's files with their hashes, and images as each network takes them."""

import hashlib
import json
import shutil
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import CLIPConfig, CLIPImageProcessorPil, CLIPModel, CLIPTokenizer

from evaluation.score import metrics
from evaluation.score.networks import load
from evaluation.score.preparation import clean_fid
from imagefleet import errors
from imagefleet.job import clip
from worker.judges.preparation import CLIP_MEAN

pytestmark = pytest.mark.slow


def picture(width: int = 61, height: int = 47, seed: int = 0) -> Image.Image:
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3))
    return Image.fromarray(pixels.astype(np.uint8))


def save_script(module: torch.nn.Module, path: Path) -> Path:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        torch.jit.script(module).save(str(path))
    return path


class Means(torch.nn.Module):
    """The mean of each colour."""

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return images.mean((2, 3), keepdim=True)


class Inception(torch.nn.Module):
    """As NVIDIA's file: `layers` takes what is resized and normalised already."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = Means()

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.layers(images) * 0


def test_the_resize_antialiases_as_clean_fid_does():
    image = picture(400, 300)
    ours = clean_fid(image, 75)
    assert ours.dtype == np.float32
    for channel in range(3):  # clean-fid's own lines
        plane = Image.fromarray(np.asarray(image)[:, :, channel].astype(np.float32))
        theirs = np.asarray(plane.resize((75, 75), resample=Image.Resampling.BICUBIC))
        np.testing.assert_array_equal(ours[..., channel], theirs.clip(0, 255))
    # Noise is gone: without antialiasing its spread would stay.
    assert ours.std() < 0.4 * np.asarray(image).std()


def test_a_torchscript_file_is_named_by_its_hash_and_its_input(tmp_path):
    path = save_script(Means(), tmp_path / "means.pt")
    (tmp_path / "means.pt.json").write_text(
        '{"size": 16, "mean": [0, 0, 0], "std": [255, 255, 1]}'
    )
    found = load.load_extractor(path)
    facts = found.facts.as_json()
    assert facts["sha256"] == hashlib.sha256(path.read_bytes()).hexdigest()
    assert (facts["name"], facts["kind"], facts["dimensions"]) == (
        "means.pt",
        "TorchScript",
        3,
    )
    assert (facts["size"], facts["std"]) == (16, (255, 255, 1))
    assert "antialiasing" in facts["resize"]
    image = picture()
    expected = clean_fid(image, 16).mean((0, 1)) / [255, 255, 1]
    np.testing.assert_allclose(found.features([image, image])[1], expected, rtol=1e-5)


def test_inception_is_taken_without_its_own_resize(tmp_path):
    found = load.load_extractor(save_script(Inception(), tmp_path / "inception.pt"))
    image = picture()
    expected = (clean_fid(image, 299).mean((0, 1)) - 128) / 128
    np.testing.assert_allclose(
        found.features([image])[0], expected, rtol=1e-4, atol=1e-5
    )


def test_an_onnx_file_gives_the_features_of_its_network(means_onnx: Path):
    found = load.load_extractor(means_onnx)
    image = picture()
    np.testing.assert_allclose(
        found.features([image])[0],
        clean_fid(image, 20).mean((0, 1)),
        rtol=1e-5,
    )
    assert found.facts.kind == "ONNX"


@pytest.fixture(scope="module")
def clip_folder(tmp_path_factory) -> Path:
    """CLIP with random weights, small, as transformers saves it."""
    folder = tmp_path_factory.mktemp("clip") / "tiny-clip"
    small = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    small |= {"num_attention_heads": 2}
    torch.manual_seed(0)
    configuration = CLIPConfig(
        text_config=small
        | {"eos_token_id": 49407, "bos_token_id": 49406, "pad_token_id": 49407},
        vision_config=small | {"image_size": 28, "patch_size": 14},
        projection_dim=12,
    )
    CLIPModel(configuration).save_pretrained(folder)
    CLIPTokenizer.from_pretrained(clip.TOKENIZER).save_pretrained(folder)
    sizes = {"size": {"shortest_edge": 28}, "crop_size": {"height": 28, "width": 28}}
    CLIPImageProcessorPil(**sizes).save_pretrained(folder)
    return folder


def test_clip_has_the_features_of_transformers(clip_folder: Path):
    found = load.load_text_extractor(clip_folder)
    weights = (clip_folder / "model.safetensors").read_bytes()
    assert found.facts.sha256 == hashlib.sha256(weights).hexdigest()
    assert found.facts.dimensions == 12
    texts = ["a red star", "two blue cars in the city, at night"]
    images = [picture(56, 56), picture(90, 56, 1)]
    model = CLIPModel.from_pretrained(clip_folder).eval()
    tokenizer = CLIPTokenizer.from_pretrained(clip_folder)
    processor = CLIPImageProcessorPil.from_pretrained(clip_folder)
    with torch.inference_mode():
        theirs = model(
            **tokenizer(texts, padding=True, return_tensors="pt"),
            pixel_values=processor(images, return_tensors="pt")["pixel_values"],
        )
    ours = (
        metrics.unit(found.features(images)),
        metrics.unit(found.text_features(texts)),
    )
    np.testing.assert_allclose(ours[0], theirs.image_embeds, atol=2e-3)
    np.testing.assert_allclose(ours[1], theirs.text_embeds, atol=1e-5)
    score = metrics.clip_score(found.features(images), found.text_features(texts))
    cosines = (theirs.image_embeds * theirs.text_embeds).sum(1)
    np.testing.assert_allclose(score, 100 * cosines.clamp_min(0), atol=0.2)


def test_clip_deviates_as_its_folder_says_where_it_says_no_mean(
    clip_folder: Path, tmp_path
):
    folder = shutil.copytree(clip_folder, tmp_path / "own")
    (folder / "preprocessor_config.json").write_text('{"image_std": [0.5, 0.4, 0.2]}')
    found = load.load_extractor(folder).facts.preparation
    assert (found.mean, found.std) == (CLIP_MEAN, (127.5, 102, 51))


def test_the_judge_prefers_what_the_caption_names(drawn):
    found = load.load_text_extractor("demo")
    images = found.features(drawn.pictures)
    words = found.text_features(drawn.captions)
    right = metrics.clip_score(images, words).mean()
    wrong = metrics.clip_score(images, np.roll(words, 1, axis=0)).mean()
    assert right > 60
    assert wrong < 30


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (None, "does not exist"),
        (
            ("folder", None),
            "has no model.safetensors",
        ),
        (("network.pt", b"no archive"), "is no TorchScript file"),
        (("network.onnx", b"no graph"), "cannot be used as an ONNX extractor"),
        (("network.h5", b""), "should be a TorchScript file"),
    ],
)
def test_what_is_no_extractor_is_refused_with_its_name(content, reason: str, tmp_path):
    path = tmp_path / (content[0] if content else "nothing.pt")
    if content and content[1] is None:
        path.mkdir()
    elif content:
        path.write_bytes(content[1])
    with pytest.raises(errors.SetupError, match=reason) as caught:
        load.load_extractor(path)
    assert str(path) in caught.value.message


def test_an_input_that_does_not_fit_is_refused(tmp_path):
    path = save_script(
        torch.nn.Sequential(torch.nn.Conv2d(4, 2, 1)), tmp_path / "four.pt"
    )
    with pytest.raises(errors.SetupError, match="fails on one image of 299 pixels"):
        load.load_extractor(path)
    (tmp_path / "four.pt.json").write_text(json.dumps({"size": 16, "std": [0, 1, 1]}))
    with pytest.raises(errors.SetupError, match="std"):
        load.load_extractor(path)
    with pytest.raises(errors.SetupError, match="no features of texts"):
        load.load_text_extractor(save_script(Means(), tmp_path / "means.pt"))
