"""A reference of what AUTOMATIC1111 1.10 tells its samplers and its model, by its formulas."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from payloads import OF_TIMESTEPS, Case, Edit, Prompt, Text, edits
from scipy import stats
from sigma_calls import CALLS, Options, dpm_fast, hat_of, karras

#: `sd_samplers_kdiffusion.py`, `samplers_k_diffusion`: the option `scheduler`, by its key.
_OWN_SCHEDULE = {
    "DPM++ 2M": "Karras",
    "DPM++ SDE": "Karras",
    "DPM++ 2M SDE": "Exponential",
    "DPM++ 2M SDE Heun": "Exponential",
    "DPM++ 2S a": "Karras",
    "DPM++ 3M SDE": "Exponential",
    "DPM2": "Karras",
    "DPM2 a": "Karras",
    "Restart": "Karras",
}
#: The same: `second_order`, `discard_next_to_last_sigma`, `brownian_noise`.
_SECOND_ORDER = ("DPM++ SDE", "DPM++ 2S a", "Heun", "DPM2", "DPM2 a", "Restart")
_DISCARDS = ("DPM++ 3M SDE", "DPM2", "DPM2 a")
_BROWNIAN = ("DPM++ SDE", "DPM++ 2M SDE", "DPM++ 2M SDE Heun", "DPM++ 3M SDE")
#: `sampler_extra_params`, and functions of k-diffusion with an argument eta.
_CHURNING = ("Euler", "Heun", "DPM2")
_SCALING = ("DPM fast", "DPM2 a", "DPM++ 2S a", *_BROWNIAN)

#: `sd_schedulers.py`: labels by names and aliases.
_LABELS = {
    "automatic": "Automatic",
    "uniform": "Uniform",
    "karras": "Karras",
    "exponential": "Exponential",
    "polyexponential": "Polyexponential",
    "sgm_uniform": "SGM Uniform",
    "SGMUniform": "SGM Uniform",
    "kl_optimal": "KL Optimal",
    "align_your_steps": "Align Your Steps",
    "simple": "Simple",
    "normal": "Normal",
    "ddim": "DDIM",
    "beta": "Beta",
}
_LABELS |= {label: label for label in _LABELS.values()}

_EITHER = {"s_churn", "s_tmin", "s_tmax", "s_noise", "s_min_uncond"}

_AYS = [14.615, 6.475, 3.861, 2.697, 1.886, 1.396, 0.963, 0.652, 0.399, 0.152, 0.029]
_AYS_XL = [14.615, 6.315, 3.771, 2.181, 1.342, 0.862, 0.555, 0.380, 0.234, 0.113, 0.029]

#: The place of the masks' white in `payloads`: left, upper, right, lower; and their side.
_WHITE = (8, 8, 40, 40)
_MASK_SIDE = 64

#: The model's timestep, and the standard deviation of noise after the call; None: none is drawn.
Call = tuple[float, float | None]


@dataclass
class Pass:
    size: tuple[int, int]
    calls: list[Call] = field(default_factory=list)
    noise_scale: float = 0.0
    image_scale: float = 0.0
    churn: float | None = None
    #: Of each call, the words of each subprompt and of the negative prompt.
    texts: list[list[str]] = field(default_factory=list)
    scales: list[float] = field(default_factory=list)
    unguided: list[bool] = field(default_factory=list)
    is_adaptive: bool = False
    #: The call from which on the refiner draws.
    switch: int | None = None
    #: Of each call, the ControlNet's weight.
    controls: list[float] = field(default_factory=list)


@dataclass
class Told:
    passes: list[Pass]
    #: The seed and the subseed of each image.
    seeds: list[tuple[int, int]]
    clip_skip: int
    #: The generator, the seed's delta for noise of steps, the size that the seed is from.
    noise: tuple[str, int, tuple[int, int] | None]
    #: The part of the image that alone is drawn: left, upper, right, lower.
    box: tuple[int, ...] | None


def told(case: Case, alphas: torch.Tensor) -> Told:
    """What a payload makes of a model with these *alphas* (float64), as `processing.py` does."""
    settings = case.payload.get("override_settings", {})
    # `processing.py` and `sd_samplers_common.py` take what a payload lacks from the settings.
    payload = {
        **{name: settings[name] for name in _EITHER & settings.keys()},
        **case.payload,
    }
    case = replace(case, payload=payload)
    sampler, scheduler = _sampler_and_scheduler(payload)
    model = _Model(alphas, is_xl=case.family == "sdxl")
    size = (payload["width"], payload["height"])
    has_image = bool(payload.get("init_images"))
    passes = [_first_pass(case, model, sampler, scheduler, has_image=has_image)]
    if payload.get("enable_hr"):
        passes[0].switch = None  # `hires_fix_refiner_pass` as installed
        passes.append(_second_pass(case, model, sampler, scheduler, size))
    images = payload.get("batch_size", 1) * payload.get("n_iter", 1)
    strength = payload.get("subseed_strength", 0)
    # `process_images_inner`: all_seeds and all_subseeds.
    seeds = [
        (
            payload["seed"] + (0 if strength else at),
            payload.get("subseed", -1) + at if strength else 0,
        )
        for at in range(images)
    ]
    resized = payload.get("seed_resize_from_w", 0), payload.get("seed_resize_from_h", 0)
    return Told(
        passes,
        seeds,
        settings.get("CLIP_stop_at_last_layers", 1),
        (
            settings.get("randn_source", "GPU"),
            settings.get("eta_noise_seed_delta", 0),
            resized if min(resized) > 0 else None,
        ),
        _crop_box(payload),
    )


def _crop_box(payload: dict[str, Any]) -> tuple[int, ...] | None:
    """`masking.get_crop_region_v2` and `expand_crop_region`."""
    if not payload.get("inpaint_full_res"):
        return None
    padding = payload.get("inpaint_full_res_padding", 0)
    ends = [
        [max(low - padding, 0), min(high + padding, _MASK_SIDE)]
        for low, high in zip(_WHITE[:2], _WHITE[2:], strict=True)
    ]
    (left, right), (upper, lower) = ends
    ratio = payload["width"] / payload["height"]
    is_wide = (right - left) / (lower - upper) > ratio
    wanted = (right - left) / ratio if is_wide else (lower - upper) * ratio
    low, high = ends[is_wide]
    more = int(wanted - (high - low))
    low = low - more // 2
    high = high + more - more // 2
    if high >= _MASK_SIDE:
        low = low - (high - _MASK_SIDE)
        high = _MASK_SIDE
    if low < 0:
        low, high = 0, high - low
    ends[is_wide] = [low, min(high, _MASK_SIDE)]
    (left, right), (upper, lower) = ends
    return left, upper, right, lower


def _sampler_and_scheduler(payload: dict[str, Any]) -> tuple[str, str]:
    """`sd_samplers.get_sampler_and_scheduler`, and `api.text2imgapi`: the field goes first."""
    name = payload.get("sampler_name") or payload["sampler_index"]
    field_ = payload.get("scheduler")
    found = "Automatic"
    for label in sorted(set(_LABELS), key=len, reverse=True):
        if name.endswith(f" {label}") and name.removesuffix(f" {label}") != "":
            name = name.removesuffix(f" {label}")
            found = _LABELS[label]
            break
    if _OWN_SCHEDULE.get(name) == found:
        found = "Automatic"
    return name, _LABELS[field_] if field_ else found


class _Model:
    """`CompVisDenoiser` of k-diffusion's external.py, and LCM's in `sd_samplers_lcm.py`."""

    def __init__(self, alphas: torch.Tensor, *, is_xl: bool) -> None:
        self.is_xl = is_xl
        self.alphas = alphas.float()
        self.sigmas = ((1 - self.alphas) / self.alphas) ** 0.5
        kept = self.alphas[19::20]
        self.lcm = ((1 - kept) / kept) ** 0.5

    def levels(self, sampler: str) -> torch.Tensor:
        return self.lcm if sampler == "LCM" else self.sigmas

    def timestep(self, sampler: str, sigma: float) -> float:
        """`sigma_to_t`; LCM's is the nearest of its fifty, the lower one in the middle of two.

        There, rounding decides, which is not the same on each machine.
        """
        logs = self.levels(sampler).log()
        if sampler == "LCM":
            own = torch.tensor(sigma, dtype=torch.float32).log()
            distances = (own - logs).abs()
            return 20 * int((distances < distances.min() + 1e-5).nonzero()[0]) + 19
        return float(
            np.interp(math.log(sigma), logs.double().numpy(), np.arange(1000.0))
        )

    def sigma(self, sampler: str, place: torch.Tensor) -> torch.Tensor:
        """`t_to_sigma`, of places among the levels."""
        logs = self.levels(sampler).log()
        low = place.floor().long()
        high = place.ceil().long()
        share = place.frac()
        return ((1 - share) * logs[low] + share * logs[high]).exp()


def _sigmas(model: _Model, sampler: str, label: str, steps: int) -> list[float]:
    """`KDiffusionSampler.get_sigmas`."""
    if steps == 0:
        return [0.0]
    if label == "Automatic":
        label = _OWN_SCHEDULE.get(sampler, "Uniform")
    count = steps + (sampler in _DISCARDS)
    levels = model.levels(sampler)
    if label == "Align Your Steps":
        made = _align_your_steps(_AYS_XL if model.is_xl else _AYS, count)
    elif label in ("Uniform", "Normal", "SGM Uniform"):
        made = _of_timesteps(model, sampler, count, cuts_last=label == "SGM Uniform")
    else:
        made = _SCHEDULES[label](levels, float(levels[0]), float(levels[-1]), count)
    if label != "KL Optimal":
        made.append(0.0)
    if sampler in _DISCARDS:
        made = [*made[:-2], made[-1]]
    return made


def _of_timesteps(
    model: _Model, sampler: str, count: int, *, cuts_last: bool
) -> list[float]:
    """`get_sigmas`, `normal_scheduler` and `sgm_uniform`: LCM's timesteps are 19, 39, ... 999."""
    step, first = (20, 19) if sampler == "LCM" else (1, 0)
    timesteps = torch.linspace(999.0, float(first), count + cuts_last)[:count]
    last = len(model.levels(sampler)) - 1
    return model.sigma(sampler, ((timesteps - first) / step).clamp(0, last)).tolist()


_Sigmas = Callable[[torch.Tensor, float, float, int], list[float]]


def _kl_optimal(_: torch.Tensor, low: float, high: float, count: int) -> list[float]:
    shares = np.arange(count + 1) / count
    angles = shares * math.atan(low) + (1 - shares) * math.atan(high)
    return list(np.tan(angles).tolist())


def _align_your_steps(known: list[float], count: int) -> list[float]:
    places = np.linspace(0, 1, count), np.linspace(0, 1, len(known))
    made = np.exp(np.interp(*places, np.log(known))).tolist()
    return [known[-1]] if count == 1 else list(made)


def _exponential(_: torch.Tensor, low: float, high: float, count: int) -> list[float]:
    return list(np.exp(np.linspace(math.log(high), math.log(low), count)).tolist())


def _beta(_: torch.Tensor, low: float, high: float, count: int) -> list[float]:
    places = stats.beta.ppf(1 - np.linspace(0, 1, count), 0.6, 0.6)
    return [low + float(place) * (high - low) for place in places]


def _simple(levels: torch.Tensor, _: float, __: float, count: int) -> list[float]:
    stride = len(levels) / count
    return [float(levels[-(1 + int(at * stride))]) for at in range(count)]


def _ddim(levels: torch.Tensor, _: float, __: float, count: int) -> list[float]:
    return [float(each) for each in levels[1 :: max(len(levels) // count, 1)]][::-1]


#: `sd_schedulers.py`: functions of the levels, their ends and the number of sigmas.
_SCHEDULES: dict[str, _Sigmas] = {
    "Karras": lambda _, low, high, count: karras(count, low, high),
    "Exponential": _exponential,
    "Polyexponential": _exponential,
    "KL Optimal": _kl_optimal,
    "Simple": _simple,
    "DDIM": _ddim,
    "Beta": _beta,
}


def _options(payload: dict[str, Any], sampler: str) -> Options:
    """`sd_samplers_common.Sampler.initialize`: each sampler's own eta, and its extra params."""
    settings = payload.get("override_settings", {})
    usual, name = (
        (0.0, "eta_ddim") if sampler in OF_TIMESTEPS else (1.0, "eta_ancestral")
    )
    eta = payload.get("eta")
    if eta is None:
        eta = settings.get(name, usual)
    is_churning = sampler in _CHURNING
    noise = payload.get("s_noise", 1) if is_churning or sampler in _SCALING else 1
    return Options(
        eta,
        payload.get("s_churn", 0) if is_churning else 0,
        payload.get("s_tmin", 0),
        payload.get("s_tmax", 0) or math.inf,
        noise,
    )


def _first_pass(
    case: Case, model: _Model, sampler: str, label: str, *, has_image: bool
) -> Pass:
    payload = case.payload
    steps = payload["steps"]
    t_enc = None
    if has_image:
        # `setup_img2img_steps`, without steps of its own.
        t_enc = int(min(payload.get("denoising_strength", 0.75), 0.999) * steps)
    size = tuple(side // 8 * 8 for side in (payload["width"], payload["height"]))
    made = _drawn(payload, model, sampler, label, steps, t_enc)
    made.size = (size[0], size[1])
    counted = steps * (1 + (sampler in _SECOND_ORDER))
    _add_texts(made, payload, sampler, (case.prompt, case.negative), (counted, None))
    return made


def _second_pass(
    case: Case, model: _Model, sampler: str, label: str, size: tuple[int, int]
) -> Pass:
    """`StableDiffusionProcessingTxt2Img.sample_hr_pass`."""
    payload = case.payload
    first_counted = payload["steps"] * (1 + (sampler in _SECOND_ORDER))
    second = payload.get("hr_sampler_name") or sampler
    label = payload.get("hr_scheduler") or label
    requested = payload.get("hr_second_pass_steps", 0) or payload["steps"]
    # `setup_img2img_steps`, with steps of its own.
    steps = int(requested / min(payload["denoising_strength"], 0.999))
    made = _drawn(payload, model, second, label, steps, requested - 1)
    made.size = _hires_size(payload, size)
    counted = requested * (1 + (second in _SECOND_ORDER))
    prompts = case.hires_prompt or case.prompt, case.hires_negative or case.negative
    _add_texts(made, payload, second, prompts, (counted, first_counted))
    return made


def _hires_size(payload: dict[str, Any], size: tuple[int, int]) -> tuple[int, int]:
    """`calculate_target_resolution`, and `truncate_x` and `truncate_y` in cells of 8."""
    width, height = size
    x = payload.get("hr_resize_x", 0)
    y = payload.get("hr_resize_y", 0)
    if not (x or y):
        scale = payload.get("hr_scale", 2.0)
        found = int(width * scale), int(height * scale)
        return found[0] // 8 * 8, found[1] // 8 * 8
    if not y:
        return x // 8 * 8, x * height // width // 8 * 8
    if not x:
        return y * width // height // 8 * 8, y // 8 * 8
    by_width = width / height < x / y
    whole = (x, x * height // width) if by_width else (y * width // height, y)
    cut = (whole[0] - x) // 8, (whole[1] - y) // 8
    return whole[0] // 8 * 8 - cut[0] * 8, whole[1] // 8 * 8 - cut[1] * 8


def _drawn(
    payload: dict[str, Any],
    model: _Model,
    sampler: str,
    label: str,
    steps: int,
    t_enc: int | None,
) -> Pass:
    options = _options(payload, sampler)
    settings = payload.get("override_settings", {})
    extra = settings.get("img2img_extra_noise", 0) if t_enc is not None else 0
    made = Pass((0, 0))
    if sampler in OF_TIMESTEPS:
        _by_timesteps(made, model, sampler, options, steps, t_enc)
        made.noise_scale += extra * made.image_scale
    else:
        _by_sigmas(made, model, sampler, label, options, steps, t_enc)
        made.noise_scale += extra
    below = payload.get("s_min_uncond", 0)
    levels = [timestep for timestep, _ in made.calls]
    if sampler not in OF_TIMESTEPS:
        levels = made.scales
    # `CFGDenoiser.forward`.
    made.unguided = [bool(at % 2 and level < below) for at, level in enumerate(levels)]
    sampled = steps if t_enc is None else t_enc + 1
    made.switch = _switch(payload, model, sampler, levels, sampled)
    made.controls = _controls(payload, len(levels), sampled)
    return made


def _switch(
    payload: dict[str, Any],
    model: _Model,
    sampler: str,
    levels: list[float],
    steps: int,
) -> int | None:
    """`sd_samplers_common.apply_refiner`; *levels* are the sigmas or timesteps of the calls."""
    if "refiner_checkpoint" not in payload:
        return None
    by_steps = payload["override_settings"].get("refiner_switch_by_sample_steps")
    total = steps * (1 + (sampler in _SECOND_ORDER))
    for call, level in enumerate(levels):
        if by_steps:
            done = torch.tensor(call / total, dtype=torch.float64)
        elif sampler in OF_TIMESTEPS:
            done = (999 - torch.tensor(int(level))) / 1000
        else:
            nearest = (model.levels(sampler) - level).abs().argmin()
            done = (999 - nearest) / 1000
        if not done < (payload.get("refiner_switch_at") or 0):
            return call
    return None


def _controls(payload: dict[str, Any], calls: int, steps: int) -> list[float]:
    """sd-webui-controlnet's `guidance_schedule_handler`, by `callback_state`'s number of steps."""
    scripts = payload.get("alwayson_scripts")
    if scripts is None:
        return []
    (unit,) = scripts["controlnet"]["args"]
    start = unit.get("guidance_start", 0)
    end = unit.get("guidance_end", 1)
    shares = [max(call - 1, 0) / steps for call in range(calls)]
    weight = unit.get("weight", 1)
    return [weight if start <= share <= end else 0.0 for share in shares]


def _by_timesteps(
    made: Pass,
    model: _Model,
    sampler: str,
    options: Options,
    steps: int,
    t_enc: int | None,
) -> None:
    """`CompVisSampler` of `sd_samplers_timesteps.py`, and the functions of `..._impl.py`."""
    known = [min(1 + at, 999) for at in range(0, 1000, 1000 // steps)] if steps else []
    alphas = model.alphas.double().numpy()
    made.noise_scale = 1.0
    taken = known
    if t_enc is not None:
        alpha = float(alphas[known[t_enc]])
        made.image_scale = math.sqrt(alpha)
        made.noise_scale = math.sqrt(1 - alpha)
        taken = known[:t_enc]
    if sampler == "UniPC":
        if not taken:
            return
        start = 1.0
        if t_enc is not None:
            start = float(torch.tensor(taken[-1]) / 1000 + 1 / 1000)
        times = torch.linspace(start, 1 / 1000, len(taken) + 1)[:-1]
        made.calls = [(each, None) for each in ((times - 1 / 1000) * 1000).tolist()]
        return
    for at, (timestep, following) in enumerate(pairwise(taken[::-1])):
        noise = None
        if sampler != "PLMS":
            now = alphas[timestep]
            then = alphas[following]
            variance = (1 - then) / (1 - now) * (1 - now / then)
            noise = options.eta * math.sqrt(variance)
        made.calls.append((float(timestep), noise))
        if sampler == "PLMS" and at == 0:
            made.calls.append((float(following), None))


def _by_sigmas(
    made: Pass,
    model: _Model,
    sampler: str,
    label: str,
    options: Options,
    steps: int,
    t_enc: int | None,
) -> None:
    """`KDiffusionSampler.sample` and `sample_img2img`."""
    sigmas = _sigmas(model, sampler, label, steps)
    if t_enc is not None:
        made.image_scale = 1.0
        sigmas = sigmas[steps - t_enc - 1 :]
    made.noise_scale = sigmas[0]
    if sampler == "DPM adaptive":
        made.is_adaptive = True
        return
    if sampler == "DPM fast":
        levels = model.levels(sampler)
        ends = (float(levels[-1]), float(levels[0]))
        count = steps
        if t_enc is not None:
            ends = sigmas[0], sigmas[max(-2, -len(sigmas))]
            count = len(sigmas) - 1
        calls = list(dpm_fast(*ends, count, options)) if count > 0 else []
    else:
        calls = list(CALLS[sampler](sigmas, options))
    made.scales = [sigma for sigma, _ in calls]
    made.calls = [(model.timestep(sampler, sigma), noise) for sigma, noise in calls]
    if options.churn > 0:
        hat = hat_of(sigmas[0], options, len(sigmas) - 1)
        made.churn = options.noise * math.sqrt(max(0.0, hat**2 - sigmas[0] ** 2))


def _add_texts(
    made: Pass,
    payload: dict[str, Any],
    sampler: str,
    prompts: tuple[Prompt, Prompt],
    counted: tuple[int, int | None],
) -> None:
    """`prompt_parser.py`: schedules of all prompts, and which entry is taken at each call."""
    parts = [*prompts[0].parts, *prompts[1].parts]
    schedules = [schedule(text, *counted) for text, _ in parts]
    made.texts = [
        [words_at(each, call) for each in schedules] for call in range(len(made.calls))
    ]
    share = 1 / 12.5 if sampler == "DDIM CFG++" else 1.0
    scale = payload.get("cfg_scale", 7.0) * share
    made.scales = [scale * weight for _, weight in prompts[0].parts]


def schedule(text: Text, steps: int, first_steps: int | None) -> list[tuple[int, str]]:
    """`get_learned_conditioning_prompt_schedules`: the last step of each words."""
    ends = {steps}
    for edit in edits(text):
        if edit.when is None:
            ends |= {*range(1, steps + 1)}
        elif (last := _last(edit.when, steps, first_steps)) >= 1:
            ends.add(last)
    return [(end, _words(text, end, steps, first_steps)) for end in sorted(ends)]


def _last(when: str, steps: int, first_steps: int | None) -> int:
    """`CollectSteps.scheduled`."""
    value = float(when)
    if "." in when:
        value = (value - (first_steps is not None)) * steps
    else:
        value -= first_steps or 0
    return min(steps, int(value))


def _words(text: Text, step: int, steps: int, first_steps: int | None) -> str:
    """`AtStep`."""
    return "".join(
        each
        if isinstance(each, str)
        else _words(_option(each, step, steps, first_steps), step, steps, first_steps)
        for each in text
    )


def _option(edit: Edit, step: int, steps: int, first_steps: int | None) -> Text:
    if edit.when is None:
        return edit.options[(step - 1) % len(edit.options)]
    return edit.options[step > _last(edit.when, steps, first_steps)]


def words_at(known: list[tuple[int, str]], call: int) -> str:
    """`reconstruct_cond_batch`."""
    return next((words for end, words in known if call <= end), known[0][1])
