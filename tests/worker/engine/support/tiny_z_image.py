"""Z-Image as a further transformer: its row, its network and its text rule, and nothing else."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - its name everywhere
from diffusers import AutoencoderKL, ZImageTransformer2DModel
from torch import Tensor, nn

from klein import tiny_klein
from worker.engine.flow.families import FlowFamily
from worker.engine.flow.text import TextRule
from worker.engine.lora.merge import Group, StackedChange
from worker.engine.networks import thin
from worker.engine.networks.transformer import Call, attend, split_heads

#: Tokens of a caption and of an image come in multiples of so many.
_MULTIPLE = 32


class SlotZImage(thin.ThinNetwork):
    """Captions of any length, padded to the context: positions and masks are each slot's own."""

    def __init__(self, network: Any) -> None:
        super().__init__(network)
        (self.enter,) = network.all_x_embedder.values()
        (final,) = network.all_final_layer.values()
        self.final = final
        self.embed_time = network.t_embedder
        self.embed_text = network.cap_embedder
        self.pads = nn.ParameterList([network.x_pad_token, network.cap_pad_token])
        self.of_image = nn.ModuleList(map(self._make, network.noise_refiner))
        self.of_text = nn.ModuleList(map(self._make, network.context_refiner))
        self.blocks = nn.ModuleList(map(self._make, network.layers))
        self._axes = network.config.axes_dims
        self._theta = network.config.rope_theta
        self._join(network.cap_embedder[1])
        # One number more tells the tokens that there are from others.
        self.context_width += 1

    def _make(self, block: Any) -> nn.Module:
        return _Block(block, self._thin)

    @torch.no_grad()
    def compute_prompt(
        self,
        vectors: Tensor,
        _added: object,
        changes: Mapping[Group, StackedChange],
        context: Tensor,
        _added_rows: object,
    ) -> None:
        norm, linear = self.embed_text
        embedded = self.prompt_layers.compute(norm(vectors), changes) + linear.bias
        said = vectors.abs().amax(-1) > 0
        padded = (said.sum(1, keepdim=True) + _MULTIPLE - 1) // _MULTIPLE * _MULTIPLE
        there = torch.arange(vectors.shape[1], device=vectors.device) < padded
        embedded = torch.where(said[..., None], embedded, self.pads[1])
        context.copy_(torch.cat([embedded, there[..., None].to(embedded)], dim=-1))

    def forward(
        self,
        x: Tensor,
        times: Tensor,
        call: Call,
        _added: object = None,
        _residuals: object = (),
    ) -> Tensor:
        slots, channels, height, width = x.shape
        high = height // 2
        wide = width // 2
        there = call.context[..., -1] > 0.5
        time = self.embed_time(1000 - times).to(x.dtype)
        time = time.repeat_interleave(call.slot_rows, dim=0)
        patches = x.view(slots, channels, high, 2, wide, 2).permute(0, 2, 4, 3, 5, 1)
        image = self.enter(patches.reshape(slots, high * wide, -1))
        pads = self.pads[0].expand(slots, -high * wide % _MULTIPLE, -1)
        image = torch.cat([image, pads], dim=1)
        image = image.repeat_interleave(call.slot_rows, dim=0)
        of_image, of_text = self._positions(there, high, wide, image.shape[1])
        mask = there[:, None, None]
        for block in self.of_image:
            image = block(image, of_image, None, time, call.slots)
        text = call.context[..., :-1]
        for block in self.of_text:
            text = block(text, of_text, mask, None, call.slots)
        tokens = torch.cat([image, text], dim=1)
        both = torch.cat([mask.new_ones(len(mask), 1, 1, image.shape[1]), mask], dim=-1)
        by = tuple(
            torch.cat(each, dim=2) for each in zip(of_image, of_text, strict=True)
        )
        for block in self.blocks:
            tokens = block(tokens, by, both, time, call.slots)
        velocity = -self.final(tokens[:, : high * wide], c=time)
        unpatched = velocity.view(-1, high, wide, 2, 2, channels)
        return unpatched.permute(0, 5, 1, 3, 2, 4).reshape(-1, channels, height, width)

    def _positions(
        self, there: Tensor, high: int, wide: int, tokens: int
    ) -> tuple[thin.Rotation, thin.Rotation]:
        """An image's first axis begins behind its own caption."""
        rows, texts = there.shape

        def rotation(*axes: Tensor) -> thin.Rotation:
            cosines, sines = thin.rotation([*axes], self._axes, self._theta)
            return cosines[:, None], sines[:, None]

        def padded(axis: Tensor) -> Tensor:
            return F.pad(axis.expand(rows, -1), (0, tokens - high * wide))

        count = torch.arange(max(high, wide, texts), device=there.device)
        after = (there.sum(1, keepdim=True) + 1).expand(-1, high * wide)
        down = count[:high].repeat_interleave(wide)
        right = count[:wide].repeat(high)
        of_image = rotation(padded(after), padded(down[None]), padded(right[None]))
        words = (1 + count[:texts])[None].expand(rows, -1)
        nothing = torch.zeros_like(words)
        return of_image, rotation(words, nothing, nothing)


class _Block(nn.Module):
    def __init__(self, block: Any, make: Any) -> None:
        super().__init__()
        own = block.attention
        feed = block.feed_forward
        self.qkv = make(own.to_q, own.to_k, own.to_v)
        self.out = make(own.to_out[0])
        self.norm_q = own.norm_q
        self.norm_k = own.norm_k
        self.gate = make(feed.w1, feed.w3)
        self.shrink = make(feed.w2)
        attention = block.attention_norm1, block.attention_norm2
        self.norms = nn.ModuleList([*attention, block.ffn_norm1, block.ffn_norm2])
        self.modulate = make(block.adaLN_modulation[0]) if block.modulation else None
        self._heads = own.heads

    def forward(
        self,
        x: Tensor,
        by: thin.Rotation,
        mask: Tensor | None,
        time: Tensor | None,
        slots: int,
    ) -> Tensor:
        scales: Any = (1.0, 1.0, 1.0, 1.0)
        if self.modulate is not None and time is not None:
            first, gate, second, last = self.modulate(time[:, None], slots).chunk(4, -1)
            scales = 1 + first, gate.tanh(), 1 + second, last.tanh()
        before, after, ahead, behind = self.norms
        qkv = self.qkv(before(x) * scales[0], slots)
        width = x.shape[-1] // self._heads
        query, key, value = (split_heads(each, width) for each in qkv.chunk(3, -1))
        query = thin.rotate(self.norm_q(query), by)
        key = thin.rotate(self.norm_k(key), by)
        attended = self.out(attend(query, key, value, mask), slots)
        x = x + scales[1] * after(attended)
        gates, values = self.gate(ahead(x) * scales[2], slots).chunk(2, -1)
        return x + scales[3] * behind(self.shrink(F.silu(gates) * values, slots))


Z_IMAGE = FlowFamily(
    name="Z-Image",
    slug="klein",  # of those whose images `plan` counts
    pipeline="ZImagePipeline",
    network=ZImageTransformer2DModel,
    slot_network=SlotZImage,
    text=TextRule(layers=(-2,), tokens=64, thinks=True, zeroes_padding=True),
    convert=dict,
    fits=lambda transformer, vae, width: (
        (transformer.in_channels, transformer.cap_feat_dim)
        == (vae.latent_channels, width)
    ),
    vae=AutoencoderKL,
    mu=lambda _places, _steps: 1.0,
    cell=16,
    plain_tokens=64,
    is_distilled=True,
)


def build(folder: Path) -> Path:
    """Writes a tiny random Z-Image in diffusers' format; returns its folder."""
    tiny_klein.build(folder)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        transformer = ZImageTransformer2DModel(
            in_channels=4, dim=32, n_layers=2, n_refiner_layers=1, n_heads=2,
            n_kv_heads=2, cap_feat_dim=16, axes_dims=[8, 4, 4], axes_lens=[256, 32, 32],
        )  # fmt: skip
        for parameter in transformer.parameters():
            nn.init.normal_(parameter, std=0.1)
        vae = AutoencoderKL(
            down_block_types=("DownEncoderBlock2D",) * 4,
            up_block_types=("UpDecoderBlock2D",) * 4,
            block_out_channels=(8, 8, 8, 8),
            latent_channels=4,
            norm_num_groups=2,
            sample_size=64,
            scaling_factor=0.36,
            shift_factor=0.12,
        )
    for part, network in {"transformer": transformer, "vae": vae}.items():
        for file in (folder / part).iterdir():
            file.unlink()
        network.save_pretrained(folder / part)
    index = {"_class_name": Z_IMAGE.pipeline, "is_distilled": True}
    (folder / "model_index.json").write_text(json.dumps(index))
    return folder
