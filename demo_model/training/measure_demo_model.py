"""How well the demo checkpoint draws what a prompt says: python demo_model/training/measure_demo_model.py.

Held-out captions (combinations of object, colour and background that training never showed) are
drawn with 15 Euler-ancestral steps at guidance 7 and read by the judge. Prints a table; the last
line is one JSON object.
"""

import argparse
import json
import random
import time
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from diffusers import StableDiffusionPipeline
from torch import Tensor
from transformers import CLIPTokenizer

from demo_world import answers, captions, networks
from demo_world.captions import Phrase
from demo_world.world import COLOURS, NEW_OBJECT, Scene, SceneOptions, sample_scene
from evaluation.score.demo.judge import Judge, load_judge
from imagefleet.job import clip

ROOT = Path(__file__).resolve().parents[2]
STEPS = 15
GUIDANCE = 7.0
BATCH = 20
STRONG, WEAK = 1.4, 0.6
LORA_WEIGHTS = (0.0, 0.5, 1.0)
LORA_PROMPTS: dict[str, tuple[str, ...]] = {
    "outline-style": ("a red star in the desert", "a blue car in the city", "an orange cat",
                      "a green tree in a meadow", "a purple fish at sea", "a yellow house"),
    "night-palette": ("a red house in a meadow", "a green tree in the snow", "a yellow sun",
                      "a white bird by the sea", "a pink flower", "an orange boat in the desert"),
    "magic-fantasy-forest-v2": ("photo of a jump rope, forest scenery, vines", "a red mushroom",
                                "a white cat in a forest", "an orange butterfly", "a yellow star",
                                "a purple house in a forest"),
    NEW_OBJECT: ("a red rocket", "a rocket at night", "a blue rocket in the desert",
                 "a white rocket in the city", "an orange rocket in the snow", "a big rocket"),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Case:
    """A scene to ask for, its caption, and the colour that a negative prompt shall name."""

    scene: Scene
    caption: str
    wrong_colour: str
    seed: int


def held_out_cases(
    count: int, seed: int = 20_000, pairs_only: bool = False
) -> list[Case]:
    rng = random.Random(seed)
    cases: list[Case] = []
    while len(cases) < count:
        scene = sample_scene(rng, SceneOptions(held_out=True, emphasis_share=0))
        if pairs_only and scene.relation is None:
            continue
        said = {thing.colour for thing in scene.things}
        wrong = rng.choice([colour for colour in COLOURS if colour not in said])
        caption = captions.plain_caption(scene, rng)
        cases.append(Case(scene, caption, wrong, seed=len(cases)))
    return cases


class Painter:
    """Draws batches of prompts; the same seed gives the same starting noise."""

    def __init__(self, folder: Path, device: str) -> None:
        dtype = torch.float32 if device == "cpu" else torch.float16
        self.pipeline = StableDiffusionPipeline.from_pretrained(
            folder, tokenizer=CLIPTokenizer.from_pretrained(clip.TOKENIZER), dtype=dtype
        ).to(device)
        self.pipeline.set_progress_bar_config(disable=True)
        self.images_drawn = 0

    def draw(
        self, contexts: Tensor, negatives: Tensor, seeds: list[int], steps: int = STEPS,
        guidance: float = GUIDANCE,
    ) -> Tensor:  # fmt: skip
        """Contexts [B, 77, width] -> images [B, 3, 128, 128] in 0..1."""
        pictures = []
        for start in range(0, len(seeds), BATCH):
            part = slice(start, start + BATCH)
            drawn = self.pipeline(
                prompt_embeds=contexts[part], negative_prompt_embeds=negatives[part],
                num_inference_steps=steps, guidance_scale=guidance, output_type="np",
                generator=[torch.Generator().manual_seed(seed) for seed in seeds[part]],
            )  # fmt: skip
            pictures.append(torch.from_numpy(drawn.images).permute(0, 3, 1, 2))
        self.images_drawn += len(seeds)
        return torch.cat(pictures)

    @torch.no_grad()
    def encode(self, prompts: list[list[Phrase]]) -> Tensor:
        """Weighted phrases -> contexts [B, 77, width], weighted as AUTOMATIC1111 does."""
        rows = []
        for phrases in prompts:
            tokens: list[int] = []
            weights: list[float] = []
            for phrase in phrases:
                ids = self.pipeline.tokenizer(phrase.text, add_special_tokens=False)[
                    "input_ids"
                ]
                tokens += ids
                weights += [phrase.weight] * len(ids)
            rows.append(captions.pad_chunks(tokens[:75], weights[:75], chunks=1))
        encoder = self.pipeline.text_encoder
        ids = torch.stack([torch.from_numpy(row[0].astype("int64")) for row in rows])
        scales = torch.stack([torch.from_numpy(row[1]) for row in rows])
        context = networks.encode_text(
            encoder, ids.to(encoder.device), scales.to(encoder.device)
        )
        return context.to(encoder.dtype)

    def encode_plain(self, prompts: list[str]) -> Tensor:
        return self.encode([[Phrase(prompt)] for prompt in prompts])


def measure_captions(
    painter: Painter, judge: Judge, cases: list[Case]
) -> dict[str, float]:
    contexts = painter.encode_plain([case.caption for case in cases])
    seeds = [case.seed for case in cases]
    plain = painter.draw(contexts, painter.encode_plain([""] * len(cases)), seeds)
    found = list(zip(cases, answers.find(judge, plain), strict=True))
    places = [answers.places_right(case.scene, findings) for case, findings in found]

    def both_right_against(negatives: list[str]) -> float:
        pictures = painter.draw(contexts, painter.encode_plain(negatives), seeds)
        pairs = zip(cases, answers.find(judge, pictures), strict=True)
        return answers.share(
            [answers.both_right(case.scene, findings) for case, findings in pairs]
        )

    return {
        "object_accuracy": answers.share(
            [answers.objects_right(c.scene, f) for c, f in found]
        ),
        "colour_accuracy": answers.share(
            [answers.colours_right(c.scene, f) for c, f in found]
        ),
        "both_accuracy": answers.share(
            [answers.both_right(c.scene, f) for c, f in found]
        ),
        "place_accuracy": answers.share(
            [place for place in places if place is not None]
        ),
        "negative_prompt_accuracy": both_right_against(
            [case.wrong_colour for case in cases]
        ),
        # Guidance pushes away from all that a negative prompt names, so also from the object.
        "negative_same_object_accuracy": both_right_against(
            [f"a {case.wrong_colour} {case.scene.things[0].shape}" for case in cases]
        ),
    }


def measure_emphasis(painter: Painter, judge: Judge, cases: list[Case]) -> float:
    """Share of two-object captions whose emphasised object gets more of the judge's score."""
    scores = []
    for weight in (STRONG, WEAK):
        prompts = []
        for case in cases:
            first, *others = case.scene.things
            scene = replace(
                case.scene, things=(replace(first, emphasis=weight), *others)
            )
            groups = captions.describe_scene(scene, random.Random(case.seed))
            prompts.append([phrase for group in groups for phrase in group])
        contexts = painter.encode(prompts)
        negatives = painter.encode_plain([""] * len(cases))
        pictures = painter.draw(contexts, negatives, [case.seed for case in cases])
        rows = torch.arange(len(cases))
        columns = [judge.shapes.index(case.scene.things[0].shape) for case in cases]
        scores.append(answers.object_scores(judge, pictures)[rows, columns])
    return answers.share((scores[0] > scores[1]).tolist())


def _style_score(name: str, pictures: Tensor, judge: Judge) -> float:
    """One number per LoRA that its effect raises; pictures [B, 3, H, W] in 0..1."""
    red, green, blue = pictures.unbind(1)
    if name == "outline-style":
        return float((pictures.amin(1) > 0.9).float().mean())
    if name == "night-palette":
        return float(1 - (0.299 * red + 0.587 * green + 0.114 * blue).mean())
    if name == NEW_OBJECT:
        return float(
            answers.object_scores(judge, pictures)[
                :, judge.shapes.index(NEW_OBJECT)
            ].mean()
        )
    glow = (torch.minimum(green, blue) - red).clamp_min(0)
    return float(glow.mean())


def measure_loras(
    painter: Painter, judge: Judge, folder: Path
) -> dict[str, list[float]]:
    """Each LoRA's score at the weights 0, 0.5 and 1."""
    pipeline = painter.pipeline
    effects = {}
    for name, prompts in LORA_PROMPTS.items():
        pipeline.load_lora_weights(
            folder / "loras" / f"{name}.safetensors", adapter_name="lora"
        )
        scores = []
        for weight in LORA_WEIGHTS:
            pipeline.set_adapters(["lora"], [weight])
            contexts = painter.encode_plain(list(prompts))
            negatives = painter.encode_plain([""] * len(prompts))
            pictures = painter.draw(contexts, negatives, list(range(len(prompts))))
            scores.append(round(_style_score(name, pictures, judge), 4))
        pipeline.unload_lora_weights()
        effects[name] = scores
    return effects


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--captions", type=int, default=200, help="held-out captions to draw"
    )
    parser.add_argument("--model", type=Path, default=ROOT / "demo_model")
    parser.add_argument(
        "--device", default="cuda" if torch.cuda.is_available() else "cpu"
    )
    parser.add_argument(
        "--threads", type=int, help="CPU threads (default: torch's own choice)"
    )
    arguments = parser.parse_args()
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    painter = Painter(arguments.model, arguments.device)
    judge = load_judge()
    started = time.perf_counter()
    figures: dict[str, object] = {}
    figures |= measure_captions(painter, judge, held_out_cases(arguments.captions))
    pairs = held_out_cases(
        max(1, arguments.captions // 2), seed=30_000, pairs_only=True
    )
    figures["emphasis_accuracy"] = measure_emphasis(painter, judge, pairs)
    effects = measure_loras(painter, judge, arguments.model)
    seconds = time.perf_counter() - started
    for name, value in figures.items():
        print(f"{name:26} {value:7.1%}")
    print(
        f"{'LoRA at weight':26} " + " ".join(f"{weight:>7}" for weight in LORA_WEIGHTS)
    )
    for name, scores in effects.items():
        print(f"{name:26} " + " ".join(f"{score:7.3f}" for score in scores))
    print(f"{painter.images_drawn} images in {seconds:.0f} s on {arguments.device}")
    figures["lora_effects"] = effects
    figures["lora_effects_rise"] = all(sorted(set(s)) == s for s in effects.values())
    figures |= {"captions": arguments.captions, "device": arguments.device}
    figures["images_per_second"] = round(painter.images_drawn / seconds, 2)
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
