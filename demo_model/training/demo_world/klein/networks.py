"""The demo's klein: FLUX.2-klein's architecture, a thousandth of its size, and its files.

Transformer, autoencoder, Qwen3 encoder and scheduler are klein's, so that diffusers'
`Flux2KleinPipeline` loads the folder. Klein takes the states of a quarter, a half and three
quarters of its encoder's layers; so does this one.
"""

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from diffusers import (
    AutoencoderKL,
    AutoencoderKLFlux2,
    FlowMatchEulerDiscreteScheduler,
    Flux2Transformer2DModel,
)
from diffusers.pipelines.flux2.pipeline_flux2_klein import compute_empirical_mu
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from torch import Tensor, nn
from transformers import Qwen2TokenizerFast, Qwen3Config, Qwen3ForCausalLM

from demo_world import captions, world

#: Of a picture, each way, and the pixels of a patch.
CELLS, PATCH_PX = 8, 16

IMAGE_TOKENS = CELLS**2

#: Klein's, whatever the prompt.
TEXT_TOKENS = 512

LATENT_CHANNELS = 4

#: Of a patch: 2x2 latents.
CHANNELS = 4 * LATENT_CHANNELS

TEXT_WIDTH, TEXT_LAYERS = 96, 4

#: Layers whose states klein takes, as shares: the 9th, 18th and 27th of Qwen3-4B's 36.
TAKEN_LAYERS: tuple[int, ...] = tuple(part * TEXT_LAYERS // 4 for part in (1, 2, 3))

#: Without guidance, as the distilled klein.
STEPS = 4

PAD, BEGIN, END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"

#: Qwen3's; the second tuple's are not special to it, only whole.
_SPECIAL_TOKENS = (
    *(PAD, BEGIN, END, "<|object_ref_start|>", "<|object_ref_end|>", "<|box_start|>"),
    *("<|box_end|>", "<|quad_start|>", "<|quad_end|>", "<|vision_start|>", "<|vision_end|>"),
    *("<|vision_pad|>", "<|image_pad|>", "<|video_pad|>"),
)  # fmt: skip
_WORD_TOKENS = (
    *("<tool_call>", "</tool_call>", "<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>"),
    *("<|fim_pad|>", "<|repo_name|>", "<|file_sep|>", "<tool_response>", "</tool_response>"),
    *("<think>", "</think>"),
)  # fmt: skip

#: Qwen3's, without tools and without the thoughts of earlier answers.
_CHAT_TEMPLATE = (
    "{%- for message in messages %}"
    "{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}"
    "{{- '<|im_start|>assistant\\n' }}"
    "{%- if enable_thinking is defined and enable_thinking is false %}"
    "{{- '<think>\\n\\n</think>\\n\\n' }}"
    "{%- endif %}"
    "{%- endif %}"
)

#: Of the tokenizer, the special tokens apart; the world's captions need no more.
_PIECES = 1_470
_CAPTIONS_READ = 20_000


def chat_text(prompt: str) -> str:
    """What klein's pipeline has its tokenizer's chat template make of a prompt."""
    return f"{BEGIN}user\n{prompt}{END}\n{BEGIN}assistant\n<think>\n\n</think>\n\n"


def build_tokenizer() -> Qwen2TokenizerFast:
    """Qwen's kind of tokenizer, its pieces learned from the world's captions."""
    qwen = Qwen2TokenizerFast()
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = qwen.backend_tokenizer.normalizer
    tokenizer.pre_tokenizer = qwen.backend_tokenizer.pre_tokenizer
    trainer = trainers.BpeTrainer(
        vocab_size=_PIECES,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_captions(), trainer)
    learned = json.loads(tokenizer.to_str())["model"]
    built = Qwen2TokenizerFast(
        vocab=learned["vocab"],
        merges=[tuple(each) for each in learned["merges"]],
        eos_token=END,
        pad_token=PAD,
        model_max_length=131_072,
    )
    built.add_special_tokens({"additional_special_tokens": list(_SPECIAL_TOKENS)})
    built.add_tokens(list(_WORD_TOKENS))
    built.chat_template = _CHAT_TEMPLATE
    built.padding_side = "right"
    return built


def _captions() -> Iterator[str]:
    rng = random.Random(0)
    for _ in range(_CAPTIONS_READ):
        text = captions.plain_caption(world.sample_scene(rng), rng)
        yield text[0].upper() + text[1:] if rng.random() < 0.1 else text
    words = (*captions.QUALITY_WORDS, *captions.NEGATIVE_WORDS)
    for _ in range(_CAPTIONS_READ // 10):
        yield ", ".join(rng.sample(words, 5))
    yield from ["user", "assistant", "\n\n"] * 100


def build_text_encoder(tokenizer: Qwen2TokenizerFast) -> Qwen3ForCausalLM:
    encoder = Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=-(-len(tokenizer) // 64) * 64,
            hidden_size=TEXT_WIDTH,
            intermediate_size=256,
            num_hidden_layers=TEXT_LAYERS,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=32,
            initializer_range=0.08,
            tie_word_embeddings=True,
            rope_parameters={"rope_type": "default", "rope_theta": 1_000_000.0},
            bos_token_id=None,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
    )
    # The states are taken without a norm: words begin as large as what the layers add to them.
    nn.init.normal_(encoder.model.embed_tokens.weight, std=0.5)
    return encoder


def build_transformer() -> Flux2Transformer2DModel:
    transformer = Flux2Transformer2DModel(
        patch_size=1,
        in_channels=CHANNELS,
        num_layers=1,
        num_single_layers=6,
        attention_head_dim=32,
        num_attention_heads=6,
        joint_attention_dim=len(TAKEN_LAYERS) * TEXT_WIDTH,
        timestep_guidance_channels=256,
        mlp_ratio=3.0,
        axes_dims_rope=(8, 8, 8, 8),
        rope_theta=2000,
        guidance_embeds=False,
    )
    for module in transformer.modules():
        if isinstance(module, nn.Linear):
            nn.init.xavier_uniform_(module.weight)
    # Each block begins as nothing, as in DiT (Peebles and Xie, 2022).
    for layer in (
        transformer.double_stream_modulation_img.linear,
        transformer.double_stream_modulation_txt.linear,
        transformer.single_stream_modulation.linear,
        transformer.norm_out.linear,
        transformer.proj_out,
    ):
        nn.init.zeros_(layer.weight)
    return transformer


def build_vae(weights: AutoencoderKL | None = None) -> AutoencoderKLFlux2:
    """*weights*: an autoencoder of the same world to take over; its statistics are set later."""
    vae = AutoencoderKLFlux2(
        block_out_channels=(32, 64, 64, 64),
        layers_per_block=1,
        latent_channels=LATENT_CHANNELS,
        norm_num_groups=8,
        sample_size=world.IMAGE_PX,
    )
    if weights is not None:
        vae.load_state_dict({**vae.state_dict(), **weights.state_dict()})
    return vae.eval()


def make_scheduler() -> FlowMatchEulerDiscreteScheduler:
    """Klein's scheduler."""
    return FlowMatchEulerDiscreteScheduler(
        shift=3.0,
        use_dynamic_shifting=True,
        base_shift=0.5,
        max_shift=1.15,
        base_image_seq_len=256,
        max_image_seq_len=4096,
    )


def step_sigmas(steps: int) -> Tensor:
    """Klein's shares of noise [steps + 1] for a picture of IMAGE_TOKENS; the last is 0."""
    scheduler = make_scheduler()
    even = torch.linspace(1, 1 / steps, steps).tolist()
    mu = compute_empirical_mu(IMAGE_TOKENS, steps)
    scheduler.set_timesteps(sigmas=even, mu=mu)
    return scheduler.sigmas


def to_tokens(latents: Tensor) -> Tensor:
    """Latents [B, 4, 16, 16] -> [B, IMAGE_TOKENS, CHANNELS], not yet normalised."""
    patches = latents.unflatten(3, (CELLS, 2)).unflatten(2, (CELLS, 2))
    return patches.permute(0, 2, 4, 1, 3, 5).flatten(3).flatten(1, 2)


def to_latents(tokens: Tensor) -> Tensor:
    """The inverse of `to_tokens`."""
    patches = tokens.unflatten(2, (LATENT_CHANNELS, 2, 2))
    patches = patches.unflatten(1, (CELLS, CELLS))
    return patches.permute(0, 3, 1, 4, 2, 5).flatten(4).flatten(2, 3)


def statistics(vae: AutoencoderKLFlux2) -> tuple[Tensor, Tensor]:
    """Mean and deviation [CHANNELS] of patches of latents."""
    deviation = (vae.bn.running_var + vae.config.batch_norm_eps).sqrt()
    return vae.bn.running_mean, deviation


def save_text_encoder(
    encoder: Qwen3ForCausalLM, tokenizer: Qwen2TokenizerFast, folder: Path
) -> None:
    """Saves float16 weights that load as float32 unless a type is asked for."""
    encoder.half().save_pretrained(folder / "text_encoder")
    file = folder / "text_encoder" / "config.json"
    config = json.loads(file.read_text()) | {"dtype": "float32"}
    file.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    tokenizer.save_pretrained(folder / "tokenizer")
    file = folder / "tokenizer" / "tokenizer_config.json"
    config = json.loads(file.read_text())
    for key in ("is_local", "local_files_only"):  # of this machine's copy
        config.pop(key, None)
    file.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


def save_index(folder: Path, *, is_distilled: bool) -> None:
    """Writes the scheduler's settings, and which parts diffusers' pipeline has."""
    make_scheduler().save_pretrained(folder / "scheduler")
    index: dict[str, Any] = {
        "_class_name": "Flux2KleinPipeline",
        "_diffusers_version": "0.42.1",
        "is_distilled": is_distilled,
        "scheduler": ["diffusers", "FlowMatchEulerDiscreteScheduler"],
        "text_encoder": ["transformers", "Qwen3ForCausalLM"],
        "tokenizer": ["transformers", "Qwen2TokenizerFast"],
        "transformer": ["diffusers", "Flux2Transformer2DModel"],
        "vae": ["diffusers", "AutoencoderKLFlux2"],
    }
    (folder / "model_index.json").write_text(json.dumps(index, indent=2) + "\n")
