"""A tiny FLUX.2-klein, engines on it, and diffusers' pipeline."""

from collections.abc import Callable, Iterator, Mapping
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch

from drawing import make_request
from imagefleet.job.noise import Noise
from klein import tiny_klein
from worker.engine import contract
from worker.engine.contract import Settings
from worker.engine.flow import checkpoint as checkpoints
from worker.engine.flow.parts import of_flow
from worker.engine.slots.engine import SlotEngine


@pytest.fixture(scope="session")
def klein(tmp_path_factory) -> Callable[..., Path]:
    """The folder of a tiny klein, distilled or not."""
    torch.set_num_threads(1)

    @cache
    def build(*, is_distilled: bool = True) -> Path:
        folder = tmp_path_factory.mktemp("flow") / "tiny-klein"
        return tiny_klein.build(folder, is_distilled=is_distilled)

    return build


@pytest.fixture(scope="session")
def pipeline(klein) -> Callable[..., Any]:
    """Diffusers' pipeline of the same weights."""

    @cache
    def read(*, is_distilled: bool = True) -> Any:
        folder = klein(is_distilled=is_distilled)
        return tiny_klein.read_pipeline(folder, is_distilled=is_distilled)

    return read


@pytest.fixture
def make_engine(klein) -> Iterator[Callable[..., SlotEngine]]:
    made = []

    def make(
        model: Path | None = None,
        *,
        slots: int = 3,
        packages: Any = None,
        config: Path | None = None,
    ) -> SlotEngine:
        path = model or klein()
        family = checkpoints.family_of(path)
        assert family is not None
        loaded = checkpoints.load_checkpoint(
            path, family, torch.device("cpu"), torch.float32, config
        )
        settings = Settings(slots=slots, packages=packages)
        made.append(SlotEngine(of_flow(loaded, settings)))
        return made[-1]

    yield make
    for engine in made:
        engine.close()


@pytest.fixture(scope="session")
def request_of() -> Callable[..., contract.ImageRequest]:
    def make(**changes: Any) -> contract.ImageRequest:
        fields = {"sampler": "euler", "negative_prompt": ""}
        # diffusers draws its noise on the CPU, as A1111's setting "CPU".
        return make_request(**{**fields, "noise": Noise(source="CPU"), **changes})

    return make


@pytest.fixture
def expected(pipeline) -> Callable[..., torch.Tensor]:
    """Diffusers' picture of a request [3, height, width], with differences of the weights."""

    def draw(
        request: contract.ImageRequest,
        dense: Mapping[str, torch.Tensor] = MappingProxyType({}),
        *,
        is_distilled: bool = True,
    ) -> torch.Tensor:
        found = pipeline(is_distilled=is_distilled)
        network = found.transformer
        originals = {key: each.clone() for key, each in network.state_dict().items()}
        with torch.no_grad():
            for path, difference in dense.items():
                network.get_submodule(path).weight += difference
        try:
            image = found(
                prompt=str(request.prompt),
                width=request.width,
                height=request.height,
                num_inference_steps=request.steps,
                guidance_scale=request.cfg_scale,
                generator=torch.Generator().manual_seed(request.seed),
                output_type="pt",
            ).images[0]
        finally:
            network.load_state_dict(originals)
        return 2 * image - 1

    return draw


@pytest.fixture
def draw_floats(draw_latents) -> Callable[..., list[torch.Tensor]]:
    """Draws requests; returns their images [3, height, width] before they are rounded."""

    def run(engine: SlotEngine, *requests: contract.ImageRequest) -> list[torch.Tensor]:
        from worker.engine.decoder import to_images

        with torch.no_grad():
            return [
                to_images(engine.checkpoint.vae, latents[None])[0]
                for latents in draw_latents(engine, *requests)
            ]

    return run
