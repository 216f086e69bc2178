"""Parts of an engine for a transformer of flows: preparer and stager."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from cachetools import LRUCache
from torch import Tensor

from imagefleet.errors import JobError
from worker.engine.contract import ImageRequest, Settings
from worker.engine.control.cache import ControlNets
from worker.engine.decoder import Decoder
from worker.engine.flow import schedules
from worker.engine.flow.checkpoint import FlowCheckpoint
from worker.engine.flow.text import ChatEncoder
from worker.engine.kernels import layers
from worker.engine.lora.merge import Groups
from worker.engine.lora.shared import Merger
from worker.engine.passes import begin
from worker.engine.passes.checkpoints import Caches
from worker.engine.passes.images import ImageCoder
from worker.engine.pixel import text_states
from worker.engine.slots import memory
from worker.engine.slots.parts import Parts
from worker.engine.slots.prepare import LoraReader, PreparedRequest, Preparer
from worker.engine.slots.queue import SlotJob
from worker.engine.slots.staging import LatentStager

#: Prompts whose states stay on the device: 7.9 MB each.
_STATES_KEPT = 32

#: Prompts that are encoded at once: a layer that is copied for them is used as often.
_ENCODED_AT_ONCE = 8

#: Of the memory that the transformer leaves, a text encoder that stays on the device takes at most
#: so much: klein's does on 24 GB, and not on 16.
_TEXT_SHARE = 0.5


class FlowPreparer(Preparer):
    def __init__(
        self, checkpoint: FlowCheckpoint, groups: Groups, encoder: ChatEncoder | None
    ) -> None:
        super().__init__(checkpoint.unet.device)
        self._checkpoint = checkpoint
        self._encoder = encoder
        family = checkpoint.family
        self._loras = LoraReader(family, checkpoint.networks, {family.backbone: groups})
        self.lora_lookups = self._loras.cache.lookups

    def prepare(self, request: ImageRequest) -> PreparedRequest:
        own = self._checkpoint
        begin.refuse_unsupported(request, f"is {own.family.name}")
        init = request.init
        image = None
        t_enc = None
        if init is not None:
            _, t_enc = begin.img2img(request.steps, init.denoising_strength)
            self._may_go_on.wait()
            image = begin.prepare_image(init, own.factor)
        loras = self._loras.read(request.loras, self._may_go_on.wait)
        if own.is_int8 and loras["loras"].keys() - loras["packs"].keys():
            raise JobError(
                "a LoRA of the job is of a kind that is merged into the weights, and this worker"
                " holds them in int8 (--precision): draw it on one that does not"
            )
        prompts = [str(request.prompt), str(request.negative_prompt)]
        if own.family.is_distilled:
            del prompts[1:]
        if self._encoder is not None:
            self._encoder.refuse_long(prompts)
        self._may_go_on.wait()
        patches = request.width // own.factor * (request.height // own.factor)
        schedule = schedules.make_schedule(
            request.sampler,
            request.steps,
            own.scheduler,
            own.family.mu(patches, request.steps),
            request.sampler_options,
            t_enc,
        )
        return PreparedRequest(
            request,
            own.family,
            schedule,
            prompts=tuple(prompts),
            states=self._read_states(prompts, request.text_states),
            **loras,
            image=image,
        )

    def _read_states(
        self, prompts: Sequence[str], paths: Sequence[Path] | None
    ) -> Tensor | None:
        """The states of *prompts* that files have; None where the stager makes them."""
        own = self._checkpoint
        encoder = own.states_encoder
        if encoder is None:
            return None
        states = [
            text_states.read(
                path, prompt, encoder, own.text_width, own.family.plain_tokens
            )
            for prompt, path in zip(prompts, paths or (None, None), strict=False)
        ]
        return torch.stack(states)


class FlowStager(LatentStager):
    """Encodes prompts, several at once, or takes their states from the request."""

    def __init__(
        self,
        checkpoint: FlowCheckpoint,
        caches: Caches,
        encoder: ChatEncoder | None,
    ) -> None:
        super().__init__(checkpoint, ImageCoder(checkpoint.vae), caches)
        self._encoder = encoder
        self._states = LRUCache[str, Tensor](_STATES_KEPT)

    @torch.no_grad()
    def _encode_together(self, jobs: Iterable[SlotJob]) -> None:
        prepared = [job.prepared for job in jobs if job.prepared.states is None]
        prompts = dict.fromkeys(prompt for each in prepared for prompt in each.prompts)
        # Touched, those that are known outlast those that come now.
        missing = [each for each in prompts if self._states.get(each) is None]
        for at in range(0, len(missing), _ENCODED_AT_ONCE):
            if self._encoder is None:
                raise RuntimeError("text states come with a request, or are encoded")
            part = missing[at : at + _ENCODED_AT_ONCE]
            states = self._encoder.encode(part).to(self._device, self._dtype)
            for prompt, own in zip(part, states, strict=True):
                # A view would keep those of the whole call in memory.
                self._states[prompt] = own.clone()

    def _encode(
        self, job: SlotJob, _loras: object, _other: object
    ) -> tuple[Tensor, None, None]:
        prepared = job.prepared
        if prepared.states is not None:
            return self._copy(prepared.states).to(self._dtype), None, None
        self._encode_together([job])  # there may be more than are kept
        states = torch.stack([self._states[each] for each in prepared.prompts])
        return states, None, None


def of_flow(checkpoint: FlowCheckpoint, settings: Settings) -> Parts:
    """The parts of an engine for a transformer of flows."""
    device = checkpoint.unet.device
    family = checkpoint.family
    if settings.packages is not None or device.type == "cuda":
        layers.replace_modules(checkpoint.vae, layers.group_norm, layers.upsampler)
    encoder = None
    if checkpoint.states_encoder is None:
        encoder = ChatEncoder(
            checkpoint.folder, family.text, device, checkpoint.unet.dtype
        )
        leaves = memory.has_no_room_for_text(
            device, encoder.size_bytes, share=_TEXT_SHARE
        )
        encoder.place(may_stay=not leaves)
    network = family.slot_network(checkpoint.unet)
    weight_bytes = sum(each.nbytes for each in checkpoint.unet.parameters())
    keeps_on_cpu = memory.has_no_room_for_originals(device, weight_bytes)
    caches = Caches(ControlNets(checkpoint.unet, has_own_layers=False))
    return Parts(
        model=checkpoint,
        settings=replace(
            settings, is_unguided=family.is_distilled, compiled_modes=("shared",)
        ),
        unet=network,
        preparer=FlowPreparer(
            checkpoint, {**network.groups, **network.changes.groups}, encoder
        ),
        caches=caches,
        stager=FlowStager(checkpoint, caches, encoder),
        merger=Merger(checkpoint.unet, keeps_on_cpu=keeps_on_cpu),
        decoder=Decoder(checkpoint.vae, checkpoint.factor),
    )
