"""Packs a folder that peft has saved into one file, as diffusers names what is in it."""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path

from imagefleet import validation
from imagefleet.errors import SetupError
from imagefleet.files import contents, lora, safetensors
from imagefleet.validation import JSONDict

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"


def folders_of(folder: Path) -> Mapping[str, Path]:
    """The folders of the networks that an adapter changes; empty if *folder* holds none.

    One network's files lie in the folder itself, several in folders with the networks' names.
    """
    if (folder / CONFIG).is_file():
        return {_network_of(folder): folder}
    return {
        network: folder / network
        for network in lora.NETWORKS
        if (folder / network / CONFIG).is_file()
    }


def pack(folder: Path, target: Path) -> None:
    """Writes the adapter in *folder* as one .safetensors file; raises SetupError."""
    entries = {}
    stated: JSONDict = {}
    begin = 0
    folders = folders_of(folder)
    headers = {network: _header_of(path) for network, path in folders.items()}
    for network, path in folders.items():
        config = (
            validation.read_file(JSONDict, path / CONFIG, "is no JSON object") or {}
        )
        stated |= {f"{network}.{key}": value for key, value in config.items()}
        header = headers[network]
        for name, (kind, first, last) in header.places.items():
            entries[f"{network}.{name.removeprefix(lora.PEFT_LAYER_PREFIX)}"] = {
                "dtype": kind,
                "shape": header.shapes[name],
                "data_offsets": (begin + first, begin + last),
            }
        begin += header.file_bytes - header.data_at
    metadata = {contents.ADAPTER_METADATA: json.dumps(stated, sort_keys=True)}
    text = json.dumps({"__metadata__": metadata, **entries}).encode()
    with target.open("wb") as file:
        file.write(len(text).to_bytes(safetensors.LENGTH_BYTES, "little") + text)
        for network, path in folders.items():
            with (path / WEIGHTS).open("rb") as weights:
                weights.seek(headers[network].data_at)
                shutil.copyfileobj(weights, file)


def _header_of(folder: Path) -> safetensors.Header:
    path = folder / WEIGHTS
    try:
        with path.open("rb") as file:
            return safetensors.read_header(file)
    except FileNotFoundError:
        raise SetupError(
            f"there is no {WEIGHTS} in {str(folder)!r}: save the adapter with peft's"
            " save_pretrained, as safetensors"
        ) from None
    except (OSError, safetensors.MalformedError):
        raise SetupError(f"{str(path)!r} is not a complete .safetensors file") from None


def _network_of(folder: Path) -> str:
    """The network whose layers an adapter's tensors name."""
    of_unet = ("down_blocks.", "mid_block.", "up_blocks.", "conv_")
    is_unet = any(
        name.removeprefix(lora.PEFT_LAYER_PREFIX).startswith(of_unet)
        for name in _header_of(folder).shapes
    )
    return "unet" if is_unet else "text_encoder"
