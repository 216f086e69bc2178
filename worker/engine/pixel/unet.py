"""An IF stage's UNet for slots: what depends on the prompt alone is computed once per image.

Of the 77 text states [4096] each call of diffusers' UNet makes a pooled vector, which is added to
the embedded timestep, and the keys and values of every attention. None of it depends on the step.
"""

from typing import Any

import torch
from diffusers import UNet2DConditionModel
from torch import Tensor, nn

from worker.engine.kernels import layers
from worker.engine.networks.transformer import (
    Call,
    SlotNetwork,
    attend,
    repeat_rows,
    split_heads,
)
from worker.engine.sampler import Limit


class TextAttention(nn.Module):
    """An attention to the image and the text, or to the text alone, in one product.

    In the place of diffusers' `Attention` with `AttnAddedKVProcessor2_0`.
    """

    def __init__(self, original: Any) -> None:
        super().__init__()
        self.original = original
        self.width: int = original.add_k_proj.out_features
        self.head_width: int = self.width // original.heads
        #: The first of its columns in the context: the text's keys, then its values.
        self.start = 0

    def text_columns(self, states: Tensor) -> Tensor:
        """Keys and values [rows, tokens, 2 * width] of encoded text [rows, tokens, text width]."""
        own = self.original
        if own.norm_cross:
            states = own.norm_encoder_hidden_states(states)
        return torch.cat([own.add_k_proj(states), own.add_v_proj(states)], dim=-1)

    def forward(
        self,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor,
        attention_mask: Tensor | None = None,  # noqa: ARG002 - what diffusers' blocks pass
    ) -> Tensor:
        """*hidden_states* [rows, channels, height, width]; the others' names are diffusers'."""
        own = self.original
        x = hidden_states
        tokens = own.group_norm(x).flatten(2).transpose(1, 2)
        query = split_heads(own.to_q(tokens), self.head_width)
        middle = self.start + self.width
        end = middle + self.width
        key = encoder_hidden_states[..., self.start : middle]
        value = encoder_hidden_states[..., middle:end]
        if not own.only_cross_attention:
            key = torch.cat([key, own.to_k(tokens)], dim=1)
            value = torch.cat([value, own.to_v(tokens)], dim=1)
        key, value = (split_heads(each, self.head_width) for each in (key, value))
        attended = own.to_out[0](attend(query, key, value))
        summed: Tensor = x + attended.transpose(1, 2).reshape(x.shape)
        return summed


class PixelUnet(SlotNetwork):
    """The UNet with a row per slot for the prompt, then one for the negative prompt, if any."""

    def __init__(
        self,
        unet: UNet2DConditionModel,
        limit: Limit | None = None,
        *,
        is_compiled: bool = False,
    ) -> None:
        """Takes the UNet's attentions over; *limit* is what estimates of images are limited by."""
        super().__init__(unet.conv_out.weight)
        self.unet = unet
        self.limit = limit
        self.attentions: list[TextAttention] = []
        for block in (*unet.down_blocks, unet.mid_block, *unet.up_blocks):
            found = getattr(block, "attentions", None) or ()
            for at, attention in enumerate(found):
                block.attentions[at] = TextAttention(attention)
                self.attentions.append(block.attentions[at])
        self.context_width = 0
        for attention in self.attentions:
            attention.start = self.context_width
            self.context_width += 2 * attention.width
        self.added_width = int(unet.time_embedding.linear_2.out_features)
        # What follows from the prompt alone is computed before, and passed on as that of a class.
        self.embed_pooled = unet.add_embedding
        self.embed_level = unet.class_embedding
        self.project = unet.encoder_hid_proj or nn.Identity()
        unet.encoder_hid_proj = None
        unet.class_embedding = nn.Identity()
        unet.register_to_config(addition_embed_type=None, class_embed_type=None)
        if is_compiled:
            layers.replace_modules(unet, layers.group_norm)

    @torch.no_grad()
    def compute_prompt(
        self,
        vectors: Tensor,
        added: tuple[Tensor, ...] | None,
        _changes: object,
        context: Tensor,
        added_rows: Tensor | None,
    ) -> None:
        """See `SlotNetwork.compute_prompt`; of text states [slot rows, tokens, width]."""
        embedded = self.embed_pooled(vectors)
        if added is not None:
            (level,) = added
            level = self.unet.time_proj(level).to(vectors.dtype)
            embedded = embedded + self.embed_level(level)
        encoded = self.project(vectors)
        context.copy_(
            torch.cat([each.text_columns(encoded) for each in self.attentions], dim=-1)
        )
        if added_rows is not None:
            added_rows.copy_(embedded)

    def forward(
        self,
        x: Tensor,
        times: Tensor,
        call: Call,
        added: Tensor | None,
        _residuals: object = (),
    ) -> Tensor:
        """The noise and the variance of all rows [rows, 6, height, width].

        x [slots, channels, height, width] in the UNet's type; times [slots] may be fractions;
        *call*'s context and *added*: see `compute_prompt`, of all slots.
        """
        rows = len(call.context)
        output: Tensor = self.unet(
            repeat_rows(x, rows),
            times.repeat_interleave(rows // len(times)),
            call.context,
            class_labels=added,
            return_dict=False,
        )[0]
        return output
