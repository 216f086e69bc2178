"""What the guided model learns: the straight way from noise to a picture (rectified flow)."""

import torch
from diffusers.pipelines.flux2.pipeline_flux2_klein import compute_empirical_mu
from torch import Tensor, nn
from torch.nn import functional

from demo_world.klein import flow, networks
from demo_world.klein.adapters import Placed
from demo_world.klein.flow import Flow, TextEncoder, TextPlan
from demo_world.klein.pictures import Pictures
from demo_world.shapes import SHAPES
from demo_world.training import schedule
from demo_world.world import COLOURS

#: Captions that are empty in training, so that there is guidance.
CAPTION_DROPOUT = 0.1

#: Of the end of the training, which sees all text tokens, and of its captions those that are long.
WHOLE_SHARE = 0.2
LONG_SHARE = 0.3

#: Pictures of a batch with all text tokens: of four times as many tokens each.
WHOLE_PART = 4

#: Of the labels in the loss, at the beginning; it falls to nothing.
_LABELS_WEIGHT = 0.2


class LabelHead(nn.Module):
    """Says which object and colour is in each cell of a patch, from states in the middle.

    It is for the training alone: states that know what is where are learned much sooner so, as with
    the features of another network (REPA, Yu et al., 2024).
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self._kinds = (1 + len(SHAPES), 1 + len(COLOURS))
        self.norm = nn.LayerNorm(width)
        self.cells = nn.Linear(width, 4 * sum(self._kinds))

    def loss(self, states: Tensor, labels: Tensor) -> Tensor:
        """States [B, IMAGE_TOKENS, width], labels [B, 2, IMAGE_TOKENS, 4]."""
        logits = self.cells(self.norm(states)).unflatten(-1, (4, -1)).float()
        parts = logits.split(self._kinds, dim=-1)
        losses = [
            functional.cross_entropy(part.flatten(0, 2), labels[:, kind].flatten())
            for kind, part in enumerate(parts)
        ]
        return losses[0] + losses[1]


def sample_sigmas(count: int, device: torch.device) -> Tensor:
    """Shares of noise [count]: half shifted as klein's four steps, half in the middle."""
    even = torch.rand(count, device=device)
    shift = torch.tensor(compute_empirical_mu(networks.IMAGE_TOKENS, networks.STEPS))
    shift = shift.exp().to(device)
    shifted = shift * even / (1 + (shift - 1) * even)
    middle = torch.randn(count, device=device).sigmoid()
    is_shifted = torch.rand(count, device=device) < 0.5
    return torch.where(is_shifted, shifted, middle).clamp(1e-3, 1)


def rounded(sigmas: Tensor) -> Tensor:
    """Half of them as pipelines in bfloat16 round them, so that these draw as well."""
    steps = (sigmas * 1000).bfloat16().float() / 1000
    is_rounded = torch.rand_like(sigmas) < 0.5
    return torch.where(is_rounded, steps, sigmas)


def next_plan(device: torch.device, *, is_whole: bool) -> TextPlan:
    return flow.whole_plan(device) if is_whole else flow.sampled_plan(device)


class BaseTask:
    """Rectified flow on pictures; with *placed*, of an adapter on a frozen model."""

    def __init__(
        self,
        pictures: Pictures,
        model: Flow,
        encoder: TextEncoder,
        empty: Tensor,
        *,
        batch: int,
        least_pictures: int,
        head: LabelHead | None = None,
        placed: Placed | None = None,
    ) -> None:
        """*empty*: ids [1, LONG_TOKENS] of no caption; *least_pictures* before it begins."""
        self._pictures = pictures
        self._flow, self._encoder, self._empty = model, encoder, empty
        self._batch, self._least = batch, least_pictures
        self._head, self._placed = head, placed

    def loss(self, progress: float) -> tuple[Tensor, dict[str, Tensor]]:
        is_whole = progress >= 1 - WHOLE_SHARE
        self._pictures.take(self._least)
        size = max(1, self._batch // WHOLE_PART) if is_whole else self._batch
        batch = self._pictures.batch(size, long_share=LONG_SHARE if is_whole else 0.0)
        device = batch.latents.device
        plan = next_plan(device, is_whole=is_whole)
        dropped = torch.rand(size, 1, device=device) < CAPTION_DROPOUT
        ids = torch.where(dropped, self._empty, batch.ids)
        sigmas = sample_sigmas(size, device)
        noise = torch.randn_like(batch.latents)
        noisy = torch.lerp(batch.latents, noise, sigmas[:, None, None])
        if self._placed is not None:
            self._placed.place()
        with schedule.autocast(device):
            with torch.set_grad_enabled(self._placed is None):
                states = self._encoder(ids, plan)
            velocity, middle = self._flow(noisy, rounded(sigmas), states, plan)
            of_labels = torch.zeros((), device=device)
            if self._head is not None:
                of_labels = self._head.loss(middle, batch.labels)
        missed = functional.mse_loss(velocity, noise - batch.latents)
        weight = _LABELS_WEIGHT * (1 - progress)
        pictures = torch.tensor(float(self._pictures.ready))
        figures = {
            "velocity": missed.detach(),
            "labels": of_labels.detach(),
            "pictures": pictures,
        }
        return missed + weight * of_labels, figures

    def take_gradients(self) -> None:
        if self._placed is not None:
            self._placed.take_gradients()
