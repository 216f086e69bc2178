"""Adapters of peft's kinds, as folders that peft saves, change a network as in peft's own model."""

import copy
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING
from torch import Tensor, nn

from imagefleet import errors
from imagefleet.files import adapter, kinds
from imagefleet.files.safetensors import UnusableError, identify
from imagefleet.validation import JSONDict
from worker.engine.lora import file as lora_file
from worker.engine.lora.merge import AppliedLora
from worker.engine.lora.shared import Merger
from worker.files import check

pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]


ATTENTION = ["to_q", "to_v", "ff.net.2"]

#: What each type is configured with, beside the layers it changes.
KINDS: dict[str, JSONDict] = {
    "LORA": {"r": 4, "lora_alpha": 3, "alpha_pattern": {"to_v": 8}},
    "LORA with rsLoRA": {"r": 4, "use_rslora": True, "rank_pattern": {"to_v": 2}},
    "LORA with DoRA": {"r": 4, "use_dora": True},
    "ADALORA": {"total_step": 10},
    "BOFT": {"boft_block_size": 4},
    "C3A": {"block_size": 4},
    "FOURIERFT": {"n_frequency": 20},
    "GRALORA": {"r": 8, "gralora_k": 2},
    "HRA": {"r": 4},
    "IA3": {"feedforward_modules": ["ff.net.2"]},
    "LOHA": {"r": 4, "alpha": 3},
    "LOKR": {"r": 4, "alpha": 3},
    "MISS": {"r": 4},
    "OFT": {"oft_block_size": 4, "r": 0},
    "RANDLORA": {"r": 4, "randlora_alpha": 2},
    "VBLORA": {
        "num_vectors": 30,
        "vector_length": 8,
        "topk": 2,
        "save_only_topk_weights": True,
    },
    "VERA": {"r": 4},
    "WAVEFT": {"n_frequency": 20},
}

#: One of each way to change weights: by a LoRA's own tensors, by adding and by multiplying.
QUICK = {"LORA with rsLoRA", "VERA", "HRA"}


@pytest.fixture(scope="module")
def saved(checkpoint_unet: nn.Module, tmp_path_factory) -> Callable[..., Any]:
    """Each adapter once, which tests leave as it is."""
    made = {}

    def make(kind: str, **changes: Any) -> tuple[nn.Module, Path]:
        if found := made.get((kind, str(changes))):
            return found
        folder = tmp_path_factory.mktemp("saved") / "style"
        torch.manual_seed(3)
        config = PEFT_TYPE_TO_CONFIG_MAPPING[kind.partition(" ")[0]]
        given = {"target_modules": ATTENTION, **KINDS.get(kind, {}), **changes}
        model = peft.get_peft_model(copy.deepcopy(checkpoint_unet), config(**given))
        for name, parameter in model.named_parameters():
            if parameter.requires_grad and "rank_num" not in name:
                parameter.data += 0.05 * torch.randn_like(parameter)
        model.save_pretrained(folder)
        made[kind, str(changes)] = (model.eval(), folder)
        return made[kind, str(changes)]

    return make


@pytest.fixture
def save(saved, tmp_path) -> Callable[..., tuple[nn.Module, Path]]:
    """The UNet with a random adapter, and the folder that peft saves of it."""

    def copied(kind: str, **changes: Any) -> tuple[nn.Module, Path]:
        model, folder = saved(kind, **changes)
        return model, Path(shutil.copytree(folder, tmp_path / "style"))

    return copied


@pytest.fixture(scope="module")
def checkpoint_unet(engine) -> nn.Module:
    return copy.deepcopy(engine.checkpoint.unet)


def read(folder: Path, layers: lora_file.Layers) -> lora_file.LoraFile:
    packed = folder.with_suffix(".safetensors")
    adapter.pack(folder, packed)
    kinds.check(kinds.LORA, packed.name, check.read_header(packed))
    return lora_file.read_lora(packed, identify(packed), layers)


@torch.no_grad()
def outputs(unet: nn.Module) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    latents = torch.randn(2, 4, 8, 8, generator=generator)
    width = unet.config.cross_attention_dim
    states = torch.randn(2, 77, width, generator=generator)
    return unet(latents, torch.tensor([7, 500]), states).sample  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    "kind",
    [
        kind if kind in QUICK else pytest.param(kind, marks=pytest.mark.slow)
        for kind in KINDS
    ],
)
def test_a_network_computes_with_an_adapter_what_it_does_in_peft(
    kind: str, save, checkpoint_unet: nn.Module, layers: lora_file.Layers
):
    model, folder = save(kind)
    found = read(folder, layers)
    unet = copy.deepcopy(checkpoint_unet)
    plain = outputs(unet)
    Merger(unet).activate([AppliedLora(found.identity, found.deltas["unet"], 1.0)])
    expected = outputs(model.base_model.model)
    assert (expected - plain).abs().max() > 1e-3, "the adapter changes nothing"
    torch.testing.assert_close(outputs(unet), expected, rtol=1e-5, atol=1e-5)
    assert not found.skipped


@pytest.mark.parametrize("kind", ["LOHA", "LORA with DoRA"])
def test_a_convolution_is_changed_as_in_peft(
    kind: str, save, checkpoint_unet: nn.Module, layers: lora_file.Layers
):
    model, folder = save(kind, target_modules=["conv1"])
    found = read(folder, layers)
    unet = copy.deepcopy(checkpoint_unet)
    Merger(unet).activate([AppliedLora(found.identity, found.deltas["unet"], 1.0)])
    expected = outputs(model.base_model.model)
    torch.testing.assert_close(outputs(unet), expected, rtol=1e-5, atol=1e-5)


def test_networks_that_lie_in_folders_of_their_own_become_one_file(
    save, layers: lora_file.Layers, tmp_path
):
    _, folder = save("VERA")
    both = tmp_path / "both"
    both.mkdir()
    folder.rename(both / "unet")
    assert [*adapter.folders_of(both)] == ["unet"]
    assert read(both, layers).deltas["unet"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"peft_type": "NEXT"}, "does not know"),
        ({"r": 10**6}, "'1000000'"),
        ({"rank_pattern": {"(a+)+$": 4}}, "rank_pattern"),
        ({"r": 3}, "cannot be read by peft"),
        ({"alpha_pattern": {"(a+)+$": 4}}, "damaged metadata"),
    ],
)
def test_a_configuration_that_peft_should_not_be_given_is_refused(
    change: JSONDict, message: str, save, layers: lora_file.Layers
):
    _, folder = save("LOHA")
    edit(folder, change)
    packed = folder.with_suffix(".safetensors")
    adapter.pack(folder, packed)
    with pytest.raises(UnusableError, match=re.escape(message)):
        lora_file.read_lora(packed, identify(packed), layers)


def test_a_lora_that_changed_the_checkpoint_as_it_began_is_refused(
    save, layers: lora_file.Layers
):
    _, folder = save("LORA")
    edit(folder, {"init_lora_weights": "pissa_niter_4"})
    with pytest.raises(errors.SetupError, match="path_initial_model_for_weight"):
        read(folder, layers)


def test_an_adapter_that_changes_more_than_weights_is_refused(
    save, layers: lora_file.Layers
):
    """A bias of peft's layers is none of the checkpoint's weights."""
    _, folder = save("BEFT", target_modules=["to_v"])
    with pytest.raises(UnusableError, match="BEFT changes more than"):
        read(folder, layers)


def test_a_folder_without_weights_says_how_to_save_them(save):
    _, folder = save("LORA")
    (folder / adapter.WEIGHTS).rename(folder / "adapter_model.bin")
    with pytest.raises(errors.SetupError, match="save_pretrained"):
        adapter.pack(folder, folder.with_suffix(".safetensors"))


def edit(folder: Path, change: JSONDict) -> None:
    path = folder / adapter.CONFIG
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
