"""LoRA and LoKr of the transformer, trained through the weights that they are merged into.

The merged weights are ordinary ones, so that what was compiled for the model serves adapters, too.
"""

import re
from pathlib import Path

import torch
from diffusers import Flux2Transformer2DModel
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

RANK = 8

#: A LoKr's first factor is so many rows and columns.
_FACTOR = 4

_LAYERS = re.compile(
    r"transformer_blocks\.\d+\.(attn\.(to_[qkv]|to_out\.0|add_[qkv]_proj|to_add_out|to_qkv_mlp_proj"
    r"|to_out)|ff(_context)?\.linear_(in|out))$"
)

#: Layers of a double block in FLUX.2's own names; those of more than one are stacked there.
_DOUBLE_LAYERS = {
    "img_attn.qkv": ("attn.to_q", "attn.to_k", "attn.to_v"),
    "txt_attn.qkv": ("attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj"),
    "img_attn.proj": ("attn.to_out.0",),
    "txt_attn.proj": ("attn.to_add_out",),
    "img_mlp.0": ("ff.linear_in",),
    "img_mlp.2": ("ff.linear_out",),
    "txt_mlp.0": ("ff_context.linear_in",),
    "txt_mlp.2": ("ff_context.linear_out",),
}
_SINGLE_LAYERS = {"linear1": ("attn.to_qkv_mlp_proj",), "linear2": ("attn.to_out",)}


def _linears(transformer: Flux2Transformer2DModel) -> dict[str, nn.Linear]:
    return {
        name: layer
        for name, layer in transformer.named_modules()
        if isinstance(layer, nn.Linear) and _LAYERS.search(name)
    }


class Adapter(nn.Module):
    """Differences of the weights of some layers."""

    def changes(self) -> dict[str, Tensor]:
        """Of each layer, by its name in diffusers, [out, in]."""
        raise NotImplementedError

    def tensors(self) -> dict[str, Tensor]:
        """Under the names that a file has."""
        raise NotImplementedError

    def save(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        tensors = {
            name: each.detach().half().contiguous().cpu()
            for name, each in self.tensors().items()
        }
        save_file(tensors, path, metadata={"format": "pt"})

    @torch.no_grad()
    def load(self, path: Path) -> None:
        found = load_file(path)
        for name, own in self.tensors().items():
            own.copy_(found[name])


class LoraAdapter(Adapter):
    """A LoRA in diffusers' names, as peft saves it."""

    def __init__(self, transformer: Flux2Transformer2DModel) -> None:
        super().__init__()
        self._names = list(_linears(transformer))
        self.down, self.up = nn.ParameterList(), nn.ParameterList()
        for layer in _linears(transformer).values():
            down = torch.empty(RANK, layer.in_features, device=layer.weight.device)
            self.down.append(nn.init.kaiming_uniform_(down, a=5**0.5))
            self.up.append(down.new_zeros(layer.out_features, RANK))

    def changes(self) -> dict[str, Tensor]:
        pairs = zip(self._names, self.down, self.up, strict=True)
        return {name: up @ down for name, down, up in pairs}

    def tensors(self) -> dict[str, Tensor]:
        tensors = {}
        for name, down, up in zip(self._names, self.down, self.up, strict=True):
            tensors[f"transformer.{name}.lora_A.weight"] = down
            tensors[f"transformer.{name}.lora_B.weight"] = up
        return tensors


class LokrAdapter(Adapter):
    """A LoKr in FLUX.2's own names, as ai-toolkit saves it: two whole factors a layer."""

    def __init__(self, transformer: Flux2Transformer2DModel) -> None:
        super().__init__()
        linears = _linears(transformer)
        self._parts: dict[str, tuple[str, ...]] = {}
        for kind, prefix, layers in (
            ("double_blocks", "transformer_blocks", _DOUBLE_LAYERS),
            ("single_blocks", "single_transformer_blocks", _SINGLE_LAYERS),
        ):
            for number in range(len(getattr(transformer, prefix))):
                for name, parts in layers.items():
                    own = tuple(f"{prefix}.{number}.{part}" for part in parts)
                    self._parts[f"{kind}.{number}.{name}"] = own
        self.first, self.second = nn.ParameterList(), nn.ParameterList()
        for parts in self._parts.values():
            layer = linears[parts[0]]
            first = torch.empty(_FACTOR, _FACTOR, device=layer.weight.device)
            self.first.append(nn.init.kaiming_uniform_(first, a=5**0.5))
            rows = len(parts) * layer.out_features // _FACTOR
            self.second.append(first.new_zeros(rows, layer.in_features // _FACTOR))

    def changes(self) -> dict[str, Tensor]:
        changes = {}
        pairs = zip(self._parts.values(), self.first, self.second, strict=True)
        for parts, first, second in pairs:
            stacked = torch.kron(first, second).chunk(len(parts))
            changes |= zip(parts, stacked, strict=True)
        return changes

    def tensors(self) -> dict[str, Tensor]:
        tensors = {}
        for name, first, second in zip(
            self._parts, self.first, self.second, strict=True
        ):
            tensors[f"diffusion_model.{name}.lokr_w1"] = first
            tensors[f"diffusion_model.{name}.lokr_w2"] = second
            # Without effect where both factors are whole, but each such file has it.
            tensors[f"diffusion_model.{name}.alpha"] = torch.tensor(1.0)
        return tensors


class Placed:
    """An adapter merged into a transformer, anew for each step."""

    def __init__(self, adapter: Adapter, transformer: Flux2Transformer2DModel) -> None:
        self.adapter = adapter
        self._transformer = transformer
        self._weights = {
            name: layer.weight for name, layer in _linears(transformer).items()
        }
        self._original = {
            name: weight.detach().clone() for name, weight in self._weights.items()
        }
        self._changes: dict[str, Tensor] = {}

    def place(self) -> None:
        self._changes = self.adapter.changes()
        with torch.no_grad():
            for name, change in self._changes.items():
                self._weights[name].copy_(self._original[name] + change)

    def take_gradients(self) -> None:
        """Those of the merged weights become the adapter's."""
        gradients = [self._weights[name].grad for name in self._changes]
        torch.autograd.backward(list(self._changes.values()), gradients)
        self._transformer.zero_grad(set_to_none=True)
