"""What transformers for slots share: linear layers with thin changes of each slot's own, attention.

The weights of such networks are too large for a copy per slot (7.2 GiB of FLUX.2-klein). So a LoRA
stays two thin products beside each layer, added to the layer's own output inside the second one: at
rank 32 they are 1 % of the operations.
"""

from collections.abc import Iterable, Mapping

import torch
import torch.nn.functional as F  # noqa: N812 - its name everywhere
from torch import Tensor
from torch.nn import Linear, Module

from worker.engine.networks import int8
from worker.engine.networks.convolution import LowRankChange, SlotChanges
from worker.engine.networks.linear import SlotLinear
from worker.engine.networks.transformer import PromptLayers, SlotNetwork

#: Cosines and sines of a rotary embedding [..., tokens, head width], each for two neighbours.
Rotation = tuple[Tensor, Tensor]


class ThinLinear(Module):
    """Linear layers of one shape and the same input as one product, with each slot's own change."""

    #: [outputs, 1], of weights in int8.
    scale: Tensor | None

    def __init__(self, layers: Mapping[str, Linear]) -> None:
        """*layers* by path; their weights become views of this one's."""
        super().__init__()
        self.linear = SlotLinear(layers)
        self.linear.share()
        self.register_buffer("scale", int8.scales_of(layers.values()), persistent=False)
        self.change = LowRankChange(layers)

    def forward(self, x: Tensor, slots: int) -> Tensor:
        """[rows, tokens, in] to [rows, tokens, layers * out]; each slot has as many rows.

        *slots* adds each slot's own change, 0 none.
        """
        if self.scale is None:
            output: Tensor = self.linear(x, per_slot=False)
        else:
            output = F.linear(x, self.linear.weight.to(x.dtype) * self.scale)
        down = self.change.down
        up = self.change.up
        if not slots or down is None or up is None:
            return output
        products = self.change.narrow(x, slots, down)
        changing, tokens, _ = products.shape
        rows = len(x) // slots * changing
        layers = up.shape[1]
        changed = output[:rows].view(changing, tokens, layers, -1)
        for layer, part in enumerate(products.chunk(layers, dim=-1)):
            changed[:, :, layer].baddbmm_(part, up[:changing, layer])
        return output


class ThinNetwork(SlotNetwork):
    """A transformer of flows: its layers are shared, and slots have thin changes beside them.

    A subclass makes its modules of the *network* that it is built from, and then calls `_join`.
    """

    def __init__(self, network: Module) -> None:
        super().__init__(next(network.parameters()))
        self._paths = {module: path for path, module in network.named_modules()}
        self.added_width = 0

    def _thin(self, *layers: Linear) -> ThinLinear:
        return ThinLinear({self._paths[layer]: layer for layer in layers})

    def _join(self, *of_prompt: Linear) -> None:
        """Notes all thin changes, and the layers *of_prompt*, which run once for an image."""
        self.prompt_layers = PromptLayers(
            {self._paths[each]: each for each in of_prompt}
        )
        self.context_width = self.prompt_layers.width
        like = torch.empty(0, dtype=self.dtype, device=self.device)
        self.changes = SlotChanges(self.find(LowRankChange), like)
        self._paths = {}


def rotation(positions: list[Tensor], widths: Iterable[int], theta: float) -> Rotation:
    """The rotary embedding of *positions* [..., tokens] on each axis, of so many numbers of a head.

    Computed in float64, as diffusers does, and rounded once.
    """
    angles = []
    for position, width in zip(positions, widths, strict=True):
        steps = torch.arange(0, width, 2, dtype=torch.float64, device=position.device)
        angles.append(position.double()[..., None] / theta ** (steps / width))
    whole = torch.cat(angles, dim=-1).repeat_interleave(2, dim=-1)
    return whole.cos().float(), whole.sin().float()


def rotate(x: Tensor, by: Rotation) -> Tensor:
    """Turns pairs of neighbours of x [rows, heads, tokens, head width]; in float32 inside."""
    cosines, sines = by
    real, imaginary = x.reshape(*x.shape[:-1], -1, 2).unbind(-1)
    turned = torch.stack([-imaginary, real], dim=-1).flatten(-2)
    rotated = x.float() * cosines + turned.float() * sines
    return rotated.to(x.dtype)


def modulate(x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    return (1 + scale) * x + shift
