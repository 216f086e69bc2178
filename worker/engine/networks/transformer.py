"""Base class of networks for slots, and the transformers of Stable Diffusion's UNets."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, TypeVar

import torch
import torch.nn.functional as F  # noqa: N812 - its name everywhere
from torch import Tensor
from torch.nn import Module, ModuleList

from imagefleet.errors import SetupError
from imagefleet.job.prompt import MAX_SUBPROMPTS
from worker.engine.kernels.layers import Upsampler, gate
from worker.engine.lora.file import Layer
from worker.engine.lora.merge import TEMPORARY_BYTES, Group, Groups, LoraChanges
from worker.engine.networks.convolution import SlotChanges
from worker.engine.networks.linear import (
    GroupChanges,
    ReloadedStack,
    SlotLinear,
    WeightStack,
    stack_by_shape,
)
from worker.engine.sampler import Limit
from worker.engine.slots.memory import SlotWeights

UNKNOWN_UNET = (
    "this UNet is not of Stable Diffusion's architecture, the only one supported"
)


Kind = TypeVar("Kind", bound=Module)

#: The paths of a network's modules, by which LoRAs name them.
ModulePaths = Mapping[Module, str]


class Call(NamedTuple):
    """Arguments that all layers of one call share."""

    #: [rows, tokens, width]: see `PromptLayers.compute`.
    context: Tensor
    #: [rows, 1, 1, tokens], added to the attention scores.
    mask: Tensor | None = None
    #: Each slot's own weights are used, else the shared ones.
    per_slot: bool = False
    #: Slots whose own changes of convolutions and of the layers for the time are added.
    slots: int = 0
    #: Rows of each slot: 1 without guidance, which needs the prompt's output alone; more of AND.
    slot_rows: int = 2
    #: [slots]: the scales, for networks that take them as an input.
    guidance: Tensor | None = None
    #: Convolutions are padded with what is at the other side of the image.
    tiles: bool = False


class PromptLayers:
    """The layers that run once for an image: what they make of its prompt's vectors.

    Keys and values of all cross-attentions, or embedded text.
    """

    def __init__(
        self, layers: Mapping[str, Layer], *, saves_memory: bool = False
    ) -> None:
        """*layers* by path; their biases are left out.

        *saves_memory*: it is too short to merge changes of several layers at once.
        """
        self._saves_memory = saves_memory
        linears = (SlotLinear({path: layer}) for path, layer in layers.items())
        self.stacks = stack_by_shape(WeightStack, "prompt", linears)
        #: The columns of each layer's output, by its path.
        self.columns: dict[str, slice] = {}
        self.width = 0
        for (_, width, _), stack in self.stacks.items():
            for path in stack.paths:
                self.columns[path] = slice(self.width, self.width + width)
                self.width += width

    @torch.no_grad()
    def compute(
        self,
        vectors: Tensor,
        changes: GroupChanges,
        out: Tensor | None = None,
    ) -> Tensor:
        """The outputs [rows, tokens, width] of vectors [rows, tokens, text width].

        *out*, if given, is what they are written to.
        """
        if out is None:
            out = vectors.new_empty((*vectors.shape[:2], self.width))
        rows = vectors.flatten(0, 1)
        outputs = out.flatten(0, 1)
        at = 0
        for group, stack in self.stacks.items():
            change = changes.get(group)
            layers = len(stack.shared)
            count = 1 if self._saves_memory else layers
            for first in range(0, layers, count):
                weights = stack.shared[first : first + count]
                if change is not None:
                    merged = torch.empty_like(weights)
                    change.merge(weights, merged, first=first)
                    weights = merged
                flat = weights.flatten(0, 1)
                torch.mm(rows, flat.T, out=outputs[:, at : at + len(flat)])
                at += len(flat)
        return out


class Transformer(Module):
    def __init__(self, original: Any, paths: ModulePaths) -> None:
        super().__init__()
        self.norm = original.norm
        self.proj_in = _linear(paths, original.proj_in)
        self.blocks = ModuleList(
            _Block(block, paths) for block in original.transformer_blocks
        )
        self.proj_out = _linear(paths, original.proj_out)

    def forward(self, x: Tensor, call: Call) -> Tensor:
        rows = len(call.context)
        (_, channels, height, width) = x.shape
        # All rows of a slot as one from here on: Inductor copies inputs of products that it finds
        # in another shape.
        tokens = (
            self.norm(x)
            .permute(0, 2, 3, 1)
            .reshape(rows // call.slot_rows, -1, channels)
        )
        tokens = self.proj_in(tokens, call.per_slot)
        for block in self.blocks:
            tokens = block(tokens, len(x), call)
            x = repeat_rows(x, rows)
        tokens = self.proj_out(tokens, call.per_slot)
        changed = tokens.view(rows, height, width, channels).permute(0, 3, 1, 2)
        output: Tensor = changed + x
        return output


class _Block(Module):
    def __init__(self, original: Any, paths: ModulePaths) -> None:
        super().__init__()
        gate = original.ff.net[0]
        if (
            original.norm_type != "layer_norm"
            or original.attn2 is None
            or original.pos_embed
        ):
            raise SetupError(UNKNOWN_UNET)
        self.norm1 = original.norm1
        self.norm2 = original.norm2
        self.norm3 = original.norm3
        kind = CrossAttention if original.only_cross_attention else SelfAttention
        self.attend_first = kind(original.attn1, paths)
        self.attend_prompt = CrossAttention(original.attn2, paths)
        self.gate = _linear(paths, gate.proj)
        self.out = _linear(paths, original.ff.net[2])

    def forward(self, x: Tensor, rows: int, call: Call) -> Tensor:
        """[slots, tokens of *rows* rows, width] to [slots, tokens of all rows, width]."""
        first = self.attend_first
        per_slot = call.per_slot
        all_rows = len(call.context)
        if isinstance(first, SelfAttention):
            x = x + first(self.norm1(x), rows, per_slot)
        if rows < all_rows:
            x = x.repeat(1, all_rows // rows, 1)
        if isinstance(first, CrossAttention):
            x = x + first(self.norm1(x), call)
        x = x + self.attend_prompt(self.norm2(x), call)
        gated = gate(self.gate(self.norm3(x), per_slot))
        output: Tensor = x + self.out(gated, per_slot)
        return output


class SelfAttention(Module):
    def __init__(self, original: Any, paths: ModulePaths) -> None:
        super().__init__()
        self.head_width: int = original.inner_dim // original.heads
        self.qkv = _linear(paths, original.to_q, original.to_k, original.to_v)
        self.out = _linear(paths, original.to_out[0])

    def forward(self, x: Tensor, rows: int, per_slot: bool) -> Tensor:
        qkv = self.qkv(x, per_slot)
        by_row = qkv.view(rows, -1, qkv.shape[2]).chunk(3, dim=-1)
        attended = attend(*(split_heads(each, self.head_width) for each in by_row))
        output: Tensor = self.out(attended.view(*x.shape[:2], -1), per_slot)
        return output


class CrossAttention(Module):
    #: The slices of keys and of values in the context's last dimension.
    keys: slice
    values: slice

    def __init__(self, original: Any, paths: ModulePaths) -> None:
        super().__init__()
        self.head_width: int = original.inner_dim // original.heads
        self.to_q = _linear(paths, original.to_q)
        self.to_k = original.to_k
        self.to_v = original.to_v
        self.out = _linear(paths, original.to_out[0])

    def forward(self, x: Tensor, call: Call) -> Tensor:
        context = call.context
        queries = self.to_q(x, call.per_slot)
        by_row = queries.view(len(context), -1, queries.shape[2])
        attending = (by_row, context[..., self.keys], context[..., self.values])
        query, key, value = (split_heads(each, self.head_width) for each in attending)
        attended = attend(query, key, value, call.mask)
        output: Tensor = self.out(attended.view(*x.shape[:2], -1), call.per_slot)
        return output


def _linear(paths: ModulePaths, *layers: Layer) -> SlotLinear:
    return SlotLinear({paths[layer]: layer for layer in layers})


def repeat_rows(x: Tensor, rows: int) -> Tensor:
    """[slots, ...] to [rows, ...], each slot's row for each of its prompts."""
    if len(x) == rows:
        return x
    channels_last = x.movedim(1, -1)  # the repeated rows stay in this order
    return channels_last.repeat_interleave(rows // len(x), dim=0).movedim(-1, 1)


def split_heads(x: Tensor, width: int) -> Tensor:
    """[rows, tokens, heads * width] to a view [rows, heads, tokens, width]."""
    return x.reshape(*x.shape[:-1], -1, width).transpose(1, 2)


def attend(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None
) -> Tensor:
    """Attention of [rows, heads, tokens, width] each; [rows, tokens, heads * width]."""
    attended = F.scaled_dot_product_attention(query, key, value, attn_mask=mask)
    return attended.transpose(1, 2).flatten(2)


class SlotState(NamedTuple):
    """The slots' tensors, which a tick updates in place."""

    #: [slots, 4, height, width], always float32.
    latents: Tensor
    #: [sampler.HISTORY, slots, 4, height, width]
    history: Tensor
    #: [slots, columns]: this call's sampler coefficients, the guidance scales, and a weight of each
    #: ControlNet of the lane.
    rows: Tensor
    #: [slots, 4, height, width]
    noise: Tensor
    #: [slots, 1, height, width]: 1 where inpainting keeps the original, 0 for other images.
    kept: Tensor
    #: [slots, 4, height, width]: the latents that are kept there.
    original: Tensor
    #: [rows, tokens, width]: the keys and values of all cross-attentions.
    context: Tensor
    #: [rows, 1, 1, tokens], if prompts may be shorter than that.
    mask: Tensor | None
    #: [rows * slots, width], added to the embedded timesteps in UNets with such inputs: one row of
    #: each slot or all, as the UNet's `added_rows` says.
    added: Tensor | None
    #: [slots, channels, height, width], which some UNets take beside the latents: five channels for
    #: inpainting, three of the image that an upscaler enlarges.
    conditioning: Tensor | None
    #: True for images that tile: see `Call.tiles`.
    tiles: bool = False

    @property
    def slot_rows(self) -> int:
        """Rows of each slot: 2 with guidance, 1 without; one more for each prompt after AND."""
        return len(self.context) // len(self.latents)

    @property
    def added_rows(self) -> int:
        if self.added is None:
            return 0
        return len(self.added) // len(self.latents)

    def first(self, slots: int) -> SlotState:
        """Views of the first slots."""
        held = len(self.latents)
        if slots == held:
            return self
        views: list[Any] = [
            each[: slots * len(each) // held] if isinstance(each, Tensor) else each
            for each in self
        ]
        return SlotState(*views)._replace(history=self.history[:, :slots])


#: A network's own names for what manages the weights, of which a compiler sees nothing.
_MANAGING = frozenset(
    {
        "changes",
        "prompt_layers",
        "temporary_bytes",
        "weights",
        "_stacks",
        "_upsamplers",
    }
)


class SlotNetwork(Module):
    """A network with one or more rows per slot, and the weights that slots have of their own."""

    #: Numbers that the cross-attentions take of each token.
    context_width: int
    #: Limits estimates of images in pixels.
    limit: Limit | None = None
    #: Number of values the network takes beside the timestep; 0 if it takes none.
    added_width: int
    #: Most rows of a slot in `added`: 1 unless each prompt of a slot has one of its own.
    added_rows: int = MAX_SUBPROMPTS + 1

    def __init__(self, like: Tensor, weights: SlotWeights = "merged") -> None:
        """*like* has the device and the type; *weights*: how slots hold LoRAs of transformers."""
        super().__init__()
        self.dtype: torch.dtype = like.dtype
        self.device: torch.device = like.device
        self.weights: SlotWeights = weights
        self.changes = SlotChanges((), like.detach())
        #: Memory for weights while they are merged.
        self.temporary_bytes = TEMPORARY_BYTES
        self.prompt_layers = PromptLayers({})
        self._stacks: Mapping[Group, WeightStack | ReloadedStack] = {}
        self._upsamplers: list[Upsampler] = []
        #: Embeds what a network takes beside the timestep, if it takes anything.
        self.added: Module | None = None

    def find(self, kind: type[Kind]) -> list[Kind]:
        """The modules of a kind, in the network's order."""
        return [module for module in self.modules() if isinstance(module, kind)]

    @property
    def groups(self) -> Groups:
        """The paths of the layers that slots can hold weights of, by group."""
        stacks = {**self._stacks, **self.prompt_layers.stacks}
        return {group: stack.paths for group, stack in stacks.items()}

    @torch.no_grad()
    def compute_prompt(
        self,
        vectors: Tensor,
        added: tuple[Tensor, ...] | None,
        changes: GroupChanges,
        context: Tensor,
        added_rows: Tensor | None,
    ) -> None:
        """Computes what a slot's calls take of its prompts, into the last two tensors.

        *vectors* [rows, tokens, width] of the prompt, and of the negative one if it has a row;
        *added*: pooled vectors and size ids by row, or of an image that is enlarged its level of
        noise [1]; LoRA *changes* of the slot; *context* [slot rows, tokens, `context_width`]: of
        `prompt_layers`; *added_rows* [`added_rows`, `added_width`] are added to the embedded
        timesteps.
        """
        self.prompt_layers.compute(vectors, changes, context)
        if self.added is not None and added is not None and added_rows is not None:
            added_rows.copy_(self.added(*added))

    @property
    def slot_bytes(self) -> int:
        """Size of a slot's weights and changes; those that are reloaded take none more."""
        if self.weights == "reloaded":
            return self.changes.slot_bytes
        weights = sum(stack.shared.nbytes for stack in self._stacks.values())
        return weights + self.changes.slot_bytes

    @property
    def reloaded(self) -> dict[str, Tensor]:
        """Weights that the only slot computes with in place of parameters, by parameter name."""
        stacks = (
            each for each in self._stacks.values() if isinstance(each, ReloadedStack)
        )
        return {
            f"{path}.weight": own for stack in stacks for path, own in stack.own.items()
        }

    def fold(self) -> None:
        """Folds the upsamplers' weights; call again whenever the shared weights change."""
        for sampler in self._upsamplers:
            sampler.fold()

    def resize(self, *slots: int) -> None:
        """Allocates zero weights for the *slots* of the first block; others have the last ones'."""
        for stack in self._stacks.values():
            stack.resize(*slots)
        self.changes.resize(*slots)

    def use_block(self, block: int, slots: int) -> None:
        """Uses another block of slots' weights, of which a lane uses the first *slots*.

        A CUDA graph keeps the block of its recording. The size of the block, which depends on what
        else has memory, is none of what is compiled.
        """
        if (block, slots) != self.changes.block:
            for stack in self._stacks.values():
                stack.use_block(block, slots)
            self.changes.use_block(block, slots)

    @torch.no_grad()
    def load_slot(self, slot: int, changes: LoraChanges) -> None:
        """Sets a slot to the shared weights plus its LoRAs' changes, asynchronously."""
        for group, stack in self._stacks.items():
            stack.load(slot, changes.stacked.get(group), self.temporary_bytes)
        self.changes.load(slot, changes.beside)

    def __getstate__(self) -> dict[str, Any]:
        """What the network computes with, without what manages the slots' weights."""
        return {
            name: value
            for name, value in self.__dict__.items()
            if name not in _MANAGING
        }

    def close(self) -> None:
        self._stacks = {}
        self.prompt_layers.stacks.clear()
        self.changes.clear()
        self.to("meta")
