"""The work on a request away from the GPU: checks, tokens, sampler schedule, LoRAs packed."""

from __future__ import annotations

import contextlib
import functools
import itertools
import threading
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import InitVar, dataclass, field, replace
from pathlib import Path
from typing import Any, TypedDict

import torch
from torch import Tensor

from imagefleet.errors import JobError
from imagefleet.files.safetensors import Identity
from imagefleet.job import differences, samplers
from imagefleet.job.clip import Chunk
from imagefleet.job.prompt import Prompt
from worker.engine import embeddings, text
from worker.engine.checkpoint import Checkpoint
from worker.engine.contract import HiresPass, ImageRequest, Lora
from worker.engine.embeddings import Embedding
from worker.engine.families.table import Family
from worker.engine.files import safetensors
from worker.engine.files.network_cache import NetworkCache
from worker.engine.files.safetensors import ReadOnce
from worker.engine.lora import merge
from worker.engine.lora.file import LoraCache, LoraFile, Network
from worker.engine.lora.merge import AppliedLora, Groups, LoraKey, PackedLoras
from worker.engine.passes import begin, upscaling
from worker.engine.passes.begin import PreparedControl
from worker.engine.passes.checkpoints import Caches
from worker.engine.passes.upscaling import UpscalerCache, Upscaling
from worker.engine.sampler import NoiseStream, Schedule
from worker.engine.samplers import schedule as schedules
from worker.engine.text import PromptRow, Tokenizer

#: LoRA files in memory: some 75 of rank 32.
_LORA_CACHE_BYTES = 2 * 1024**3

#: Memory for embeddings: some 3,000 of SD1.5 with eight vectors.
_EMBEDDING_CACHE_BYTES = 64 * 2**20

#: Most jobs of a campaign have the same; none of them is changed.
_make_schedule = functools.lru_cache(maxsize=256)(schedules.make_schedule)


#: A request's LoRAs, by the network that they change.
Applied = Mapping[Network, Sequence[AppliedLora]]

#: A job's LoRAs in host memory, by the network that they change.
AssembledLoras = Mapping[Network, Tensor]


@dataclass(frozen=True)
class PreparedRequest:
    """A request that the engine can start at once."""

    request: ImageRequest
    #: The family of the engine's own checkpoint.
    family: Family
    schedule: Schedule
    #: Rows of the subprompts that AND joins, last first, then of the negative prompt.
    text_rows: tuple[PromptRow, ...] = ()
    #: Texts of the rows that an encoder reads whole, in place of `text_rows`.
    prompts: tuple[str, ...] = ()
    #: Their text states [prompts, tokens, width]; None: the stager makes them.
    states: Tensor | None = None
    loras: Applied = field(default_factory=dict)
    #: The LoRAs for a slot, as far as slots can hold them.
    packs: Mapping[Network, PackedLoras] = field(default_factory=dict)
    #: Start image of img2img or inpainting.
    image: begin.PreparedImage | None = None
    #: The second pass of hires fix.
    second: PreparedRequest | None = None
    #: Upscaling that a second pass begins with; None for a first pass.
    upscaling: Upscaling | None = None
    controls: tuple[PreparedControl, ...] = ()
    #: The image that an upscaling checkpoint enlarges.
    enlarged: begin.LowResolution | None = None
    #: The file of the VAE that the request names.
    vae: Identity | None = None
    #: The checkpoint that draws and decodes, if it is not the engine's own.
    checkpoint: Identity | None = None
    #: Checkpoint that encodes the start image, if it is not the engine's own.
    begun_by: Identity | None = None
    #: The first of its schedule's calls: those before are the pass' before.
    begins: int = 0
    #: The first call that is the next pass'; None: all are its own.
    ends: int | None = None
    #: True if the UNet takes the guidance scale as an input, in place of a second row.
    embeds_guidance: bool = False

    @property
    def next_pass(self) -> PreparedRequest | None:
        """The pass that follows on this one, from the same seed."""
        if self.second is None:
            return None
        own = self.request
        request = replace(
            self.second.request, seed=own.seed, noise=own.noise, stop=own.stop
        )
        return replace(self.second, request=request)

    @property
    def lora_key(self) -> LoraKey:
        """LoRAs of the network that draws; () for none."""
        return merge.key_of(self.loras.get(self.family.backbone, ()))

    @property
    def text_key(self) -> LoraKey:
        """LoRAs of the text encoders; () for none."""
        texts = (self.loras.get(network, ()) for network in self.family.networks)
        return merge.key_of(itertools.chain.from_iterable(texts))

    @property
    def pack(self) -> PackedLoras | None:
        """LoRAs of the drawing network for a slot; None if they must be merged for all slots."""
        return self.packs.get(self.family.backbone)

    def assemble(self) -> AssembledLoras:
        """Puts the request's LoRAs together in host memory, ready to be copied."""
        return {network: packed.assemble() for network, packed in self.packs.items()}

    @property
    def lora_bytes(self) -> int:
        return self.pack.size_bytes if self.pack else 0

    @property
    def weights(self) -> tuple[float, ...]:
        """Factors of the guidance scale for each row but the negative prompt's."""
        prompt = self.request.prompt
        if self.family.is_distilled or not isinstance(prompt, Prompt):
            return (1.0,)
        return prompt.weights[::-1]

    def scales(self, call: int) -> tuple[float, ...]:
        """Guidance weights of all rows but the negative prompt's in a UNet call.

        Without guidance, AUTOMATIC1111 takes the first prompt that AND joins for it, at a scale of
        1 (`CFGDenoiser.forward`).
        """
        if self.family.is_distilled:
            return self.weights
        if self.embeds_guidance:
            return (self.request.cfg_scale * self.weights[0],)
        if any(self.schedule.unguided[call : call + 1]):
            *others, _ = self.weights
            return (*others, 1.0 - sum(others))
        scale = self.request.cfg_scale * self.schedule.guidance_share
        return tuple(scale * weight for weight in self.weights)

    def rows(self, call: int) -> int:
        """The rows of a UNet call: the prompt's, and with guidance the negative prompt's."""
        count = len(self.weights)
        has_own = self.family.is_distilled or self.embeds_guidance
        if has_own or any(self.schedule.unguided[call : call + 1]):
            return count
        needs_all = self.schedule.guidance_share != 1  # DDIM CFG++, at any scale
        return count + (needs_all or sum(self.scales(call)) != 1)

    @property
    def texts(self) -> list[tuple[tuple[Chunk, ...], int]]:
        """The texts of all rows that are drawn, one after the other, and what each fills."""
        most_rows = max(map(self.rows, range(len(self.schedule.table))))
        drawn = self.text_rows[:most_rows]
        return [(chunks, row.length) for row in drawn for chunks in row.texts.values()]

    def texts_at(self, call: int) -> list[int]:
        """The numbers of each row's text in a call, of `texts` or of the states."""
        if self.prompts:
            return list(range(len(self.prompts)))
        at = 0
        numbers = []
        for row in self.text_rows:
            numbers.append(at + row.at(call))
            at += len(row.texts)
        return numbers

    @property
    def is_edited(self) -> bool:
        return any(len(row.texts) > 1 for row in self.text_rows)

    def changes_texts(self, call: int) -> bool:
        """True if a call has other texts than the one before."""
        return (
            self.is_edited
            and call > 0
            and self.texts_at(call) != self.texts_at(call - 1)
        )

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

    def first_latents(self, noise: NoiseStream) -> Tensor:
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
        if self.prompts:
            return self.family.plain_tokens
        longest = max(length for _, length in self.texts)
        contexts = (self.family.plain_tokens, *self.family.long_tokens)
        return contexts[bisect_left(contexts, longest * text.CONTEXT_TOKENS)]


class LoraFields(TypedDict):
    """A request's LoRAs, as fields of `PreparedRequest`."""

    loras: Applied
    packs: Mapping[Network, PackedLoras]


@dataclass(eq=False)
class LoraReader:
    """The LoRA files of one model; thread-safe."""

    _family: Family
    #: The model's, by name.
    _networks: InitVar[Mapping[str, Any]]
    #: What slots hold changes of, by network.
    groups: Mapping[Network, Groups]

    def __post_init__(self, networks: Mapping[str, Any]) -> None:
        # Diffusers looks through all of a network for its type.
        self.dtypes: Mapping[Network, torch.dtype] = {
            name: networks[name].dtype for name in self.groups
        }
        self._device = networks[self._family.backbone].device
        self.cache = LoraCache(self._family.lora_layers(networks), _LORA_CACHE_BYTES)

    def read(self, loras: Sequence[Lora], wait: Callable[[], object]) -> LoraFields:
        """Each network's LoRAs, if any; weights of one that is named twice add up, in any order.

        They are packed for the device where slots can hold them all. *wait* is called before each
        long part.
        """
        family = self._family
        files: dict[Identity, LoraFile] = {}
        weights = defaultdict[tuple[Network, Identity], float](float)
        for lora in loras:
            wait()
            file = self.cache.get(lora)
            files[file.identity] = file
            weights[family.backbone, file.identity] += lora.unet_weight
            for network in family.networks:
                weights[network, file.identity] += lora.text_encoder_weight
        if len(files) > 1 and any(file.depends_on_weights for file in files.values()):
            differences.warn("mixed_loras")
        applied = defaultdict[Network, list[AppliedLora]](list)
        for (network, identity), weight in sorted(weights.items()):
            deltas = files[identity].deltas[network]
            if weight and deltas:
                applied[network].append(AppliedLora(identity, deltas, weight))
        wait()
        packs = {}
        for network, found in applied.items():
            packed = merge.pack(found, self.groups[network], dtype=self.dtypes[network])
            if packed is not None:
                packed.build(self._device)
                packs[network] = packed
        return LoraFields(loras=applied, packs=packs)


class Preparer:
    """Prepares requests for one model; called from several threads."""

    def __init__(self, device: torch.device) -> None:
        self.upscalers = UpscalerCache(device)
        self.lora_lookups: Mapping[str, int] = {"hit": 0, "miss": 0}
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

    def prepare(self, request: ImageRequest) -> PreparedRequest:
        """Checks a request and reads its files.

        Raises JobError if this model cannot draw it, TransientError if a file cannot be read.
        """
        raise NotImplementedError

    def use(self, checkpoint: Any) -> None:
        """Prepares for another checkpoint, in the networks of the one before."""
        raise NotImplementedError

    def find_embeddings(
        self, _prompts: Iterable[Prompt | str], _names: Collection[str]
    ) -> tuple[str, ...]:
        """See `Tokenizer.find_names`; none without CLIP, for which embeddings are made."""
        return ()


class RequestPreparer(Preparer):
    def __init__(
        self,
        checkpoint: Checkpoint,
        groups: Mapping[Network, Groups],
        caches: Caches,
    ) -> None:
        super().__init__(checkpoint.unet.device)
        self._checkpoint = checkpoint
        self._caches = caches
        self._loras = LoraReader(checkpoint.family, checkpoint.networks, groups)
        self.tokenizer = Tokenizer(checkpoint.tokenizer)
        self._widths = {
            embeddings.NAMES[network]: text_encoder.get_input_embeddings().weight.shape[
                1
            ]
            for network, text_encoder in checkpoint.text_encoders.items()
        }
        self._embeddings = ReadOnce[Embedding](
            _EMBEDDING_CACHE_BYTES, lambda embedding: embedding.size_bytes
        )
        self.lora_lookups = self._loras.cache.lookups

    def use(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint
        self.tokenizer = Tokenizer(checkpoint.tokenizer)
        if self._caches.checkpoints is not None:
            self._caches.checkpoints.stand_beside(checkpoint)

    def find_embeddings(
        self, prompts: Iterable[Prompt | str], names: Collection[str]
    ) -> tuple[str, ...]:
        return self.tokenizer.find_names(prompts, names)

    def prepare(self, request: ImageRequest) -> PreparedRequest:
        """Checks a request, tokenises its prompts, reads its files and packs its LoRAs."""
        first, *_ = self._checkpoint.text_encoders.values()
        layers = first.config.num_hidden_layers
        encoders = self._checkpoint.family.text_encoders
        is_taken = any(each.rules.layer is None for each in encoders)
        if is_taken and not 1 <= request.clip_skip <= layers:
            raise JobError(
                f"clip_skip is {request.clip_skip}; this model's text encoder has {layers} layers"
            )
        init = request.init
        image = None
        steps = request.steps
        enlarged = None
        if (image_noise := self._checkpoint.image_noise) is not None:
            enlarged = begin.prepare_enlarged(
                request, image_noise, self._checkpoint.factor
            )
        if init is None or enlarged is not None:
            schedule = self._schedule(request, request.steps)
        else:
            taken = begin.img2img(request.steps, init.denoising_strength)
            schedule = self._schedule(request, *taken)
            steps = taken.t_enc + 1
            self._may_go_on.wait()
            image = begin.prepare_image(init, self._checkpoint.factor)
        dtype = self._loras.dtypes["text_encoder"]
        named = [
            self._embeddings.get(
                each.sha256,
                functools.partial(embeddings.read, each, self._widths, dtype),
            )
            for each in request.embeddings
        ]
        loras = self._loras.read(request.loras, self._may_go_on.wait)
        rows = self._text_rows(request, named)
        self._may_go_on.wait()
        vae = request.vae
        prepared = PreparedRequest(
            request,
            self._checkpoint.family,
            schedule,
            rows,
            **loras,
            image=image,
            controls=self._controls(request, schedule, steps),
            enlarged=enlarged,
            vae=self._check_file(self._caches.vaes, vae.name, vae.path)
            if vae
            else None,
            embeds_guidance=self._checkpoint.unet.config.time_cond_proj_dim is not None,
        )
        if request.hires is None:
            return self._refined(prepared, steps)
        return replace(
            prepared, second=self._second_pass(prepared, request.hires, named)
        )

    def _second_pass(
        self,
        first: PreparedRequest,
        hires: HiresPass,
        named: Sequence[Embedding],
    ) -> PreparedRequest:
        """Prepares the second pass, with the first pass' LoRAs if it has no own."""
        own = first.request
        names = ("prompt", "negative_prompt", "sampler", "sampler_options", "loras")
        of_its_own = {name: getattr(hires, name) for name in names}
        request = replace(
            own,
            width=hires.width,
            height=hires.height,
            steps=hires.steps or own.steps,
            hires=None,
            **{name: value for name, value in of_its_own.items() if value is not None},
        )
        taken = begin.second_pass(request.steps, hires.denoising_strength)
        checkpoint = self._check_checkpoint(hires.checkpoint)
        if self._is_sdxls_refiner(checkpoint):
            raise JobError(
                "hr_checkpoint_name: SDXL's refiner only goes on with images"
            )
        schedule = self._schedule(request, *taken)
        if hires.loras is not None:
            loras = self._loras.read(hires.loras, self._may_go_on.wait)
            first = replace(first, **loras)
        second = replace(
            first,
            request=request,
            checkpoint=checkpoint,
            begun_by=checkpoint,
            text_rows=self._text_rows(request, named),
            schedule=schedule,
            upscaling=upscaling.find(
                hires, lambda path: self.upscalers.get(path).enlarge
            ),
        )
        return self._refined(second, taken.t_enc + 1)

    def _refined(self, drawn: PreparedRequest, steps: int) -> PreparedRequest:
        """An image's last pass of so many steps, in two if a refiner goes on with it.

        As in AUTOMATIC1111, that has the prompt's LoRAs, and its own text states and VAE. Of SDXL's
        own refiner, no LoRA, embedding or ControlNet fits the networks: none has an effect.
        """
        refiner = drawn.request.refiner
        if refiner is None:
            return drawn
        checkpoint = self._check_checkpoint(refiner.path)
        total = (
            samplers.editing_steps(drawn.request.sampler, steps)
            if refiner.by_steps
            else None
        )
        at = drawn.schedule.switch_call(refiner.switch_at, total)
        if checkpoint == drawn.checkpoint or at == len(drawn.schedule.table):
            return drawn
        rest = replace(drawn, checkpoint=checkpoint, begins=at)
        if self._is_sdxls_refiner(checkpoint):
            rest = replace(
                rest,
                text_rows=self._text_rows(replace(drawn.request, loras=()), ()),
                loras={},
                packs={},
                controls=(),
            )
        if at:
            return replace(drawn, ends=at, second=rest)
        return rest

    def _check_checkpoint(self, path: Path | None) -> Identity | None:
        if path is None:
            return None
        return self._check_file(self._caches.checkpoints, path.stem, path)

    def _is_sdxls_refiner(self, checkpoint: Identity | None) -> bool:
        others = self._caches.checkpoints
        return others is not None and others.is_refiner(checkpoint)

    def _text_rows(
        self, request: ImageRequest, named: Sequence[Embedding]
    ) -> tuple[PromptRow, ...]:
        """The rows of a pass, whose words are also those that its own LoRAs bundle."""
        # Named ones go before those in LoRAs' files, as in AUTOMATIC1111.
        found = {each.name: each for each in named}
        for file in map(self._loras.cache.get, dict.fromkeys(request.loras)):
            what = f"the LoRA {file.identity[0]!r}, for the word"
            for name in file.embeddings.keys() - found:
                with safetensors.named(f"{what} {name!r},"):
                    vectors = embeddings.vectors_of(
                        file.embeddings[name],
                        self._widths,
                        self._loras.dtypes["text_encoder"],
                    )
                identity = f"{file.identity} {name}"
                found[name] = Embedding(name, identity, vectors)
        words = [*found.values()]
        rows = self.tokenizer.rows(request.prompt, words)
        if (
            len(rows) > 1
            and self._checkpoint.unet.config.time_cond_proj_dim is not None
        ):
            raise JobError(
                "this model takes its guidance as an input: it does not draw AND"
            )
        if len(rows) > 1 and request.controls and request.sampler_options.s_min_uncond:
            raise JobError("AND with s_min_uncond and ControlNets is not supported")
        return (*rows, *self.tokenizer.rows(request.negative_prompt, words))

    def _controls(
        self, request: ImageRequest, schedule: Schedule, steps: int
    ) -> tuple[PreparedControl, ...]:
        """The ControlNets of a first pass that takes so many *steps*."""
        if not request.controls:
            return ()
        if schedule.extend is not None:
            raise JobError(
                "DPM adaptive cannot be controlled: it has no number of steps"
            )
        self._may_go_on.wait()
        check = self._caches.control_nets.check_file
        checked = [(check(each.name, each.path), each) for each in request.controls]
        return begin.prepare_controls(checked, schedule.finished, steps)

    def _schedule(
        self, request: ImageRequest, steps: int, t_enc: int | None = None
    ) -> Schedule:
        prediction_type = self._checkpoint.prediction_type
        sampler = samplers.SAMPLERS.get(request.sampler)
        is_lcm = sampler is not None and sampler.estimates == "consistency"
        if is_lcm and prediction_type == "v_prediction":
            differences.warn("lcm_of_velocities")
        return _make_schedule(
            request.sampler,
            steps,
            self._checkpoint.alphas_cumprod,
            prediction_type,
            request.sampler_options,
            t_enc=t_enc,
            is_xl=self._checkpoint.family.has_sdxl_steps,
        )

    def _check_file(
        self, cache: NetworkCache[Any] | None, name: str, path: Path
    ) -> Identity | None:
        if cache is None:
            return None
        self._may_go_on.wait()
        return cache.check_file(name, path)
