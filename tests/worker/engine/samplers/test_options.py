"""Options of samplers, ends of schedules and inpainting, against k-diffusion."""

import pytest
import torch

import references
from imagefleet.job.samplers import Options
from sampling import (
    SHAPE,
    alphas_cumprod,
    noises,
    relative_difference,
    sample,
    stand_in,
    taking,
    too_different,
)
from worker.engine import sampler
from worker.engine.families import reading
from worker.engine.samplers.schedule import make_schedule

CHURN = {"s_churn": 8.0, "s_tmin": 0.1, "s_tmax": 9.0, "s_noise": 1.02}
OPTIONS = [
    *((method, CHURN) for method in ("euler", "heun", "dpm_2")),
    *((method, {"eta": 0.0}) for method in references.METHODS if "ancestral" in method),
    *((method, {"eta": 0.0}) for method in references.METHODS if "_sde" in method),
    *(
        (method, {"eta": 0.6, "s_noise": 1.1})
        for method in references.METHODS
        if "_sde" in method
        or method in ("dpm_2_ancestral", "dpmpp_2s_ancestral", "dpm_fast")
    ),
    ("euler_ancestral", {"eta": 0.3}),
    ("dpm_fast", {"eta": 0.0}),
    ("euler", {"s_churn": 80.0}),  # more than a step takes
]


def test_options_are_k_diffusions(k_diffusion, monkeypatch):
    reference = references.Reference(k_diffusion, stand_in, alphas_cumprod())

    def difference(method: str, options: dict[str, float], steps: int) -> float:
        noise = noises(3 * steps + 80)
        monkeypatch.setattr(torch, "randn_like", taking(noise[1:]))
        theirs = reference.draw(method, "uniform", steps, noise, options)
        made = make_schedule(
            method, steps, alphas_cumprod(), "epsilon", Options(**options)
        )
        return relative_difference(sample(made, noise, stand_in), theirs)

    found = {
        f"{method}, {options}, {steps} steps": difference(method, options, steps)
        for method, options in OPTIONS
        for steps in (2, 7, 20)
    }
    assert found.pop(f"heun, {CHURN}, 2 steps") < 4e-5
    assert too_different(found) == {}


@pytest.mark.parametrize("steps", [3, 5])
@pytest.mark.parametrize("method", ["euler", "heun", "dpm_2"])
def test_no_churn_follows_on_a_last_step_that_ends_above_zero(
    k_diffusion, method: str, steps: int, monkeypatch
):
    noise = noises(20)
    monkeypatch.setattr(torch, "randn_like", taking(noise[1:]))
    reference = references.Reference(k_diffusion, stand_in, alphas_cumprod())
    options = {"s_churn": 5.0}
    theirs = reference.draw(method, "kl_optimal", steps, noise, options)
    known = alphas_cumprod()
    name = f"{method}_kl_optimal"
    made = make_schedule(name, steps, known, "epsilon", Options(**options))
    assert not made.noisy[-1]
    assert relative_difference(sample(made, noise, stand_in), theirs) < 1e-5


def test_an_inpainting_of_the_end_of_a_schedule_is_k_diffusions(
    k_diffusion, monkeypatch
):
    """The image is in the estimate where it is kept, as in AUTOMATIC1111's `CFGDenoiser`."""
    image, *noise = noises(100)
    kept = torch.zeros(SHAPE[0], 1, *SHAPE[2:])
    kept[..., 4:] = 1
    inpainting = sampler.Inpainting(kept, image)
    reference = references.Reference(k_diffusion, stand_in, alphas_cumprod())

    def masked(x: torch.Tensor, sigma: torch.Tensor) -> torch.Tensor:
        return reference.model(x, sigma) * (1 - kept) + image * kept

    def difference(method: str, t_enc: int) -> float:
        monkeypatch.setattr(torch, "randn_like", taking(noise[1:]))
        theirs = reference.draw_end(method, masked, image, 15, t_enc, noise)
        made = make_schedule(method, 15, alphas_cumprod(), "epsilon", t_enc=t_enc)
        ours = sample(made, noise, stand_in, image=image, inpainting=inpainting)
        return relative_difference(ours, theirs)

    found = {
        (method, t_enc): difference(method, t_enc)
        for method in references.METHODS
        for t_enc in (1, 5, 14)
    }
    assert too_different(found) == {}


#: With zero terminal SNR the first sigma is 4519, and rounding counts for more; most where it
#: decides how long the steps are.
@pytest.mark.parametrize("is_rescaled", [False, True])
@pytest.mark.parametrize("method", references.METHODS)
def test_v_prediction_is_k_diffusions(
    k_diffusion, method: str, is_rescaled: bool, monkeypatch
):
    alphas = alphas_cumprod()
    bound = 1e-5
    if is_rescaled:
        alphas = reading.rescale_to_zero_terminal_snr(alphas)
        bound = 5e-4 if method == "dpm_adaptive" else 1e-4
    noise = noises(100)
    monkeypatch.setattr(torch, "randn_like", taking(noise[1:]))
    reference = references.Reference(k_diffusion, stand_in, alphas)
    scalings = k_diffusion.external.VDenoiser(None).get_scalings
    epsilon = reference.model

    def denoise(latents: torch.Tensor, sigma: torch.Tensor) -> torch.Tensor:
        skip, out, scale = (part.view(-1, 1, 1, 1) for part in scalings(sigma))
        output = stand_in(latents * scale, epsilon.sigma_to_t(sigma))
        return output * out + latents * skip

    theirs = reference.draw_by(method, denoise, "karras", 12, noise)
    made = make_schedule(f"{method}_karras", 12, alphas, "v_prediction")
    assert relative_difference(sample(made, noise, stand_in), theirs) < bound
