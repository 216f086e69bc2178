"""The fields of a job for its passes, and those that a payload of AUTOMATIC1111 sets."""

import functools
import itertools
from typing import Annotated, NamedTuple, Self

from pydantic import BeforeValidator, model_validator

from imagefleet import validation
from imagefleet.job import override_settings, samplers, settings_table
from imagefleet.job import prompt as prompts
from imagefleet.job.passes import controlnet, extras, hires, img2img
from imagefleet.job.passes.adetailer import Detail
from imagefleet.job.passes.controlnet import Scripts, Unit
from imagefleet.job.passes.extras import Extras
from imagefleet.job.passes.first import Share
from imagefleet.job.passes.hires import Hires, PromptPair
from imagefleet.job.prompt import LoraTag, Prompt
from imagefleet.job.sizes import PartialSize, whole_cells
from imagefleet.validation import JSONDict, JSONObject


class Pass(NamedTuple):
    """Work of one pass: its size in pixels, and the UNet's calls with the rows of each."""

    width: int
    height: int
    calls: int
    controls: int = 0
    #: True if the pass begins with pixels, which the VAE encodes.
    encodes: bool = False
    #: True if the pass ends with pixels, which the VAE decodes.
    decodes: bool = True
    #: Pixels that networks enlarge before it, or in its place.
    enlarged: int = 0
    #: Rows of a call: one of each prompt that AND joins, and one with guidance. Steps that
    #: `s_min_uncond` leaves without count as guided.
    rows: int = 2

    @property
    def is_drawn(self) -> bool:
        return bool(self.calls or self.encodes or self.decodes)


_Named = Annotated[str | None, BeforeValidator(override_settings.file_name)]


class PassFields(Hires, Extras):
    """Fields of a job's passes: input image, ControlNets, second pass, refiner and enlarging."""

    alwayson_scripts: Scripts = Scripts()
    #: The VAE that encodes and decodes; None: the checkpoint's own.
    sd_vae: _Named = None
    tiling: bool = False
    #: The checkpoint of the second pass; None: the first's.
    hr_checkpoint_name: _Named = None
    #: The checkpoint that goes on with the image, with `enable_hr` in the second pass alone.
    refiner_checkpoint: _Named = None
    #: The share of the model's timesteps after which it does; None: from the beginning.
    refiner_switch_at: Share | None = None
    #: True if that is a share of the steps, as up to AUTOMATIC1111 1.7.
    refiner_switch_by_sample_steps: bool = False

    @model_validator(mode="after")
    def _passes_are_possible(self) -> Self:
        if not self.init_images and (
            unused := self.model_fields_set & img2img.OWN_FIELDS
        ):
            raise ValueError(f"{min(unused)}: is for img2img; init_images is missing")
        if self.controls:
            controlnet.check(self.controls)
            if self.enable_hr:
                raise ValueError(
                    "alwayson_scripts: ControlNets with enable_hr are not supported"
                )
            if self.mask is not None and self.inpaint_full_res:
                raise ValueError(
                    "alwayson_scripts: ControlNets with inpaint_full_res are not supported:"
                    " set it to false"
                )
        if self.enable_hr:
            if self.init_images:
                raise ValueError("enable_hr: is for txt2img; remove it, or init_images")
            hires.check(self, self.denoising_strength)
            hires.read_prompts(self)
        if self.details and self.mask is not None:
            raise ValueError("alwayson_scripts: ADetailer with a mask is not supported")
        with validation.as_error(ValueError, "alwayson_scripts: ad_prompt: "):
            _ = self.detail_prompts
        if not extras.FIELDS.isdisjoint(self.model_fields_set):
            scripts = self.controls or self.details
            given = {"enable_hr": self.enable_hr, "alwayson_scripts": scripts}
            extras.check(self, {name for name, value in given.items() if value})
        return self

    @model_validator(mode="after")
    def _samplers_are_possible(self) -> Self:
        if not (self.refiner_checkpoint or self.use_downcasted_alpha_bar):
            return self
        refined = hires.sampler(self) if self.enable_hr else self.sampler
        used = [samplers.NAMES[key] for key in (self.sampler, refined)]
        if self.refiner_checkpoint and used[1].is_adaptive:
            raise ValueError("refiner_checkpoint: is not supported with DPM adaptive")
        for sampler in used:
            # AUTOMATIC1111 rounds those of timesteps at other places.
            is_of_timesteps = sampler.schedule is None or sampler.distilled_stride > 1
            if self.use_downcasted_alpha_bar and is_of_timesteps:
                raise ValueError(
                    f"use_downcasted_alpha_bar: is not for {sampler.title}"
                )
        return self

    @property
    def controls(self) -> tuple[Unit, ...]:
        return self.alwayson_scripts.controlnet.args

    @property
    def details(self) -> tuple[Detail, ...]:
        """The detectors whose finds are drawn again, in their order."""
        return self.alwayson_scripts.adetailer.args

    @functools.cached_property
    def detail_prompts(self) -> tuple[PromptPair, ...]:
        """The prompt and the negative prompt of each of the details; None: the image's."""
        found = []
        for detail in self.details:
            steps = detail.own("ad_steps", self.steps)
            samplers.check_steps(self.sampler, steps)
            steps = samplers.editing_steps(self.sampler, steps)
            positive = negative = None
            if detail.ad_prompt:
                positive = self.read(prompts.read_prompt, detail.ad_prompt, steps)
            if detail.ad_negative_prompt:
                negative = self.read(
                    prompts.read_negative_prompt, detail.ad_negative_prompt, steps
                )
            found.append((positive, negative))
        return tuple(found)

    @property
    def has_inputs(self) -> bool:
        """True if a worker has to read more for it than what its prompts name."""
        return bool(
            self.init_images
            or self.enable_hr
            or self.controls
            or self.sd_vae
            or self.refiner_checkpoint
        )

    @property
    def hires_prompts(self) -> PromptPair:
        """The prompt and the negative prompt of the second pass; None: the first's."""
        return hires.read_prompts(self) if self.enable_hr else (None, None)

    @property
    def shown_hires_prompts(self) -> tuple[str, str]:
        """The `shown_prompts` of the second pass; an empty one is the first pass' own."""
        return self._shown(self.hr_prompt), self._shown(self.hr_negative_prompt)

    @property
    def all_prompts(self) -> tuple[Prompt, ...]:
        of_details = itertools.chain.from_iterable(self.detail_prompts)
        given = (
            self.parsed_prompt,
            self.parsed_negative_prompt,
            *self.hires_prompts,
            *of_details,
        )
        return tuple(each for each in given if each is not None)

    @property
    def loras(self) -> tuple[LoraTag, ...]:
        """The LoRAs of all passes, each with its weights once."""
        second, _ = self.hires_prompts
        return tuple(
            dict.fromkeys(self.parsed_prompt.loras + (second.loras if second else ()))
        )

    @property
    def sources(self) -> tuple[str, ...]:
        """The images that the job is given (`imagefleet.job.passes.sources`)."""
        masks = () if self.mask is None else (self.mask,)
        return (*self.init_images, *masks, *(unit.image for unit in self.controls))

    @property
    def only_upscales(self) -> bool:
        """True if nothing is drawn: the job's image is one that it is given, enlarged."""
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
    def size_to_begin_with(self) -> PartialSize:
        """Width and height of the first pass, or of the image that is enlarged, as far as known."""
        return self.input_size if self.only_upscales else (self.width, self.height)

    @property
    def input_size(self) -> PartialSize:
        """Width and height of the image that the job is given, as far as known."""
        raise NotImplementedError

    @property
    def final_size(self) -> PartialSize:
        """Width and height of the job's images, as far as the job alone tells."""
        if self.only_upscales:
            return extras.final_size(self, *self.size_to_begin_with)
        if self.mask is not None and self.inpaint_full_res:
            return None, None  # those of the image that it is given
        if self.width is None or self.height is None:
            return self.width, self.height
        if not self.enable_hr:
            return whole_cells(self.width, self.height)
        return hires.sizes_after(self, (self.width, self.height))[1]

    def passes(self, width: int, height: int, *, enlarges: bool = False) -> list[Pass]:
        """The passes of an image of this size at first; *enlarges*: the model draws all steps."""
        size = width, height
        if self.only_upscales:
            enlarged = len(self.upscaler_files) * extras.network_pixels(
                size, extras.scale(self, size)
            )
            whole, _ = extras.sizes_after(self, size)
            return [Pass(*whole, 0, decodes=False, enlarged=enlarged)]
        begins_with_image = bool(self.init_images) and not enlarges
        steps = self.steps
        if begins_with_image:
            steps = _last_steps(self.denoising_strength, steps)
        calls = samplers.unet_calls(self.sampler, steps)
        rows = _rows(self.parsed_prompt, self.cfg_scale, self.sampler)
        if not self.enable_hr:
            controls = len(self.controls)
            return [Pass(width, height, calls, controls, begins_with_image, rows=rows)]
        by_pixels = self.upscaler not in hires.LATENT
        _, second = hires.sizes_after(self, size)
        enlarged = len(self.upscaler_files) * extras.network_pixels(
            size, second[0] / width
        )
        steps = hires.steps(self) if self.denoising_strength else 0
        own, _ = self.hires_prompts
        sampler = hires.sampler(self)
        return [
            Pass(width, height, calls, decodes=by_pixels, rows=rows),
            Pass(
                *second,
                samplers.unet_calls(sampler, steps),
                encodes=by_pixels,
                enlarged=enlarged,
                rows=_rows(own or self.parsed_prompt, self.cfg_scale, sampler),
            ),
        ]

    def detail_passes(self, width: int, height: int) -> list[Pass]:
        """One part for each detector, of an image whose first pass has this size."""
        found = []
        for detail, (own, _) in zip(self.details, self.detail_prompts, strict=True):
            steps = detail.own("ad_steps", self.steps)
            steps = _last_steps(detail.ad_denoising_strength, steps)
            guidance = detail.own("ad_cfg_scale", self.cfg_scale)
            found.append(
                Pass(
                    detail.own("ad_inpaint_width", width),
                    detail.own("ad_inpaint_height", height),
                    samplers.unet_calls(self.sampler, steps),
                    encodes=True,
                    rows=_rows(own or self.parsed_prompt, guidance, self.sampler),
                )
            )
        return found


#: Fields that have a default, which is not null, and so is what null stands for.
_NEVER_NULL = frozenset(
    name
    for name, field in PassFields.model_fields.items()
    if not field.is_required() and field.default is not None
)


def _last_steps(strength: float, steps: int) -> int:
    """The last steps of a schedule, which a pass with an image takes: AUTOMATIC1111's count."""
    return int(min(strength, 0.999) * steps) + 1


def _rows(prompt: Prompt, cfg_scale: float, sampler: str) -> int:
    """Rows of a call: each prompt's that AND joins, and with guidance the negative prompt's."""
    is_guided = cfg_scale * sum(prompt.weights) != 1
    return len(prompt.subprompts) + (
        is_guided or samplers.NAMES[sampler].needs_negative
    )


def fields_of_job(payload: JSONObject) -> JSONDict:
    """The fields of a job that a payload sets; raises ValueError for one that is not supported."""
    if only_upscales(payload) and extras.IMAGE in payload:
        payload = _with_input(payload)
    passes = _passes(payload)
    fields = _taken(payload, passes)
    if scripts := fields.pop("alwayson_scripts", None):
        fields["alwayson_scripts"] = controlnet.fields_of_scripts(
            scripts, fields.get("seed")
        )
    legacy_name = fields.pop("sampler_index", None)
    if legacy_name and not fields.get("sampler_name"):
        fields["sampler_name"] = legacy_name
    if (settings := fields.pop("override_settings", None)) not in (None, "", [], {}):
        if "adetailer" in fields.get("alwayson_scripts", {}):
            passes |= {settings_table.IMG2IMG}
        fields |= override_settings.fields(settings, fields, passes)
    if fields.get("refiner_checkpoint") in override_settings.NO_FILE:
        fields = {
            name: each
            for name, each in fields.items()
            if not name.startswith("refiner_")
        }
    if settings_table.EXTRAS not in passes:
        defaults = settings_table.DEFAULTS.get(str(fields.get("defaults")), {})
        tells_scheduler = bool(fields.get("scheduler"))
        fields |= {
            name: each for name, each in defaults.items() if fields.get(name) is None
        }
        if defaults and not tells_scheduler:
            fields["scheduler"] = (
                samplers.scheduler_in(str(fields["sampler_name"]))
                or defaults["scheduler"]
            )
    return fields


def _taken(payload: JSONObject, passes: frozenset[str]) -> JSONDict:
    """Fields that a payload sets in a job of these passes; ValueError for refused ones."""
    ignored = _without_effect(passes)
    if not payload.get("seed_enable_extras", True):
        ignored |= settings_table.SEED_EXTRAS
    fields = {}
    for name, value in payload.items():
        row = settings_table.FIELDS.get(name)
        if value is None and (row or name in _NEVER_NULL):
            continue  # null switches a field off
        if row is None:  # as most are
            fields[name] = value
        elif name in ignored:
            continue
        elif row.field:
            fields[name] = value
        elif value not in row.neutral:
            raise ValueError(
                f"{name} is not supported: it would change the image; remove it or switch it off"
            )
    return fields


def only_upscales(payload: JSONObject) -> bool:
    """True if a payload is one of extras, which enlarges an image and draws none."""
    return payload.get("upscaler_1") not in (None, "", "None")


def _passes(payload: JSONObject) -> frozenset[str]:
    """The names that `settings_table` has for the passes of a payload."""
    if only_upscales(payload):
        return frozenset({settings_table.EXTRAS})
    first = (
        settings_table.IMG2IMG
        if _begins_with_image(payload)
        else settings_table.TXT2IMG
    )
    return frozenset(
        {first, *([settings_table.HIRES] if _has_second_pass(payload) else ())}
    )


@functools.cache
def _without_effect(passes: frozenset[str]) -> frozenset[str]:
    return frozenset(
        name
        for name, row in settings_table.FIELDS.items()
        if passes.isdisjoint(row.passes | row.refused)
    )


def _with_input(payload: JSONObject) -> JSONDict:
    """A payload of extras with its image, which has a name of its own, in `init_images`."""
    fields = dict(payload)
    if (image := fields.pop(extras.IMAGE)) not in (None, ""):
        if _begins_with_image(fields):
            raise ValueError(
                f"{extras.IMAGE} and init_images are the same field: keep one of the"
                " two"
            )
        fields["init_images"] = [image]
    return fields


def _begins_with_image(payload: JSONObject) -> bool:
    return payload.get("init_images") not in (None, "", [])


def _has_second_pass(payload: JSONObject) -> bool:
    value = payload.get("enable_hr")
    if isinstance(value, str):  # as tables have it
        value = value.strip().lower()
    return value not in (None, False, 0, "", "0", "false", "f", "no", "n", "off")
