"""Stable Diffusion's UNets for slots: two rows per slot, with shared or per-slot weights.

The same arithmetic on the same weights as diffusers' UNet2DConditionModel. What differs:
activations stay channels-last throughout; self-attention's q, k and v are one product, and so are
the time projections of all resnets; cross-attention's keys and values are an input, since they
change with the prompt, not with the step. Rows are in the order slot 0's prompt (cond), slot 0's
negative prompt (uncond), slot 1's prompt, ... Up to the first cross-attention a slot's two rows are
equal, and computed as one; not in SDXL, which takes more of the prompt beside the timestep. Some
transformers of the x4 upscaler attend to the prompt twice, and not to the image.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - its name everywhere
from torch import nn

from imagefleet import errors
from worker.engine.kernels.layers import KernelSelector, Upsampler, default_attention
from worker.engine.lora.kinds import TEMPORARY_BYTES, StackedChange
from worker.engine.lora.merge import Group
from worker.engine.slots import convolution
from worker.engine.slots.convolution import LowRankChange, SlotChanges, SlotConv
from worker.engine.slots.linear import (
    ReloadedStack,
    SlotLinear,
    WeightStack,
    join_biases,
    stack_by_shape,
)
from worker.engine.slots.memory import SlotWeights
from worker.engine.slots.transformer import (
    UNKNOWN_UNET,
    CrossAttention,
    KeysValues,
    SelfAttention,
    Transformer,
    repeat_rows,
    select_and_attend,
)


class SlotEncoder(nn.Module):
    """The first half of a UNet, down to its middle, which ControlNets have as well."""

    def __init__(self, original: Any, paths: Mapping[nn.Module, str]) -> None:
        """*original* is diffusers' UNet or ControlNet; *paths* are those of its modules."""
        super().__init__()
        self.time_proj = original.time_proj
        self.time_embedding = _TimeEmbedding(original.time_embedding, paths)
        self.added = _added_embedding(original)
        self.conv_in = _conv(paths, original.conv_in)
        self.down = nn.ModuleList(_Down(block, paths) for block in original.down_blocks)
        attentions = getattr(original.mid_block, "attentions", None) or ()
        self.mid = _Layers(original.mid_block.resnets[1:], attentions, paths)
        self.mid_first = _Resnet(original.mid_block.resnets[0], paths)
        self.dtype: torch.dtype = original.conv_in.weight.dtype
        self.device: torch.device = original.conv_in.weight.device

    def _join(self, paths: Mapping[nn.Module, str], *, saves_memory: bool = False) -> None:
        """Makes one product each of what all layers compute of the time and of the prompt."""
        crosses = [module for module in self.modules() if isinstance(module, CrossAttention)]
        self.time_projections = _TimeProjections(
            [module for module in self.modules() if isinstance(module, _Resnet)], paths
        )
        self._self_attentions = [
            module for module in self.modules() if isinstance(module, SelfAttention)
        ]
        self.keys_values = KeysValues(crosses, paths, saves_memory=saves_memory)

    @property
    def added_width(self) -> int:
        """Number of values the UNet takes beside the timestep; 0 if it takes none."""
        return 0 if self.added is None else self.added.width

    @property
    def added_rows(self) -> int:
        """Rows of a slot in `added`: 2 if prompt and negative prompt have one each, else 1."""
        return 2 if isinstance(self.added, _AddedEmbedding) else 1

    @torch.no_grad()
    def embed_added(self, *inputs: torch.Tensor) -> torch.Tensor:
        """`encode`'s *added* [rows, width] of pooled vectors and size ids, one each per row.

        Of upscalers, of the levels of noise on the images [rows].
        """
        if self.added is None:
            raise RuntimeError("this network has no such inputs")
        embedded: torch.Tensor = self.added(*inputs)
        return embedded

    def encode(
        self,
        x: torch.Tensor,
        times: torch.Tensor,
        context: torch.Tensor,
        mask: torch.Tensor | None,
        per_slot: bool,
        slots: int,
        added: torch.Tensor | None,
        hint: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]:
        """The middle's output, the embedded timesteps, and the output of every layer before.

        As `SlotUnet.forward`; *slots*: 0 without changes. *hint* [slots, channels, height, width]
        is added to the first layer's output.
        """
        time = self.time_embedding(self.time_proj(times).to(x.dtype), slots)
        if added is not None:
            time = repeat_rows(time, len(added)) + added
        time = self.time_projections(time, slots)
        x = self.conv_in(x, slots)
        if hint is not None:
            x = x + hint
        if added is not None:
            x = repeat_rows(x, len(added))
        skips = [x]
        for block in self.down:
            x = block(x, time, skips, context, mask, per_slot, slots)
        x = self.mid_first(x, time, slots)
        for attend, resnet in zip(self.mid.attentions, self.mid.resnets, strict=True):
            x = resnet(attend(x, context, mask, per_slot), time, slots)
        return x, time, skips

    @contextlib.contextmanager
    def selecting_kernels(self, selector: KernelSelector) -> Iterator[None]:
        """Has the next call of each self-attention within select its fastest kernel."""
        for attend in self._self_attentions:
            attend.kernel = select_and_attend(attend, selector)
        try:
            yield
        except BaseException:
            self.use_default_attention()
            raise

    def use_default_attention(self) -> None:
        for attend in self._self_attentions:
            attend.kernel = default_attention


class SlotUnet(SlotEncoder):
    """Shares its weights with the diffusers UNet it is made from, which stays usable."""

    def __init__(self, unet: Any, weights: SlotWeights = "merged") -> None:
        """*weights*: how slots hold LoRAs of transformers; "reloaded" is for one slot."""
        paths = {module: path for path, module in unet.named_modules()}
        super().__init__(unet, paths)
        self.weights: SlotWeights = weights
        self.up = nn.ModuleList(_Up(block, paths) for block in unet.up_blocks)
        self.norm_out = unet.conv_norm_out
        self.conv_out = _conv(paths, unet.conv_out)
        linears = [module for module in self.modules() if isinstance(module, SlotLinear)]
        self._stacks: Mapping[Group, WeightStack | ReloadedStack] = {}
        if weights == "factors":
            for linear in linears:
                linear.keep_apart()
        elif weights == "reloaded":
            self._stacks = stack_by_shape(ReloadedStack, "slots", linears)
        else:
            self._stacks = stack_by_shape(WeightStack, "slots", linears)
        self._join(paths, saves_memory=weights != "merged")
        self._upsamplers = [module for module in self.modules() if isinstance(module, Upsampler)]
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
        """Size of a slot's weights and changes; those that are reloaded take none more."""
        if self.weights == "reloaded":
            return self.changes.slot_bytes
        weights = sum(stack.shared.nbytes for stack in self._stacks.values())
        return weights + self.changes.slot_bytes

    @property
    def reloaded(self) -> dict[str, torch.Tensor]:
        """What the only slot computes with in place of parameters, by their names, if any."""
        stacks = (each for each in self._stacks.values() if isinstance(each, ReloadedStack))
        return {f"{path}.weight": own for stack in stacks for path, own in stack.own.items()}

    def forward(
        self,
        x: torch.Tensor,
        times: torch.Tensor,
        context: torch.Tensor,
        mask: torch.Tensor | None,
        per_slot: bool,
        changes: bool = False,
        added: torch.Tensor | None = None,
        residuals: Sequence[torch.Tensor] = (),
    ) -> torch.Tensor:
        """The UNet's output [2 * slots, 4, height, width].

        x [slots, 4, height, width]; times [slots]; context [2 * slots, tokens, width] from
        `keys_values`; mask [2 * slots, 1, 1, tokens], added to the attention scores, or None.
        *per_slot* uses each slot's own weights, else the shared ones. *changes* adds each slot's
        changes of convolutions and of the layers for the time. *added* [added_rows * slots, width]
        is added to the embedded timesteps, in UNets with such inputs. *residuals* of ControlNets
        are added to the outputs of all layers of the first half, the middle's last.
        """
        slots = len(x) if changes else 0
        x, time, skips = self.encode(x, times, context, mask, per_slot, slots, added)
        if residuals:
            *firsts, last = residuals
            skips = [
                repeat_rows(skip, len(each)) + each
                for skip, each in zip(skips, firsts, strict=True)
            ]
            x = x + last
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
        self._stacks = {}
        self.keys_values.stacks.clear()
        self.changes.clear()
        self.to("meta")

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


class _TimeEmbedding(nn.Module):
    def __init__(self, original: Any, paths: Mapping[nn.Module, str]) -> None:
        super().__init__()
        if original.cond_proj is not None or original.post_act is not None:
            raise errors.SetupError(UNKNOWN_UNET)
        self.first, self.act, self.second = original.linear_1, original.act, original.linear_2
        self.first_change, self.second_change = (
            LowRankChange({paths[layer]: layer}) for layer in (self.first, self.second)
        )

    def forward(self, x: torch.Tensor, slots: int) -> torch.Tensor:
        hidden = self.first(x) + self.first_change(x, slots) if slots else self.first(x)
        hidden = self.act(hidden)
        output: torch.Tensor = self.second(hidden)
        return output + self.second_change(hidden, slots) if slots else output


class _AddedEmbedding(nn.Module):
    """SDXL's second part of the timestep's embedding: the prompt as one vector, and the sizes."""

    def __init__(self, unet: Any) -> None:
        super().__init__()
        if unet.config.addition_embed_type != "text_time":
            raise errors.SetupError(UNKNOWN_UNET)
        self.embed_numbers, self.embed = unet.add_time_proj, unet.add_embedding
        self.width: int = unet.add_embedding.linear_2.out_features

    def forward(self, pooled: torch.Tensor, sizes: torch.Tensor) -> torch.Tensor:
        numbers = self.embed_numbers(sizes.flatten()).reshape(len(sizes), -1)
        embedded: torch.Tensor = self.embed(torch.cat([pooled, numbers.to(pooled.dtype)], dim=-1))
        return embedded


class _LevelEmbedding(nn.Module):
    """The x4 upscaler's second part of the timestep's embedding: the noise on its image."""

    def __init__(self, embedding: Any) -> None:
        super().__init__()
        if not isinstance(embedding, nn.Embedding):
            raise errors.SetupError(UNKNOWN_UNET)
        self.embed = embedding
        self.width = embedding.embedding_dim

    def forward(self, levels: torch.Tensor) -> torch.Tensor:
        embedded: torch.Tensor = self.embed(levels)
        return embedded


def _added_embedding(original: Any) -> _AddedEmbedding | _LevelEmbedding | None:
    if original.config.addition_embed_type is not None:
        return _AddedEmbedding(original)
    if original.class_embedding is not None:
        return _LevelEmbedding(original.class_embedding)
    return None


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
        self.register_buffer("bias", join_biases(layers), False)
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
            changed = [change(time, slots) for change in self.changes]
            projected = projected + torch.cat(changed, dim=1)
        return projected


class _Resnet(nn.Module):
    #: The block's columns of the output of `_TimeProjections`.
    time: slice

    def __init__(self, original: Any, paths: Mapping[nn.Module, str]) -> None:
        super().__init__()
        if original.time_embedding_norm != "default" or original.output_scale_factor != 1:
            raise errors.SetupError(UNKNOWN_UNET)
        self.norm1, self.conv1 = original.norm1, _conv(paths, original.conv1)
        self.norm2, self.conv2 = original.norm2, _conv(paths, original.conv2)
        shortcut = original.conv_shortcut
        self.conv_shortcut = None if shortcut is None else _conv(paths, shortcut)
        self.time_emb_proj = original.time_emb_proj

    def forward(self, x: torch.Tensor, times: torch.Tensor, slots: int) -> torch.Tensor:
        time = repeat_rows(times[:, self.time], len(x))
        changed = self.conv1(F.silu(self.norm1(x)), slots) + time[:, :, None, None]
        changed = self.conv2(F.silu(self.norm2(changed)), slots)
        kept = x if self.conv_shortcut is None else self.conv_shortcut(x, slots)
        summed: torch.Tensor = kept + changed
        return summed


class _Layers(nn.Module):
    def __init__(self, resnets: Any, attentions: Any, paths: Mapping[nn.Module, str]) -> None:
        super().__init__()
        self.resnets = nn.ModuleList(_Resnet(resnet, paths) for resnet in resnets)
        self.attentions = nn.ModuleList(Transformer(each, paths) for each in attentions)

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
            x = torch.cat([x, repeat_rows(skips.pop(), len(x))], dim=1)
            x = resnet(x, time, slots)
            if attend is not None:
                x = attend(x, context, mask, per_slot)
        for sampler in self.samplers:
            x = sampler(x, slots, skips[-1].shape[2:])
        return x


def _conv(paths: Mapping[nn.Module, str], layer: nn.Module) -> SlotConv:
    return SlotConv(layer, paths[layer])
