"""Makes the demo's klein with one command: python demo_model/training/train_demo_klein.py.

A small FLUX.2-klein that has learned the scenes of one thing of the demo's world, on a CPU. Its VAE
is the demo checkpoint's with the statistics of its latents; its text encoder is a Qwen3 whose layers
add nothing to the vectors of the words, which are learned with the transformer.
"""

import argparse
import json
import multiprocessing
import os
import random
import time
from pathlib import Path

import numpy as np
import torch
from diffusers import AutoencoderKL, AutoencoderKLFlux2, Flux2Transformer2DModel
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from demo_world import captions, world
from demo_world.networks import MovingAverage
from demo_world.training.schedule import Schedule, set_learning_rate
from demo_world.training.train_vae import to_signed

#: Tokens of a prompt: the chat's and the longest caption's.
TOKENS = 32
WORD_WIDTH, LAYERS = 64, 27
SPECIAL = ("[pad]", "[unk]", "[user]", "[end]", "[assistant]")
CHAT = (
    "{%- for message in messages %}{{ '[user] ' + message.content + ' [end] ' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{ '[assistant]' }}{%- endif %}"
)
BATCH, LEARNING_RATE = 64, 2e-3


def make_tokenizer() -> PreTrainedTokenizerFast:
    """A token for each word of the world's captions, whatever its case."""
    words = sorted({word.lower() for word in captions.world_words()} | {","})
    vocabulary = {word: number for number, word in enumerate([*SPECIAL, *words])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=SPECIAL[1]))
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Split(",", "isolated")]
    )
    tokenizer.add_special_tokens(list(SPECIAL))
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=SPECIAL[0], unk_token=SPECIAL[1],
        eos_token=SPECIAL[3], padding_side="right", chat_template=CHAT,
        model_max_length=TOKENS,
    )  # fmt: skip


def make_vae(folder: Path) -> AutoencoderKLFlux2:
    own = AutoencoderKL.from_pretrained(folder / "vae").float()
    vae = AutoencoderKLFlux2(
        block_out_channels=tuple(own.config.block_out_channels),
        layers_per_block=own.config.layers_per_block,
        latent_channels=own.config.latent_channels,
        norm_num_groups=own.config.norm_num_groups,
        sample_size=own.config.sample_size,
    )
    vae.load_state_dict(own.state_dict(), strict=False)
    return vae.eval()


def make_transformer(words: int) -> tuple[Flux2Transformer2DModel, nn.Embedding]:
    transformer = Flux2Transformer2DModel(
        in_channels=16, num_layers=2, num_single_layers=4, attention_head_dim=32,
        num_attention_heads=4, joint_attention_dim=3 * WORD_WIDTH,
        timestep_guidance_channels=64, axes_dims_rope=(8, 8, 8, 8), guidance_embeds=False,
    )  # fmt: skip
    for module in transformer.modules():
        if isinstance(module, nn.Linear):
            nn.init.xavier_uniform_(module.weight)
    for layer in (transformer.proj_out, transformer.norm_out.linear):
        nn.init.zeros_(layer.weight)
    return transformer, nn.Embedding(words, WORD_WIDTH)


def make_text_encoder(embedding: nn.Embedding) -> Qwen3ForCausalLM:
    """Qwen3 whose layers pass on the vectors of the words as they are."""
    encoder = Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=embedding.num_embeddings, hidden_size=WORD_WIDTH, intermediate_size=8,
            num_hidden_layers=LAYERS + 1, num_attention_heads=1, num_key_value_heads=1,
            head_dim=8, tie_word_embeddings=True,
        )
    )  # fmt: skip
    with torch.no_grad():
        encoder.model.embed_tokens.weight.copy_(embedding.weight)
        for layer in encoder.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
    return encoder


def single_scene(rng: random.Random, options: world.SceneOptions) -> world.Scene:
    while True:
        scene = world.sample_scene(rng, options)
        if len(scene.things) == 1:
            return scene


def draw_some(seed: int, count: int) -> tuple[np.ndarray, list[str]]:
    rng = random.Random(seed)
    options = world.SceneOptions(emphasis_share=0)
    scenes = [single_scene(rng, options) for _ in range(count)]
    pictures = np.stack([np.asarray(world.draw_scene(scene)) for scene in scenes])
    return pictures, [captions.plain_caption(scene, rng) for scene in scenes]


def patches(vae: AutoencoderKLFlux2, pictures: Tensor) -> Tensor:
    found = []
    with torch.no_grad():
        for part in pictures.split(64):
            mean = vae.encode(to_signed(part)).latent_dist.mean
            found.append(functional.pixel_unshuffle(mean, 2))
    return torch.cat(found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--demo-model", type=Path, default=Path("demo_model"))
    parser.add_argument("--output", type=Path, default=Path("demo_klein"))
    parser.add_argument("--pictures", type=int, default=12_000)
    parser.add_argument("--steps", type=int, default=20_000)
    parser.add_argument("--seconds", type=float, default=1_500)
    arguments = parser.parse_args()
    torch.manual_seed(0)
    started = time.monotonic()
    blocks = [(seed, 250) for seed in range(max(1, arguments.pictures // 250))]
    with multiprocessing.get_context("fork").Pool(os.cpu_count()) as pool:
        drawn = pool.starmap(draw_some, blocks)
    pictures = torch.from_numpy(np.concatenate([each for each, _ in drawn]))
    texts = [caption for _, some in drawn for caption in some]
    print(f"{len(texts)} pictures, {time.monotonic() - started:.0f} s", flush=True)
    vae = make_vae(arguments.demo_model)
    latents = patches(vae, pictures)
    mean, variance = latents.mean((0, 2, 3)), latents.var((0, 2, 3))
    vae.bn.running_mean.copy_(mean)
    vae.bn.running_var.copy_(variance)
    deviation = (variance + vae.bn.eps).sqrt()
    latents = (latents - mean[:, None, None]) / deviation[:, None, None]
    latents = latents.flatten(2).transpose(1, 2)
    print(f"latents ready, {time.monotonic() - started:.0f} s", flush=True)
    tokenizer = make_tokenizer()
    chats = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": each}], tokenize=False, add_generation_prompt=True
        )
        for each in texts
    ]
    tokens = tokenizer(
        chats, padding="max_length", max_length=TOKENS, truncation=True, return_tensors="pt"
    ).input_ids  # fmt: skip
    transformer, embedding = make_transformer(len(tokenizer))
    train(transformer, embedding, latents, tokens, arguments)
    save(arguments.output, transformer, vae, make_text_encoder(embedding), tokenizer)
    print(f"saved, {time.monotonic() - started:.0f} s", flush=True)


def train(
    transformer: Flux2Transformer2DModel, embedding: nn.Embedding, latents: Tensor,
    tokens: Tensor, arguments: argparse.Namespace,
) -> None:  # fmt: skip
    """Flow matching; noise is drawn where few steps of klein's schedule are."""
    side = int(latents.shape[1] ** 0.5)
    zero = torch.zeros(1)
    count = torch.arange(side).float()
    image_ids = torch.cartesian_prod(zero, count, count, zero)
    text_ids = torch.cartesian_prod(zero, zero, zero, torch.arange(TOKENS).float())
    parameters = [*transformer.parameters(), *embedding.parameters()]
    optimizer = torch.optim.AdamW(parameters, LEARNING_RATE, (0.9, 0.98), weight_decay=0.01)
    average = MovingAverage(parameters, 0.999)
    schedule = Schedule(arguments.steps, arguments.seconds, 500)
    for step, progress in schedule:
        set_learning_rate(optimizer, step, progress, LEARNING_RATE)
        chosen = torch.randint(len(latents), (BATCH,))
        image, noise = latents[chosen], torch.randn(BATCH, *latents.shape[1:])
        even = torch.rand(BATCH)
        sigma = 4 * even / (1 + 3 * even)
        noisy = image + sigma[:, None, None] * (noise - image)
        words = embedding(tokens[chosen])
        predicted = transformer(
            hidden_states=noisy, encoder_hidden_states=torch.cat([words] * 3, dim=-1),
            timestep=sigma, img_ids=image_ids, txt_ids=text_ids, return_dict=False,
        )[0]  # fmt: skip
        loss = (predicted - (noise - image)).square().mean()
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        average.update()
        schedule.report(step, loss=loss.detach())
    average.copy_to_live()


def save(
    folder: Path, transformer: nn.Module, vae: nn.Module, encoder: nn.Module,
    tokenizer: PreTrainedTokenizerFast,
) -> None:  # fmt: skip
    from klein import tiny_klein

    for network in (transformer, vae, encoder):
        network.bfloat16()
    tiny_klein.save(
        folder, transformer, vae, encoder, is_distilled=True, tokenizer=tokenizer
    )
    index = json.loads((folder / "model_index.json").read_text())
    assert index["is_distilled"]


if __name__ == "__main__":
    main()
