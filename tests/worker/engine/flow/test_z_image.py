"""A further transformer touches its row, its network and its text rule: Z-Image, tiny."""

import itertools
from typing import Any

import pytest
import torch
from diffusers import AutoencoderKL, ZImageTransformer2DModel
from safetensors.torch import save_file
from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM

from tiny_z_image import Z_IMAGE, build
from worker.engine import contract
from worker.engine.flow import families, schedules

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def z_image(tmp_path_factory) -> Any:
    return build(tmp_path_factory.mktemp("flow") / "tiny-z-image")


@pytest.fixture
def engine(make_engine, z_image, monkeypatch) -> Any:
    monkeypatch.setitem(families.FAMILIES, Z_IMAGE.pipeline, (Z_IMAGE, Z_IMAGE))
    return make_engine(z_image, slots=3)


@torch.no_grad()
def caption(folder: Any, prompt: str) -> torch.Tensor:
    """The states of a prompt's own tokens, as `ZImagePipeline` takes them."""
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder / "tokenizer")
    encoder = Qwen3ForCausalLM.from_pretrained(folder / "text_encoder")
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": prompt}],
        tokenize=False,
        add_generation_prompt=True,
        enable_thinking=True,
    )
    found = tokenizer(chat, return_tensors="pt", max_length=64, truncation=True)
    output = encoder(**found, output_hidden_states=True)
    states: torch.Tensor = output.hidden_states[-2][0]
    return states


@torch.no_grad()
def expected(folder: Any, engine: Any, request: Any, changes: Any = ()) -> torch.Tensor:
    """The image by diffusers' network and VAE, of one caption without padding to others."""
    network = ZImageTransformer2DModel.from_pretrained(folder / "transformer")
    for path, difference_ in dict(changes).items():
        network.get_submodule(path).weight += difference_
    states = caption(folder, request.prompt)
    sides = request.height // 8, request.width // 8
    generator = torch.Generator().manual_seed(request.seed)
    latents = torch.randn((1, 4, *sides), generator=generator)
    config = engine.checkpoint.scheduler
    sigmas = schedules.make_sigmas(request.steps, config, Z_IMAGE.mu(0, 0))
    for sigma, following in itertools.pairwise(sigmas):
        time = torch.tensor([1 - float(sigma)])
        found = network([latents[0][:, None]], time, [states], return_dict=False)[0]
        latents = latents - float(following - sigma) * found[0][:, 0][None]
    vae = AutoencoderKL.from_pretrained(folder / "vae")
    scaled = latents / vae.config.scaling_factor + vae.config.shift_factor
    image: torch.Tensor = vae.decode(scaled).sample[0]
    return image


def test_captions_of_unlike_lengths_share_calls(
    engine, z_image, request_of, draw_floats
):
    requests = [
        request_of(prompt="A cat", seed=1, steps=3),
        request_of(prompt="a much longer caption of a cat", steps=5),
        request_of(prompt="A dog", width=96, height=64, steps=4),
    ]
    for request, image in zip(requests, draw_floats(engine, *requests), strict=True):
        assert (image - expected(z_image, engine, request)).abs().max() < 1e-5


def test_its_loras_are_thin_products_in_slots(
    engine, z_image, request_of, draw_floats, tmp_path
):
    path = "layers.0.attention.to_q"
    up = torch.randn(32, 4)
    down = torch.randn(4, 32) / 8
    key = f"diffusion_model.{path}"
    file = tmp_path / "style.safetensors"
    save_file({f"{key}.lora_A.weight": down, f"{key}.lora_B.weight": up}, file)
    styled = request_of(loras=(contract.Lora("style", file, 1.0, 1.0),))
    plain = request_of()
    drawn = draw_floats(engine, styled, plain)
    wanted = expected(z_image, engine, styled, {path: up @ down})
    assert (drawn[0] - wanted).abs().max() < 1e-5
    assert (drawn[1] - expected(z_image, engine, plain)).abs().max() < 1e-5


@torch.no_grad()
def test_an_image_to_begin_with_has_its_own_vaes_latents(engine, z_image):
    image = torch.full((64, 96, 3), 200, dtype=torch.uint8)
    vae = AutoencoderKL.from_pretrained(z_image / "vae")
    levels = image.permute(2, 0, 1)[None] / 127.5 - 1
    mean = vae.encode(levels).latent_dist.mean
    wanted = (mean - vae.config.shift_factor) * vae.config.scaling_factor
    found = engine._stager._images.encode(image.numpy())
    assert (found - wanted[0]).abs().max() < 1e-5
