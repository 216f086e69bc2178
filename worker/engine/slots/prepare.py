"""The work on a request away from the GPU: checks, tokens, sampler schedule, LoRAs packed."""

from __future__ import annotations

import contextlib
import functools
import itertools
import threading
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from imagefleet import errors
from imagefleet.files.safetensors import Identity
from imagefleet.job.clip import MAX_CHUNKS, Chunk
from imagefleet.job.prompt import Prompt
from worker.engine import contract, embeddings, sampler, text
from worker.engine.checkpoint import Checkpoint
from worker.engine.control.held import ControlNets
from worker.engine.files.safetensors import ReadOnce
from worker.engine.lora import file as lora_file
from worker.engine.lora import merge
from worker.engine.passes import begin, upscaling
from worker.engine.passes.begin import PreparedControl
from worker.engine.passes.upscaling import UpscalerCache, Upscaling
from worker.engine.sampler import NoiseStream
from worker.engine.samplers import schedule as schedules

#: Prompt chunks in the contexts of longer prompts, which share calls with each other by these: only
#: cross-attention depends on the context, so a call takes 1 %, 4 % and 13 % more operations than a
#: plain one, whatever its prompts' length. The last is the longest prompt there is.
LONG_CHUNKS = (4, 10, MAX_CHUNKS)

#: Masks need contexts that are multiples of this.
_TOKENS_ALIGNMENT = 8

#: LoRA files in memory: some 75 of rank 32.
_LORA_CACHE_BYTES = 2 * 1024**3

#: Memory for embeddings: some 3,000 of SD1.5 with eight vectors.
_EMBEDDING_CACHE_BYTES = 64 * 2**20


@dataclass(frozen=True, slots=True)
class PreparedRequest:
    """A request that the engine can start at once."""

    request: contract.ImageRequest
    schedule: sampler.Schedule
    prompt: tuple[Chunk, ...] = ()
    negative_prompt: tuple[Chunk, ...] = ()
    states: torch.Tensor | None = None
    """Text states of both prompts [2, tokens, width], in their chunks' place."""
    loras: Mapping[lora_file.Network, Sequence[merge.AppliedLora]] = field(default_factory=dict)
    packs: Mapping[lora_file.Network, merge.PackedLoras] = field(default_factory=dict)
    """The LoRAs for a slot; without the UNet's, they must be merged into the shared weights."""
    image: begin.PreparedImage | None = None
    """What it begins with beside noise."""
    second: PreparedRequest | None = None
    """The second pass of hires fix."""
    upscaling: Upscaling | None = None
    """How a second pass begins; None for a first pass."""
    controls: tuple[PreparedControl, ...] = ()
    enlarged: begin.LowResolution | None = None
    """The image that an upscaling checkpoint enlarges."""
    embeds_guidance: bool = False
    """Whether the UNet takes the guidance scale as an input, in place of a second row."""

    @property
    def next_pass(self) -> PreparedRequest | None:
        """What follows on this pass, from the same seed."""
        if self.second is None:
            return None
        seed, noise = self.request.seed, self.request.noise
        return replace(self.second, request=replace(self.second.request, seed=seed, noise=noise))

    @property
    def told_size(self) -> tuple[int, int]:
        """The width and height in pixels that SDXL is told, as AUTOMATIC1111 does."""
        request = self.request
        return self.upscaling.size if self.upscaling else (request.width, request.height)

    @property
    def lora_key(self) -> merge.LoraKey:
        """What changes the UNet; () for nothing."""
        return merge.key_of(self.loras.get("unet", ()))

    @property
    def text_key(self) -> merge.LoraKey:
        """What changes the text encoders; () for nothing."""
        texts = (loras for network, loras in self.loras.items() if network != "unet")
        return merge.key_of(itertools.chain.from_iterable(texts))

    @property
    def lora_bytes(self) -> int:
        """Bytes that the UNet's LoRAs take on the device."""
        return self.packs["unet"].size_bytes if "unet" in self.packs else 0

    def guidance(self, call: int) -> float:
        """The guidance scale of a UNet call; 1 takes the prompt's output alone."""
        if self.embeds_guidance:
            return self.request.cfg_scale
        is_unguided = any(self.schedule.unguided[call : call + 1])
        return 1.0 if is_unguided else self.request.cfg_scale * self.schedule.guidance_share

    def rows(self, call: int) -> int:
        """The rows of a UNet call: the prompt's, and with guidance the negative prompt's."""
        if self.embeds_guidance or any(self.schedule.unguided[call : call + 1]):
            return 1
        needs_both = self.schedule.guidance_share != 1  # DDIM CFG++, at any scale
        return 2 if needs_both or self.guidance(call) != 1 else 1

    @property
    def prompts(self) -> list[tuple[Chunk, ...]]:
        """The prompt, and the negative prompt if any call is guided."""
        is_guided = any(self.rows(call) > 1 for call in range(len(self.schedule.table)))
        return [self.prompt, self.negative_prompt] if is_guided else [self.prompt]

    def noise(self, channels: int, factor: int) -> NoiseStream:
        """The image's noise from its beginning, for latents of so many *channels*."""
        request = self.request
        shape = (channels, request.height // factor, request.width // factor)
        draws = sum(self.schedule.noisy) + (self.schedule.initial_churn is not None)
        return NoiseStream(
            request.seed,
            shape,
            request.noise,
            factor=factor,
            draws=draws,
            brownian=self.schedule.brownian,
        )

    def first_latents(self, noise: NoiseStream) -> torch.Tensor:
        """The noise that the image starts from [channels, height, width]."""
        latents = noise.first() * self.schedule.initial_scale
        if self.schedule.initial_churn is not None:
            churn = torch.empty_like(latents)
            noise.fill(churn)
            latents += churn * self.schedule.initial_churn
        return latents

    @property
    def tokens(self) -> int:
        """The context of its calls: the shortest that holds its longer prompt."""
        if self.states is not None:
            return self.states.shape[1]
        longest = max(map(len, self.prompts))
        if longest <= text.PLAIN_CHUNKS:
            return text.PLAIN_TOKENS
        tokens = min(each for each in LONG_CHUNKS if each >= longest) * text.CONTEXT_TOKENS
        return tokens + -tokens % _TOKENS_ALIGNMENT


class Preparer:
    """Prepares requests for one model; called from several threads."""

    def __init__(self, device: torch.device) -> None:
        self.upscalers = UpscalerCache(device)
        self.lora_lookups: Mapping[str, int] = {"hit": 0, "miss": 0, "no_effect": 0}
        self._may_go_on = threading.Event()
        self._may_go_on.set()

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Holds up all other threads' long parts of `prepare`, for some milliseconds at most.

        A thread that launches kernels asks for Python's lock at each of them; with eight threads
        that prepare jobs, it would wait for it most of the time.
        """
        self._may_go_on.clear()
        try:
            yield
        finally:
            self._may_go_on.set()

    def prepare(self, request: contract.ImageRequest) -> PreparedRequest:
        """Checks a request and reads its files.

        Raises JobError if this model cannot draw it, and TransientError if a file could not be
        read.
        """
        raise NotImplementedError

    def find_embeddings(
        self,
        _prompts: Iterable[Prompt | str],
        _names: Collection[str],
    ) -> tuple[str, ...]:
        """See `text.Tokenizer.find_names`; none without CLIP, for which embeddings are made."""
        return ()


class RequestPreparer(Preparer):
    """Prepares requests for a model of latents."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        groups: Mapping[lora_file.Network, merge.Groups],
        control_nets: ControlNets,
    ) -> None:
        super().__init__(checkpoint.unet.device)
        self._checkpoint = checkpoint
        self.groups = groups
        self._control_nets = control_nets
        self._networks = checkpoint.networks
        self.tokenizer = text.Tokenizer(checkpoint.tokenizer)
        self._widths = {
            embeddings.NAMES[network]: text_encoder.get_input_embeddings().weight.shape[1]
            for network, text_encoder in checkpoint.text_encoders.items()
        }
        self._embeddings = ReadOnce[embeddings.Embedding](
            _EMBEDDING_CACHE_BYTES, lambda embedding: embedding.size_bytes
        )
        layers = lora_file.Layers(checkpoint.unet, checkpoint.text_encoders)
        self._lora_cache = lora_file.LoraCache(layers, _LORA_CACHE_BYTES)
        self.lora_lookups = self._lora_cache.lookups

    def use(self, checkpoint: Checkpoint) -> None:
        """Prepares for another checkpoint, in the networks of the one before."""
        self._checkpoint = checkpoint
        self.tokenizer = text.Tokenizer(checkpoint.tokenizer)

    def find_embeddings(
        self, prompts: Iterable[Prompt | str], names: Collection[str]
    ) -> tuple[str, ...]:
        return self.tokenizer.find_names(prompts, names)

    def prepare(self, request: contract.ImageRequest) -> PreparedRequest:
        """Checks a request, tokenises its prompts, reads its files and packs its LoRAs."""
        self._check_size(request)
        self._check_clip_skip(request.clip_skip)
        init, image, steps = request.init, None, request.steps
        enlarged = None
        if (image_noise := self._checkpoint.image_noise) is not None:
            factor = self._checkpoint.factor
            enlarged = begin.prepare_enlarged(request, image_noise, factor)
        if init is None or enlarged is not None:
            schedule = self._schedule(request, request.steps)
        elif request.hires is not None:
            raise errors.JobError("a second pass (hires fix) is for images that begin with noise")
        else:
            taken = begin.img2img(request.steps, init.denoising_strength)
            schedule, steps = self._schedule(request, *taken), taken.t_enc + 1
            self._may_go_on.wait()
            size = request.width, request.height
            image = begin.prepare_image(init, *size, self._checkpoint.factor)
        dtype = self._checkpoint.text_encoder.dtype
        named = [
            self._embeddings.get(
                each.sha256, functools.partial(embeddings.read, each, self._widths, dtype)
            )
            for each in request.embeddings
        ]
        prompt = self.tokenizer.chunks(request.prompt, named)
        negative_prompt = self.tokenizer.chunks(request.negative_prompt, named)
        loras = self._read_loras(request.loras)
        self._may_go_on.wait()
        prepared = PreparedRequest(
            request,
            schedule,
            prompt,
            negative_prompt,
            loras=loras,
            packs=self._pack(loras),
            image=image,
            controls=self._controls(request, schedule, steps),
            enlarged=enlarged,
            embeds_guidance=self._checkpoint.unet.config.time_cond_proj_dim is not None,
        )
        if request.hires is None:
            return prepared
        return replace(prepared, second=self._second_pass(prepared, request.hires, named))

    def _second_pass(
        self,
        first: PreparedRequest,
        hires: contract.HiresPass,
        named: Sequence[embeddings.Embedding],
    ) -> PreparedRequest:
        """Prepares the second pass with the first pass' LoRAs and ControlNets."""
        own = first.request
        names = ("prompt", "negative_prompt", "sampler", "cfg_scale")
        of_its_own = {name: getattr(hires, name) for name in names}
        request = replace(
            own,
            width=hires.width,
            height=hires.height,
            steps=hires.steps or own.steps,
            hires=None,
            controls=tuple(
                begin.resize_control(control, hires.width, hires.height) for control in own.controls
            ),
            **{name: value for name, value in of_its_own.items() if value is not None},
        )
        self._check_size(request)
        taken = begin.second_pass(request.steps, hires.denoising_strength)
        schedule = self._schedule(request, *taken)
        return replace(
            first,
            request=request,
            prompt=self.tokenizer.chunks(request.prompt, named),
            negative_prompt=self.tokenizer.chunks(request.negative_prompt, named),
            schedule=schedule,
            upscaling=upscaling.find(
                hires, own.width, own.height, lambda path: self.upscalers.get(path).enlarge
            ),
            controls=self._controls(request, schedule, taken.t_enc + 1),
        )

    def _controls(
        self, request: contract.ImageRequest, schedule: sampler.Schedule, steps: int
    ) -> tuple[PreparedControl, ...]:
        """The ControlNets of a pass that takes so many *steps*."""
        if not request.controls:
            return ()
        if schedule.extend is not None:
            raise errors.JobError("DPM adaptive cannot be controlled: it has no number of steps")
        self._may_go_on.wait()
        checked = [(self._control_nets.check(each), each) for each in request.controls]
        size = request.width, request.height
        return begin.prepare_controls(checked, size, schedule.finished, steps)

    def _schedule(
        self, request: contract.ImageRequest, steps: int, t_enc: int | None = None
    ) -> sampler.Schedule:
        return schedules.make_schedule(
            request.sampler,
            steps,
            self._checkpoint.alphas_cumprod,
            self._checkpoint.prediction_type,
            request.sampler_options,
            t_enc=t_enc,
            is_xl=self._checkpoint.family.slug == "sdxl",
        )

    def _check_size(self, request: contract.ImageRequest) -> None:
        factor = self._checkpoint.factor
        if request.width % factor or request.height % factor:
            raise errors.JobError(
                f"{request.width}x{request.height} pixels cannot be drawn: both sides must be"
                f" multiples of {factor}"
            )

    def _check_clip_skip(self, clip_skip: int) -> None:
        layers = self._checkpoint.text_encoder.config.num_hidden_layers
        if self._checkpoint.family.skips_layers and not 1 <= clip_skip <= layers:
            raise errors.JobError(
                f"clip_skip is {clip_skip}; this model's text encoder has {layers} layers"
            )

    def _read_loras(
        self, loras: Sequence[contract.Lora]
    ) -> dict[lora_file.Network, list[merge.AppliedLora]]:
        """Each network's LoRAs; weights of one that is named twice add up, in whatever order."""
        networks: list[lora_file.Network] = ["unet", *self._checkpoint.family.networks]
        files: dict[Identity, lora_file.LoraFile] = {}
        weights = defaultdict[tuple[lora_file.Network, Identity], float](float)
        for lora in loras:
            self._may_go_on.wait()
            file = self._lora_cache.get(lora)
            files[file.identity] = file
            for network in networks:
                is_unet = network == "unet"
                weight = lora.unet_weight if is_unet else lora.text_encoder_weight
                weights[network, file.identity] += weight
        return {
            network: [
                merge.AppliedLora(identity, files[identity].deltas[network], weight)
                for identity in sorted(files)
                if (weight := weights[network, identity]) and files[identity].deltas[network]
            ]
            for network in networks
        }

    def _pack(
        self, loras: Mapping[lora_file.Network, Sequence[merge.AppliedLora]]
    ) -> dict[lora_file.Network, merge.PackedLoras]:
        """Each network's LoRAs for the device, where slots can hold them all."""
        packs = {}
        for network, found in loras.items():
            dtype = self._networks[network].dtype
            if (packed := merge.pack(found, self.groups[network], dtype=dtype)) is not None:
                packs[network] = packed
        return packs
