"""Klein's networks as they are trained: the same numbers as diffusers', faster.

Klein gives its transformer 512 text tokens whatever the prompt, nearly all of them padding, whose
states hardly differ. Most of the training sees the first tokens and a sample of the others instead,
each of which counts in attention for as many as it stands for: a quarter of the tokens.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from diffusers import Flux2Transformer2DModel
from torch import Tensor, nn
from torch.nn import functional
from transformers import Qwen3ForCausalLM

from demo_world.klein import drawing, networks
from demo_world.training import schedule

#: Of the padding behind the first tokens: one of each of so many equal parts.
_SAMPLED_TOKENS = 16


@dataclass(frozen=True, slots=True)
class TextPlan:
    """Which of the text tokens are computed."""

    positions: Tensor
    """[T], rising."""
    bias: Tensor | None
    """What attention adds for each key [S, S], S being T + IMAGE_TOKENS; None: all are there."""


def whole_plan(device: torch.device) -> TextPlan:
    return TextPlan(torch.arange(networks.TEXT_TOKENS, device=device), None)


def sampled_plan(device: torch.device) -> TextPlan:
    """A new sample; for prompts of no more than `drawing.SHORT_TOKENS`."""
    first = drawing.SHORT_TOKENS
    part = (networks.TEXT_TOKENS - first) // _SAMPLED_TOKENS
    parts = torch.arange(first, networks.TEXT_TOKENS, part, device=device)
    drawn = parts + torch.randint(part, parts.shape, device=device)
    positions = torch.cat([torch.arange(first, device=device), drawn])
    bias = torch.zeros(len(positions) + networks.IMAGE_TOKENS, device=device)
    bias[first : len(positions)] = math.log(part)
    return TextPlan(positions, bias.expand(len(bias), -1).contiguous())


Layer = Callable[..., Any]


@dataclass(frozen=True, slots=True)
class Layers:
    """How one layer of each kind is computed."""

    double: Layer
    single: Layer
    text: Layer


def make_layers(*, is_compiled: bool) -> Layers:
    kinds = (_double, _single, _text_layer)
    if is_compiled:
        # One program for all layers of a kind; another for each size.
        torch._dynamo.config.recompile_limit = 64
        # What cannot be compiled is computed as it is.
        torch._dynamo.config.suppress_errors = True
        kinds = tuple(torch.compile(each, dynamic=False) for each in kinds)
    return Layers(*kinds)


def _norm(x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    return functional.layer_norm(x, x.shape[-1:], eps=1e-6) * (1 + scale) + shift


def _rms(x: Tensor, norm: Any, eps: float = 1e-6) -> Tensor:
    x = x.float()
    return x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * norm.weight


def _turned(x: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
    """*x* [B, S, heads, D] by the angles of its positions, neighbouring channels being a pair."""
    cos, sin = (each[None, :, None] for each in rotary)
    real, imaginary = x.unflatten(-1, (-1, 2)).unbind(-1)
    return x * cos + torch.stack([-imaginary, real], -1).flatten(-2) * sin


def _attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
    """Each [B, S, heads, D] -> [B, S, heads * D]."""
    kind = value.dtype
    heads = (each.to(kind).transpose(1, 2) for each in (query, key, value))
    mask = mask if mask is None or mask.dtype == torch.bool else mask.to(kind)
    output = functional.scaled_dot_product_attention(*heads, attn_mask=mask)
    return output.transpose(1, 2).flatten(2)


def _heads(projection: Tensor, attention: Any) -> Tensor:
    return projection.unflatten(-1, (-1, attention.head_dim))


def _gated(x: Tensor) -> Tensor:
    gate, value = x.chunk(2, -1)
    return functional.silu(gate) * value


def _double(
    block: Any,
    image: Tensor,
    text: Tensor,
    image_shifts: Tensor,
    text_shifts: Tensor,
    rotary: tuple[Tensor, Tensor],
    bias: Tensor | None,
) -> tuple[Tensor, Tensor]:
    of_image, of_text = image_shifts.chunk(6, -1), text_shifts.chunk(6, -1)
    own = block.attn
    x = _norm(image, of_image[1], of_image[0])
    y = _norm(text, of_text[1], of_text[0])
    query = torch.cat(
        [
            _rms(_heads(own.add_q_proj(y), own), own.norm_added_q),
            _rms(_heads(own.to_q(x), own), own.norm_q),
        ],
        dim=1,
    )
    key = torch.cat(
        [
            _rms(_heads(own.add_k_proj(y), own), own.norm_added_k),
            _rms(_heads(own.to_k(x), own), own.norm_k),
        ],
        dim=1,
    )
    value = _heads(torch.cat([own.add_v_proj(y), own.to_v(x)], dim=1), own)
    output = _attend(_turned(query, rotary), _turned(key, rotary), value, bias)
    tokens = text.shape[1]
    image = image + of_image[2] * own.to_out[0](output[:, tokens:])
    text = text + of_text[2] * own.to_add_out(output[:, :tokens])
    x = block.ff.linear_in(_norm(image, of_image[4], of_image[3]))
    y = block.ff_context.linear_in(_norm(text, of_text[4], of_text[3]))
    image = image + of_image[5] * block.ff.linear_out(_gated(x))
    text = text + of_text[5] * block.ff_context.linear_out(_gated(y))
    return image, text


def _single(
    block: Any,
    x: Tensor,
    shifts: Tensor,
    rotary: tuple[Tensor, Tensor],
    bias: Tensor | None,
) -> Tensor:
    shift, scale, gate = shifts.chunk(3, -1)
    own = block.attn
    joined = own.to_qkv_mlp_proj(_norm(x, scale, shift))
    width = own.inner_dim
    query, key, value = (
        _heads(each, own) for each in joined[..., : 3 * width].chunk(3, -1)
    )
    query = _turned(_rms(query, own.norm_q), rotary)
    key = _turned(_rms(key, own.norm_k), rotary)
    output = _attend(query, key, value, bias)
    hidden = torch.cat([output, _gated(joined[..., 3 * width :])], dim=-1)
    return x + gate * own.to_out(hidden)


def _text_layer(
    layer: Any, x: Tensor, rotary: tuple[Tensor, Tensor], mask: Tensor
) -> Tensor:
    own = layer.self_attn
    eps = layer.input_layernorm.variance_epsilon
    y = _rms(x, layer.input_layernorm, eps)
    query = _rms(_heads(own.q_proj(y), own), own.q_norm, eps)
    key = _rms(_heads(own.k_proj(y), own), own.k_norm, eps)
    value = _heads(own.v_proj(y), own)
    key, value = (
        each.repeat_interleave(own.num_key_value_groups, dim=2) for each in (key, value)
    )
    cos, sin = (each[:, :, None] for each in rotary)

    def turned(part: Tensor) -> Tensor:
        first, second = part.chunk(2, -1)
        return part * cos + torch.cat([-second, first], -1) * sin

    x = x + own.o_proj(_attend(turned(query), turned(key), value, mask))
    y = _rms(x, layer.post_attention_layernorm, eps)
    mlp = layer.mlp
    return x + mlp.down_proj(functional.silu(mlp.gate_proj(y)) * mlp.up_proj(y))


class TextEncoder:
    """The states that klein takes of its text encoder."""

    def __init__(self, encoder: Qwen3ForCausalLM, layers: Layers, pad: int) -> None:
        self.network = encoder
        self._layers = layers
        self._pad = pad

    def __call__(self, ids: Tensor, plan: TextPlan) -> Tensor:
        """Ids [B, LONG_TOKENS] -> states [B, T, 3 * TEXT_WIDTH]."""
        model = self.network.model
        positions = plan.positions
        lengths = (ids != self._pad).sum(1)
        missing = networks.TEXT_TOKENS - ids.shape[1]
        ids = functional.pad(ids, (0, missing), value=self._pad)[:, positions]
        is_past = positions[:, None] >= positions
        is_word = positions < lengths[:, None]
        mask = is_past & is_word[:, None, None]
        x = model.embed_tokens(ids)
        rotary = model.rotary_emb(x, positions[None])
        states = []
        for layer in model.layers[: networks.TAKEN_LAYERS[-1]]:
            x = self._layers.text(layer, x, rotary, mask)
            states.append(x)
        return torch.cat([states[each - 1] for each in networks.TAKEN_LAYERS], dim=-1)


class Flow(nn.Module):
    """A transformer that predicts the velocity, noise - picture."""

    def __init__(
        self, transformer: Flux2Transformer2DModel, layers: Layers, *, taps: int = 3
    ) -> None:
        """*taps*: after so many single blocks the image's states are given out, too."""
        super().__init__()
        self.network = transformer
        self._layers = layers
        self._taps = taps
        device = transformer.device
        words, cells = torch.arange(networks.TEXT_TOKENS), torch.arange(networks.CELLS)
        zero = torch.zeros(1, dtype=torch.long)
        places = torch.cat(
            [
                torch.cartesian_prod(zero, zero, zero, words),
                torch.cartesian_prod(zero, cells, cells, zero),
            ]
        )
        self._rotary = transformer.pos_embed(places.to(device))

    def forward(
        self, latents: Tensor, sigmas: Tensor, states: Tensor, plan: TextPlan
    ) -> tuple[Tensor, Tensor]:
        """The velocity, and states in the middle, [B, IMAGE_TOKENS, width].

        Args:
            latents: [B, IMAGE_TOKENS, CHANNELS], noisy.
            sigmas: the share of noise [B].
            states: of the plan's text tokens.
            plan: of the text.
        """
        own = self.network
        image_places = networks.TEXT_TOKENS + torch.arange(
            networks.IMAGE_TOKENS, device=latents.device
        )
        places = torch.cat([plan.positions, image_places])
        cos, sin = (each[places] for each in self._rotary)
        rotary = (cos, sin)
        time = own.time_guidance_embed(sigmas * 1000, None)
        of_image = own.double_stream_modulation_img(time)[:, None]
        of_text = own.double_stream_modulation_txt(time)[:, None]
        of_both = own.single_stream_modulation(time)[:, None]
        image = own.x_embedder(latents).float()
        text = own.context_embedder(states).float()
        for block in own.transformer_blocks:
            image, text = self._layers.double(
                block, image, text, of_image, of_text, rotary, plan.bias
            )
        both = torch.cat([text, image], dim=1)
        middle = both
        for number, block in enumerate(own.single_transformer_blocks, start=1):
            both = self._layers.single(block, both, of_both, rotary, plan.bias)
            if number == self._taps:
                middle = both
        tokens = text.shape[1]
        velocity = own.proj_out(own.norm_out(both[:, tokens:], time))
        return velocity.float(), middle[:, tokens:]


@torch.no_grad()
def draw(
    flow: Flow,
    encoder: TextEncoder,
    ids: Tensor,
    noise: Tensor,
    *,
    steps: int,
    guidance: float = 1.0,
    empty: Tensor | None = None,
) -> Tensor:
    """Latents of prompts by Euler's steps, as klein's pipeline takes them.

    *empty*: ids [1, LONG_TOKENS] of the empty prompt, where there is guidance.
    """
    device = noise.device
    plan = whole_plan(device)
    with schedule.autocast(device):
        states = encoder(ids, plan)
        nothing = encoder(empty, plan) if empty is not None else None
        sigmas = networks.step_sigmas(steps).to(device)
        latents = noise
        for sigma, following in zip(sigmas[:-1], sigmas[1:], strict=True):
            at = sigma.expand(len(latents))
            velocity, _ = flow(latents, at, states, plan)
            if nothing is not None:
                rows = nothing.expand(len(latents), -1, -1)
                unguided, _ = flow(latents, at, rows, plan)
                velocity = unguided + guidance * (velocity - unguided)
            latents = latents + (following - sigma) * velocity
    return latents
