"""Four steps without guidance: each stands for several guided ones of the base.

As in progressive distillation (Salimans and Ho, https://arxiv.org/abs/2202.00512), piece by piece
of klein's own schedule (PeRFlow, Yan et al., 2024). Half of the pictures go on from the student's
own step, so that it learns to mend its errors.
"""

import torch
from torch import Tensor

from demo_world.klein import base, drawing, networks
from demo_world.klein.adapters import Placed
from demo_world.klein.flow import Flow, TextEncoder, TextPlan
from demo_world.klein.pictures import Pictures
from demo_world.training import schedule

GUIDANCE = 3.0

#: Of the teacher for each of the student's: most for the last, which goes the longest way.
_TEACHER_STEPS = (2, 2, 4, 8)

_OWN_SHARE = 0.5
_WHOLE_SHARE = 0.3


class DistilTask:
    """The student's velocity at the begin of each piece leads to the end that the teacher finds."""

    def __init__(
        self,
        pictures: Pictures,
        teacher: Flow,
        student: Flow,
        encoder: TextEncoder,
        empty: Tensor,
        *,
        batch: int,
        least_pictures: int,
        placed: Placed | None = None,
    ) -> None:
        """*pictures* give their captions alone; *placed*: an adapter of a frozen student."""
        self._pictures, self._least = pictures, least_pictures
        self._teacher, self._student = teacher, student
        self._encoder, self._empty = encoder, empty
        self._batch, self._placed = batch, placed
        device = empty.device
        self._sigmas = networks.step_sigmas(networks.STEPS).to(device)
        self._is_whole: bool | None = None
        self._latents = self._ids = torch.empty(0)

    def loss(self, progress: float) -> tuple[Tensor, dict[str, Tensor]]:
        is_whole = progress >= 1 - _WHOLE_SHARE
        if is_whole != self._is_whole:
            self._begin(is_whole=is_whole)
        plan = base.next_plan(self._empty.device, is_whole=is_whole)
        states, ends = self._teach(plan)
        starts = self._latents
        steps, size = starts.shape[:2]
        if self._placed is not None:
            self._placed.place()
        with schedule.autocast(starts.device):
            velocity, _ = self._student(
                starts.flatten(0, 1),
                base.rounded(self._sigmas[:-1].repeat_interleave(size)),
                states.flatten(0, 1),
                plan,
            )
        velocity = velocity.unflatten(0, (steps, size))
        distances = self._sigmas.diff()[:, None, None, None]
        missed = (velocity - (ends - starts) / distances).square().mean((1, 2, 3))
        self._move(starts + distances * velocity.detach(), ends)
        figures = {f"step_{n + 1}": each.detach() for n, each in enumerate(missed)}
        return missed.mean(), figures

    def take_gradients(self) -> None:
        if self._placed is not None:
            self._placed.take_gradients()

    def _begin(self, *, is_whole: bool) -> None:
        """Pictures on their way, as many at each step of the student's."""
        self._is_whole = is_whole
        self._pictures.take(self._least)
        parts = networks.STEPS * (base.WHOLE_PART if is_whole else 1)
        size = max(1, self._batch // parts)
        device = self._empty.device
        shape = (networks.STEPS, size, networks.IMAGE_TOKENS, networks.CHANNELS)
        self._latents = torch.zeros(shape, device=device)
        self._ids = self._empty.expand(networks.STEPS, size, drawing.LONG_TOKENS)
        self._move(self._latents, self._latents)
        for _ in range(networks.STEPS - 1):
            _, ends = self._teach(base.next_plan(device, is_whole=is_whole))
            self._move(ends, ends)

    def _move(self, own: Tensor, taught: Tensor) -> None:
        """Each picture to its next step; finished ones leave, and new ones begin."""
        size = own.shape[1]
        device = own.device
        is_own = torch.rand(networks.STEPS, size, 1, 1, device=device) < _OWN_SHARE
        ends = torch.where(is_own, own, taught)
        noise = torch.randn_like(ends[:1])
        self._latents = torch.cat([noise, ends[:-1]])
        share = base.LONG_SHARE if self._is_whole else 0.0
        ids = self._pictures.batch(size, long_share=share).ids
        self._ids = torch.cat([ids[None], self._ids[:-1]])

    @torch.no_grad()
    def _teach(self, plan: TextPlan) -> tuple[Tensor, Tensor]:
        """Text states [STEPS, size, T, width], and latents at the end of each piece."""
        steps, size = self._latents.shape[:2]
        with schedule.autocast(self._latents.device):
            ids = torch.cat([self._ids.flatten(0, 1), self._empty])
            captioned, nothing = self._encoder(ids, plan).split([steps * size, 1])
            states = captioned.unflatten(0, (steps, size))
            nothing = nothing.expand(size, -1, -1)
            ends = [
                self._guided_end(piece, torch.cat([states[piece], nothing]), plan)
                for piece in range(steps)
            ]
        return states, torch.stack(ends)

    def _guided_end(self, piece: int, states: Tensor, plan: TextPlan) -> Tensor:
        """Steps of Adams and Bashforth, of the second order after the first."""
        count = _TEACHER_STEPS[piece]
        begin, end = self._sigmas[piece], self._sigmas[piece + 1]
        distance = (end - begin) / count
        latents = self._latents[piece]
        before: Tensor | None = None
        for step in range(count):
            at = (begin + step * distance).expand(2 * len(latents))
            rows, _ = self._teacher(latents.repeat(2, 1, 1), at, states, plan)
            captioned, unguided = rows.chunk(2)
            velocity = unguided + GUIDANCE * (captioned - unguided)
            change = velocity if before is None else 1.5 * velocity - 0.5 * before
            latents = latents + distance * change
            before = velocity
        return latents
