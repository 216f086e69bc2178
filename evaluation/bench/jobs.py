"""The jobs of all measurements: variations of the reference message."""

import itertools
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from imagefleet.files import demo
from imagefleet.job import samplers
from imagefleet.job.prompt import Prompt, read_prompt
from worker.engine.contract import ImageRequest, Lora

#: Steps of mixed jobs, all equally frequent.
MIXED_STEPS = range(10, 41)

#: Coprime with the number of mixed step counts, so that consecutive jobs differ much.
_STRIDE = 17

_LORA_TAG = re.compile(r"<lora:[^>]*>,? ?")
_STRENGTHS = (0.35, 0.5, 0.65, 0.8)


@dataclass(frozen=True)
class Workload:
    """Endless jobs with different seeds, prompts and LoRAs, if there are any.

    A prompt is the job's number and *words*; *sizes*, *loras* (those of one job), *steps*,
    *repeats*, how often the words are in the prompt, *forms*, what the prompt is with them,
    *samplers* and *cfg_scales* are used in turn.
    """

    words: str
    negative_prompt: str
    sizes: tuple[tuple[int, int], ...]
    lora_directory: Path
    loras: tuple[tuple[str, ...], ...] = ()
    steps: tuple[int, ...] = (15,)
    repeats: tuple[int, ...] = (1,)
    samplers: tuple[str, ...] = ("euler_ancestral",)
    cfg_scales: tuple[float, ...] = (7.0,)
    forms: tuple[str, ...] = ()

    def requests(self) -> Iterator[ImageRequest]:
        """All jobs, as requests to an engine."""
        return map(self.request, itertools.count())

    def request(self, number: int) -> ImageRequest:
        width, height = self.sizes[number % len(self.sizes)]
        words = [self.words] * self.repeats[number % len(self.repeats)]
        steps = self.steps[number * _STRIDE % len(self.steps)]
        prompt: Prompt | str = " ".join([str(number), *words])
        if self.forms:
            form = self.forms[number % len(self.forms)]
            prompt = read_prompt(form.format(prompt), steps=steps)
        return ImageRequest(
            prompt=prompt,
            negative_prompt=self.negative_prompt,
            loras=tuple(self._loras(number)),
            sampler=self.samplers[number % len(self.samplers)],
            steps=steps,
            cfg_scale=self.cfg_scales[number % len(self.cfg_scales)],
            seed=number,
            width=width,
            height=height,
        )

    def message(self, number: int) -> str:
        """Queue message of the job that `request` gives for this number."""
        return message(number, self.request(number))

    def _loras(self, number: int) -> Iterator[Lora]:
        if not self.loras:
            return
        rounds, at = divmod(number, len(self.loras))
        strength = _STRENGTHS[(rounds + at) % len(_STRENGTHS)]
        for name in self.loras[at]:
            file = self.lora_directory / f"{name}.safetensors"
            yield Lora(name, file, strength, strength)


def reference_words() -> tuple[str, str]:
    """The reference message's prompt, without its LoRA, and its negative prompt."""
    message = json.loads(demo.REFERENCE_MESSAGE)
    return _LORA_TAG.sub("", message["prompt"]), message["negative_prompt"]


def message(number: int, request: ImageRequest) -> str:
    """Queue message of a plain request, with the number as the job's id."""
    tags = "".join(f" <lora:{lora.name}:{lora.unet_weight}>" for lora in request.loras)
    job = {
        "id": f"{number:06}",
        "prompt": f"{request.prompt}{tags}",
        "negative_prompt": request.negative_prompt,
        "sampler_name": samplers.SAMPLERS[request.sampler].name,
        "steps": request.steps,
        "cfg_scale": request.cfg_scale,
        "seed": request.seed,
        "width": request.width,
        "height": request.height,
    }
    return json.dumps(job)
