"""k-diffusion's samplers on schedules computed apart, as AUTOMATIC1111 1.10 puts them together."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from scipy import stats

#: Key: k-diffusion's function, and what AUTOMATIC1111 gives it.
METHODS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "euler": ("euler", {}),
    "euler_ancestral": ("euler_ancestral", {}),
    "dpmpp_2m": ("dpmpp_2m", {}),
    "dpmpp_sde": ("dpmpp_sde", {}),
    "dpmpp_2m_sde": ("dpmpp_2m_sde", {}),
    "dpmpp_2m_sde_heun": ("dpmpp_2m_sde", {"solver_type": "heun"}),
    "dpmpp_3m_sde": ("dpmpp_3m_sde", {}),
    "dpmpp_2s_ancestral": ("dpmpp_2s_ancestral", {}),
    "lms": ("lms", {}),
    "heun": ("heun", {}),
    "dpm_2": ("dpm_2", {}),
    "dpm_2_ancestral": ("dpm_2_ancestral", {}),
    "dpm_fast": ("dpm_fast", {"eta": 1.0}),
    "dpm_adaptive": ("dpm_adaptive", {"eta": 1.0}),
}

_SDE = ("dpmpp_sde", "dpmpp_2m_sde", "dpmpp_2m_sde_heun", "dpmpp_3m_sde")

_AYS = [14.615, 6.475, 3.861, 2.697, 1.886, 1.396, 0.963, 0.652, 0.399, 0.152, 0.029]


class Reference:
    def __init__(
        self, k_diffusion: Any, unet: Callable[..., Any], alphas: torch.Tensor
    ) -> None:
        """Computes sigmas in float32, unless *alphas* are in float16."""
        self.sampling = k_diffusion.sampling
        self.model = k_diffusion.external.DiscreteEpsDDPMDenoiser(
            unet,
            alphas if alphas.dtype == torch.float16 else alphas.float(),
            quantize=False,
        )
        self.ends = float(self.model.sigma_min), float(self.model.sigma_max)

    def draw(
        self,
        method: str,
        schedule: str,
        steps: int,
        noise: Sequence[torch.Tensor],
        options: Mapping[str, Any],
    ) -> torch.Tensor:
        return self.draw_by(method, self.model, schedule, steps, noise, **options)

    def draw_by(
        self,
        method: str,
        denoise: Callable[..., torch.Tensor],
        schedule: str,
        steps: int,
        noise: Sequence[torch.Tensor],
        **options: Any,
    ) -> torch.Tensor:
        """Draws with a function that denoises in place of the model."""
        sigmas = self._taken(method, schedule, steps)
        own = {"dpm_fast": (*self.ends, steps), "dpm_adaptive": self.ends}
        path = own.get(method, (sigmas,))
        return self._run(method, denoise, noise[0] * sigmas[0], path, options)

    def draw_end(
        self,
        method: str,
        denoise: Callable[..., torch.Tensor],
        image: torch.Tensor,
        steps: int,
        t_enc: int,
        noise: Sequence[torch.Tensor],
        **options: Any,
    ) -> torch.Tensor:
        """The last `t_enc` + 1 steps of the uniform schedule, on an image."""
        sigmas = self._taken(method, "uniform", steps)[steps - t_enc - 1 :]
        ends = sigmas[-2].item(), sigmas[0].item(), len(sigmas) - 1
        path = {"dpm_fast": ends, "dpm_adaptive": ends[:2]}.get(method, (sigmas,))
        return self._run(method, denoise, image + noise[0] * sigmas[0], path, options)

    def _taken(self, method: str, schedule: str, steps: int) -> torch.Tensor:
        if method not in ("dpm_2", "dpm_2_ancestral", "dpmpp_3m_sde"):
            return self.sigmas(schedule, steps)
        longer = self.sigmas(schedule, steps + 1)
        return torch.cat([longer[:-2], longer[-1:]])

    def _run(
        self,
        method: str,
        denoise: Callable[..., torch.Tensor],
        begun: torch.Tensor,
        path: Sequence[Any],
        options: Mapping[str, Any],
    ) -> torch.Tensor:
        name, given = METHODS[method]
        given = {**given, **options}
        if method in _SDE:
            given.setdefault("noise_sampler", lambda *_: torch.randn_like(begun))
        function = getattr(self.sampling, f"sample_{name}")
        return function(denoise, begun, *path, disable=True, **given)

    def sigmas(self, schedule: str, steps: int) -> torch.Tensor:
        """By k-diffusion where it has the schedule, else by its definition."""
        if schedule in ("karras", "exponential", "polyexponential"):
            return getattr(self.sampling, f"get_sigmas_{schedule}")(steps, *self.ends)
        if schedule == "uniform":
            return self.model.get_sigmas(steps)
        made = getattr(self, f"_{schedule}")(steps)
        end = [] if schedule == "kl_optimal" else [0.0]
        return torch.tensor([*made, *end])

    def _sgm_uniform(self, steps: int) -> list[float]:
        return self._normal(steps + 1)[:-1]

    def _normal(self, steps: int) -> list[float]:
        first, last = (
            float(self.model.sigma_to_t(torch.tensor(end))) for end in self.ends
        )
        return self.model.t_to_sigma(torch.linspace(last, first, steps)).tolist()

    def _turbo(self, steps: int) -> list[float]:
        """Timesteps a stride apart that end a stride above -1, rounded."""
        return [
            float(self.model.sigmas[round(1000 * at / steps - 1)])
            for at in range(steps, 0, -1)
        ]

    def _simple(self, steps: int) -> list[float]:
        return [
            float(self.model.sigmas[999 - int(at * 1000 / steps)])
            for at in range(steps)
        ]

    def _ddim(self, steps: int) -> list[float]:
        return [float(self.model.sigmas[at]) for at in range(1, 1000, 1000 // steps)][
            ::-1
        ]

    def _beta(self, steps: int) -> list[float]:
        low, high = self.ends
        places = stats.beta.ppf(1 - np.linspace(0, 1, steps), 0.6, 0.6)
        return [low + float(place) * (high - low) for place in places]

    def _beta_comfyui(self, steps: int) -> list[float]:
        """`beta_scheduler` of ComfyUI's samplers.py, which skips a timestep that it had before."""
        shares = 1 - np.linspace(0, 1, steps, endpoint=False)
        places = np.rint(stats.beta.ppf(shares, 0.6, 0.6) * 999).astype(int).tolist()
        return [float(self.model.sigmas[at]) for at in dict.fromkeys(places)]

    def _kl_optimal_comfyui(self, steps: int) -> list[float]:
        low, high = (np.arctan(end) for end in self.ends)
        shares = np.arange(steps) / max(1, steps - 1)
        return np.tan(shares * low + (1 - shares) * high).tolist()

    def _kl_optimal(self, steps: int) -> list[float]:
        """Sabour et al. (2024), theorem 3.1: the arc tangent goes down evenly; float32, as there.

        Near a quarter turn a tangent makes 200 of each rounding.
        """
        low, high = (torch.tensor(end).atan() for end in self.ends)
        shares = torch.linspace(0, 1, steps + 1)
        return ((1 - shares) * high + shares * low).tan().tolist()

    def _align_your_steps(self, steps: int) -> list[float]:
        """Interpolated in log sigma, by the paper's recipe."""
        if steps == len(_AYS):
            return _AYS
        old, new = (torch.linspace(0, 1, count).numpy() for count in (len(_AYS), steps))
        return np.exp(np.interp(new, old, np.log(_AYS))).tolist()  # type: ignore[no-any-return]
