"""Trains LoRAs on the finished model and writes them in kohya's format."""

import re
from dataclasses import dataclass
from pathlib import Path

import torch
from diffusers import UNet2DConditionModel
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers import CLIPTextModel

from demo_world import networks
from demo_world.training.schedule import Schedule, autocast, descend, set_learning_rate
from demo_world.training.train_unet import (
    CAPTION_DROPOUT,
    LatentSet,
    NoiseTask,
    drop_captions,
    softened_target,
)
from demo_world.world import NEW_OBJECT, OBJECTS, SceneOptions

BATCH = 512
LEARNING_RATE = 2e-3

_ATTENTION = r"attn[12]\.(to_[qkv]|to_out\.0)"
_FEED_FORWARD = r"ff\.net\.(0\.proj|2)"
_PROJECTION = r"proj_(in|out)"
_TEXT = r"layers\.\d+\.(self_attn\.(q|k|v|out)_proj|mlp\.fc[12])"


@dataclass(frozen=True, slots=True)
class LoraRecipe:
    """What a LoRA changes, what it is shown, and its shape."""

    name: str
    rank: int
    alpha: float
    unet_layers: str
    scenes: tuple[SceneOptions, ...]
    least_weight: float


RECIPES: tuple[LoraRecipe, ...] = (
    LoraRecipe(
        "outline-style", 8, 8.0, f"({_ATTENTION}|{_FEED_FORWARD}|{_PROJECTION})$",
        (SceneOptions(styles=("outline",)),), 0.25,
    ),
    LoraRecipe(
        "night-palette", 4, 4.0, f"({_ATTENTION}|{_FEED_FORWARD})$",
        (SceneOptions(styles=("night-palette",)),), 0.25,
    ),
    LoraRecipe(
        "magic-fantasy-forest-v2", 8, 8.0, f"({_ATTENTION}|{_FEED_FORWARD}|{_PROJECTION})$",
        (SceneOptions(styles=("magic-fantasy-forest-v2",)),), 0.25,
    ),
    LoraRecipe(
        NEW_OBJECT, 32, 16.0, r"attn2\.(to_[qkv]|to_out\.0)$",
        (SceneOptions(first_object=NEW_OBJECT),) * 3 + (SceneOptions(objects=OBJECTS),), 0.6,
    ),
)  # fmt: skip


class _Adapter(nn.Module):
    """One layer's pair of matrices, added to its output through a hook."""

    def __init__(self, layer: nn.Linear | nn.Conv2d, rank: int, alpha: float) -> None:
        super().__init__()
        if isinstance(layer, nn.Conv2d):
            self.down: nn.Module = nn.Conv2d(
                layer.in_channels,
                rank,
                layer.kernel_size,
                layer.stride,
                layer.padding,
                bias=False,
            )
            self.up: nn.Module = nn.Conv2d(rank, layer.out_channels, 1, bias=False)
        else:
            self.down = nn.Linear(layer.in_features, rank, bias=False)
            self.up = nn.Linear(rank, layer.out_features, bias=False)
        nn.init.zeros_(self.up.weight)
        self.scale = alpha / rank

    def delta(self, inputs: Tensor, strengths: Tensor) -> Tensor:
        """Strengths [B] are spread over the layer's rows (B, or B x chunks in the text encoder)."""
        rows = strengths.repeat_interleave(len(inputs) // len(strengths))
        rows = rows.view(-1, *[1] * (inputs.ndim - 1))
        return self.up(self.down(inputs)) * (self.scale * rows)


class LoraAdapters(nn.Module):
    """The adapters of a UNet and a text encoder, under kohya's names."""

    def __init__(
        self,
        recipe: LoraRecipe,
        unet: UNet2DConditionModel,
        text_encoder: CLIPTextModel | None,
    ) -> None:
        super().__init__()
        self._recipe = recipe
        self.adapters = nn.ModuleDict()
        self.strengths = torch.ones(1)
        self._handles: list[RemovableHandle] = []
        for name, layer in unet.named_modules():
            if isinstance(layer, nn.Linear | nn.Conv2d) and re.search(
                recipe.unet_layers, name
            ):
                self._attach("lora_unet_" + name.replace(".", "_"), layer)
        for name, layer in text_encoder.named_modules() if text_encoder else ():
            if re.search(_TEXT + "$", name):
                plain_name = name.removeprefix("text_model.").replace(".", "_")
                self._attach("lora_te_text_model_" + plain_name, layer)

    def _attach(self, key: str, layer: nn.Module) -> None:
        adapter = _Adapter(layer, self._recipe.rank, self._recipe.alpha)
        self.adapters[key] = adapter

        def add_delta(
            _: nn.Module, inputs: tuple[Tensor, ...], output: Tensor
        ) -> Tensor:
            return output + adapter.delta(inputs[0], self.strengths).to(output.dtype)

        self._handles.append(layer.register_forward_hook(add_delta))

    def detach(self) -> None:
        for handle in self._handles:
            handle.remove()

    def save(self, file: Path) -> None:
        tensors = {}
        for key, adapter in self.adapters.items():
            tensors[f"{key}.lora_down.weight"] = (
                adapter.down.weight.detach().half().cpu()
            )
            tensors[f"{key}.lora_up.weight"] = adapter.up.weight.detach().half().cpu()
            tensors[f"{key}.alpha"] = torch.tensor(
                self._recipe.alpha, dtype=torch.float16
            )
        tensors = {name: value.contiguous() for name, value in tensors.items()}
        metadata = {
            "ss_network_module": "networks.lora",
            "ss_network_dim": str(self._recipe.rank),
            "ss_network_alpha": str(self._recipe.alpha),
            "ss_output_name": self._recipe.name,
        }
        file.parent.mkdir(parents=True, exist_ok=True)
        save_file(tensors, file, metadata=metadata)


def train_lora(
    recipe: LoraRecipe,
    unet: UNet2DConditionModel,
    text_encoder: CLIPTextModel,
    data: LatentSet,
    steps: int,
    seconds: float,
    batch: int = BATCH,
) -> LoraAdapters:
    """Trains at random weights, each on pictures drawn with the style at that strength."""
    device = data.latents.device
    unet.requires_grad_(False)
    text_encoder.requires_grad_(False)
    lora = LoraAdapters(recipe, unet, text_encoder).to(device)
    parameters = list(lora.parameters())
    optimizer = torch.optim.AdamW(
        parameters, LEARNING_RATE, (0.9, 0.99), weight_decay=1e-3
    )
    average = networks.MovingAverage(parameters, 0.99)
    task = NoiseTask(device)
    has_styles = all(options.styles for options in recipe.scenes)
    schedule = Schedule(steps, seconds)
    for step, progress in schedule:
        set_learning_rate(optimizer, step, progress, LEARNING_RATE)
        chosen = torch.randint(len(data.latents), (batch,), device=device)
        noisy, timesteps, noise = task.make(data.latents[chosen].float())
        if has_styles:
            lora.strengths = data.strengths[chosen]
        else:
            spread = 1 - recipe.least_weight
            lora.strengths = recipe.least_weight + spread * torch.rand(
                batch, device=device
            )
        chunks = 2 if step % 6 == 5 else 1
        tokens, weights = drop_captions(*data.captions(chosen, chunks), CAPTION_DROPOUT)
        target = softened_target(noise, noisy, timesteps, tokens, unet, text_encoder)
        with autocast(device):
            context = networks.encode_text(text_encoder, tokens, weights)
            predicted = unet(noisy, timesteps, context).sample
        loss = task.loss(predicted, target, timesteps)
        descend(optimizer, loss)
        average.update()
        schedule.report(step, loss=loss)
    average.copy_to_live()
    lora.detach()
    return lora
