"""The fields of a job for its passes, and what of AUTOMATIC1111's payload becomes a job's fields.

All others do not change the image, or are refused by name: docs/jobs.md has tables of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from pydantic import model_validator

from imagefleet.job import override_settings, samplers
from imagefleet.job.passes import controlnet, extras, hires, img2img
from imagefleet.job.passes.controlnet import Scripts, Unit
from imagefleet.job.passes.extras import Extras
from imagefleet.job.passes.hires import Hires
from imagefleet.job.prompt import Prompt

#: Fields about saving, sending and the web page's settings.
WITHOUT_EFFECT = frozenset(
    {
        "comments",
        "do_not_save_grid",
        "do_not_save_samples",
        "force_task_id",
        "override_settings_restore_afterwards",
        "save_images",
        "send_images",
    }
)

_EMPTY: tuple[object, ...] = (None, "", [], {})

#: Fields that change the image -> their neutral values.
NEUTRAL_VALUES: Mapping[str, tuple[object, ...]] = {
    "disable_extra_networks": (None, False),
    "distilled_cfg_scale": (None, 3.5),
    "firstphase_height": (None, 0),  # the image's size, even without `enable_hr`
    "firstphase_width": (None, 0),
    "infotext": _EMPTY,  # sets the fields that the payload leaves out
    "refiner_checkpoint": (*_EMPTY, "None", "none"),
    "refiner_switch_at": (None, 0, 0.8, 1),
    "restore_faces": (None, False),
    "script_args": _EMPTY,
    "script_name": _EMPTY,
    "styles": _EMPTY,
    "tiling": (None, False),
}

_WITHOUT_EFFECT = WITHOUT_EFFECT | img2img.WITHOUT_EFFECT | extras.WITHOUT_EFFECT
_NEUTRAL_VALUES: Mapping[str, tuple[object, ...]] = {
    **NEUTRAL_VALUES,
    **img2img.NEUTRAL_VALUES,
    **hires.NEUTRAL_VALUES,
    **extras.NEUTRAL_VALUES,
}

#: Fields that matter with a second pass alone, beside those that begin with `hr_`.
_OF_SECOND_PASS = frozenset({"enable_hr", *hires.NEUTRAL_VALUES})

#: Fields of a job for which AUTOMATIC1111 takes null as not given.
_NULL_IS_DEFAULT = frozenset(
    (
        *("s_churn", "s_min_uncond", "s_noise", "s_tmax", "s_tmin"),
        *("eta_noise_seed_delta", "subseed", "subseed_strength"),
        *("seed_resize_from_h", "seed_resize_from_w"),
        *(img2img.FIELDS | hires.FIELDS | extras.FIELDS),
    )
)

#: Fields that do not simply go into a job, beside those that begin with `hr_`.
_WITH_RULES = frozenset(
    (
        *_WITHOUT_EFFECT,
        *_OF_SECOND_PASS,
        *_NEUTRAL_VALUES,
        *_NULL_IS_DEFAULT,
        *("init_images", "denoising_strength"),
    )
)


@dataclass(frozen=True, slots=True)
class Pass:
    """What one pass takes: its size in pixels, and the UNet's calls with the rows of each."""

    width: int
    height: int
    calls: int
    controls: int = 0
    encodes: bool = False
    """Whether the pass begins with pixels, which the VAE encodes."""
    decodes: bool = True
    """Whether the pass ends with pixels, which the VAE decodes."""
    enlarged: int = 0
    """Pixels that networks enlarge before it, or in its place."""
    rows: int = 2
    """Rows of a call: 1 without guidance. Steps that `s_min_uncond` leaves without count as 2."""

    @property
    def is_drawn(self) -> bool:
        return bool(self.calls or self.encodes or self.decodes)


class PassFields(Hires, Extras):
    """What a job's image begins with, what controls or enlarges it, and its second pass."""

    alwayson_scripts: Scripts = Scripts()

    @model_validator(mode="after")
    def _passes_are_possible(self) -> Self:
        if not self.init_images and (unused := self.model_fields_set & img2img.OWN_FIELDS):
            raise ValueError(f"{min(unused)}: is for img2img; init_images is missing")
        if self.controls:
            controlnet.check(self.controls)
            if self.enable_hr:
                raise ValueError("alwayson_scripts: ControlNets with enable_hr are not supported")
            if self.mask is not None and self.inpaint_full_res:
                raise ValueError(
                    "alwayson_scripts: ControlNets with inpaint_full_res are not supported: set it"
                    " to false"
                )
        if self.enable_hr:
            if self.init_images:
                raise ValueError("enable_hr: is for txt2img; remove it, or init_images")
            hires.check(self, self.denoising_strength)
            hires.read_prompts(self)
        if not extras.FIELDS.isdisjoint(self.model_fields_set):
            given = {"enable_hr": self.enable_hr, "alwayson_scripts": self.controls}
            extras.check(self, {name for name, value in given.items() if value})
        return self

    @property
    def controls(self) -> tuple[Unit, ...]:
        return self.alwayson_scripts.controlnet.args

    @property
    def has_inputs(self) -> bool:
        """Whether a worker has to read more for it than what its prompts name."""
        return bool(self.init_images or self.enable_hr or self.controls)

    @property
    def hires_prompts(self) -> tuple[Prompt | None, Prompt | None]:
        """The prompt and the negative prompt of the second pass; None: the first's."""
        return hires.read_prompts(self) if self.enable_hr else (None, None)

    @property
    def shown_hires_prompts(self) -> tuple[str, str]:
        """The `shown_prompts` of the second pass; an empty one is the first pass' own."""
        return self._shown(self.hr_prompt), self._shown(self.hr_negative_prompt)

    @property
    def all_prompts(self) -> tuple[Prompt, ...]:
        given = (self.parsed_prompt, self.parsed_negative_prompt, *self.hires_prompts)
        return tuple(each for each in given if each is not None)

    @property
    def sources(self) -> tuple[str, ...]:
        """The images that the job is given (`imagefleet.job.passes.sources`)."""
        masks = () if self.mask is None else (self.mask,)
        return (*self.init_images, *masks, *(unit.image for unit in self.controls))

    @property
    def only_upscales(self) -> bool:
        """Whether nothing is drawn: the job's image is one that it is given, enlarged."""
        return self.upscaler_1 is not None

    @property
    def upscalers(self) -> tuple[str, ...]:
        """The upscalers that enlarge in place of a drawing: the second one only where it shows."""
        second = self.upscaler_2 if self.extras_upscaler_2_visibility else None
        return tuple(each for each in (self.upscaler_1, second) if each is not None)

    @property
    def upscaler_files(self) -> tuple[str, ...]:
        named = (self.upscaler_file, *self.upscalers)
        return tuple(each for each in named if each and each not in hires.RESAMPLING)

    @property
    def size_to_begin_with(self) -> tuple[int | None, int | None]:
        """Width and height of the first pass, or of the image that is enlarged, as far as known."""
        return self.input_size if self.only_upscales else (self.width, self.height)

    @property
    def input_size(self) -> tuple[int | None, int | None]:
        """Width and height of the image that the job is given, as far as known."""
        raise NotImplementedError

    @property
    def final_size(self) -> tuple[int | None, int | None]:
        """Width and height of the job's images, as far as the job alone tells."""
        if self.only_upscales:
            return extras.final_size(self, *self.size_to_begin_with)
        if self.mask is not None and self.inpaint_full_res:
            return None, None  # those of the image that it is given
        if not self.enable_hr:
            return self.width, self.height
        if self.width is None or self.height is None:
            return None, None
        return hires.size_after(self, (self.width, self.height))

    def passes(self, width: int, height: int, *, enlarges: bool = False) -> list[Pass]:
        """The passes of an image of this size at first; *enlarges*: the model draws all steps."""
        size = width, height
        if self.only_upscales:
            enlarged = len(self.upscaler_files) * extras.network_pixels(
                size, extras.scale(self, size)
            )
            whole, _ = extras.sizes_after(self, size)
            return [Pass(*whole, 0, decodes=False, enlarged=enlarged)]
        controls, begins_with_image = len(self.controls), bool(self.init_images) and not enlarges
        steps = self.steps
        if begins_with_image:
            steps = img2img.taken_steps(self.steps, self.denoising_strength)
        calls = samplers.unet_calls(self.sampler, steps)
        rows = _rows(self.guidance, self.sampler)
        if not self.enable_hr:
            return [Pass(width, height, calls, controls, begins_with_image, rows=rows)]
        by_pixels = self.upscaler not in hires.LATENT
        second = hires.size_after(self, size)
        enlarged = len(self.upscaler_files) * extras.network_pixels(size, second[0] / width)
        steps = hires.steps(self) if self.denoising_strength else 0
        own, _ = self.hires_prompts
        sampler = hires.sampler(self)
        guidance = self.guidance if own is None else self.cfg_scale * own.weight
        second_calls, second_rows = samplers.unet_calls(sampler, steps), _rows(guidance, sampler)
        return [
            Pass(width, height, calls, decodes=by_pixels, rows=rows),
            Pass(*second, second_calls, encodes=by_pixels, enlarged=enlarged, rows=second_rows),
        ]


def _rows(guidance: float, sampler: str) -> int:
    """DDIM CFG++ takes the negative prompt's at any scale."""
    return 1 if guidance == 1 and sampler != "ddim_cfgpp" else 2


def fields_of_job(payload: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a job that a payload sets; raises ValueError for one that is not supported."""
    if only_upscales(payload) and extras.IMAGE in payload:
        payload = _with_input(payload)
    begins_with_image, has_second_pass = _begins_with_image(payload), _has_second_pass(payload)
    fields = {}
    for name, value in payload.items():
        is_hires = name.startswith(hires.PREFIX)
        if not is_hires and name not in _WITH_RULES:  # as most are
            fields[name] = value
            continue
        if (
            name in _WITHOUT_EFFECT
            or (not has_second_pass and (is_hires or name in _OF_SECOND_PASS))
            or (not begins_with_image and name == "init_images")
            or (not (begins_with_image or has_second_pass) and name == "denoising_strength")
        ):
            continue
        is_unknown = is_hires and name not in hires.FIELDS
        allowed = _NEUTRAL_VALUES.get(name, (None,) if is_unknown else ())
        if allowed and value not in allowed:
            raise ValueError(
                f"{name} is not supported: it would change the image; remove it or switch it off"
            )
        if not allowed and (value is not None or name not in _NULL_IS_DEFAULT):
            fields[name] = value
    if scripts := fields.pop("alwayson_scripts", None):
        fields["alwayson_scripts"] = controlnet.fields_of_scripts(scripts)
    legacy_name = fields.pop("sampler_index", None)
    if legacy_name and not fields.get("sampler_name"):
        fields["sampler_name"] = legacy_name
    if (settings := fields.pop("override_settings", None)) not in _EMPTY:
        neutral = dict(img2img.NEUTRAL_SETTINGS) if begins_with_image else {}
        neutral |= hires.NEUTRAL_SETTINGS if has_second_pass else {}
        fields |= override_settings.fields(settings, fields, neutral)
    return fields


def only_upscales(payload: Mapping[str, Any]) -> bool:
    """Whether a payload is one of extras, which enlarges an image and draws none."""
    return payload.get("upscaler_1") not in (None, "", "None")


def is_foreign(name: str) -> bool:
    """Whether a field of a payload is none of a job's."""
    return (
        name in _WITHOUT_EFFECT
        or name in _NEUTRAL_VALUES
        or name == extras.IMAGE
        or name.startswith(hires.PREFIX)
    )


def _with_input(payload: Mapping[str, Any]) -> dict[str, Any]:
    """A payload of extras with its image, which has a name of its own, in `init_images`."""
    fields = dict(payload)
    if (image := fields.pop(extras.IMAGE)) not in (None, ""):
        if _begins_with_image(fields):
            raise ValueError(
                f"{extras.IMAGE} and init_images are the same field: keep one of the two"
            )
        fields["init_images"] = [image]
    return fields


def _begins_with_image(payload: Mapping[str, Any]) -> bool:
    return payload.get("init_images") not in (None, "", [])


def _has_second_pass(payload: Mapping[str, Any]) -> bool:
    value = payload.get("enable_hr")
    if isinstance(value, str):  # as tables have it
        value = value.strip().lower()
    return value not in (None, False, 0, "", "0", "false", "f", "no", "n", "off")
