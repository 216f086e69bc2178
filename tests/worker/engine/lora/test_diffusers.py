"""LoRAs on the trained demo model draw the same images as diffusers with peft."""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import EulerAncestralDiscreteScheduler, StableDiffusionPipeline
from diffusers.utils import convert_state_dict_to_diffusers
from peft import get_peft_model_state_dict
from safetensors.torch import load_file, save_file
from transformers import CLIPTokenizer

import key_names
from diffusers_pipelines import draw_in_diffusers
from drawing import ROUNDING, difference, draw, make_request
from imagefleet.job import clip
from worker.engine import contract

DEMO_MODEL = Path(__file__).parents[4] / "demo_model"

#: Name, and strength on the text encoder and on the UNet.
Uses = list[tuple[str, float, float]]

#: The second with another strength on the text encoder than on the UNet.
TWO: Uses = [("magic-fantasy-forest-v2", 0.6, 0.6), ("night-palette", 1.0, 0.4)]

pytestmark = [
    pytest.mark.slow,
    # two adapters in one model are intended
    pytest.mark.filterwarnings("ignore:Already found a `peft_config`:UserWarning"),
]


@cache
def tokenizer() -> CLIPTokenizer:
    return CLIPTokenizer.from_pretrained(clip.TOKENIZER)


def request_of(*loras: contract.Lora) -> contract.ImageRequest:
    words = {
        "prompt": "a red circle above a blue square",
        "negative_prompt": "green",
    }
    return make_request(**words, width=64, height=64, seed=5, loras=loras)


@pytest.fixture(scope="module")
def base(demo_engine: contract.Engine) -> contract.Outcome:
    """The image without a LoRA."""
    return draw(demo_engine, request_of())[0]


def load_in_diffusers(uses: Uses) -> StableDiffusionPipeline:
    scheduler = EulerAncestralDiscreteScheduler.from_pretrained(
        DEMO_MODEL / "scheduler", timestep_spacing="linspace"
    )
    pipeline = StableDiffusionPipeline.from_pretrained(
        DEMO_MODEL,
        scheduler=scheduler,
        tokenizer=tokenizer(),
        safety_checker=None,
        feature_extractor=None,
    )
    pipeline.set_progress_bar_config(disable=True)
    for name, _, _ in uses:
        weights = load_file(DEMO_MODEL / "loras" / f"{name}.safetensors")
        pipeline.load_lora_weights(weights, adapter_name=name)
    if uses:
        pipeline.set_adapters(
            [name for name, _, _ in uses],
            [{"text_encoder": text, "unet": unet} for _, text, unet in uses],
        )
    return pipeline


def test_loras_in_four_key_formats_match_diffusers(
    demo_engine: contract.Engine,
    base,
    tmp_path,
):
    expected = draw_in_diffusers(load_in_diffusers(TWO), request_of())
    for spelling in ("kohya", "diffusers", "old diffusers", "peft"):
        loras = []
        for name, text, unet in TWO:
            path = DEMO_MODEL / "loras" / f"{name}.safetensors"
            if spelling != "kohya":
                weights, metadata = key_names.respell(path, DEMO_MODEL, spelling)
                path = tmp_path / f"{name}-{spelling}.safetensors"
                save_file(weights, path, metadata)
            loras.append(contract.Lora(name, path, text, unet))
        image = draw(demo_engine, request_of(*loras))[0]
        assert difference(image, expected) <= ROUNDING
    assert difference(base, expected) > 20, "or the test shows nothing"
    assert (base == draw(demo_engine, request_of())[0]).all()


@pytest.mark.parametrize(
    "spell", [convert_state_dict_to_diffusers, dict], ids=["own", "peft"]
)
def test_a_file_saved_by_diffusers_is_read_with_alpha_from_its_header(
    demo_engine: contract.Engine,
    base,
    tmp_path,
    spell: Callable[[Any], dict[str, torch.Tensor]],
):
    uses = [("rocket", 1.0, 1.0)]  # its alpha is half of its rank
    pipeline = load_in_diffusers(uses)
    layers = {
        network: get_peft_model_state_dict(
            getattr(pipeline, network), adapter_name="rocket"
        )
        for network in ("unet", "text_encoder")
    }
    StableDiffusionPipeline.save_lora_weights(
        tmp_path,
        unet_lora_layers=spell(layers["unet"]),
        text_encoder_lora_layers=spell(layers["text_encoder"]),
        weight_name="saved.safetensors",
        unet_lora_adapter_metadata=pipeline.unet.peft_config["rocket"].to_dict(),
        text_encoder_lora_adapter_metadata=pipeline.text_encoder.peft_config[
            "rocket"
        ].to_dict(),
    )
    lora = contract.Lora("saved", tmp_path / "saved.safetensors", 1.0, 1.0)
    image = draw(demo_engine, request_of(lora))[0]
    assert difference(image, draw_in_diffusers(pipeline, request_of())) <= ROUNDING
    assert difference(image, base) > 20, "or the test shows nothing"
