"""Prompt editing and AND are AUTOMATIC1111 1.10's, by k-diffusion and a text encoder called apart.

Of `prompt_parser.py`: texts by the denoiser's call, and the padding of what AND joins; of
`sd_hijack_clip.py`: all entries of a prompt are encoded as one batch, whose mean weights keep; of
`sd_samplers_cfg_denoiser.py`: `combine_denoised`.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from drawing import make_request
from imagefleet.job import prompt as prompts
from imagefleet.job import samplers
from imagefleet.job.samplers import Options
from worker.engine import contract

pytestmark = pytest.mark.slow

#: Words and their weights.
Words = Sequence[tuple[str, float]]

#: The weight of what AND joins, and its words until a call.
Joined = tuple[float, Sequence[tuple[int, Words]]]

STEPS = 5

LONG = "a red house in a meadow under a blue sky " * 9

RED = "a red house"
BLUE = "a blue house"

UGLY: Joined = (1.0, [(STEPS, [("ugly", 1)])])

NO_WORDS: Joined = (1.0, [(STEPS, [("", 1)])])


def all_along(weight: float, words: str) -> Joined:
    """The same words in all calls."""
    return (weight, [(STEPS, [(words, 1)])])


def edited(weight: float, *texts: tuple[int, str]) -> Joined:
    """Words until a call, and the next until another."""
    return (weight, [(call, [(words, 1)]) for call, words in texts])


class Case(NamedTuple):
    prompt: str
    negative_prompt: str
    #: What the prompt says.
    joined: Sequence[Joined]
    #: What the negative prompt says.
    negative: Joined
    sampler: str = "euler"
    #: Of the request.
    changes: Mapping[str, Any] = {}


CASES: Mapping[str, Case] = {
    "an edit after two steps": Case(
        "a [red:blue:2] house", "ugly", [edited(1.0, (2, RED), (5, BLUE))], UGLY
    ),
    "an edit by a share, with weights": Case(
        "[red (house:1.4)::0.5] cat",
        "(ugly:1.2)",
        [(1.0, [(2, [("red ", 1), ("house", 1.4), (" cat", 1)]), (5, [(" cat", 1)])])],
        (1.0, [(5, [("ugly", 1.2)])]),
        "dpmpp_2m",
    ),
    "alternation": Case(
        "[red|(blue:1.2)|] cat",
        "ugly",
        [
            (
                1.0,
                [
                    (1, [("red cat", 1)]),
                    (2, [("blue", 1.2), (" cat", 1)]),
                    (3, [(" cat", 1)]),
                    (4, [("red cat", 1)]),
                    (5, [("blue", 1.2), (" cat", 1)]),
                ],
            )
        ],
        UGLY,
        "euler_ancestral",
    ),
    "AND with weights": Case(
        "a cat :0.8 AND a dog:-0.4 AND (red:1.3) sky",
        "ugly",
        [
            all_along(0.8, "a cat"),
            all_along(-0.4, " a dog"),
            (1.0, [(5, [(" ", 1), ("red", 1.3), (" sky", 1)])]),
        ],
        UGLY,
    ),
    "AND of other lengths": Case(
        f"a cat AND [{LONG}:dog:3]",
        "",
        [all_along(1.0, "a cat"), edited(1.0, (3, " " + LONG), (5, " dog"))],
        NO_WORDS,
    ),
    "a negative edit with a sampler of two calls": Case(
        "a cat",
        "[(ugly:1.3)::0.3]",
        [edited(1.0, (10, "a cat"))],
        (1.0, [(3, [("ugly", 1.3)]), (10, [("", 1)])]),
        "heun",
    ),
    "AND without guidance": Case(
        "a cat:0.5 AND a dog:0.25 AND a tree",
        "ugly",
        [
            all_along(0.5, "a cat"),
            all_along(0.25, " a dog"),
            all_along(1.0, " a tree"),
        ],
        UGLY,
        changes={"cfg_scale": 1.0},
    ),
    "AND whose weights leave nothing of the negative prompt": Case(
        "a cat:0.75 AND a dog:0.25",
        "ugly",
        [all_along(0.75, "a cat"), all_along(0.25, " a dog")],
        UGLY,
        changes={"cfg_scale": 1.0},
    ),
    "every other call without the negative prompt": Case(
        "a [cat|hut]:0.7 AND a dog:0.5",
        "ugly",
        [
            edited(
                0.7,
                (1, "a cat"),
                (2, "a hut"),
                (3, "a cat"),
                (4, "a hut"),
                (5, "a cat"),
            ),
            all_along(0.5, " a dog"),
        ],
        UGLY,
        changes={"sampler_options": Options(s_min_uncond=1000.0)},
    ),
}


@dataclasses.dataclass
class Reference:
    pipeline: Any
    k_diffusion: Any

    def encode(
        self, entries: Sequence[tuple[int, Words]]
    ) -> list[dict[str, torch.Tensor]]:
        """What each entry gives the UNet, encoded as one batch."""
        pipeline = self.pipeline
        is_xl = hasattr(pipeline, "text_encoder_2")
        tokenizer = pipeline.tokenizer
        cut = []
        for _, words in entries:
            ids = []
            weights = []
            for text, weight in words:
                found = tokenizer(text, add_special_tokens=False).input_ids
                ids += found
                weights += [float(weight)] * len(found)
            places = range(0, max(1, len(ids)), 75)
            cut.append([(ids[at : at + 75], weights[at : at + 75]) for at in places])
        count = max(map(len, cut))
        cut = [[*chunks, *[([], [])] * (count - len(chunks))] for chunks in cut]
        encoders = [(pipeline.text_encoder, tokenizer.eos_token_id)]
        if is_xl:
            encoders.append((pipeline.text_encoder_2, 0))
        vectors = []
        pooled = None
        for place in range(count):
            sides = []
            for encoder, padding in encoders:
                chunks = [chunks[place] for chunks in cut]
                begin = tokenizer.bos_token_id
                end = tokenizer.eos_token_id
                ids = [
                    [begin, *each, end, *[padding] * (75 - len(each))]
                    for each, _ in chunks
                ]
                weights = [
                    [1.0, *each, *[1.0] * (76 - len(each))] for _, each in chunks
                ]
                output = encoder(torch.tensor(ids), output_hidden_states=True)
                z = output.hidden_states[-2] if is_xl else output.last_hidden_state
                weighted = z * torch.tensor(weights)[:, :, None]
                sides.append(weighted * (z.mean() / weighted.mean()))
                if encoder is not pipeline.text_encoder and place == 0:
                    pooled = output.text_embeds
            vectors.append(torch.cat(sides, dim=-1))
        joined = torch.cat(vectors, dim=1)
        found = [{"vectors": each[None]} for each in joined]
        if pooled is not None:
            found = [
                {**one, "pooled": each[None]}
                for one, each in zip(found, pooled, strict=True)
            ]
        return found

    def conds(
        self, joined: Sequence[Joined], negative: Joined
    ) -> tuple[list[tuple[float, Joined, list[dict[str, torch.Tensor]]]], Any]:
        encoded = [
            (weight, entries, self.encode(entries)) for weight, entries in joined
        ]
        longest = max(each[0]["vectors"].shape[1] for _, _, each in encoded)
        for _, _, texts in encoded:
            for one in texts:
                vectors = one["vectors"]
                last = vectors[:, -1:].repeat(1, longest - vectors.shape[1], 1)
                one["vectors"] = torch.cat([vectors, last], dim=1)
        _, entries = negative
        texts = self.encode(entries)
        if "pooled" in texts[0] and all(words == [("", 1)] for _, words in entries):
            texts = [{name: each * 0 for name, each in one.items()} for one in texts]
        return encoded, (entries, texts)  # type: ignore[return-value]

    @torch.no_grad()
    def draw(
        self, request: contract.ImageRequest, joined: Sequence[Joined], negative: Joined
    ) -> torch.Tensor:
        conds, (ends, unconds) = self.conds(joined, negative)
        calls = [0]
        scale = request.cfg_scale
        alternates = request.sampler_options.s_min_uncond > 0

        def text_of(entries: Any, texts: Any) -> dict[str, torch.Tensor]:
            found = next(
                (at for at, each in enumerate(entries) if calls[0] <= each[0]), 0
            )
            return texts[found]  # type: ignore[no-any-return]

        def combine(predict: Any) -> torch.Tensor:
            texts = [text_of(entries, texts) for _, entries, texts in conds]
            outputs = predict(texts).split(1)
            uncond = predict([text_of(ends, unconds)])
            applied = scale
            if alternates and calls[0] % 2:
                uncond = outputs[0]
                applied = 1.0
            denoised = uncond.clone()
            for (weight, _, _), output in zip(conds, outputs, strict=True):
                denoised += (output - uncond) * (weight * applied)
            calls[0] += 1
            return denoised

        generator = torch.Generator().manual_seed(request.seed)
        shape = (1, 4, request.height // 8, request.width // 8)
        noise = torch.randn(shape, generator=generator)
        alphas = self.pipeline.scheduler.alphas_cumprod
        model = self.k_diffusion.external.DiscreteEpsDDPMDenoiser(
            lambda x, times, text: self.unet(x, times, text, request),
            alphas,
            quantize=False,
        )

        def denoise(x: torch.Tensor, sigma: torch.Tensor) -> torch.Tensor:
            def predict(texts: Sequence[dict[str, torch.Tensor]]) -> torch.Tensor:
                """All of one length."""
                text = {
                    name: torch.cat([each[name] for each in texts]) for name in texts[0]
                }
                rows = x.expand(len(texts), -1, -1, -1)
                found: torch.Tensor = model(rows, sigma.expand(len(texts)), text=text)
                return found

            return combine(predict)

        sigmas = model.get_sigmas(request.steps)
        options = {"disable": True}
        if request.sampler == "euler_ancestral":
            options["noise_sampler"] = lambda *_: torch.randn(
                shape, generator=generator
            )
        sample = getattr(self.k_diffusion.sampling, f"sample_{request.sampler}")
        return sample(denoise, noise * sigmas[0], sigmas, **options)

    def unet(
        self,
        x: torch.Tensor,
        times: torch.Tensor,
        text: Mapping[str, torch.Tensor],
        request: contract.ImageRequest,
    ) -> torch.Tensor:
        added = {}
        if "pooled" in text:
            size = request.height, request.width
            ids = torch.tensor([[*size, 0, 0, *size]] * len(x), dtype=torch.float32)
            added = {
                "added_cond_kwargs": {"text_embeds": text["pooled"], "time_ids": ids}
            }
        return self.pipeline.unet(x, times, text["vectors"], **added).sample


def request_of(case: Case, seed: int) -> contract.ImageRequest:
    steps = samplers.editing_steps(case.sampler, STEPS)
    request = make_request(
        prompt=prompts.read_prompt(case.prompt, steps=steps),
        negative_prompt=prompts.read_negative_prompt(case.negative_prompt, steps=steps),
        sampler=case.sampler,
        steps=STEPS,
        cfg_scale=4.0,
        seed=seed,
    )
    return dataclasses.replace(request, **case.changes)


def draw_latents(
    engine: Any,
    monkeypatch: pytest.MonkeyPatch,
    requests: Sequence[contract.ImageRequest],
) -> list[torch.Tensor]:
    """The latents of all requests, drawn at once."""
    latents = {}
    add = type(engine._decoder).add

    def note(self: Any, ticket: int, drawn: torch.Tensor, *others: Any) -> None:
        latents[ticket] = drawn.clone()
        add(self, ticket, drawn, *others)

    with monkeypatch.context() as patch:
        patch.setattr(type(engine._decoder), "add", note)
        waiting = list(enumerate(map(engine.prepare, requests)))
        finished = 0
        while finished < len(requests):
            while waiting and engine.free:
                engine.admit(*waiting.pop(0))
            for each in engine.tick():
                assert isinstance(each.outcome, np.ndarray), each.outcome
                finished += 1
    return [latents[ticket] for ticket in range(len(requests))]


@pytest.mark.parametrize("family", ["sd1", "sdxl"])
def test_all_are_drawn_beside_each_other_and_plain_jobs_as_alone(
    family: str,
    family_engine,
    family_pipeline,
    k_diffusion,
    monkeypatch,
):
    reference = Reference(family_pipeline(family), k_diffusion)
    expected = []
    requests = []
    for seed, case in enumerate(CASES.values(), start=1):
        requests.append(request_of(case, seed))
        drawn = reference.draw(requests[-1], case.joined, case.negative)
        expected.append(drawn[0])
        plain = dataclasses.replace(
            requests[-1], prompt="a boat", negative_prompt="", seed=seed
        )
        if seed % 3 == 0:
            requests.append(plain)
            ends = [(samplers.editing_steps(plain.sampler, STEPS), [("a boat", 1)])]
            none = [(ends[0][0], [("", 1)])]
            expected.append(reference.draw(plain, [(1.0, ends)], (1.0, none))[0])
    found = draw_latents(family_engine(family), monkeypatch, requests)
    for request, ours, theirs in zip(requests, found, expected, strict=True):
        error = float((ours - theirs).abs().max() / theirs.abs().max())
        assert error < 1e-5, f"{error:.2g} for {str(request.prompt)[:40]!r}"
