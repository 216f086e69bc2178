"""FLUX.2-klein's transformer for slots, of diffusers' modules.

The same arithmetic as `Flux2Transformer2DModel`, but that queries, keys and values are one product,
and that the prompt's 512 text states are embedded once for an image. All blocks share the three
vectors that the time enters as.
"""

from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - its name everywhere
from torch import Tensor
from torch.nn import Linear, Module, ModuleList

from worker.engine.networks import thin
from worker.engine.networks.thin import Rotation, ThinLinear, modulate
from worker.engine.networks.transformer import Call, attend, split_heads

#: Shift, scale and gate [rows, 1, width], once or for attention and feed-forward.
Modulation = tuple[Tensor, ...]


class SlotKlein(thin.ThinNetwork):
    """Shares its weights with the transformer that it is made from, which stays usable."""

    def __init__(self, network: Any) -> None:
        super().__init__(network)
        time = network.time_guidance_embed
        self.time_proj = time.time_proj
        self.time_first = self._thin(time.timestep_embedder.linear_1)
        self.time_second = self._thin(time.timestep_embedder.linear_2)
        self.modulate_image = self._thin(network.double_stream_modulation_img.linear)
        self.modulate_text = self._thin(network.double_stream_modulation_txt.linear)
        self.modulate_all = self._thin(network.single_stream_modulation.linear)
        self.embed = self._thin(network.x_embedder)
        self.pairs = ModuleList(
            _Pair(block, self._thin) for block in network.transformer_blocks
        )
        self.blocks = ModuleList(
            _Block(block, self._thin) for block in network.single_transformer_blocks
        )
        self.norm_out = network.norm_out.norm
        self.modulate_out = self._thin(network.norm_out.linear)
        self.proj_out = self._thin(network.proj_out)
        self._axes: tuple[int, ...] = tuple(network.config.axes_dims_rope)
        self._theta: int = network.config.rope_theta
        self._join(network.context_embedder)

    def forward(
        self,
        x: Tensor,
        times: Tensor,
        call: Call,
        _added: object = None,
        _residuals: object = (),
    ) -> Tensor:
        """The velocities of all rows [rows, channels, height, width].

        x [slots, channels, height, width] are patches of latents; times [slots] are 1000 sigma.
        """
        slots = call.slots
        _, _, height, width = x.shape
        time = self.time_proj(times).to(x.dtype)[:, None]
        time = self.time_second(F.silu(self.time_first(time, slots)), slots)
        time = F.silu(time)

        def of_time(layer: Module, parts: int) -> Modulation:
            made: Tensor = layer(time, slots)
            return made.repeat_interleave(call.slot_rows, dim=0).chunk(parts, dim=-1)

        by = self._rotation(call.context.shape[1], height, width, x.device)
        image = self.embed(x.flatten(2).transpose(1, 2), slots)
        image = image.repeat_interleave(call.slot_rows, dim=0)
        text = call.context
        of_image = of_time(self.modulate_image, 6)
        of_text = of_time(self.modulate_text, 6)
        for pair in self.pairs:
            text, image = pair(text, image, of_text, of_image, by, slots)
        tokens = torch.cat([text, image], dim=1)
        of_all = of_time(self.modulate_all, 3)
        for block in self.blocks:
            tokens = block(tokens, of_all, by, slots)
        image = tokens[:, text.shape[1] :]
        scale, shift = of_time(self.modulate_out, 2)
        output = self.proj_out(modulate(self.norm_out(image), scale, shift), slots)
        unpacked: Tensor = output.transpose(1, 2).unflatten(2, (height, width))
        return unpacked

    def _rotation(
        self, texts: int, height: int, width: int, device: torch.device
    ) -> Rotation:
        """Text is counted on the last axis, the image on the two in the middle."""

        def count(number: int) -> Tensor:
            return torch.arange(number, device=device)

        zeros = count(1).expand(texts + height * width)
        down = count(height).repeat_interleave(width)
        right = count(width).repeat(height)
        axes = [
            zeros,
            torch.cat([zeros[:texts], down]),
            torch.cat([zeros[:texts], right]),
            torch.cat([count(texts), zeros[texts:]]),
        ]
        return thin.rotation(axes, self._axes, self._theta)


class _Stream(Module):
    """The half of a pair of streams that the image goes through, or the text."""

    def __init__(
        self,
        make: Any,
        norms: tuple[Module, Module],
        projections: tuple[Linear, ...],
        qk_norms: tuple[Any, Any],
        feed_forward: Any,
    ) -> None:
        super().__init__()
        self.norm_first, self.norm_second = norms
        *qkv, out = projections
        self.qkv: ThinLinear = make(*qkv)
        self.out: ThinLinear = make(out)
        self.norm_q, self.norm_k = qk_norms
        self.gate: ThinLinear = make(feed_forward.linear_in)
        self.shrink: ThinLinear = make(feed_forward.linear_out)

    def project(self, x: Tensor, by: Modulation, slots: int) -> tuple[Tensor, ...]:
        """Queries, keys and values [rows, heads, tokens, head width], not rotated."""
        shift, scale, *_ = by
        projected = self.qkv(modulate(self.norm_first(x), scale, shift), slots)
        return _normed(projected, self.norm_q, self.norm_k)

    def add(self, x: Tensor, attended: Tensor, by: Modulation, slots: int) -> Tensor:
        _, _, gate, shift, scale, second_gate = by
        x = x + gate * self.out(attended, slots)
        gated = self.gate(modulate(self.norm_second(x), scale, shift), slots)
        added: Tensor = x + second_gate * self.shrink(_swiglu(gated), slots)
        return added


class _Pair(Module):
    """A block of two streams, which attend to each other."""

    def __init__(self, block: Any, make: Any) -> None:
        super().__init__()
        own = block.attn
        self.image = _Stream(
            make,
            (block.norm1, block.norm2),
            (own.to_q, own.to_k, own.to_v, own.to_out[0]),
            (own.norm_q, own.norm_k),
            block.ff,
        )
        self.text = _Stream(
            make,
            (block.norm1_context, block.norm2_context),
            (own.add_q_proj, own.add_k_proj, own.add_v_proj, own.to_add_out),
            (own.norm_added_q, own.norm_added_k),
            block.ff_context,
        )

    def forward(
        self,
        text: Tensor,
        image: Tensor,
        of_text: Modulation,
        of_image: Modulation,
        by: Rotation,
        slots: int,
    ) -> tuple[Tensor, Tensor]:
        projected = zip(
            self.text.project(text, of_text, slots),
            self.image.project(image, of_image, slots),
            strict=True,
        )
        query, key, value = (torch.cat(both, dim=2) for both in projected)
        attended = attend(thin.rotate(query, by), thin.rotate(key, by), value)
        count = text.shape[1]
        text = self.text.add(text, attended[:, :count], of_text, slots)
        image = self.image.add(image, attended[:, count:], of_image, slots)
        return text, image


class _Block(Module):
    """A block of one stream, whose attention and feed-forward run beside each other."""

    def __init__(self, block: Any, make: Any) -> None:
        super().__init__()
        own = block.attn
        self.norm = block.norm
        self.norm_q = own.norm_q
        self.norm_k = own.norm_k
        self.enter: ThinLinear = make(own.to_qkv_mlp_proj)
        self.leave: ThinLinear = make(own.to_out)
        self._inner: int = own.inner_dim

    def forward(
        self, x: Tensor, by_time: Modulation, by: Rotation, slots: int
    ) -> Tensor:
        shift, scale, gate = by_time
        entered = self.enter(modulate(self.norm(x), scale, shift), slots)
        qkv = entered[..., : 3 * self._inner]
        query, key, value = _normed(qkv, self.norm_q, self.norm_k)
        attended = attend(thin.rotate(query, by), thin.rotate(key, by), value)
        gated = _swiglu(entered[..., 3 * self._inner :])
        left = self.leave(torch.cat([attended, gated], dim=-1), slots)
        added: Tensor = x + gate * left
        return added


def _normed(qkv: Tensor, norm_q: Any, norm_k: Any) -> tuple[Tensor, ...]:
    """Queries, keys and values [rows, heads, tokens, head width] of a product's columns."""
    width = int(norm_q.weight.shape[0])
    query, key, value = (split_heads(each, width) for each in qkv.chunk(3, dim=-1))
    return norm_q(query), norm_k(key), value


def _swiglu(x: Tensor) -> Tensor:
    gates, values = x.chunk(2, dim=-1)
    return F.silu(gates) * values
