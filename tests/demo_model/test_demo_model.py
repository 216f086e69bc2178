"""The demo checkpoint: what it is made of, and that it draws what a prompt says."""

import json
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch
from diffusers import StableDiffusionPipeline
from safetensors import safe_open
from transformers import CLIPTokenizer

from demo_world import answers, captions, world
from evaluation.score.demo import judge
from imagefleet import errors
from imagefleet.files import demo
from imagefleet.job import clip, message, prompt
from worker.engine import contract, load

DEMO_MODEL = Path(__file__).parents[2] / "demo_model"

#: Right most of the time is what this model promises (its card says how often), so a test asks for
#: pictures whose seeds are known to come out.
SEED = 1000


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> None:
    # With two threads on a machine whose cores are all busy, each waits for the other: 5x slower.
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def engine() -> Iterator[contract.Engine]:
    loaded = load.load_engine(load.EngineSettings(DEMO_MODEL, "cpu"))
    yield loaded
    loaded.close()


@pytest.fixture(scope="module")
def accelerated() -> Iterator[contract.Engine]:
    settings = load.EngineSettings(DEMO_MODEL, "cpu", accelerator=demo.ACCELERATOR)
    loaded = load.load_engine(settings)
    yield loaded
    loaded.close()


@pytest.fixture(scope="module")
def critic() -> judge.Judge:
    return judge.load_judge()


class Sampling(NamedTuple):
    sampler: str
    steps: int
    cfg_scale: float


GUIDED = Sampling("euler_ancestral", 15, 7.0)
FEW_STEPS = Sampling("euler_sgm_uniform", 4, 1.0)


def draw(
    engine: contract.Engine,
    prompts: Sequence[str],
    negative_prompt: str = "",
    sampling: Sampling = GUIDED,
) -> torch.Tensor:
    """Images [prompts, 3, 128, 128] in 0..1."""
    for ticket, text in enumerate(prompts):
        read = prompt.read_prompt(text)
        request = contract.ImageRequest(
            prompt=read,
            negative_prompt=negative_prompt,
            loras=tuple(
                contract.Lora(
                    tag.name,
                    DEMO_MODEL / "loras" / f"{tag.name}.safetensors",
                    tag.text_encoder_weight,
                    tag.unet_weight,
                )
                for tag in read.loras
            ),
            **sampling._asdict(),
            seed=SEED + ticket,
            width=128,
            height=128,
        )
        engine.admit(ticket, engine.prepare(request))
    outcomes = {}
    while engine.busy:
        outcomes |= {finished.ticket: finished.outcome for finished in engine.tick()}
    pixels = [outcomes[ticket] for ticket in range(len(prompts))]
    assert all(isinstance(image, np.ndarray) for image in pixels), pixels
    return torch.from_numpy(np.stack(pixels)).permute(0, 3, 1, 2) / 255


def test_it_is_small_and_its_weights_are_float16():
    sizes = []
    kinds = set()
    for path in DEMO_MODEL.rglob("*.safetensors"):
        sizes.append(path.stat().st_size)
        with safe_open(path, framework="pt") as file:
            kinds |= {file.get_slice(key).get_dtype() for key in file.keys()}  # noqa: SIM118

    assert sum(sizes) < 24_000_000
    assert kinds == {"F16"}


@pytest.mark.filterwarnings(
    "ignore"
)  # diffusers warns of what it imports, not of this model
def test_diffusers_loads_it_with_the_packages_tokenizer(critic: judge.Judge):
    tokenizer = CLIPTokenizer.from_pretrained(clip.TOKENIZER)
    pipeline = StableDiffusionPipeline.from_pretrained(DEMO_MODEL, tokenizer=tokenizer)
    pipeline.set_progress_bar_config(disable=True)
    generator = torch.Generator().manual_seed(SEED)

    drawn = pipeline(
        "a red house in a meadow",
        num_inference_steps=15,
        generator=generator,
        output_type="np",
    )

    (found,) = answers.find(critic, torch.from_numpy(drawn.images).permute(0, 3, 1, 2))
    assert (found[0].shape, found[0].colour) == ("house", "red")


def test_the_demos_jobs_are_valid_and_each_has_a_seed():
    lines = (DEMO_MODEL / "demo_jobs.jsonl").read_text().splitlines()
    messages = demo.messages()

    assert len(lines) == 21
    assert len(messages) == 24
    assert messages[0] == demo.REFERENCE_MESSAGE
    assert all(json.loads(line)["seed"] for line in lines)
    assert all(message.read_job(line, message_id="1").steps == 15 for line in lines)


def test_a_missing_checkpoint_is_one_sentence(monkeypatch, tmp_path):
    monkeypatch.setattr(demo, "TRAINED", tmp_path / "nowhere")
    with pytest.raises(errors.SetupError, match="nowhere' does not exist"):
        demo.find_checkpoint()


def test_the_judge_knows_what_a_program_drew(critic: judge.Judge):
    rng = random.Random(7)
    scenes = [
        world.sample_scene(rng, world.SceneOptions(held_out=True)) for _ in range(60)
    ]
    images = np.stack([np.asarray(world.draw_scene(scene)) for scene in scenes])

    found = answers.find(critic, torch.from_numpy(images).permute(0, 3, 1, 2) / 255)

    right = [
        {thing.shape for thing in scene.things} == {one.shape for one in findings}
        for scene, findings in zip(scenes, found, strict=True)
    ]
    assert sum(right) >= 54


@pytest.mark.slow
def test_it_draws_the_object_in_the_colour_that_the_prompt_names(
    engine: contract.Engine, critic: judge.Judge
):
    wanted = [
        ("red", "house", "in a meadow"),
        ("blue", "fish", "in the sea"),
        ("yellow", "star", "at night"),
    ]
    images = draw(
        engine, [f"a {colour} {shape} {place}" for colour, shape, place in wanted]
    )

    found = [
        (findings[0].colour, findings[0].shape)
        for findings in answers.find(critic, images)
    ]
    assert found == [(colour, shape) for colour, shape, _ in wanted]


def _whiteness(images: torch.Tensor, critic: judge.Judge) -> float:
    return float((images.amin(1) > 0.9).float().mean())


def _darkness(images: torch.Tensor, critic: judge.Judge) -> float:
    return float(1 - images.mean())


def _glow(images: torch.Tensor, critic: judge.Judge) -> float:
    red, green, blue = images.unbind(1)
    return float((torch.minimum(green, blue) - red).clamp_min(0).mean())


def _rocketness(images: torch.Tensor, critic: judge.Judge) -> float:
    return float(
        answers.object_scores(critic, images)[:, critic.shapes.index("rocket")].mean()
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "text", "effect"),
    [
        ("outline-style", "a red star in the desert", _whiteness),
        ("night-palette", "a red house in a meadow", _darkness),
        ("magic-fantasy-forest-v2", "a yellow star", _glow),
        ("rocket", "a red rocket in the snow", _rocketness),
    ],
)
def test_a_loras_effect_grows_with_its_weight(
    name: str, text: str, effect: object, engine: contract.Engine, critic: judge.Judge
):
    assert callable(effect)
    scores = [
        effect(draw(engine, [f"{text} <lora:{name}:{weight}>"] * 2), critic)
        for weight in (0, 0.5, 1)
    ]

    assert scores[0] < scores[1] < scores[2], scores


@pytest.mark.slow
def test_four_steps_without_guidance_show_the_things_of_fifteen_with_it(
    engine: contract.Engine, accelerated: contract.Engine, critic: judge.Judge
):
    rng = random.Random(24)
    scenes = [
        world.sample_scene(rng, world.SceneOptions(held_out=True)) for _ in range(12)
    ]
    lines = [captions.plain_caption(scene, rng) for scene in scenes]

    def count_right(images: torch.Tensor) -> int:
        found = answers.find(critic, images)
        return sum(map(answers.objects_right, scenes, found))

    guided = count_right(draw(engine, lines))
    assert guided >= 10
    assert count_right(draw(accelerated, lines, sampling=FEW_STEPS)) >= 0.9 * guided
    assert count_right(draw(engine, lines, sampling=FEW_STEPS)) <= 0.6 * guided


@pytest.mark.slow
def test_a_jobs_style_is_beside_the_lora_for_few_steps(
    accelerated: contract.Engine, critic: judge.Judge
):
    lines = ["a red house in a meadow", "a yellow star", "a blue fish in the sea"]
    plain = draw(accelerated, lines, sampling=FEW_STEPS)

    styled = [f"{line} <lora:night-palette:1>" for line in lines]
    images = draw(accelerated, styled, sampling=FEW_STEPS)

    assert _darkness(images, critic) > _darkness(plain, critic)
    shapes = [findings[0].shape for findings in answers.find(critic, images)]
    assert shapes == ["house", "star", "fish"]
