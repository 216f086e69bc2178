"""Stable Diffusion 1.x's UNet for slots: two rows per slot, with shared or per-slot weights.

The same arithmetic on the same weights as diffusers' UNet2DConditionModel. What differs:
activations stay channels-last throughout; self-attention's q, k and v are one product, and so are
the time projections of all resnets; cross-attention's keys and values are an input, since they
change with the prompt, not with the step. Rows are in the order slot 0's prompt (cond), slot 0's
negative prompt (uncond), slot 1's prompt, ... Up to the first cross-attention a slot's two rows are
equal, and computed as one.
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

from imagefleet import errors
from worker.engine.kernels.layers import Attend, KernelSelector, Upsampler, default_attention
from worker.engine.lora.pack import Group
from worker.engine.lora.stacked import TEMPORARY_BYTES, StackedChange
from worker.engine.slots import convolution
from worker.engine.slots.convolution import LowRankChange, SlotChanges, SlotConv
from worker.engine.slots.linear import SlotLinear, stack_by_shape

_NOT_SD1 = "this UNet is not of Stable Diffusion 1.x's architecture, the only one supported"


class SlotUnet(nn.Module):
    """Shares its weights with the diffusers UNet it is made from, which stays usable."""

    def __init__(self, unet: Any) -> None:
        super().__init__()
        paths = {module: path for path, module in unet.named_modules()}
        self.time_proj = unet.time_proj
        self.time_embedding = _TimeEmbedding(unet.time_embedding, paths)
        self.conv_in = _conv(paths, unet.conv_in)
        self.down = nn.ModuleList(_Down(block, paths) for block in unet.down_blocks)
        self.mid = _Layers(unet.mid_block.resnets[1:], unet.mid_block.attentions, paths)
        self.mid_first = _Resnet(unet.mid_block.resnets[0], paths)
        self.up = nn.ModuleList(_Up(block, paths) for block in unet.up_blocks)
        self.norm_out = unet.conv_norm_out
        self.conv_out = _conv(paths, unet.conv_out)
        linears = [module for module in self.modules() if isinstance(module, SlotLinear)]
        self._stacks = stack_by_shape("slots", linears)
        crosses = [module for module in self.modules() if isinstance(module, _CrossAttention)]
        self.time_projections = _TimeProjections(
            [module for module in self.modules() if isinstance(module, _Resnet)], paths
        )
        self._self_attentions = [
            module for module in self.modules() if isinstance(module, _SelfAttention)
        ]
        self._upsamplers = [module for module in self.modules() if isinstance(module, Upsampler)]
        self.keys_values = KeysValues(crosses, paths)
        self.dtype: torch.dtype = unet.conv_out.weight.dtype
        self.device: torch.device = unet.conv_out.weight.device
        self.changes = SlotChanges(
            (module for module in self.modules() if isinstance(module, LowRankChange)),
            unet.conv_out.weight.detach(),
        )
        self._block = 0
        self.temporary_bytes = TEMPORARY_BYTES
        """Memory for weights while they are merged."""

    @property
    def groups(self) -> dict[Group, list[str]]:
        """The paths of the layers that slots can hold weights of, by group."""
        stacks = {**self._stacks, **self.keys_values.stacks}
        return {group: stack.paths for group, stack in stacks.items()}

    @property
    def slot_bytes(self) -> int:
        """Size of a slot's weights and changes."""
        weights = sum(stack.shared.nbytes for stack in self._stacks.values())
        return weights + self.changes.slot_bytes

    def forward(
        self,
        x: torch.Tensor,
        times: torch.Tensor,
        context: torch.Tensor,
        mask: torch.Tensor | None,
        per_slot: bool,
        changes: bool = False,
    ) -> torch.Tensor:
        """The UNet's output [2 * slots, 4, height, width].

        x [slots, 4, height, width]; times [slots]; context [2 * slots, tokens, width] from
        `keys_values`; mask [2 * slots, 1, 1, tokens], added to the attention scores, or None.
        *per_slot* uses each slot's own weights, else the shared ones. *changes* adds each slot's
        changes of convolutions and of the layers for the time.
        """
        slots = len(x) if changes else 0
        time = self.time_embedding(self.time_proj(times).to(x.dtype), slots)
        time = self.time_projections(time, slots)
        x = self.conv_in(x, slots)
        skips = [x]
        for block in self.down:
            x = block(x, time, skips, context, mask, per_slot, slots)
        x = self.mid_first(x, time, slots)
        for attend, resnet in zip(self.mid.attentions, self.mid.resnets, strict=True):
            x = resnet(attend(x, context, mask, per_slot), time, slots)
        for block in self.up:
            x = block(x, time, skips, context, mask, per_slot, slots)
        output: torch.Tensor = self.conv_out(F.silu(self.norm_out(x)), slots)
        return output

    def fold(self) -> None:
        """Folds the upsamplers' weights; call again whenever the shared weights change."""
        for sampler in self._upsamplers:
            sampler.fold()

    def resize(self, slots: int) -> None:
        """Allocates zero weights for *slots* slots, in one block."""
        self._block = 0
        for stack in self._stacks.values():
            stack.resize(slots)
        self.changes.resize(slots)

    def use_block(self, block: int) -> None:
        """Uses another block of slots' weights, allocated at its first use.

        A CUDA graph keeps the block with which it was recorded.
        """
        if block != self._block:
            for stack in self._stacks.values():
                stack.use_block(block)
            self.changes.use_block(block)
            self._block = block

    def close(self) -> None:
        """Frees all weights."""
        self._stacks.clear()
        self.keys_values.stacks.clear()
        self.changes.clear()
        self.to("meta")

    @contextlib.contextmanager
    def selecting_kernels(self, selector: KernelSelector) -> Iterator[None]:
        """Within it, each self-attention's next call selects its fastest kernel."""
        for attend in self._self_attentions:
            attend.kernel = functools.partial(_select_and_attend, attend, selector)
        try:
            yield
        except BaseException:
            self.use_default_attention()
            raise

    def use_default_attention(self) -> None:
        for attend in self._self_attentions:
            attend.kernel = default_attention

    @torch.no_grad()
    def load_slot(
        self,
        slot: int,
        changes: Mapping[Group, StackedChange],
        convolutions: Mapping[convolution.Shape, convolution.Factors],
    ) -> None:
        """Sets a slot to the shared weights plus its LoRAs' changes, asynchronously."""
        for group, stack in self._stacks.items():
            stack.load(slot, changes.get(group), self.temporary_bytes)
        self.changes.load(slot, convolutions)


class KeysValues:
    """The keys and values of all cross-attentions, computed from a prompt's vectors."""

    def __init__(self, crosses: list[_CrossAttention], paths: Mapping[nn.Module, str]) -> None:
        layers = [layer for cross in crosses for layer in (cross.to_k, cross.to_v)]
        self.stacks = stack_by_shape("prompt", (SlotLinear({paths[each]: each}) for each in layers))
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
        self, vectors: torch.Tensor, changes: Mapping[Group, StackedChange]
    ) -> torch.Tensor:
        """Keys and values [rows, tokens, width] of vectors [rows, tokens, text width]."""
        products = []
        for group, stack in self.stacks.items():
            weights = stack.shared
            if group in changes:
                weights = torch.empty_like(stack.shared)
                changes[group].merge(stack.shared, weights)
            products.append(F.linear(vectors, weights.flatten(0, 1)))
        return torch.cat(products, dim=-1)


class _TimeEmbedding(nn.Module):
    def __init__(self, original: Any, paths: Mapping[nn.Module, str]) -> None:
        super().__init__()
        if original.cond_proj is not None or original.post_act is not None:
            raise errors.SetupError(_NOT_SD1)
        self.first, self.act, self.second = original.linear_1, original.act, original.linear_2
        self.first_change, self.second_change = (
            LowRankChange({paths[layer]: layer}) for layer in (self.first, self.second)
        )

    def forward(self, x: torch.Tensor, slots: int) -> torch.Tensor:
        hidden = self.first(x) + self.first_change(x) if slots else self.first(x)
        hidden = self.act(hidden)
        output: torch.Tensor = self.second(hidden)
        return output + self.second_change(hidden) if slots else output


class _TimeProjections(nn.Module):
    """The time projections of all resnets as one product."""

    weight: torch.Tensor
    bias: torch.Tensor

    def __init__(self, resnets: list[_Resnet], paths: Mapping[nn.Module, str]) -> None:
        super().__init__()
        # By shape: the slots' changes of one shape are one product, too.
        resnets = sorted(resnets, key=lambda resnet: len(resnet.time_emb_proj.weight))
        layers = [resnet.time_emb_proj for resnet in resnets]
        by_outputs = itertools.groupby(layers, key=lambda layer: len(layer.weight))
        self.changes = nn.ModuleList(
            LowRankChange({paths[layer]: layer for layer in alike}) for _, alike in by_outputs
        )
        self.register_buffer("weight", torch.cat([each.weight for each in layers]).detach(), False)
        self.register_buffer("bias", torch.cat([each.bias for each in layers]).detach(), False)
        at = 0
        for resnet, layer in zip(resnets, layers, strict=True):
            resnet.time = slice(at, at + len(layer.weight))
            # A view of the whole, so that merging into a layer merges here.
            layer.weight = nn.Parameter(self.weight[resnet.time], requires_grad=False)
            at = resnet.time.stop

    def forward(self, time: torch.Tensor, slots: int) -> torch.Tensor:
        time = F.silu(time)
        projected: torch.Tensor = F.linear(time, self.weight, self.bias)
        if slots:
            projected = projected + torch.cat([change(time) for change in self.changes], dim=1)
        return projected


class _Resnet(nn.Module):
    #: Its columns of the output of `_TimeProjections`.
    time: slice

    def __init__(self, original: Any, paths: Mapping[nn.Module, str]) -> None:
        super().__init__()
        if original.time_embedding_norm != "default" or original.output_scale_factor != 1:
            raise errors.SetupError(_NOT_SD1)
        self.norm1, self.conv1 = original.norm1, _conv(paths, original.conv1)
        self.norm2, self.conv2 = original.norm2, _conv(paths, original.conv2)
        shortcut = original.conv_shortcut
        self.conv_shortcut = None if shortcut is None else _conv(paths, shortcut)
        self.time_emb_proj = original.time_emb_proj

    def forward(self, x: torch.Tensor, times: torch.Tensor, slots: int) -> torch.Tensor:
        time = _repeat_rows(times[:, self.time], len(x))
        changed = self.conv1(F.silu(self.norm1(x)), slots) + time[:, :, None, None]
        changed = self.conv2(F.silu(self.norm2(changed)), slots)
        kept = x if self.conv_shortcut is None else self.conv_shortcut(x, slots)
        summed: torch.Tensor = kept + changed
        return summed


class _Layers(nn.Module):
    def __init__(self, resnets: Any, attentions: Any, paths: Mapping[nn.Module, str]) -> None:
        super().__init__()
        self.resnets = nn.ModuleList(_Resnet(resnet, paths) for resnet in resnets)
        self.attentions = nn.ModuleList(_Transformer(each, paths) for each in attentions)

    def pairs(self) -> Iterator[tuple[nn.Module, nn.Module | None]]:
        return itertools.zip_longest(self.resnets, self.attentions)


class _Down(_Layers):
    def __init__(self, block: Any, paths: Mapping[nn.Module, str]) -> None:
        super().__init__(block.resnets, getattr(block, "attentions", None) or (), paths)
        self.samplers = nn.ModuleList(
            _conv(paths, sampler.conv) for sampler in block.downsamplers or ()
        )

    def forward(
        self,
        x: torch.Tensor,
        time: torch.Tensor,
        skips: list[torch.Tensor],
        context: torch.Tensor,
        mask: torch.Tensor | None,
        per_slot: bool,
        slots: int,
    ) -> torch.Tensor:
        for resnet, attend in self.pairs():
            x = resnet(x, time, slots)
            if attend is not None:
                x = attend(x, context, mask, per_slot)
            skips.append(x)
        for sampler in self.samplers:
            x = sampler(x, slots)
            skips.append(x)
        return x


class _Up(_Layers):
    def __init__(self, block: Any, paths: Mapping[nn.Module, str]) -> None:
        super().__init__(block.resnets, getattr(block, "attentions", None) or (), paths)
        self.samplers = nn.ModuleList(
            SlotConv(Upsampler(sampler), paths[sampler.conv]) for sampler in block.upsamplers or ()
        )

    def forward(
        self,
        x: torch.Tensor,
        time: torch.Tensor,
        skips: list[torch.Tensor],
        context: torch.Tensor,
        mask: torch.Tensor | None,
        per_slot: bool,
        slots: int,
    ) -> torch.Tensor:
        for resnet, attend in self.pairs():
            x = torch.cat([x, _repeat_rows(skips.pop(), len(x))], dim=1)
            x = resnet(x, time, slots)
            if attend is not None:
                x = attend(x, context, mask, per_slot)
        for sampler in self.samplers:
            x = sampler(x, slots, skips[-1].shape[2:])
        return x


class _Transformer(nn.Module):
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
            x = _repeat_rows(x, rows)
        tokens = self.proj_out(tokens, per_slot)
        changed: torch.Tensor = tokens.view(rows, height, width, channels).permute(0, 3, 1, 2) + x
        return changed


class _Block(nn.Module):
    def __init__(self, original: Any, paths: Mapping[nn.Module, str]) -> None:
        super().__init__()
        gate = original.ff.net[0]
        if original.norm_type != "layer_norm" or original.attn2 is None or original.pos_embed:
            raise errors.SetupError(_NOT_SD1)
        self.norm1, self.norm2, self.norm3 = original.norm1, original.norm2, original.norm3
        self.attend_self = _SelfAttention(original.attn1, paths)
        self.attend_prompt = _CrossAttention(original.attn2, paths)
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
        x = x + self.attend_self(self.norm1(x), rows, per_slot)
        if rows < len(context):
            x = x.repeat(1, len(context) // rows, 1)
        x = x + self.attend_prompt(self.norm2(x), context, mask, per_slot)
        values, gates = self.gate(self.norm3(x), per_slot).chunk(2, dim=-1)
        gated: torch.Tensor = x + self.out(values * F.gelu(gates), per_slot)
        return gated


class _SelfAttention(nn.Module):
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


class _CrossAttention(nn.Module):
    #: Their slices of the context's last dimension.
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


def _select_and_attend(
    attend: _SelfAttention,
    selector: KernelSelector,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
) -> torch.Tensor:
    attend.kernel = selector.select(q, k, v)
    return attend.kernel(q, k, v)


def _linear(paths: Mapping[nn.Module, str], *layers: nn.Module) -> SlotLinear:
    return SlotLinear({paths[layer]: layer for layer in layers})


def _conv(paths: Mapping[nn.Module, str], layer: nn.Module) -> SlotConv:
    return SlotConv(layer, paths[layer])


def _repeat_rows(x: torch.Tensor, rows: int) -> torch.Tensor:
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
