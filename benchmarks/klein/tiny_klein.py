"""A tiny random model of FLUX.2-klein's architecture: transformer, VAE, Qwen3 encoder, tokenizer.

All modules are klein's, so that tests exercise the real code paths; only the widths differ.
"""

import json
from pathlib import Path
from typing import Any

import torch
from diffusers import (
    AutoencoderKLFlux2,
    FlowMatchEulerDiscreteScheduler,
    Flux2KleinPipeline,
    Flux2Transformer2DModel,
)
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from imagefleet.validation import JSONDict

#: Pixels on a side.
NATIVE_SIDE = 64

#: As Qwen3's, but for tools and thoughts of earlier answers.
CHAT_TEMPLATE = (
    "{%- for message in messages %}{{ '<|im_start|>' + message.role + '\\n' + message.content"
    " + '<|im_end|>\\n' }}{%- endfor %}{%- if add_generation_prompt %}"
    "{{ '<|im_start|>assistant\\n' }}{%- if not enable_thinking %}"
    "{{ '<think>\\n\\n</think>\\n\\n' }}{%- endif %}{%- endif %}"
)
_SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>", "</think>")

#: Layers of the encoder: klein takes the states of three, of which the last is the 27th.
_LAYERS = 28

_TEXT_WIDTH, _LATENTS = 16, 4


def build(folder: Path, *, is_distilled: bool = True, seed: int = 0) -> Path:
    """Writes a random model in diffusers' format; returns its folder.

    The same seed gives the same weights.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        transformer = make_transformer(in_channels=4 * _LATENTS)
        vae = make_vae()
        encoder = make_text_encoder()
    save(folder, transformer, vae, encoder, is_distilled=is_distilled)
    return folder


def save(
    folder: Path,
    transformer: Flux2Transformer2DModel,
    vae: AutoencoderKLFlux2,
    encoder: Qwen3ForCausalLM,
    *,
    is_distilled: bool,
) -> None:
    transformer.save_pretrained(folder / "transformer")
    vae.save_pretrained(folder / "vae")
    encoder.save_pretrained(folder / "text_encoder")
    make_tokenizer().save_pretrained(folder / "tokenizer")
    make_scheduler().save_pretrained(folder / "scheduler")
    index = {
        "_class_name": "Flux2KleinPipeline",
        "is_distilled": is_distilled,
        "scheduler": ["diffusers", "FlowMatchEulerDiscreteScheduler"],
        "text_encoder": ["transformers", "Qwen3ForCausalLM"],
        "tokenizer": ["transformers", "Qwen2TokenizerFast"],
        "transformer": ["diffusers", "Flux2Transformer2DModel"],
        "vae": ["diffusers", "AutoencoderKLFlux2"],
    }
    text = json.dumps(index, indent=2, sort_keys=True)
    (folder / "model_index.json").write_text(f"{text}\n")


def make_transformer(**changes: Any) -> Flux2Transformer2DModel:
    config: JSONDict = {
        "patch_size": 1,
        "num_layers": 2,
        "num_single_layers": 2,
        "attention_head_dim": 16,
        "num_attention_heads": 2,
        "joint_attention_dim": 3 * _TEXT_WIDTH,
        "timestep_guidance_channels": 32,
        "axes_dims_rope": (4, 4, 4, 4),
        "guidance_embeds": False,
    }
    return Flux2Transformer2DModel(**{**config, **changes}).eval()


def make_vae(**changes: Any) -> AutoencoderKLFlux2:
    config: JSONDict = {
        "block_out_channels": (8, 8, 8, 8),
        "layers_per_block": 1,
        "latent_channels": _LATENTS,
        "norm_num_groups": 2,
        "sample_size": NATIVE_SIDE,
    }
    vae = AutoencoderKLFlux2(**{**config, **changes}).eval()
    torch.nn.init.uniform_(vae.bn.running_mean, -0.5, 0.5)
    torch.nn.init.uniform_(vae.bn.running_var, 0.5, 2.0)
    return vae


def make_text_encoder(**changes: Any) -> Qwen3ForCausalLM:
    config: JSONDict = {
        "vocab_size": 256 + len(_SPECIAL),
        "hidden_size": _TEXT_WIDTH,
        "intermediate_size": 32,
        "num_hidden_layers": _LAYERS,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 8,
    }
    return Qwen3ForCausalLM(Qwen3Config(**{**config, **changes})).eval()


def make_tokenizer() -> PreTrainedTokenizerFast:
    """A token for each byte, and Qwen3's special ones."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: number for number, letter in enumerate(letters)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(
        add_prefix_space=False, use_regex=False
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(_SPECIAL))
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=_SPECIAL[0],
        eos_token=_SPECIAL[2],
        padding_side="right",
        chat_template=CHAT_TEMPLATE,
    )


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


def read_pipeline(
    folder: Path, *, is_distilled: bool = True, dtype: torch.dtype = torch.float32
) -> Flux2KleinPipeline:
    """Diffusers' pipeline of a folder that `save` wrote."""
    of_type = {"torch_dtype": dtype}
    pipeline = Flux2KleinPipeline(
        FlowMatchEulerDiscreteScheduler.from_pretrained(folder / "scheduler"),
        AutoencoderKLFlux2.from_pretrained(folder / "vae", **of_type),
        Qwen3ForCausalLM.from_pretrained(folder / "text_encoder", dtype=dtype),
        PreTrainedTokenizerFast.from_pretrained(folder / "tokenizer"),
        Flux2Transformer2DModel.from_pretrained(folder / "transformer", **of_type),
        is_distilled=is_distilled,
    )
    pipeline.set_progress_bar_config(disable=True)
    return pipeline
