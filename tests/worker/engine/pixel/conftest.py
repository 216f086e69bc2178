"""Tiny stages of DeepFloyd IF's architecture, engines on them, and diffusers' pipelines."""

import shutil
from collections.abc import Awaitable, Callable, Iterator
from functools import cache
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import IFPipeline, IFSuperResolutionPipeline
from PIL import Image

from imagefleet.storage.open import Storage
from pixel import tiny_cascade
from worker.engine import contract
from worker.engine.contract import Settings
from worker.engine.pixel import checkpoint as checkpoints
from worker.engine.pixel.parts import of_pixels
from worker.engine.slots.engine import SlotEngine

PROMPT = "A red house"
NEGATIVE = "blurry"


@pytest.fixture(scope="session")
def stage(tmp_path_factory) -> Callable[..., Path]:
    """The folder of a tiny stage, by 'base' or 'sr' and changes of its scheduler."""
    torch.set_num_threads(1)

    @cache
    def build(name: tiny_cascade.StageName, **scheduler: Any) -> Path:
        return tiny_cascade.build(
            tmp_path_factory.mktemp("cascade") / name, name, **scheduler
        )

    return build


@pytest.fixture(scope="session")
def remove_encoder() -> Callable[[Path, Path], Path]:
    """Copies a stage to a folder without its text encoder, as an 8 GB card has it."""

    def copy(whole: Path, folder: Path) -> Path:
        shutil.copytree(whole, folder)
        (folder / "text_encoder" / "model.safetensors").unlink()
        shutil.rmtree(folder / "tokenizer")
        return folder

    return copy


@pytest.fixture(scope="session")
def without_encoder(stage, remove_encoder, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("small") / "base"
    return remove_encoder(stage("base"), folder)  # type: ignore[no-any-return]


@pytest.fixture
def stored(storage: Storage) -> Callable[[str], Awaitable[tuple[contract.Pixels, str]]]:
    """Reads an image from the storage, and its parameters."""

    async def read(name: str) -> tuple[contract.Pixels, str]:
        data = await storage.blobs.read(f"default/{name}.png", max_bytes=2**20)
        with Image.open(BytesIO(data)) as image:
            return np.asarray(image.convert("RGB")), image.info["parameters"]

    return read


@pytest.fixture
def make_engine(stage) -> Iterator[Callable[..., SlotEngine]]:
    made = []

    def make(
        name: str = "base",
        *,
        slots: int = 3,
        packages: Any = None,
        **scheduler: Any,
    ) -> SlotEngine:
        folder = scheduler.pop("folder", None) or stage(name, **scheduler)
        loaded = checkpoints.load_checkpoint(folder, torch.device("cpu"), torch.float32)
        made.append(
            SlotEngine(of_pixels(loaded, Settings(slots=slots, packages=packages)))
        )
        return made[-1]

    yield make
    for engine in made:
        engine.close()


@pytest.fixture(scope="session")
def pipeline(stage) -> Callable[..., Any]:
    """The pipeline of a tiny stage in diffusers."""

    def build(name: str, **scheduler: Any) -> Any:
        kind = IFPipeline if name == "base" else IFSuperResolutionPipeline
        found = kind.from_pretrained(stage(name, **scheduler))
        found.set_progress_bar_config(disable=True)
        return found

    return build


@pytest.fixture(scope="session")
def low_image() -> contract.Pixels:
    """Coarse patches, as a base stage's image."""
    coarse = np.random.default_rng(0).integers(0, 256, (4, 4, 3), np.uint8)
    side = tiny_cascade.BASE_SIDE // 4
    return coarse.repeat(side, axis=0).repeat(side, axis=1)


@pytest.fixture(scope="session")
def request_of(low_image: contract.Pixels) -> Callable[..., contract.ImageRequest]:
    """A request for a tiny stage; the one that upscales gets an image."""

    def make(name: str = "base", **changes: Any) -> contract.ImageRequest:
        side = tiny_cascade.BASE_SIDE if name == "base" else tiny_cascade.SR_SIDE
        fields = {
            "prompt": PROMPT,
            "negative_prompt": NEGATIVE,
            "loras": (),
            "sampler": "ddpm",
            "steps": 8,
            "cfg_scale": 7.0 if name == "base" else 4.0,
            "seed": 1,
            "width": side,
            "height": side,
            "init": contract.InitImage(low_image, 0.25) if name == "sr" else None,
        }
        return contract.ImageRequest(**{**fields, **changes})

    return make
