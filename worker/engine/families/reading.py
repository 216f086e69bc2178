"""Reads networks in diffusers format and their noise schedules, while an engine may draw.

The libraries' `from_pretrained` changes torch's default type for the whole process while it builds
a network: images that are drawn at that time would begin with other noise.
"""

import contextlib
import json
import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from diffusers import DDPMScheduler, ModelMixin
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from imagefleet.errors import SetupError
from imagefleet.validation import JSONDict, JSONObject
from worker.engine.files.safetensors import Tensors

#: What the libraries raise for missing, truncated or mismatched files.
LOADING_ERRORS = (
    ImportError,
    OSError,
    ValueError,
    LookupError,
    TypeError,
    RuntimeError,
    SafetensorError,
)

#: Names of an attention's layers in the VAEs of older folders, and today's.
_OLDER = re.compile(r"(\.attentions\.\d+\.)(query|key|value|proj_attn)(\.\w+)$")
_TODAYS = {"query": "to_q", "key": "to_k", "value": "to_v", "proj_attn": "to_out.0"}

#: A level that some versions of transformers give a text encoder, and files of all of them have.
_LEVEL = "text_model."

#: The level of a language model's layers in files that have its last layer, too.
_CAUSAL_LEVEL = "model."


def read_network(
    network: type[Any], folder: Path, config: JSONObject | None = None
) -> Any:
    """A network of diffusers or transformers on the CPU, in the types of its files.

    *config*, if given, goes before the folder's own. Raises SetupError if it is missing or damaged.
    """
    stem = "diffusion_pytorch_model" if issubclass(network, ModelMixin) else "model"
    files = _files(folder, stem)
    with named(folder):
        weights = {key: each for path in files for key, each in load_file(path).items()}
        made = build(network, config or read_json(folder / "config.json"))
        assign(made, weights)
    return made


@contextlib.contextmanager
def named(path: Path, what: str = "") -> Iterator[None]:
    """Raises what the libraries raise in the block as a SetupError that names *path*."""
    try:
        yield
    except LOADING_ERRORS as error:
        raise SetupError(
            f"{what}{str(path)!r} cannot be loaded: {brief(error)}"
        ) from error


def build(network: type[Any], config: JSONObject) -> Any:
    """A network without memory for its weights, but for what checkpoints need not contain."""
    with torch.device("meta"):
        if issubclass(network, ModelMixin):
            made = network.from_config(config)
        else:
            made = network(network.config_class.from_dict(dict(config)))
    for module in made.modules():
        # A text encoder's only buffer.
        if isinstance(found := getattr(module, "position_ids", None), Tensor):
            numbers = torch.arange(found.shape[-1]).unsqueeze(0)
            module.register_buffer("position_ids", numbers, persistent=False)
    return made


def assign(network: nn.Module, weights: Tensors) -> None:
    """Gives a network built without memory its weights, for inference.

    Raises RuntimeError if some have another shape, and ValueError if some are missing.
    """
    own = network.state_dict().keys()
    named = {_name_in(own, key): each for key, each in weights.items()}
    network.load_state_dict(named, strict=False, assign=True)
    if isinstance(network, PreTrainedModel):
        network.tie_weights()
    tensors = network.state_dict()  # statistics of a VAE as well
    missing = sorted(
        name
        for name, each in tensors.items()
        if each.is_meta and each.is_floating_point()
    )
    if missing:
        raise ValueError(
            f"it lacks {len(missing)} of its weights, for example {missing[0]}"
        )
    network.requires_grad_(requires_grad=False).eval()


def network_config(folder: Path, default: JSONObject) -> JSONDict:
    return read_json(folder / "config.json") or dict(default)


def read_json(path: Path) -> JSONDict:
    """A configuration; nothing without its file. Raises SetupError if it is no JSON object."""
    if not path.is_file():
        return {}
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise SetupError(f"{str(path)!r} is not JSON: {brief(error)}") from error
    if not isinstance(found, dict):
        raise SetupError(f"{str(path)!r} is not a JSON object")
    return found


def brief(error: Exception) -> str:
    """The first line that says something: libraries append pages of weight names and links."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    # torch's first line is only a heading: "Error(s) in loading state_dict for ...:".
    said = next(
        (line for line in lines if not line.endswith(":")), type(error).__name__
    )
    return said[:200]


def _files(folder: Path, stem: str) -> list[Path]:
    """The files with a network's weights; those in float16 only where there are no others."""
    names = [path.name for path in folder.glob("*.safetensors")]
    variant = ".fp16" if all(".fp16" in name for name in names) else ""
    whole = f"{stem}{variant}.safetensors"
    if whole in names:
        return [folder / whole]
    parts = read_json(folder / f"{stem}.safetensors.index{variant}.json").get(
        "weight_map"
    )
    if not isinstance(parts, dict):
        raise SetupError(
            f"{str(folder)!r} has neither {whole} nor an index of its parts"
        )
    names = sorted({Path(str(name)).name for name in parts.values()})
    return [folder / name for name in names]


def _name_in(own: Collection[str], key: str) -> str:
    """The network's name of the weight that a file calls *key*."""
    others = (
        key.removeprefix(_LEVEL),
        _LEVEL + key,
        key.removeprefix(_CAUSAL_LEVEL),
        _OLDER.sub(lambda found: f"{found[1]}{_TODAYS[found[2]]}{found[3]}", key),
    )
    return next((each for each in (key, *others) if each in own), key)


#: Empty tensors that mark the single files of some checkpoints.
V_PREDICTION_KEY = "v_pred"
ZERO_TERMINAL_SNR_KEY = "ztsnr"

#: AUTOMATIC1111's last value in place of 0, from which no image could be computed.
_LAST_ALPHA = 4.8973451890853435e-08

#: The highest level of noise on the image of an x4 upscaler whose configuration says none.
_MAX_LEVEL = 350


@dataclass(frozen=True)
class ImageNoise:
    """The noise on the image that an x4 upscaler enlarges."""

    scheduler: DDPMScheduler
    #: The highest timestep.
    max_level: int

    @property
    def timesteps(self) -> int:
        """The number of timesteps, of which a level is one."""
        return int(self.scheduler.config.num_train_timesteps)


def image_noise(index: JSONObject, scheduler: JSONObject, levels: int) -> ImageNoise:
    """Reads it from a folder's configurations; *levels*: how many the UNet knows."""
    made = DDPMScheduler.from_config(dict(scheduler))
    # On a GPU, a level out of range is a device-side assert, which ends the process.
    most = min(levels, int(made.config.num_train_timesteps)) - 1
    return ImageNoise(made, min(int(index.get("max_noise_level", _MAX_LEVEL)), most))


def prediction_type(
    model: Path, scheduler: JSONObject, stated: str | None, keys: Collection[str]
) -> str | None:
    """Prediction type by the scheduler's configuration, else as *stated*, else by the file's keys.

    A single file's own mark goes before the configuration that lies beside it. Raises SetupError if
    it predicts something else.
    """
    if V_PREDICTION_KEY in keys and stated != "epsilon":
        return "v_prediction"
    found: str | None = scheduler.get("prediction_type", stated)
    if found not in {None, "epsilon", "v_prediction"}:
        raise SetupError(
            f"{str(model)!r} predicts {str(found)[:40]!r}; imagefleet generates with checkpoints"
            " that predict epsilon or v_prediction"
        )
    return found


def alphas_cumprod(model: Path, scheduler: JSONObject, keys: Collection[str]) -> Tensor:
    """SD's 'scaled_linear' schedule: betas with evenly spaced square roots.

    Raises SetupError if the checkpoint has another one.
    """
    if scheduler.get("beta_schedule", "scaled_linear") != "scaled_linear":
        raise SetupError(
            f"{str(model)!r} does not have Stable Diffusion's noise schedule"
        )
    start = scheduler.get("beta_start", 0.00085)
    end = scheduler.get("beta_end", 0.012)
    count = scheduler.get("num_train_timesteps", 1000)
    betas = torch.linspace(start**0.5, end**0.5, count, dtype=torch.float64) ** 2
    alphas = torch.cumprod(1 - betas, dim=0)
    if scheduler.get("rescale_betas_zero_snr") or ZERO_TERMINAL_SNR_KEY in keys:
        return rescale_to_zero_terminal_snr(alphas)
    return alphas


def rescale_to_zero_terminal_snr(alphas: Tensor) -> Tensor:
    """Lin et al. (2024), algorithm 1, with AUTOMATIC1111's last value: nothing but noise there."""
    roots = alphas.sqrt()
    first = roots[0].item()
    last = roots[-1].item()
    rescaled = ((roots - last) * (first / (first - last))) ** 2
    rescaled[-1] = _LAST_ALPHA
    return rescaled
