"""The jobs of all measurements: variations of the reference message."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from imagefleet.files import demo
from imagefleet.job import samplers
from worker.engine import contract

#: Steps of mixed jobs, all equally frequent.
MIXED_STEPS = range(10, 41)

#: Coprime with the number of mixed step counts, so that consecutive jobs differ much.
_STRIDE = 17

_LORA_TAG = re.compile(r"<lora:[^>]*>,? ?")
_STRENGTHS = (0.35, 0.5, 0.65, 0.8)


@dataclass(frozen=True, slots=True)
class Workload:
    """Endless jobs with different seeds, prompts and LoRAs, if there are any.

    A prompt is the job's number and *words*; *sizes*, *loras* (those of one job), *steps*,
    *repeats*, how often the words are in the prompt, *samplers* and *cfg_scales* are used in turn.
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

    def requests(self) -> Iterator[contract.ImageRequest]:
        """All jobs, as requests to an engine."""
        return map(self.request, itertools.count())

    def request(self, number: int) -> contract.ImageRequest:
        width, height = self._size(number)
        loras = [
            contract.Lora(name, self.lora_directory / f"{name}.safetensors", strength, strength)
            for name, strength in self._loras(number)
        ]
        return contract.ImageRequest(
            prompt=self._prompt(number),
            negative_prompt=self.negative_prompt,
            loras=tuple(loras),
            sampler=self.samplers[number % len(self.samplers)],
            steps=self._steps(number),
            cfg_scale=self._cfg_scale(number),
            seed=number,
            width=width,
            height=height,
        )

    def message(self, number: int) -> str:
        """The same job as a queue message."""
        width, height = self._size(number)
        tags = "".join(f" <lora:{name}:{strength}>" for name, strength in self._loras(number))
        job = {
            "id": f"{number:06}",
            "prompt": f"{self._prompt(number)}{tags}",
            "negative_prompt": self.negative_prompt,
            "sampler_name": samplers.SAMPLERS[self.samplers[number % len(self.samplers)]].name,
            "steps": self._steps(number),
            "cfg_scale": self._cfg_scale(number),
            "seed": number,
            "width": width,
            "height": height,
        }
        return json.dumps(job)

    def _prompt(self, number: int) -> str:
        return " ".join([str(number), *[self.words] * self.repeats[number % len(self.repeats)]])

    def _steps(self, number: int) -> int:
        return self.steps[number * _STRIDE % len(self.steps)]

    def _cfg_scale(self, number: int) -> float:
        return self.cfg_scales[number % len(self.cfg_scales)]

    def _size(self, number: int) -> tuple[int, int]:
        return self.sizes[number % len(self.sizes)]

    def _loras(self, number: int) -> list[tuple[str, float]]:
        if not self.loras:
            return []
        rounds, at = divmod(number, len(self.loras))
        strength = _STRENGTHS[(rounds + at) % len(_STRENGTHS)]
        return [(name, strength) for name in self.loras[at]]


def reference_words() -> tuple[str, str]:
    """The reference message's prompt, without its LoRA, and its negative prompt."""
    message = json.loads(demo.REFERENCE_MESSAGE)
    return _LORA_TAG.sub("", message["prompt"]), message["negative_prompt"]
