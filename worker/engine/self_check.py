"""A node's checks of its own engine: the weights on the device, and a LoRA of no file."""

import contextlib
import hashlib
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor, nn

from imagefleet import errors
from worker.engine import checksums
from worker.engine.families.table import Model
from worker.engine.lora import shared
from worker.engine.lora.file import adaptable_layers

#: A LoRA's usual rank is 8 or more; a lower one is as good a check.
LORA_RANK = 4

#: The size of the LoRA's change as a share of each weight's (Frobenius norms). The demo model's
#: image of 4 steps changes by 30 levels of 255 where it changes most; at 0.5 it would be chaotic,
#: and differ from one precision to the other.
LORA_SHARE = 0.2

#: Keys of kohya's format.
_PREFIXES = {"unet": "lora_unet_", "text_encoder": "lora_te_text_model_"}


#: Buffers that are made of the weights when they are loaded. The slots' own change with every job.
_DERIVED = "folded"


class SelfCheck:
    """See `contract.SelfCheck`."""

    def __init__(
        self,
        checkpoint: Model,
        merger: shared.Merger,
        computing: Mapping[str, nn.Module],
        text_encoder_lock: contextlib.AbstractContextManager[object],
        reloaded: Callable[[], Mapping[str, Tensor]],
    ) -> None:
        """*computing*: the modules that compute, with buffers made of the checkpoint's weights.

        *reloaded*: puts the checkpoint's own weights in place; returns what computes in place of
        parameters that are in the host's memory. Another thread may merge LoRAs into the text
        encoder, while it holds *text_encoder_lock*.
        """
        self.weights_id = checkpoint.weights_id
        self._networks = checkpoint.networks
        self._backbone = checkpoint.family.backbone
        self._merger = merger
        self._computing = computing
        self._text_encoder_lock = text_encoder_lock
        self._reloaded = reloaded
        self._expected = dict(checkpoint.weight_sums or {})
        tensors = {**checksums.named_parameters(self._networks), **self._derived()}
        self._types = {name: tensor.dtype for name, tensor in tensors.items()}

    def find_fault(self) -> str | None:
        """Compares the bits of the weights on the device with those that the CPU read.

        LoRAs that are merged now do not count; the slots' own copies are not compared.
        """
        replaced = dict(self._reloaded())
        originals = self._merger.originals
        replaced |= {f"{path}.weight": weight for path, weight in originals.items()}
        tensors = checksums.named_parameters(self._networks)
        tensors |= {f"{self._backbone}.{name}": each for name, each in replaced.items()}
        if not originals:
            tensors |= self._derived()
        # A VAE that overflowed was widened, which is exact in both directions.
        own = {
            name: each.to(self._types.get(name, each.dtype))
            for name, each in tensors.items()
        }
        with self._text_encoder_lock:
            found = checksums.sum_bits(own)
        if not originals:
            # The first ones are what they have to stay.
            self._expected = found | self._expected
        differing = [
            name for name, total in found.items() if self._expected[name] != total
        ]
        if not differing:
            return None
        more = f" and {len(differing) - 1} more" if len(differing) > 1 else ""
        return (
            f"the weights on the device are not the checkpoint's: {differing[0]}{more}"
        )

    def _derived(self) -> dict[str, Tensor]:
        return {
            f"{network}'s own {name}": buffer
            for network, module in self._computing.items()
            for name, buffer in module.named_buffers()
            if name.endswith(_DERIVED)
        }

    def write_lora(self, path: Path) -> None:
        """Writes a LoRA on all attentions, noise by the layers' names; NodeError if it cannot."""
        self._reloaded()
        tensors: dict[str, Tensor] = {}
        for network, prefix in _PREFIXES.items():
            for layer_path, layer in adaptable_layers(self._networks[network]).items():
                if not isinstance(layer, nn.Linear) or "attn" not in layer_path:
                    continue
                name = layer_path.removeprefix("text_model.").replace(".", "_")
                key = f"{prefix}{name}"
                outer, inner = layer.weight.shape
                up = _noise(f"{key} up", outer)
                down = _noise(f"{key} down", inner)
                size = layer.weight.float().norm().item()
                scale = LORA_SHARE * size / np.linalg.norm(up @ down.T).item()
                up = scale * up
                down = down.T.copy()
                tensors[f"{key}.lora_up.weight"] = torch.from_numpy(up).half()
                tensors[f"{key}.lora_down.weight"] = torch.from_numpy(down).half()
        try:
            save_file(tensors, path)
        except (OSError, SafetensorError) as error:
            raise errors.NodeError(
                f"{str(path)!r} cannot be written: {error}"
            ) from error


def _noise(name: str, length: int) -> np.ndarray:
    """[length, LORA_RANK] between -1 and 1; no library's next version draws it differently."""
    data = hashlib.shake_256(name.encode()).digest(length * LORA_RANK)
    levels = np.frombuffer(data, np.uint8).astype(np.float32).reshape(length, LORA_RANK)
    return levels / 127.5 - 1
