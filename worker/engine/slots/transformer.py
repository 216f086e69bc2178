"""The transformers of Stable Diffusion's UNets for slots: attention to the image and the prompt."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - its name everywhere
from torch import nn

from imagefleet import errors
from worker.engine.kernels.layers import Attend, KernelSelector, default_attention
from worker.engine.lora.kinds import StackedChange
from worker.engine.lora.merge import Group
from worker.engine.slots.linear import SlotLinear, WeightStack, stack_by_shape

UNKNOWN_UNET = "this UNet is not of Stable Diffusion's architecture, the only one supported"


class KeysValues:
    """The keys and values of all cross-attentions, computed from a prompt's vectors."""

    def __init__(
        self,
        crosses: list[CrossAttention],
        paths: Mapping[nn.Module, str],
        *,
        saves_memory: bool = False,
    ) -> None:
        """*saves_memory*: it is too short to merge changes of low rank."""
        self._saves_memory = saves_memory
        layers = [layer for cross in crosses for layer in (cross.to_k, cross.to_v)]
        linears = (SlotLinear({paths[each]: each}) for each in layers)
        self.stacks = stack_by_shape(WeightStack, "prompt", linears)
        slices: dict[str, slice] = {}
        self.width = 0
        for (_, width, _), stack in self.stacks.items():
            for path in stack.paths:
                slices[path] = slice(self.width, self.width + width)
                self.width += width
        for cross in crosses:
            cross.keys, cross.values = (slices[paths[each]] for each in (cross.to_k, cross.to_v))

    @torch.no_grad()
    def compute(
        self,
        vectors: torch.Tensor,
        changes: Mapping[Group, StackedChange],
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Keys and values [rows, tokens, width] of vectors [rows, tokens, text width].

        *out*, if given, is what they are written to.
        """
        if out is None:
            out = vectors.new_empty((*vectors.shape[:2], self.width))
        rows, outputs, at = vectors.flatten(0, 1), out.flatten(0, 1), 0
        for group, stack in self.stacks.items():
            weights, change = stack.shared, changes.get(group)
            stays_apart = change is not None and self._saves_memory and not change.stacks
            if change is not None and not stays_apart:
                weights = torch.empty_like(stack.shared)
                change.merge(stack.shared, weights)
            flat = weights.flatten(0, 1)
            part = outputs[:, at : at + len(flat)]
            torch.mm(rows, flat.T, out=part)
            if change is not None and stays_apart:
                change.add_to(part, rows)
            at += len(flat)
        return out


class Transformer(nn.Module):
    def __init__(self, original: Any, paths: Mapping[nn.Module, str]) -> None:
        super().__init__()
        self.norm = original.norm
        self.proj_in = _linear(paths, original.proj_in)
        self.blocks = nn.ModuleList(_Block(block, paths) for block in original.transformer_blocks)
        self.proj_out = _linear(paths, original.proj_out)

    def forward(
        self, x: torch.Tensor, context: torch.Tensor, mask: torch.Tensor | None, per_slot: bool
    ) -> torch.Tensor:
        rows, (_, channels, height, width) = len(context), x.shape
        # All rows of a slot as one from here on: Inductor copies inputs of products that it finds
        # in another shape.
        tokens = self.norm(x).permute(0, 2, 3, 1).reshape(rows // 2, -1, channels)
        tokens = self.proj_in(tokens, per_slot)
        for block in self.blocks:
            tokens = block(tokens, len(x), context, mask, per_slot)
            x = repeat_rows(x, rows)
        tokens = self.proj_out(tokens, per_slot)
        changed: torch.Tensor = tokens.view(rows, height, width, channels).permute(0, 3, 1, 2) + x
        return changed


class _Block(nn.Module):
    def __init__(self, original: Any, paths: Mapping[nn.Module, str]) -> None:
        super().__init__()
        gate = original.ff.net[0]
        if original.norm_type != "layer_norm" or original.attn2 is None or original.pos_embed:
            raise errors.SetupError(UNKNOWN_UNET)
        self.norm1, self.norm2, self.norm3 = original.norm1, original.norm2, original.norm3
        kind = CrossAttention if original.only_cross_attention else SelfAttention
        self.attend_first = kind(original.attn1, paths)
        self.attend_prompt = CrossAttention(original.attn2, paths)
        self.gate = _linear(paths, gate.proj)
        self.out = _linear(paths, original.ff.net[2])

    def forward(
        self,
        x: torch.Tensor,
        rows: int,
        context: torch.Tensor,
        mask: torch.Tensor | None,
        per_slot: bool,
    ) -> torch.Tensor:
        """[slots, tokens of *rows* rows, width] to [slots, tokens of all rows, width]."""
        first = self.attend_first
        if isinstance(first, SelfAttention):
            x = x + first(self.norm1(x), rows, per_slot)
        if rows < len(context):
            x = x.repeat(1, len(context) // rows, 1)
        if isinstance(first, CrossAttention):
            x = x + first(self.norm1(x), context, mask, per_slot)
        x = x + self.attend_prompt(self.norm2(x), context, mask, per_slot)
        values, gates = self.gate(self.norm3(x), per_slot).chunk(2, dim=-1)
        gated: torch.Tensor = x + self.out(values * F.gelu(gates), per_slot)
        return gated


class SelfAttention(nn.Module):
    def __init__(self, original: Any, paths: Mapping[nn.Module, str]) -> None:
        super().__init__()
        self.heads = original.heads
        self.qkv = _linear(paths, original.to_q, original.to_k, original.to_v)
        self.out = _linear(paths, original.to_out[0])
        self.kernel: Attend = default_attention

    def forward(self, x: torch.Tensor, rows: int, per_slot: bool) -> torch.Tensor:
        q, k, v = (
            _split_heads(each, rows, self.heads) for each in self.qkv(x, per_slot).chunk(3, dim=-1)
        )
        attended = self.kernel(q, k, v)
        output: torch.Tensor = self.out(_merge_heads(attended, len(x)), per_slot)
        return output


class CrossAttention(nn.Module):
    #: The slices of keys and of values in the context's last dimension.
    keys: slice
    values: slice

    def __init__(self, original: Any, paths: Mapping[nn.Module, str]) -> None:
        super().__init__()
        self.heads = original.heads
        self.to_q = _linear(paths, original.to_q)
        self.to_k, self.to_v = original.to_k, original.to_v
        self.out = _linear(paths, original.to_out[0])

    def forward(
        self, x: torch.Tensor, context: torch.Tensor, mask: torch.Tensor | None, per_slot: bool
    ) -> torch.Tensor:
        q = _split_heads(self.to_q(x, per_slot), len(context), self.heads)
        shape = (*context.shape[:2], self.heads, -1)
        k = context[..., self.keys].view(shape).transpose(1, 2)
        v = context[..., self.values].view(shape).transpose(1, 2)
        attended = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        output: torch.Tensor = self.out(_merge_heads(attended, len(x)), per_slot)
        return output


def select_and_attend(attend: SelfAttention, selector: KernelSelector) -> Attend:
    """A kernel that selects the fastest one for its inputs, which the layer uses from then on."""

    def select(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        attend.kernel = selector.select(q, k, v)
        return attend.kernel(q, k, v)

    return select


def _linear(paths: Mapping[nn.Module, str], *layers: nn.Module) -> SlotLinear:
    return SlotLinear({paths[layer]: layer for layer in layers})


def repeat_rows(x: torch.Tensor, rows: int) -> torch.Tensor:
    """[slots, ...] to [rows, ...], each slot's row for its prompt and its negative prompt."""
    if len(x) == rows:
        return x
    channels_last = x.movedim(1, -1)  # the repeated rows stay in this order
    return channels_last.repeat_interleave(rows // len(x), dim=0).movedim(-1, 1)


def _split_heads(x: torch.Tensor, rows: int, heads: int) -> torch.Tensor:
    """[slots, tokens of all rows, width] to a view [rows, heads, tokens, head width]."""
    slots, tokens, width = x.shape
    return x.view(rows, slots * tokens // rows, heads, width // heads).transpose(1, 2)


def _merge_heads(x: torch.Tensor, slots: int) -> torch.Tensor:
    """[rows, heads, tokens, head width] back to [slots, tokens of all rows, width]."""
    _, heads, _, width = x.shape
    return x.transpose(1, 2).reshape(slots, -1, heads * width)
