"""Stable Diffusion's UNets for slots: one row or two per slot, with shared or per-slot weights.

The same arithmetic on the same weights as diffusers' UNet2DConditionModel, but that activations
stay channels-last; self-attention's q, k and v are one product, and so are the time projections of
all resnets; cross-attention's keys and values are an input, which the prompt alone changes.
Rows are in the order slot 0's prompt (cond), slot 0's negative prompt (uncond), slot 1's prompt...
Without guidance a slot has the first alone. Up to the first cross-attention a slot's two rows are
equal, and computed as one; not in SDXL, which takes more of the prompt beside the timestep.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - its name everywhere
from torch import Tensor
from torch.nn import Module, ModuleList

from imagefleet.errors import SetupError
from worker.engine.kernels.layers import Upsampler, normalise_and_activate
from worker.engine.networks.convolution import LowRankChange, SlotChanges, SlotConv
from worker.engine.networks.linear import (
    ReloadedStack,
    SlotLinear,
    WeightStack,
    join_biases,
    stack_by_shape,
)
from worker.engine.networks.transformer import (
    UNKNOWN_UNET,
    Call,
    CrossAttention,
    ModulePaths,
    PromptLayers,
    SlotNetwork,
    Transformer,
    repeat_rows,
)
from worker.engine.slots.memory import SlotWeights


class SlotEncoder(SlotNetwork):
    """The first half of a UNet, down to its middle, which ControlNets have as well."""

    def __init__(
        self,
        original: Any,
        paths: ModulePaths,
        weights: SlotWeights = "merged",
    ) -> None:
        """*original* is diffusers' UNet or ControlNet; *paths* are those of its modules."""
        super().__init__(original.conv_in.weight, weights)
        self.time_proj = original.time_proj
        self.time_embedding = _TimeEmbedding(original.time_embedding, paths)
        takes_sizes = original.config.addition_embed_type is not None
        # The second part of the timestep's embedding: SDXL's, or that of the noise on an image.
        self.added = (
            _AddedEmbedding(original) if takes_sizes else original.class_embedding
        )
        width = original.time_embedding.linear_2.out_features
        self.added_width = 0 if self.added is None else width
        if not takes_sizes:
            self.added_rows = 1
        self.conv_in = _conv(paths, original.conv_in)
        self.down = ModuleList(_Down(block, paths) for block in original.down_blocks)
        self.mid = _Layers(original.mid_block, original.mid_block.resnets[1:], paths)
        self.mid_first = _Resnet(original.mid_block.resnets[0], paths)

    def _join(self, paths: ModulePaths, *, saves_memory: bool = False) -> None:
        """Makes one product each of what all layers compute of the time and of the prompt."""
        crosses = self.find(CrossAttention)
        self.time_projections = _TimeProjections(self.find(_Resnet), paths)
        layers = [layer for cross in crosses for layer in (cross.to_k, cross.to_v)]
        of_prompt = PromptLayers(
            {paths[each]: each for each in layers}, saves_memory=saves_memory
        )
        for cross in crosses:
            cross.keys = of_prompt.columns[paths[cross.to_k]]
            cross.values = of_prompt.columns[paths[cross.to_v]]
        self.prompt_layers = of_prompt
        self.context_width = of_prompt.width

    def encode(
        self,
        x: Tensor,
        times: Tensor,
        call: Call,
        added: Tensor | None,
        hint: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, list[Tensor]]:
        """The middle's output, the embedded timesteps, and the output of every layer before.

        As `SlotUnet.forward`; *hint* [slots, channels, height, width] is added to the first one.
        """
        slots = call.slots
        time = self.time_embedding(
            self.time_proj(times).to(x.dtype), slots, call.guidance
        )
        if added is not None:
            time = repeat_rows(time, len(added)) + added
        time = self.time_projections(time, slots)
        x = self.conv_in(x, slots, tiles=call.tiles)
        if hint is not None:
            x = x + hint
        if added is not None:
            x = repeat_rows(x, len(added))
        skips = [x]
        for block in self.down:
            x = block(x, time, skips, call)
        x = self.mid_first(x, time, call)
        for attend, resnet in zip(self.mid.attentions, self.mid.resnets, strict=True):
            x = resnet(attend(x, call), time, call)
        return x, time, skips


class SlotUnet(SlotEncoder):
    """Shares its weights with the diffusers UNet it is made from, which stays usable."""

    def __init__(self, unet: Any, weights: SlotWeights = "merged") -> None:
        """*weights*: how slots hold LoRAs of transformers; "reloaded" is for one slot."""
        paths = {module: path for path, module in unet.named_modules()}
        super().__init__(unet, paths, weights)
        self.up = ModuleList(_Up(block, paths) for block in unet.up_blocks)
        self.norm_out = unet.conv_norm_out
        self.conv_out = _conv(paths, unet.conv_out)
        linears = self.find(SlotLinear)
        if weights == "reloaded":
            self._stacks = stack_by_shape(ReloadedStack, "slots", linears)
        else:
            self._stacks = stack_by_shape(WeightStack, "slots", linears)
        self._join(paths, saves_memory=weights != "merged")
        self._upsamplers = self.find(Upsampler)
        self.changes = SlotChanges(
            self.find(LowRankChange), unet.conv_out.weight.detach()
        )

    def forward(
        self,
        x: Tensor,
        times: Tensor,
        call: Call,
        added: Tensor | None = None,
        residuals: Sequence[Tensor] = (),
    ) -> Tensor:
        """The UNet's output [rows, 4, height, width].

        x [slots, 4, height, width]; times [slots]. *added* [added_rows * slots, width] is added to
        the embedded timesteps, in UNets with such inputs. *residuals* of ControlNets are added to
        the outputs of all layers of the first half, the middle's last.
        """
        x, time, skips = self.encode(x, times, call, added)
        if residuals:
            *firsts, last = residuals
            skips = [
                repeat_rows(skip, len(each)) + each
                for skip, each in zip(skips, firsts, strict=True)
            ]
            x = x + last
        for block in self.up:
            x = block(x, time, skips, call)
        output: Tensor = self.conv_out(
            normalise_and_activate(x, self.norm_out, activates=True),
            call.slots,
            tiles=call.tiles,
        )
        return output


class _TimeEmbedding(Module):
    def __init__(self, original: Any, paths: ModulePaths) -> None:
        super().__init__()
        if original.post_act is not None:
            raise SetupError(UNKNOWN_UNET)
        self.embed_guidance = original.cond_proj
        self.first = original.linear_1
        self.act = original.act
        self.second = original.linear_2
        self.first_change = LowRankChange({paths[self.first]: self.first})
        self.second_change = LowRankChange({paths[self.second]: self.second})

    def forward(self, x: Tensor, slots: int, guidance: Tensor | None = None) -> Tensor:
        """*guidance*: the scales [slots], of which LCM's models take more than their rows."""
        if self.embed_guidance is not None and guidance is not None:
            # Luo et al. (2023), latent consistency.
            half = self.embed_guidance.in_features // 2
            rate = -math.log(10_000) / (half - 1)
            rates = torch.arange(half, device=x.device) * rate
            angles = 1000 * (guidance - 1)[:, None] * torch.exp(rates)
            scales = torch.cat([angles.sin(), angles.cos()], dim=1)
            x = x + self.embed_guidance(scales.to(x.dtype))
        hidden = self.first(x)
        self.first_change.add(hidden, x, slots)
        hidden = self.act(hidden)
        output: Tensor = self.second(hidden)
        self.second_change.add(output, hidden, slots)
        return output


class _AddedEmbedding(Module):
    """SDXL's second part of the timestep's embedding: the prompt as one vector, and the sizes."""

    def __init__(self, unet: Any) -> None:
        super().__init__()
        self.embed_numbers = unet.add_time_proj
        self.embed = unet.add_embedding

    def forward(self, pooled: Tensor, sizes: Tensor) -> Tensor:
        numbers = self.embed_numbers(sizes.flatten()).reshape(len(sizes), -1)
        embedded: Tensor = self.embed(
            torch.cat([pooled, numbers.to(pooled.dtype)], dim=-1)
        )
        return embedded


class _TimeProjections(Module):
    """The time projections of all resnets as one product."""

    weight: Tensor
    bias: Tensor

    def __init__(self, resnets: list[_Resnet], paths: ModulePaths) -> None:
        super().__init__()
        # By shape: the slots' changes of one shape are one product, too.
        resnets = sorted(resnets, key=lambda resnet: len(resnet.time_emb_proj.weight))
        layers = [resnet.time_emb_proj for resnet in resnets]
        by_outputs = itertools.groupby(layers, key=lambda layer: len(layer.weight))
        self.changes = ModuleList(
            LowRankChange({paths[layer]: layer for layer in alike})
            for _, alike in by_outputs
        )
        self.register_buffer(
            "weight", torch.cat([each.weight for each in layers]).detach(), False
        )
        self.register_buffer("bias", join_biases(layers), False)
        at = 0
        for resnet, layer in zip(resnets, layers, strict=True):
            resnet.time = slice(at, at + len(layer.weight))
            # A view of the whole, so that merging into a layer merges here.
            layer.weight.data = self.weight[resnet.time]
            at = resnet.time.stop

    def forward(self, time: Tensor, slots: int) -> Tensor:
        time = F.silu(time)
        projected = F.linear(time, self.weight, self.bias)
        at = 0
        change: Any
        for change in self.changes:
            change.add(projected[:, at : at + change.width], time, slots)
            at += change.width
        return projected


class _Resnet(Module):
    #: The block's columns of the output of `_TimeProjections`.
    time: slice

    def __init__(self, original: Any, paths: ModulePaths) -> None:
        super().__init__()
        if (
            original.time_embedding_norm != "default"
            or original.output_scale_factor != 1
        ):
            raise SetupError(UNKNOWN_UNET)
        self.norm1 = original.norm1
        self.norm2 = original.norm2
        self.conv1 = _conv(paths, original.conv1)
        self.conv2 = _conv(paths, original.conv2)
        shortcut = original.conv_shortcut
        self.conv_shortcut = None if shortcut is None else _conv(paths, shortcut)
        self.time_emb_proj = original.time_emb_proj

    def forward(self, x: Tensor, times: Tensor, call: Call) -> Tensor:
        slots = call.slots
        tiles = call.tiles
        time = repeat_rows(times[:, self.time], len(x))
        changed = normalise_and_activate(x, self.norm1, activates=True)
        changed = self.conv1(changed, slots, tiles=tiles)
        changed = normalise_and_activate(
            changed, self.norm2, added=time, activates=True
        )
        changed = self.conv2(changed, slots, tiles=tiles)
        kept = x if self.conv_shortcut is None else self.conv_shortcut(x, slots)
        summed: Tensor = kept + changed
        return summed


class _Layers(Module):
    def __init__(self, block: Any, resnets: Any, paths: ModulePaths) -> None:
        super().__init__()
        attentions = getattr(block, "attentions", None) or ()
        self.resnets = ModuleList(_Resnet(resnet, paths) for resnet in resnets)
        self.attentions = ModuleList(Transformer(each, paths) for each in attentions)

    def pairs(self) -> Iterator[tuple[Module, Module | None]]:
        return itertools.zip_longest(self.resnets, self.attentions)


class _Down(_Layers):
    def __init__(self, block: Any, paths: ModulePaths) -> None:
        super().__init__(block, block.resnets, paths)
        self.samplers = ModuleList(
            _conv(paths, each.conv) for each in block.downsamplers or ()
        )

    def forward(
        self, x: Tensor, time: Tensor, skips: list[Tensor], call: Call
    ) -> Tensor:
        for resnet, attend in self.pairs():
            x = resnet(x, time, call)
            if attend is not None:
                x = attend(x, call)
            skips.append(x)
        for sampler in self.samplers:
            x = sampler(x, call.slots, tiles=call.tiles)
            skips.append(x)
        return x


class _Up(_Layers):
    def __init__(self, block: Any, paths: ModulePaths) -> None:
        super().__init__(block, block.resnets, paths)
        self.samplers = ModuleList(
            SlotConv(Upsampler(sampler), paths[sampler.conv])
            for sampler in block.upsamplers or ()
        )

    def forward(
        self, x: Tensor, time: Tensor, skips: list[Tensor], call: Call
    ) -> Tensor:
        for resnet, attend in self.pairs():
            joined = (x, repeat_rows(skips.pop(), len(x)))
            # Compiled, a sum with slots' changes is in no order yet: images would be joined channel
            # by channel, and of [rows, height, width, channels] Inductor takes height for these.
            pixels = [each.flatten(2).transpose(1, 2) for each in joined]
            both = torch.cat(pixels, dim=-1).transpose(1, 2)
            x = resnet(both.view(len(x), -1, *x.shape[2:]), time, call)
            if attend is not None:
                x = attend(x, call)
        for sampler in self.samplers:
            x = sampler(x, call.slots, skips[-1].shape[2:], tiles=call.tiles)
        return x


def _conv(paths: ModulePaths, layer: Module) -> SlotConv:
    return SlotConv(layer, paths[layer])
