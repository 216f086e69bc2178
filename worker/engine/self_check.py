"""A node's check of its own engine: the bits of the weights on the device."""

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import nn

from worker.engine import checksums
from worker.engine.families.table import Model
from worker.engine.files.safetensors import Tensors
from worker.engine.lora import shared

#: Buffers that are made of the weights when they are loaded. The slots' own change with every job.
_DERIVED = "folded"


@dataclass(eq=False)
class SelfCheck:
    """See `contract.SelfCheck`."""

    _checkpoint: Model
    _merger: shared.Merger
    #: The modules that compute, with buffers made of the checkpoint's weights.
    _computing: Mapping[str, nn.Module]
    #: Held by another thread while it merges LoRAs into the text encoder.
    _text_encoder_lock: contextlib.AbstractContextManager[object]
    #: Puts the checkpoint's own weights in place; returns what computes in place of parameters that
    #: are in the host's memory.
    _reloaded: Callable[[], Tensors]

    def __post_init__(self) -> None:
        self._expected = dict(self._checkpoint.weight_sums or {})
        tensors = checksums.named_parameters(self._checkpoint.networks)
        tensors |= self._derived()
        self._types = {name: tensor.dtype for name, tensor in tensors.items()}

    def find_fault(self) -> str | None:
        """Compares the bits of the weights on the device with those that the CPU read.

        LoRAs that are merged now do not count; the slots' own copies are not compared.
        """
        replaced = dict(self._reloaded())
        originals = self._merger.originals
        replaced |= {f"{path}.weight": weight for path, weight in originals.items()}
        tensors = checksums.named_parameters(self._checkpoint.networks)
        backbone = self._checkpoint.family.backbone
        tensors |= {f"{backbone}.{name}": each for name, each in replaced.items()}
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

    def _derived(self) -> Tensors:
        return {
            f"{network}'s own {name}": buffer
            for network, module in self._computing.items()
            for name, buffer in module.named_buffers()
            if name.endswith(_DERIVED)
        }
