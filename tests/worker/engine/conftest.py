"""A tiny checkpoint with SD1.5's architecture, engines on it, and helpers to draw with them."""

import copy
import dataclasses
import importlib
import importlib.util
import io
import pickle
import shutil
import sys
import types
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import AutoencoderKL, UNet2DConditionModel
from safetensors.torch import save_file

import key_names
import tiny_model
from drawing import draw, make_request
from families import tiny_controlnets
from imagefleet.job.samplers import Options
from worker.engine import checkpoint as checkpoints
from worker.engine import contract, device, load, text
from worker.engine.contract import Settings
from worker.engine.families.latents import of_latents
from worker.engine.passes.checkpoints import Read
from worker.engine.slots import engine as slots

DEMO_MODEL = Path(__file__).parents[3] / "demo_model"


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory) -> Path:
    """With half of SD1.5's levels: an image takes half the time."""
    # Two threads on a busy machine wait for each other: 5x slower.
    torch.set_num_threads(1)
    return tiny_model.build_half_checkpoint(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="session")
def small_model(checkpoint: Path, tmp_path_factory) -> Path:
    """The tiny checkpoint with one block of each kind, which take seconds to trace."""
    folder = tmp_path_factory.mktemp("model") / "small"
    shutil.copytree(checkpoint, folder)
    shutil.rmtree(folder / "unet")
    shutil.rmtree(folder / "vae")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        unet = UNet2DConditionModel(
            sample_size=16,
            down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
            up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
            block_out_channels=(32, 32),
            layers_per_block=0,
            cross_attention_dim=32,
            attention_head_dim=4,
            norm_num_groups=8,
        )
        vae = AutoencoderKL(
            sample_size=32,
            down_block_types=("DownEncoderBlock2D",) * 2,
            up_block_types=("UpDecoderBlock2D",) * 2,
            block_out_channels=(16, 16),
            layers_per_block=0,
            norm_num_groups=8,
            scaling_factor=0.18215,
        )
    unet.save_pretrained(folder / "unet")
    vae.save_pretrained(folder / "vae")
    return folder


@pytest.fixture(scope="session")
def lora_paths(tmp_path_factory, checkpoint: Path) -> list[Path]:
    folder = tmp_path_factory.mktemp("loras")
    return [
        tiny_model.build_tiny_lora(
            folder / f"style-{seed}.safetensors", checkpoint, seed=seed
        )
        for seed in range(3)
    ]


@pytest.fixture(scope="session")
def styles(lora_paths: list[Path]) -> list[contract.Lora]:
    """The same as jobs name them."""
    return [contract.Lora(path.stem, path, 1.0, 1.0) for path in lora_paths]


@pytest.fixture(scope="session")
def make_control(tmp_path_factory, checkpoint: Path) -> Callable[..., contract.Control]:
    """A tiny ControlNet for the checkpoint in a folder, and an image of lines of a seed's own."""
    files = {}

    def make(
        seed: int = 0, folder: Path = checkpoint, *, image: int = 0, **changes: Any
    ) -> contract.Control:
        if (path := files.get((folder, seed))) is None:
            path = (
                tmp_path_factory.mktemp("controlnets")
                / f"{folder.name}-{seed}.safetensors"
            )
            files[folder, seed] = tiny_controlnets.build(path, folder, seed)
        control = contract.Control(path.stem, path, _lines(image, 64, 64))
        return dataclasses.replace(control, **changes)

    return make


LONG = "a red house in a meadow, (under a blue sky:1.2), " * 5

#: Every other step goes without the negative prompt.
EVERY_OTHER = Options(s_min_uncond=1000.0)


@pytest.fixture
def mixed(make_control, styles: list[contract.Lora]) -> list[contract.ImageRequest]:
    """Jobs of all kinds: passes, masks, LoRAs, ControlNets, with and without guidance."""
    style, other, _ = styles
    hires = contract.HiresPass(
        64, 64, denoising_strength=0.7, steps=2, upscaler="Latent"
    )
    mask = np.zeros((64, 64), np.uint8)
    mask[:, 32:] = 255
    masked = contract.InitImage(_lines(5, 64, 64), 0.6, mask)
    return [
        make_request(steps=3),
        make_request(seed=2, cfg_scale=1.0, init=masked),
        make_request(
            seed=3, cfg_scale=1.0, loras=(style,), negative_prompt=LONG, steps=2
        ),
        make_request(
            seed=4, loras=(style, other), steps=3, clip_skip=2, prompt=LONG * 2
        ),
        make_request(
            seed=5, sampler_options=EVERY_OTHER, steps=4, sampler="dpmpp_2m_karras"
        ),
        make_request(
            seed=6, sampler_options=EVERY_OTHER, loras=(style,), sampler="plms"
        ),
        make_request(
            seed=7, cfg_scale=1.0, hires=hires, loras=(other,), prompt=LONG, steps=2
        ),
        make_request(seed=8, sampler_options=EVERY_OTHER, controls=(make_control(),)),
        make_request(seed=9, cfg_scale=1.0, controls=(make_control(),), steps=2),
        make_request(seed=10, init=masked, sampler="ddim", steps=8, loras=(style,)),
        make_request(
            seed=11,
            steps=2,
            width=96,
            height=96,
            hires=dataclasses.replace(hires, upscaler="Lanczos"),
        ),
    ]


def _lines(seed: int, width: int, height: int) -> contract.Pixels:
    random = np.random.default_rng(seed)
    image = np.zeros((height, width, 3), np.uint8)
    for _ in range(4):
        image[random.integers(height)] = 255
        image[:, random.integers(width)] = random.integers(0, 256, 3)
    return image


@pytest.fixture(scope="session")
def engine(checkpoint: Path) -> slots.SlotEngine:
    """Draws images one by one; shared by tests that leave it unchanged."""
    return load.load_engine(load.EngineSettings(checkpoint, "cpu", slots=1))


@pytest.fixture(scope="session")
def demo_engine() -> slots.SlotEngine:
    """On the trained demo model; shared by tests that leave it unchanged."""
    torch.set_num_threads(1)
    return load.load_engine(load.EngineSettings(DEMO_MODEL, "cpu", slots=1))


@pytest.fixture(scope="session")
def clip() -> checkpoints.Checkpoint:
    """A checkpoint with CLIP's own vocabulary."""
    torch.set_num_threads(1)
    return checkpoints.load_checkpoint(DEMO_MODEL, torch.device("cpu"), torch.float32)


@pytest.fixture(scope="session")
def tokenizer(clip: checkpoints.Checkpoint) -> text.Tokenizer:
    return text.Tokenizer(clip.tokenizer)


@pytest.fixture
def encoder(clip: checkpoints.Checkpoint) -> text.Encoder:
    tokens = clip.tokenizer
    return text.Encoder(
        [text.Reader(clip.text_encoder)], tokens.bos_token_id, tokens.eos_token_id
    )


@pytest.fixture(scope="session")
def slot_engine(checkpoint: Path) -> slots.SlotEngine:
    """Shared by tests that leave it unchanged."""
    return load.load_engine(load.EngineSettings(checkpoint, "cpu", slots=3))


class _Structure(pickle.Pickler):
    """Pickles networks without their tensors, which it notes."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self.tensors: list[torch.Tensor] = []

    def persistent_id(self, obj: object) -> int | None:
        if not isinstance(obj, torch.Tensor):
            return None
        self.tensors.append(obj)
        return len(self.tensors) - 1


class _Copy(pickle.Unpickler):
    tensors: list[torch.Tensor]

    def persistent_load(self, pid: int) -> torch.Tensor:
        return self.tensors[pid]


@pytest.fixture(scope="session")
def copy_checkpoint(checkpoint: Path) -> Callable[..., checkpoints.Checkpoint]:
    """Copies a checkpoint, which is read once in each precision: engines change theirs."""
    cpu = torch.device("cpu")

    @cache
    def read(
        precision: device.Precision, model: Path
    ) -> tuple[checkpoints.Checkpoint, bytes, list[torch.Tensor]]:
        loaded = checkpoints.load_checkpoint(
            model, cpu, device.find_dtype(precision, cpu)
        )
        file = io.BytesIO()
        structure = _Structure(file)
        structure.dump(
            {name: getattr(loaded, name) for name in ("unet", "vae", "text_encoders")}
        )
        return loaded, file.getvalue(), structure.tensors

    def make(
        precision: device.Precision, model: Path = checkpoint
    ) -> checkpoints.Checkpoint:
        loaded, structure, tensors = read(precision, model)
        # `copy.deepcopy` takes four times as long for a tree of modules.
        copied = _Copy(io.BytesIO(structure))
        copied.tensors = copy.deepcopy(tensors)
        return dataclasses.replace(loaded, **copied.load())

    return make


@pytest.fixture
def make_slot_engine(
    copy_checkpoint, checkpoint: Path
) -> Iterator[Callable[..., slots.SlotEngine]]:
    made = []

    def make(
        precision: device.Precision = "auto",
        model: Path = checkpoint,
        read: Read | None = None,
        **settings: Any,
    ) -> slots.SlotEngine:
        copied = copy_checkpoint(precision, model)
        # What compiles does not depend on how long a test takes.
        given = {"slots": 3, "queue_seconds": lambda: 0.0, **settings}
        made.append(slots.SlotEngine(of_latents(copied, Settings(**given), read)))
        return made[-1]

    yield make
    for loaded in made:
        loaded.close()


@pytest.fixture(scope="session")
def single_file(tmp_path_factory, checkpoint: Path) -> Path:
    """The tiny checkpoint as one file with the keys of SD1.5's original release."""
    path = tmp_path_factory.mktemp("single") / "tiny.safetensors"
    save_file(key_names.original_layout(checkpoint), path)
    return path


@pytest.fixture(scope="session")
def k_diffusion() -> types.SimpleNamespace:
    """The real `k_diffusion.sampling` and `.external`, without its training dependencies."""
    found = importlib.util.find_spec("k_diffusion")
    assert found, (
        "k-diffusion is missing: `make test` installs it, without its dependencies"
    )
    package = types.ModuleType("k_diffusion")
    package.__path__ = list(found.submodule_search_locations or ())
    unused = ["torchdiffeq", "torchvision", "torchvision.transforms"]
    stubs = {name: types.ModuleType(name) for name in unused}
    vars(stubs["torchdiffeq"])["odeint"] = None
    vars(stubs["torchvision.transforms"])["functional"] = None
    with pytest.MonkeyPatch.context() as patch:
        for name, module in {**stubs, "k_diffusion": package}.items():
            patch.setitem(sys.modules, name, module)
        return types.SimpleNamespace(
            sampling=importlib.import_module("k_diffusion.sampling"),
            external=importlib.import_module("k_diffusion.external"),
        )


@pytest.fixture
def draw_latents(monkeypatch) -> Callable[..., list[torch.Tensor]]:
    """Draws requests; returns what the decoder is given: latents, or images of pixels."""

    def run(engine: Any, *requests: contract.ImageRequest) -> list[torch.Tensor]:
        found = {}
        add = engine._decoder.add

        def note(ticket: int, latents: torch.Tensor, *others: object) -> None:
            found[ticket] = latents.clone()
            add(ticket, latents, *others)

        monkeypatch.setattr(engine._decoder, "add", note)
        outcomes = draw(engine, *requests)
        monkeypatch.undo()
        assert all(isinstance(each, np.ndarray) for each in outcomes), outcomes
        return [found[ticket] for ticket in range(len(requests))]

    return run
