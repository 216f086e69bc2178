"""Stable Diffusion 1.x's UNet for slots: two rows a slot, and weights of its own for each.

The same arithmetic on the same weights as diffusers' UNet2DConditionModel, whose resnets it calls.
What differs: activations stay in one layout (channels last) all the way; self-attention's q, k and
v are one product; cross-attention's keys and values come from outside, since they change with the
prompt, not with the step. Rows are in the order slot 0's prompt, slot 0's negative prompt, slot
1's prompt, ...
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - its name everywhere
from torch import nn

from jobs import errors
from worker.engine import attention
from worker.engine.slot_linear import Factors, SlotLinear


class SlotUnet(nn.Module):
    """Shares its weights with the *unet* that it is made from, which stays usable."""

    def __init__(self, unet: Any) -> None:
        super().__init__()
        paths = {module: path for path, module in unet.named_modules()}
        self.time_proj = unet.time_proj
        self.time_embedding = unet.time_embedding
        self.conv_in = unet.conv_in
        self.down = nn.ModuleList(_Down(block, paths) for block in unet.down_blocks)
        self.mid = _Layers(unet.mid_block.resnets[1:], unet.mid_block.attentions, paths)
        self.mid_first = unet.mid_block.resnets[0]
        self.up = nn.ModuleList(_Up(block, paths) for block in unet.up_blocks)
        self.norm_out = unet.conv_norm_out
        self.conv_out = unet.conv_out
        self.linears = [module for module in self.modules() if isinstance(module, SlotLinear)]
        crosses = [module for module in self.modules() if isinstance(module, _CrossAttention)]
        self._self_attentions = [
            module for module in self.modules() if isinstance(module, _SelfAttention)
        ]
        self.keys_values = KeysValues(crosses, paths)
        self.dtype: torch.dtype = self.conv_out.weight.dtype

    @property
    def paths(self) -> frozenset[str]:
        """The layers for which each slot can have weights of its own."""
        own = (path for linear in self.linears for path in linear.parts)
        return frozenset([*own, *self.keys_values.parts])

    def forward(
        self,
        x: torch.Tensor,
        times: torch.Tensor,
        context: torch.Tensor,
        mask: torch.Tensor,
        by_slot: bool,
    ) -> torch.Tensor:
        """The UNet's output [2 * slots, 4, height, width].

        x [2 * slots, 4, height, width], times [2 * slots]; context [2 * slots, tokens, width of
        all keys and values] of `keys_values`, mask [2 * slots, 1, 1, tokens], added to the scores.
        *by_slot* takes the slots' own weights, else the shared ones.
        """
        time = self.time_embedding(self.time_proj(times).to(x.dtype))
        x = self.conv_in(x)
        skips = [x]
        for block in self.down:
            x = block(x, time, skips, context, mask, by_slot)
        x = self.mid_first(x, time)
        for attend, resnet in zip(self.mid.attentions, self.mid.resnets, strict=True):
            x = resnet(attend(x, context, mask, by_slot), time)
        for block in self.up:
            x = block(x, time, skips, context, mask, by_slot)
        output: torch.Tensor = self.conv_out(F.silu(self.norm_out(x)))
        return output

    def resize(self, slots: int) -> None:
        """Makes room for the own weights of *slots* slots, all zero."""
        for linear in self.linears:
            linear.resize(slots)

    @contextlib.contextmanager
    def choosing(self, chooser: attention.Chooser) -> Iterator[None]:
        """Within it, each self-attention takes the kernel that is fastest for what it sees."""
        for attend in self._self_attentions:
            attend.kernel = functools.partial(_choose, attend, chooser)
        try:
            yield
        except BaseException:
            self.attend_by_default()
            raise

    def attend_by_default(self) -> None:
        for attend in self._self_attentions:
            attend.kernel = attention.default

    @torch.no_grad()
    def load_slot(self, slot: int, factors: Mapping[str, Factors]) -> None:
        """Gives a slot the shared weights and on top its LoRAs' changes; no synchronisation."""
        own = [linear.slots[slot] for linear in self.linears]
        torch._foreach_copy_(own, [linear.weight for linear in self.linears])
        for linear in self.linears:
            linear.change(slot, factors)


class KeysValues(nn.Module):
    """The keys and values of all cross-attentions: one product over a prompt's vectors."""

    weight: torch.Tensor

    def __init__(self, crosses: list[_CrossAttention], paths: Mapping[nn.Module, str]) -> None:
        super().__init__()
        layers = {paths[layer]: layer for cross in crosses for layer in (cross.to_k, cross.to_v)}
        self._packed = SlotLinear(layers)
        self.parts = self._packed.parts
        for at, cross in enumerate(crosses):
            keys, values = list(self.parts.values())[2 * at : 2 * at + 2]
            cross.place = (keys.start, values.start, values.stop)
        self.width = len(self._packed.weight)

    @torch.no_grad()
    def compute(self, vectors: torch.Tensor, factors: Mapping[str, Factors]) -> torch.Tensor:
        """Keys and values [rows, tokens, width] of vectors [rows, tokens, text width]."""
        weight = self._packed.weight
        if not factors.keys().isdisjoint(self.parts):
            weight = weight.clone()
            for path, rows in self.parts.items():
                if path in factors:
                    weight[rows].addmm_(*factors[path])
        return F.linear(vectors, weight, self._packed.bias)


class _Layers(nn.Module):
    def __init__(self, resnets: Any, attentions: Any, paths: Mapping[nn.Module, str]) -> None:
        super().__init__()
        self.resnets = nn.ModuleList(resnets)
        self.attentions = nn.ModuleList(_Transformer(each, paths) for each in attentions)

    def pairs(self) -> Iterator[tuple[nn.Module, nn.Module | None]]:
        return itertools.zip_longest(self.resnets, self.attentions)


class _Down(_Layers):
    def __init__(self, block: Any, paths: Mapping[nn.Module, str]) -> None:
        super().__init__(block.resnets, getattr(block, "attentions", None) or (), paths)
        self.samplers = nn.ModuleList(block.downsamplers or ())

    def forward(
        self,
        x: torch.Tensor,
        time: torch.Tensor,
        skips: list[torch.Tensor],
        context: torch.Tensor,
        mask: torch.Tensor,
        by_slot: bool,
    ) -> torch.Tensor:
        for resnet, attend in self.pairs():
            x = resnet(x, time)
            if attend is not None:
                x = attend(x, context, mask, by_slot)
            skips.append(x)
        for sampler in self.samplers:
            x = sampler(x)
            skips.append(x)
        return x


class _Up(_Layers):
    def __init__(self, block: Any, paths: Mapping[nn.Module, str]) -> None:
        super().__init__(block.resnets, getattr(block, "attentions", None) or (), paths)
        self.samplers = nn.ModuleList(sampler.conv for sampler in block.upsamplers or ())

    def forward(
        self,
        x: torch.Tensor,
        time: torch.Tensor,
        skips: list[torch.Tensor],
        context: torch.Tensor,
        mask: torch.Tensor,
        by_slot: bool,
    ) -> torch.Tensor:
        for resnet, attend in self.pairs():
            x = resnet(torch.cat([x, skips.pop()], dim=1), time)
            if attend is not None:
                x = attend(x, context, mask, by_slot)
        for conv in self.samplers:
            # Not diffusers' own upsampler: from 64 rows on it copies into another layout.
            x = conv(F.interpolate(x, size=skips[-1].shape[2:]))
        return x


class _Transformer(nn.Module):
    def __init__(self, original: Any, paths: Mapping[nn.Module, str]) -> None:
        super().__init__()
        self.norm = original.norm
        self.proj_in = _linear(paths, original.proj_in)
        self.blocks = nn.ModuleList(_Block(block, paths) for block in original.transformer_blocks)
        self.proj_out = _linear(paths, original.proj_out)

    def forward(
        self, x: torch.Tensor, context: torch.Tensor, mask: torch.Tensor, by_slot: bool
    ) -> torch.Tensor:
        rows, channels, height, width = x.shape
        tokens = self.norm(x).permute(0, 2, 3, 1).reshape(rows, height * width, channels)
        tokens = self.proj_in(tokens, by_slot)
        for block in self.blocks:
            tokens = block(tokens, context, mask, by_slot)
        tokens = self.proj_out(tokens, by_slot)
        changed: torch.Tensor = tokens.view(rows, height, width, channels).permute(0, 3, 1, 2) + x
        return changed


class _Block(nn.Module):
    def __init__(self, original: Any, paths: Mapping[nn.Module, str]) -> None:
        super().__init__()
        gate = original.ff.net[0]
        if original.norm_type != "layer_norm" or original.attn2 is None or original.pos_embed:
            raise errors.SetupError("this UNet is not Stable Diffusion 1.x's: set engine to batch")
        self.norm1, self.norm2, self.norm3 = original.norm1, original.norm2, original.norm3
        self.attend_self = _SelfAttention(original.attn1, paths)
        self.attend_prompt = _CrossAttention(original.attn2, paths)
        self.gate = _linear(paths, gate.proj)
        self.out = _linear(paths, original.ff.net[2])

    def forward(
        self, x: torch.Tensor, context: torch.Tensor, mask: torch.Tensor, by_slot: bool
    ) -> torch.Tensor:
        x = x + self.attend_self(self.norm1(x), by_slot)
        x = x + self.attend_prompt(self.norm2(x), context, mask, by_slot)
        values, gates = self.gate(self.norm3(x), by_slot).chunk(2, dim=-1)
        gated: torch.Tensor = x + self.out(values * F.gelu(gates), by_slot)
        return gated


class _SelfAttention(nn.Module):
    def __init__(self, original: Any, paths: Mapping[nn.Module, str]) -> None:
        super().__init__()
        self.heads = original.heads
        self.qkv = _linear(paths, original.to_q, original.to_k, original.to_v)
        self.out = _linear(paths, original.to_out[0])
        self.kernel: attention.Attend = attention.default

    def forward(self, x: torch.Tensor, by_slot: bool) -> torch.Tensor:
        q, k, v = (_by_head(each, self.heads) for each in self.qkv(x, by_slot).chunk(3, dim=-1))
        attended = self.kernel(q, k, v)
        output: torch.Tensor = self.out(attended.transpose(1, 2).flatten(2), by_slot)
        return output


class _CrossAttention(nn.Module):
    #: Where its keys begin in the context's last dimension, where its values begin and end.
    place: tuple[int, int, int]

    def __init__(self, original: Any, paths: Mapping[nn.Module, str]) -> None:
        super().__init__()
        self.heads = original.heads
        self.to_q = _linear(paths, original.to_q)
        self.to_k, self.to_v = original.to_k, original.to_v
        self.out = _linear(paths, original.to_out[0])

    def forward(
        self, x: torch.Tensor, context: torch.Tensor, mask: torch.Tensor, by_slot: bool
    ) -> torch.Tensor:
        keys, values, end = self.place
        q = _by_head(self.to_q(x, by_slot), self.heads)
        k = _by_head(context[..., keys:values], self.heads)
        v = _by_head(context[..., values:end], self.heads)
        attended = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        output: torch.Tensor = self.out(attended.transpose(1, 2).flatten(2), by_slot)
        return output


def _choose(
    attend: _SelfAttention,
    chooser: attention.Chooser,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
) -> torch.Tensor:
    attend.kernel = chooser.choose(q, k, v)
    return attend.kernel(q, k, v)


def _linear(paths: Mapping[nn.Module, str], *layers: nn.Module) -> SlotLinear:
    return SlotLinear({paths[layer]: layer for layer in layers})


def _by_head(x: torch.Tensor, heads: int) -> torch.Tensor:
    """From [rows, tokens, width] to [rows, heads, tokens, width of a head], without a copy."""
    rows, tokens, width = x.shape
    return x.view(rows, tokens, heads, width // heads).transpose(1, 2)
