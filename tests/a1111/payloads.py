"""Random payloads of AUTOMATIC1111's API, each with what its prompts say at each step.

A prompt is made as a tree and then written down, so that nothing has to read it.
"""

import base64
import io
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from PIL import Image

#: `modules/sd_samplers_kdiffusion.py`, `sd_samplers_lcm.py` and `sd_samplers_timesteps.py` of 1.10.
SAMPLERS = (
    "DPM++ 2M",
    "DPM++ SDE",
    "DPM++ 2M SDE",
    "DPM++ 2M SDE Heun",
    "DPM++ 2S a",
    "DPM++ 3M SDE",
    "Euler a",
    "Euler",
    "LMS",
    "Heun",
    "DPM2",
    "DPM2 a",
    "DPM fast",
    "DPM adaptive",
    "Restart",
    "LCM",
    "DDIM",
    "DDIM CFG++",
    "PLMS",
    "UniPC",
)

#: `modules/sd_schedulers.py`, by their labels.
SCHEDULERS = (
    "Automatic",
    "Uniform",
    "Karras",
    "Exponential",
    "Polyexponential",
    "SGM Uniform",
    "KL Optimal",
    "Align Your Steps",
    "Simple",
    "Normal",
    "DDIM",
    "Beta",
)

OF_TIMESTEPS = ("DDIM", "DDIM CFG++", "PLMS", "UniPC")

#: One call of the model a step, whose number its scripts count.
ONE_CALL = ("Euler", "Euler a", "DPM++ 2M", "DPM++ 2M SDE", "LMS", "LCM", "DDIM")

#: Kinds of models, in turn: the second one predicts velocities.
FAMILIES = ("sd1", "sd2", "sd1", "sdxl")

_WORDS = ("a house", "red", "tall tree", "by night", "fog", "snow", "a cat")


@dataclass(frozen=True)
class Edit:
    """`[before:after:when]`; without a *when*, `[one|other]`."""

    options: tuple["Text", ...]
    when: str | None = None


Text = tuple[str | Edit, ...]


@dataclass(frozen=True)
class Prompt:
    """Texts that AND joins, with their weights."""

    parts: tuple[tuple[Text, float], ...]

    @property
    def written(self) -> str:
        texts = []
        for text, weight in self.parts:
            suffix = "" if weight == 1 else f" :{weight:g}"
            texts.append(f"{written(text)}{suffix}")
        return " AND ".join(texts)


@dataclass
class Case:
    payload: dict[str, Any]
    prompt: Prompt
    negative: Prompt
    hires_prompt: Prompt | None = None
    hires_negative: Prompt | None = None
    family: str = "sd1"


def case(seed: int) -> Case:
    """The payload of that number."""
    chance = random.Random(seed)
    prompt = _prompt(chance, joins=True)
    negative = _prompt(chance, joins=False)
    payload: dict[str, Any] = {
        "prompt": prompt.written,
        "negative_prompt": negative.written,
        "defaults": "a1111-1.10",
        "steps": chance.choice([1, 2, 3, 4, 5, 8, 12, 15, 20, 28, 33, 40, 50]),
        "sampler_name": _sampler(chance),
        "seed": chance.choice([0, 7, 2**32 - 1, 2**40 + 5, chance.randrange(2**32)]),
        "width": chance.choice([64, 72, 128, 200, 512]),
        "height": chance.choice([64, 100, 192, 256]),
    }
    family = FAMILIES[seed % len(FAMILIES)]
    made = Case(payload, prompt, negative, family=family)
    _maybe(
        chance,
        payload,
        scheduler=chance.choice(
            [None, "", *SCHEDULERS, "automatic", "karras", "sgm_uniform"]
        ),
        cfg_scale=chance.choice([0, 1, 1.5, 7, 12.5]),
        batch_size=chance.choice([1, 2]),
        n_iter=chance.choice([1, 3]),
        eta=chance.choice([None, 0, 0.5, 1]),
        s_churn=chance.choice([0, 3, 20]),
        s_tmin=chance.choice([0, 0.5]),
        s_tmax=chance.choice([0, 8]),
        s_noise=chance.choice([1, 1.1]),
        s_min_uncond=chance.choice([0, 1.5, 700]),
    )
    if chance.random() < 0.3:
        payload |= {"subseed": chance.choice([3, 2**33]), "subseed_strength": 0.4}
    _maybe(
        chance,
        payload.setdefault("override_settings", {}),
        eta_ancestral=chance.choice([0, 0.5, 1]),
        eta_ddim=chance.choice([0, 0.5, 1]),
        eta_noise_seed_delta=chance.choice([0, 31337]),
        randn_source=chance.choice(["CPU", "GPU", "NV"]),
        CLIP_stop_at_last_layers=chance.choice([1, 2]),
    )
    _maybe(chance, payload, seed_resize_from_w=96, seed_resize_from_h=64)
    if chance.random() < 0.2:
        payload["sampler_index"] = payload.pop("sampler_name")
    for name in ("s_churn", "s_tmin", "s_tmax", "s_noise", "s_min_uncond"):
        if name in payload and chance.random() < 0.3:
            payload["override_settings"][name] = payload.pop(name)
    kind = chance.random()
    if kind < 0.35:
        _add_second_pass(chance, made)
    elif kind < 0.65:
        _add_image(chance, payload)
    if kind < 0.65 and chance.random() < 0.3:
        payload["override_settings"]["img2img_extra_noise"] = 0.25
    if chance.random() < 0.25:
        _add_refiner(chance, payload)
    elif family == "sd1" and kind >= 0.35 and not payload.get("inpaint_full_res"):
        _add_control(chance, payload)
    return made


def _add_refiner(chance: random.Random, payload: dict[str, Any]) -> None:
    payload["refiner_checkpoint"] = "other"
    _maybe(chance, payload, refiner_switch_at=chance.choice([0, 0.2, 0.5, 0.8, 1]))
    settings = payload["override_settings"]
    _maybe(chance, settings, refiner_switch_by_sample_steps=True)


def _add_control(chance: random.Random, payload: dict[str, Any]) -> None:
    """A unit of sd-webui-controlnet, with a sampler of one call a step."""
    payload |= {"sampler_name": chance.choice(ONE_CALL), "s_min_uncond": 0}
    payload.pop("sampler_index", None)
    payload["override_settings"].pop("s_min_uncond", None)
    unit = {"model": "lines", "image": _image("RGB", chance)}
    _maybe(
        chance,
        unit,
        weight=chance.choice([0.5, 1.5]),
        guidance_start=chance.choice([0, 0.2, 0.5]),
        guidance_end=chance.choice([0.6, 1]),
    )
    payload["alwayson_scripts"] = {"controlnet": {"args": [unit]}}


def _add_second_pass(chance: random.Random, made: Case) -> None:
    payload = made.payload
    payload |= {
        "enable_hr": True,
        "denoising_strength": chance.choice([0.3, 0.55, 0.7, 1]),
    }
    if chance.random() < 0.4:
        payload["hr_resize_x"] = chance.choice([0, 192, 300])
        payload["hr_resize_y"] = chance.choice([128, 260])
    else:
        payload["hr_scale"] = chance.choice([1.3, 1.5, 2])
    _maybe(
        chance,
        payload,
        hr_second_pass_steps=chance.choice([0, 3, 9]),
        hr_sampler_name=chance.choice([None, *SAMPLERS]),
        hr_scheduler=chance.choice([None, *SCHEDULERS]),
    )
    for name, joins in (("hr_prompt", True), ("hr_negative_prompt", False)):
        prompt = _prompt(chance, joins=joins)
        if chance.random() < 0.6 or not prompt.written:  # which is the first pass' own
            continue
        payload[name] = prompt.written
        if joins:
            made.hires_prompt = prompt
        else:
            made.hires_negative = prompt


def _add_image(chance: random.Random, payload: dict[str, Any]) -> None:
    payload["init_images"] = [_image("RGB", chance)]
    _maybe(
        chance,
        payload,
        denoising_strength=chance.choice([0, 0.2, 0.5, 0.75, 0.99, 1]),
        resize_mode=chance.choice([0, 1, 2]),
    )
    if chance.random() < 0.4:
        payload["mask"] = _image("L", chance)
        payload["inpaint_full_res"] = chance.choice([False, True])
        _maybe(chance, payload, inpainting_fill=chance.randrange(4), mask_blur=0)
        if payload["inpaint_full_res"]:
            payload["mask_blur"] = 0
            padding = chance.choice([0, 5, 60])
            _maybe(chance, payload, inpaint_full_res_padding=padding)


def _image(mode: str, chance: random.Random) -> str:
    image = Image.new(mode, (64, 64))
    image.paste(
        chance.choice([200, 255]) if mode == "L" else (9, 200, 90), (8, 8, 40, 40)
    )
    out = io.BytesIO()
    image.save(out, "PNG")
    return base64.b64encode(out.getvalue()).decode()


def _sampler(chance: random.Random) -> str:
    name = chance.choice(SAMPLERS)
    if name in OF_TIMESTEPS or chance.random() < 0.75:
        return name
    return f"{name} {chance.choice(SCHEDULERS[1:])}"


def _maybe(chance: random.Random, fields: dict[str, Any], **values: Any) -> None:
    fields |= {name: value for name, value in values.items() if chance.random() < 0.4}


def _prompt(chance: random.Random, *, joins: bool) -> Prompt:
    count = chance.choice([1, 1, 1, 2, 3]) if joins else chance.choice([0, 1, 1])
    parts = [
        (text(chance, depth=0), chance.choice([1.0, 1.0, 0.5, 1.2]) if joins else 1.0)
        for _ in range(count)
    ]
    return Prompt(tuple(parts) or (((), 1.0),))


def text(chance: random.Random, depth: int = 0) -> Text:
    """A text of words, emphasis and edits."""
    pieces: list[str | Edit] = []
    for _ in range(chance.randint(1, 3)):
        kind = chance.random()
        word = chance.choice(_WORDS)
        if kind > 0.85 and depth < 2:
            pieces.append(Edit((text(chance, depth + 1), text(chance, depth + 1))))
        elif kind > 0.65 and depth < 2:
            when = chance.choice(["2", "5", "0.25", ".5", "1.3", "0", "99", "1.0"])
            options = text(chance, depth + 1), text(chance, depth + 1)
            pieces.append(Edit(options, when))
        elif kind > 0.5:
            pieces.append(f"({word}:1.2)")
        else:
            pieces.append(word)
        pieces.append(" ")
    return tuple(pieces[:-1])


def written(text: Text) -> str:
    """A text as a prompt."""
    return "".join(
        each
        if isinstance(each, str)
        else f"[{'|'.join(map(written, each.options))}]"
        if each.when is None
        else f"[{':'.join(map(written, each.options))}:{each.when}]"
        for each in text
    )


def edits(text: Text) -> Sequence[Edit]:
    """All edits of a text, those in options of others too."""
    own = [each for each in text if isinstance(each, Edit)]
    return [
        *own,
        *(one for each in own for option in each.options for one in edits(option)),
    ]
