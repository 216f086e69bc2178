from collections.abc import Callable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import (
    AutoencoderTiny,
    EulerAncestralDiscreteScheduler,
    StableDiffusionPipeline,
    StableDiffusionXLPipeline,
)
from PIL import Image
from transformers import CLIPTokenizer

import a1111
import tiny_model
from drawing import draw
from families import tiny_families
from imagefleet.job import clip
from worker.engine import checkpoint as checkpoints
from worker.engine import contract, load

#: Of the images that jobs begin with, and of their masks.
SIDE = 64


#: The UNets' levels.
HALVED: Mapping[str, Mapping[str, Any]] = {
    "sd1": tiny_model.TWO_LEVELS,
    "sd2": {**tiny_model.TWO_LEVELS, "attention_head_dim": (2, 4)},
    "sdxl": {
        "block_out_channels": (32, 64),
        "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"),
        "up_block_types": ("CrossAttnUpBlock2D", "UpBlock2D"),
        "transformer_layers_per_block": (1, 2),
        "attention_head_dim": (2, 4),
        "layers_per_block": 1,
    },
}


@pytest.fixture(scope="session")
def family_folder(tmp_path_factory) -> Callable[..., Path]:
    """A tiny checkpoint of a family in diffusers' format; SD2's predicts v."""
    torch.set_num_threads(1)

    @cache
    def build(family: tiny_families.FamilyName) -> Path:
        kind = "v_prediction" if family == "sd2" else "epsilon"
        folder = tmp_path_factory.mktemp("families") / family
        return tiny_families.build(
            folder, family, unet_changes=HALVED[family], prediction_type=kind
        )

    return build


@pytest.fixture(scope="session", autouse=True)
def _read_tokenizers_once() -> Iterator[None]:
    """Nothing changes one, and CLIP's takes a third as long as the networks of a tiny model."""
    with pytest.MonkeyPatch.context() as patch:
        read = cache(checkpoints._find_tokenizer)
        patch.setattr(checkpoints, "_find_tokenizer", read)
        yield


@pytest.fixture(scope="session")
def family_checkpoint(
    family_folder, copy_checkpoint
) -> Callable[..., checkpoints.Checkpoint]:
    """Its own, as nobody has changed it: an engine changes its checkpoint's layers."""

    def read(
        family: str, path: Path | None = None, **settings: Any
    ) -> checkpoints.Checkpoint:
        if path is None and not settings:
            found: checkpoints.Checkpoint = copy_checkpoint(
                "float32", family_folder(family)
            )
            return found
        return checkpoints.load_checkpoint(
            path or family_folder(family),
            torch.device("cpu"),
            torch.float32,
            **settings,
        )

    return read


@pytest.fixture(scope="session")
def family_engine(family_folder) -> Callable[[str], Any]:
    """Shared by tests that leave it unchanged."""
    return cache(
        lambda family: load.load_engine(
            load.EngineSettings(family_folder(family), "cpu", slots=3)
        )
    )


@pytest.fixture(scope="session")
def draw_family(family_engine) -> Callable[[str, Any], Any]:
    """The image of a request by a family's engine."""
    return lambda family, request: draw(family_engine(family), request)[0]


@pytest.fixture(scope="session")
def family_pipeline(family_folder) -> Callable[..., Any]:
    """The pipeline of a family in diffusers, in float32, with AUTOMATIC1111's sizes."""

    def build(family: str) -> Any:
        folder = family_folder(family)
        scheduler = EulerAncestralDiscreteScheduler.from_pretrained(
            folder / "scheduler", timestep_spacing="linspace"
        )
        padding = {} if family == "sd1" else {"pad_token": "!"}
        last = CLIPTokenizer.from_pretrained(clip.TOKENIZER, **padding)
        if family == "sdxl":
            first = CLIPTokenizer.from_pretrained(clip.TOKENIZER)
            pipeline = StableDiffusionXLPipeline.from_pretrained(
                folder,
                scheduler=scheduler,
                tokenizer=first,
                tokenizer_2=last,
                add_watermarker=False,
            )
        else:
            pipeline = StableDiffusionPipeline.from_pretrained(
                folder,
                scheduler=scheduler,
                tokenizer=last,
                safety_checker=None,
                feature_extractor=None,
            )
        pipeline.set_progress_bar_config(disable=True)
        a1111.resize_last(pipeline.unet)
        return pipeline

    return cache(build)


@pytest.fixture
def build_taesd(tmp_path) -> Any:
    """Random weights; *blocks*: each but the first doubles the sides."""

    def build(blocks: int = 2) -> Path:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            widths = (8,) * blocks
            counts = (1,) * blocks
            tiny = AutoencoderTiny(
                encoder_block_out_channels=widths,
                decoder_block_out_channels=widths,
                num_encoder_blocks=counts,
                num_decoder_blocks=counts,
            )
        tiny.save_pretrained(tmp_path / f"taesd-{blocks}")
        return tmp_path / f"taesd-{blocks}"

    return build


@pytest.fixture(scope="session")
def pixels() -> contract.Pixels:
    """Large smooth shapes of several colours."""
    small = np.random.default_rng(3).integers(0, 256, (4, 4, 3), np.uint8)
    return np.asarray(
        Image.fromarray(small).resize((SIDE, SIDE), Image.Resampling.BICUBIC)
    )


@pytest.fixture(scope="session")
def mask() -> np.ndarray[Any, Any]:
    """The right half, with an edge that was blurred, and a corner."""
    mask = np.zeros((SIDE, SIDE), np.uint8)
    mask[:, 40:] = 255
    mask[:, 32:40] = np.linspace(0, 255, 8)
    mask[:16, :16] = 255
    return mask


@pytest.fixture
def latents(family_engine, monkeypatch) -> list[torch.Tensor]:
    """Those that decoders are given from now on."""
    kind = type(family_engine("sd1")._decoder)
    seen = []
    add = kind.add
    monkeypatch.setattr(
        kind, "add", lambda *given: seen.append(given[2]) or add(*given)
    )
    return seen
