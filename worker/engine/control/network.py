"""ControlNets for slots: the same arithmetic as diffusers' ControlNetModel, made as `SlotUnet` is.

All slots share its weights, which LoRAs do not change. It has keys and values of its own for each
prompt; the control image is embedded once, before the first step.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from worker.engine.contract import Pixels
from worker.engine.kernels.layers import channels_last
from worker.engine.networks.linear import SlotLinear
from worker.engine.networks.transformer import Call, repeat_rows
from worker.engine.networks.unet import SlotEncoder
from worker.engine.passes.begin import levels_of


class SlotControlNet(SlotEncoder):
    """Takes over the weights of the ControlNetModel that it is made from."""

    def __init__(self, original: Any, *, pools: bool) -> None:
        """*pools*: its outputs are averaged over the image, and steer the prompt's rows alone."""
        paths = {module: path for path, module in original.named_modules()}
        super().__init__(original, paths)
        for linear in self.find(SlotLinear):
            linear.share()
        self._join(paths)
        self.pools = pools
        self.hint = original.controlnet_cond_embedding
        self.outs = nn.ModuleList(
            [*original.controlnet_down_blocks, original.controlnet_mid_block]
        )
        self.size_bytes = sum(each.nbytes for each in self.tensors())

    def forward(
        self,
        x: Tensor,
        times: Tensor,
        call: Call,
        added: Tensor | None,
        hint: Tensor,
        weights: Tensor,
    ) -> list[Tensor]:
        """Residuals for the outputs of the UNet's layers, the middle's last.

        As `SlotUnet.forward`; *hint* [slots, channels, height, width] from `embed`; *weights*
        [slots]. Those of the layers before the first prompt have one row per slot, others all.
        """
        x, _, skips = self.encode(x, times, call, added, hint)
        skips.append(x)
        return [
            self._weigh(out(skip), weights, call.slot_rows)
            for out, skip in zip(self.outs, skips, strict=True)
        ]

    @torch.no_grad()
    def embed(self, pixels: Pixels) -> Tensor:
        """The control image [channels, height, width] of the latents' size."""
        levels = levels_of(pixels, self.device) / 255
        embedded: Tensor = self.hint(levels.to(self.dtype))
        return embedded[0]

    def record_stream(self) -> None:
        """Keeps the network's memory allocated until the current stream's pending work is done."""
        if self.device.type == "cuda":
            stream = torch.cuda.current_stream(self.device)
            for tensor in self.tensors():
                tensor.record_stream(stream)

    def tensors(self) -> Iterator[Tensor]:
        stacks = (stack.shared for stack in self.prompt_layers.stacks.values())
        return itertools.chain(self.parameters(), self.buffers(), stacks)

    def _weigh(self, output: Tensor, weights: Tensor, slot_rows: int) -> Tensor:
        if not self.pools:
            return output * repeat_rows(weights[:, None], len(output))[..., None, None]
        rows = repeat_rows(output.mean((2, 3), keepdim=True), slot_rows * len(weights))
        guided = slot_rows - 1 or 1
        by_row = torch.stack(
            [*[weights] * guided, torch.zeros_like(weights)][:slot_rows], dim=1
        )
        return rows * by_row.flatten()[:, None, None, None]


class ControlState(NamedTuple):
    """A ControlNet of a lane, and what it takes of the lane's slots; a tick changes none of it."""

    network: SlotControlNet
    #: [slots, channels, height, width]: the embedded control images.
    hints: Tensor
    #: [rows, tokens, width]: the keys and values of its cross-attentions.
    context: Tensor
    #: [rows, width], as `SlotState.added`.
    added: Tensor | None

    @classmethod
    def zeros(
        cls,
        network: SlotControlNet,
        slots: int,
        sides: Sequence[int],
        context: torch.Size,
    ) -> ControlState:
        """Empty, for latents of these *sides* (height, width); *context*: the UNet's own shape."""
        like = next(network.conv_in.parameters())
        (rows, tokens, _) = context
        return cls(
            network,
            channels_last(like.new_zeros((slots, len(like), *sides))),
            like.new_zeros((rows, tokens, network.context_width)),
            like.new_zeros((rows, network.added_width))
            if network.added_width
            else None,
        )

    def first(self, slots: int) -> ControlState:
        rows = slots * self.slot_rows
        added = None if self.added is None else self.added[:rows]
        return ControlState(
            self.network, self.hints[:slots], self.context[:rows], added
        )

    @property
    def slot_rows(self) -> int:
        return len(self.context) // len(self.hints)

    def fill(
        self,
        slot: int,
        hint: Tensor,
        vectors: Tensor,
        added: tuple[Tensor, ...] | None,
    ) -> None:
        """Sets a slot to a job's control image, vectors and added inputs of the slot's rows."""
        rows = slice(slot * self.slot_rows, (slot + 1) * self.slot_rows)
        self.hints[slot].copy_(hint)
        added_rows = None if self.added is None else self.added[rows]
        self.network.compute_prompt(vectors, added, {}, self.context[rows], added_rows)


def residuals(
    controls: Sequence[ControlState],
    x: Tensor,
    times: Tensor,
    mask: Tensor | None,
    weights: Tensor,
) -> list[Tensor]:
    """Sums the residuals of a lane's ControlNets; *weights* [slots, ControlNets]."""
    total: list[Tensor] = []
    for at, control in enumerate(controls):
        weight = weights[:, at].to(x.dtype)
        call = Call(control.context, mask, slot_rows=control.slot_rows)
        found = control.network(x, times, call, control.added, control.hints, weight)
        if not total:
            total = found
            continue
        for layer, (one, other) in enumerate(zip(total, found, strict=True)):
            rows = max(len(one), len(other))
            total[layer] = repeat_rows(one, rows) + repeat_rows(other, rows)
    return total
