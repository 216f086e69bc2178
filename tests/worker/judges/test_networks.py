"""Networks that judge images: the score of each format, and what is wrong with a file."""

import asyncio
import random
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file
from transformers import CLIPConfig, CLIPModel

from demo_world import captions, world
from evaluation.score import metrics
from evaluation.score.networks.clip import ClipExtractor
from imagefleet import errors
from imagefleet.files import demo
from imagefleet.job import clip
from imagefleet.storage.open import open_storage
from imagefleet.storage.settings import StorageSettings
from worker.engine import judges as judges_of_clip
from worker.files.library import Source
from worker.judges import pixels
from worker.judges.networks import Drawn, Judges

#: A CLIP of two layers, as transformers saves it.
_TOWER = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 1,
}


def tiny_clip(folder: Path, seed: int = 0) -> Path:
    torch.manual_seed(seed)
    text = {**_TOWER, "eos_token_id": clip.VOCABULARY_SIZE - 1}
    vision = {**_TOWER, "image_size": 32, "patch_size": 8}
    configuration = CLIPConfig(
        text_config=text, vision_config=vision, projection_dim=16
    )
    CLIPModel(configuration).save_pretrained(folder)
    for file in clip.TOKENIZER.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    return folder


def pictures(count: int) -> list[Drawn]:
    chance = np.random.default_rng(0)
    return [
        Drawn(chance.integers(0, 256, (40, 48, 3), np.uint8), f"a red house {number}")
        for number in range(count)
    ]


async def without_files(compute: Callable[[], Any]) -> Any:
    """Calls a function as the engine's thread does, which must not wait for a disk."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delattr(judges_of_clip, "Path")
        return compute()


def score(folder: Path, name: str, drawn: Sequence[Drawn]) -> list[float]:
    """The scores by the networks of a folder."""

    async def scored() -> list[float]:
        settings = StorageSettings(storage=f"local:{folder / 'storage'}")
        async with open_storage(settings) as storage:
            await storage.create()
            for file in (folder / "judges").iterdir():
                blob = f"judges/{file.name}"
                await storage.files.create(blob, file.read_bytes(), "", {})
            source = Source(storage.files, folder / "cache", 2**30)
            found = await Judges(source, "cpu", without_files).scores([name], drawn)
            return [each[name] for each in found]

    return asyncio.run(scored())


@pytest.fixture
def judges(tmp_path: Path) -> Path:
    (tmp_path / "judges").mkdir()
    return tmp_path / "judges"


def test_clip_and_heads_on_its_embedding_score_as_the_evaluation_does(
    judges: Path, tmp_path: Path
):
    folder = tiny_clip(tmp_path / "clip")
    (folder / "model.safetensors").rename(judges / "clip.safetensors")
    (folder / "model.safetensors").symlink_to(judges / "clip.safetensors")
    drawn = pictures(4)
    extractor = ClipExtractor(folder, "cpu")
    seen = extractor.features([Image.fromarray(each.pixels) for each in drawn])
    texts = extractor.text_features([each.words for each in drawn])
    found = score(tmp_path, "clip", drawn)
    assert found == pytest.approx(metrics.clip_score(seen, texts), abs=1e-3)

    seen = metrics.unit(seen)
    first = torch.randn(8, 16)
    bias = torch.randn(8)
    last = torch.randn(1, 8)
    layers = {"0.weight": first, "0.bias": bias, "2.weight": last}
    weights = {f"layers.{name}": tensor for name, tensor in layers.items()}
    save_file(weights, judges / "aesthetic.safetensors")
    hidden = seen @ first.numpy().T + bias.numpy()
    expected = (hidden @ last.numpy().T).ravel()
    assert score(tmp_path, "aesthetic", drawn) == pytest.approx(expected, abs=1e-3)

    concept = torch.from_numpy(seen[:1].astype(np.float32))
    threshold = torch.tensor([0.99])
    checker = {
        "concept_embeds": concept.clone(),
        "concept_embeds_weights": threshold,
        "special_care_embeds": -concept,
        "special_care_embeds_weights": threshold.clone(),
        "vision_model.pre_layrnorm.weight": torch.zeros(1),
    }
    save_file(checker, judges / "safety.safetensors")
    expected = 100 * (0.99 - seen @ seen[0])
    assert expected[0] == pytest.approx(-1)
    assert score(tmp_path, "safety", drawn) == pytest.approx(expected, abs=1e-3)

    for layer, shape, sentence in (
        ("weight", (1, 16), "of no known kind"),
        ("layers.0.weight", (1, 2), "a head of another CLIP"),
        ("layers.1.weight", (2, 16), "a head of another CLIP, or gives no image one"),
    ):
        save_file({layer: torch.zeros(shape)}, judges / f"{layer}.safetensors")
        with pytest.raises(
            errors.JobError, match=rf"{layer}(\.safetensors)? is {sentence}"
        ):
            score(tmp_path, layer, drawn)


def test_a_judge_or_its_clip_that_was_replaced_is_read_anew(
    judges: Path, tmp_path: Path
):
    drawn = pictures(2)
    head = torch.randn(1, 16)
    found = []
    for seed, sign in ((0, 1), (0, -1), (1, -1)):
        file = tiny_clip(tmp_path / "clip", seed) / "model.safetensors"
        file.rename(judges / "clip.safetensors")
        save_file({"layers.0.weight": sign * head}, judges / "taste.safetensors")
        found.append(score(tmp_path, "taste", drawn))
        for fetched in ("storage", "cache"):
            shutil.rmtree(tmp_path / fetched)
    first, negated, of_other_clip = found
    assert negated == [-value for value in first]
    assert of_other_clip != pytest.approx(negated, abs=1e-3)


def test_the_judge_of_the_demo_tells_a_picture_from_others_by_its_prompt(
    judges: Path, tmp_path: Path
):
    file = demo.TRAINED / "judges" / "clip.onnx"
    (judges / "clip.onnx").write_bytes(file.read_bytes())
    chance = random.Random(3)
    options = world.SceneOptions(emphasis_share=0)
    scenes = [world.sample_scene(chance, options) for _ in range(8)]
    shown = [world.draw_scene(scene).convert("RGB") for scene in scenes]
    words = [captions.plain_caption(scene, chance) for scene in scenes]
    drawn = [
        Drawn(np.asarray(image), text)
        for told in (words, words[3:] + words[:3])
        for image, text in zip(shown, told, strict=True)
    ]
    found = score(tmp_path, "clip", drawn)
    assert np.mean(found[:8]) > 2 * np.mean(found[8:])


def test_a_head_beside_a_clip_in_onnx_is_refused_before_anything_is_judged(
    judges: Path, tmp_path: Path
):
    (judges / "clip.onnx").write_bytes(b"not read")
    save_file({"layers.0.weight": torch.zeros(1, 2)}, judges / "taste.safetensors")
    with pytest.raises(errors.JobError, match=r"needs clip\.safetensors"):
        score(tmp_path, "taste", [])


async def test_a_judge_in_onnx_is_fetched_once_and_nothing_is_asked_again(
    tmp_path: Path,
):
    """Two libraries with one cache would each throw away what the other has fetched."""
    data = (demo.TRAINED / "judges" / "clip.onnx").read_bytes()
    settings = StorageSettings(storage=f"local:{tmp_path / 'storage'}")
    async with open_storage(settings) as storage:
        await storage.create()
        await storage.files.create("judges/clip.onnx", data, "", {})
        network = Judges(Source(storage.files, tmp_path / "cache", 2**30), "cpu")
        first = await network.scores(["clip"], pictures(2))
        reads = storage.operations.blob_reads
        assert reads
        assert await network.scores(["clip"], pictures(2)) == first
        assert storage.operations.blob_reads == reads


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("clip", "is no CLIP model in transformers' names"),
        ("taste", "neither contrast nor coherence"),
    ],
)
def test_a_file_that_is_no_judge_is_a_bad_job_with_a_reason(
    judges: Path, tmp_path: Path, name: str, why: str
):
    save_file({"weight": torch.zeros(2)}, judges / "clip.safetensors")
    with pytest.raises(errors.JobError, match=why):
        score(tmp_path, name, pictures(1))


def test_noise_and_blank_pictures_have_neither_coherence_nor_contrast():
    noise = np.random.default_rng(0).integers(0, 256, (64, 64, 3), np.uint8)
    blank = np.full((64, 64, 3), 7, np.uint8)
    ramp = np.repeat(np.arange(64, dtype=np.uint8)[:, None, None], 64, 1).repeat(3, 2)
    assert abs(pixels.coherence(noise)) < 0.1
    assert pixels.coherence(ramp) > 0.9
    assert pixels.contrast(blank) == 0
    assert pixels.contrast(ramp) > 10


def test_the_hash_of_a_picture_outlives_its_size_and_its_brightness():
    chance = np.random.default_rng(1)
    small = Image.fromarray(chance.integers(0, 256, (6, 6, 3), np.uint8))
    picture = small.resize((96, 96), Image.Resampling.BICUBIC)
    darker = picture.point(lambda value: value * 0.8)
    larger = picture.resize((192, 192))
    own, *others = (
        int(pixels.perceptual_hash(np.asarray(image)), 16)
        for image in (picture, darker, larger, picture.rotate(90))
    )
    near, also_near, far = ((own ^ other).bit_count() for other in others)
    assert max(near, also_near) <= 3
    assert far > 16
