"""ComfyUI's graph of nodes (`nodes.py`), as a job where each node has a counterpart in one.

The graph is that of the chunk `prompt`, in which its page has resolved Reroute and PrimitiveNode.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PureWindowsPath
from types import MappingProxyType
from typing import Any, NamedTuple

from imagefleet.errors import JobError
from imagefleet.job import samplers
from imagefleet.validation import JSONDict, JSONObject
from loadgen.infotext.reading import WORDS, Named, Reading, damaged, sampler_fields

_FIRST = "CheckpointLoaderSimple"
_LORA = "LoraLoader"
_SKIP = "CLIPSetLastLayer"
_PREDICTION = "ModelSamplingDiscrete"
_SAMPLERS = ("KSampler", "KSamplerAdvanced")
_VALUES = (
    "PrimitiveInt",
    "PrimitiveFloat",
    "PrimitiveString",
    "PrimitiveStringMultiline",
)
_ENLARGING = ("LatentUpscale", "LatentUpscaleBy")

#: What a KSamplerAdvanced has that does all that a KSampler does.
_WHOLE = {
    "add_noise": "enable",
    "start_at_step": 0,
    "return_with_leftover_noise": "disable",
}

_UPSCALERS = WORDS["comfyui"]["upscalers"]

#: What AUTOMATIC1111 reads otherwise in a prompt; square brackets are escaped.
_OTHERWISE = re.compile(r"[()<#]|\b(?:AND|BREAK)\b|:[\d.]+\s*$")

#: Alternatives and comments, which its page resolves; a graph that has them was sent without it.
_OF_PAGE = re.compile(r"\{[^{}]*\|[^{}]*\}|//|/\*")

#: An embedding, maybe in a folder and with its suffix; AUTOMATIC1111 has its name alone.
_EMBEDDING = re.compile(r"embedding:([^\s,():|]+)")

#: Schedules by its names.
_SCHEDULES = WORDS["comfyui"]["schedules"]

#: The schedules that end at the smallest sigma, before 0.
_WHOLE_SCHEDULES = {"normal", "karras", "exponential", "kl_optimal"}


class _Sampler(NamedTuple):
    """A sampler that draws what one of ComfyUI's does."""

    key: str
    fields: JSONObject = MappingProxyType({})
    #: The sentence about how the picture differs; empty where it is the same.
    said: str = ""


#: Samplers by its names.
_SAMPLERS_HERE = {
    name: _Sampler(**row) for name, row in WORDS["comfyui"]["samplers"].items()
}


@dataclass(frozen=True, eq=False)
class _Node:
    graph: Mapping[str, _Node]
    name: str
    kind: str
    inputs: JSONObject

    def value(self, name: str, usual: Any = None) -> Any:
        value = self.inputs.get(name, usual)
        return (
            self.behind(name, *_VALUES).inputs["value"]
            if isinstance(value, list)
            else value
        )

    def behind(self, name: str, *kinds: str) -> _Node:
        """The node behind an input; raises JobError for one of another kind."""
        node = self.graph[str(self.inputs[name][0])]
        if node.kind not in kinds:
            raise JobError(f"node {node.name} ({node.kind}) has no counterpart")
        return node

    def chain(self, name: str, *kinds: str) -> Iterator[_Node]:
        """The nodes behind inputs of this name, to the checkpoint."""
        node = self
        for _ in self.graph:
            node = node.behind(name, _FIRST, *kinds)
            yield node
            if node.kind == _FIRST:
                return
        raise JobError("its graph goes in a circle")


def read(text: str) -> Reading:
    """The job of a graph; raises JobError for one with nodes that no job draws."""
    graph: dict[str, _Node] = {}
    with damaged("the graph's JSON is cut or damaged"):
        for name, node in json.loads(text).items():
            graph[name] = _Node(
                graph, name[:40], str(node["class_type"])[:80], {**node["inputs"]}
            )
        return _read(graph)


def _read(graph: Mapping[str, _Node]) -> Reading:
    # Of its page, or of an extension.
    showing = [
        node for node in graph.values() if isinstance(node.inputs.get("images"), list)
    ]
    saving = [node for node in showing if node.kind.startswith("SaveImage")] or showing
    if len(pictures := {str(node.inputs["images"]) for node in saving}) != 1:
        raise JobError(f"its graph saves {len(pictures)} pictures, not one")
    decode = saving[0].behind("images", "VAEDecode")
    last = first = decode.behind("samples", *_SAMPLERS)
    latent = enlarged = last.behind("latent_image", "EmptyLatentImage", *_ENLARGING)
    if enlarged.kind in _ENLARGING:
        first = enlarged.behind("samples", *_SAMPLERS)
        latent = first.behind("latent_image", "EmptyLatentImage")
    reading = _sampled(first)
    job = reading.job
    job |= {name: latent.value(name) for name in ("width", "height")}
    if (first.value("denoise", 1), latent.value("batch_size", 1)) != (1, 1):
        raise JobError(
            "it is one of a batch of one noise, or its first pass is not whole"
        )
    if last is not first:
        second = _sampled(last).job
        if other := [
            name for name in second if name != "steps" and second[name] != job[name]
        ]:
            raise JobError(f"its second pass has its own {', '.join(other)}")
        job |= {
            "enable_hr": True,
            "denoising_strength": last.value("denoise", 1),
            "hr_second_pass_steps": second["steps"],
            **_enlarged(enlarged, job),
        }
    vae = decode.behind("vae", _FIRST, "VAELoader")
    if vae.kind == "VAELoader":
        job["override_settings"]["sd_vae"] = vae.value("vae_name")
        reading.models.append(Named("vae", vae.value("vae_name")))
    return reading


def _sampled(node: _Node) -> Reading:
    """Reads the settings of a sampler node, but for its strength."""
    value = node.value
    is_advanced = node.kind == _SAMPLERS[1]
    is_whole = all(value(name) == usual for name, usual in _WHOLE.items())
    if is_advanced and not (is_whole and value("end_at_step") >= value("steps")):
        raise JobError(f"node {node.name} ({node.kind}) does not do all steps")
    sampler = value("sampler_name")
    schedule = value("scheduler")
    fields, said = fields_of_sampler(sampler, schedule)
    *on_unet, checkpoint = node.chain(
        "model", _LORA, "LoraLoaderModelOnly", _PREDICTION
    )
    predictions = [each for each in on_unet if each.kind == _PREDICTION]
    on_unet = [each for each in on_unet if each.kind != _PREDICTION]
    nodes = [node.behind(each, "CLIPTextEncode") for each in ("positive", "negative")]
    layers, others = ([*text.chain("clip", _LORA, _SKIP)] for text in nodes)
    if layers != others:
        raise JobError("its prompts have text encoders of their own")
    texts = [str(text.value("text")) for text in nodes]
    prompt, negative = (
        re.sub(r"([][])", r"\\\1", _EMBEDDING.sub(_named, text)) for text in texts
    )
    # Empty, it is zeros for SDXL in AUTOMATIC1111, where ComfyUI encodes no words.
    negative = negative or " "
    name = checkpoint.value("ckpt_name")
    settings = {"sd_model_checkpoint": name, "randn_source": "CPU"}
    models = [Named("model", name)]
    on_text = [each for each in layers if each.kind == _LORA]
    for each in reversed(dict.fromkeys([*on_unet, *on_text])):
        lora = PureWindowsPath(each.value("lora_name")).stem
        te = each.value("strength_clip") if each in on_text else 0
        unet = each.value("strength_model") if each in on_unet else 0
        prompt += f" <lora:{lora}:{te}:{unet}>"
        models.append(Named("lora", lora))
    if skips := [each for each in layers if each.kind == _SKIP]:
        settings["CLIP_stop_at_last_layers"] = -skips[0].value("stop_at_clip_layer")
    job = {
        "prompt": prompt,
        "negative_prompt": negative,
        "override_settings": settings,
        "steps": value("steps"),
        "cfg_scale": value("cfg"),
        "seed": value("noise_seed" if is_advanced else "seed"),
    }
    models += [
        Named("embedding", _named(found))
        for text in texts
        for found in _EMBEDDING.finditer(text)
    ]
    if not _is_distilled(predictions, sampler) and sampler == "lcm":
        said.append(
            "its LCM has no node ModelSamplingDiscrete, and so calls the model between LCM's"
            " timesteps: alike and not equal"
        )
    said += _said_of_texts(texts)
    return Reading(job | fields, models, said, cuts_prompts_elsewhere=True)


def fields_of_sampler(name: str, scheduler: str) -> tuple[JSONDict, list[str]]:
    """The fields of a sampler by its names here, and sentences about what they draw otherwise.

    Raises JobError for one without a counterpart.
    """
    known = _SAMPLERS_HERE.get(name)
    schedule = _SCHEDULES.get(scheduler)
    if known is None or schedule is None:
        shown = f"{name} {scheduler}"[:80]
        raise JobError(f"the sampler and schedule {shown!r} have no counterpart")
    sampler = samplers.SAMPLERS[known.key]
    said = [known.said] if known.said else []
    if sampler.is_between_ends and scheduler not in _WHOLE_SCHEDULES:
        said.append(
            "its sampler ends at its schedule's last sigma: alike and not equal"
        )
    fields = sampler_fields(sampler.title, samplers.SCHEDULES[schedule])
    return {**fields, **known.fields}, said


def _named(embedding: re.Match[str]) -> str:
    """The name of an embedding's file."""
    path = PureWindowsPath(embedding[1])
    return path.stem if path.suffix in {".pt", ".bin", ".safetensors"} else path.name


def _is_distilled(predictions: Sequence[_Node], sampler: str) -> bool:
    """True if a node makes the model LCM's, as it always is here; JobError for another kind."""
    for each in predictions:
        kind = str(each.value("sampling"))[:40]
        if (kind, sampler) != ("lcm", "lcm") or each.value("zsnr"):
            raise JobError(
                f"node {each.name} ({each.kind}) makes the model one of {kind}, which has no"
                f" counterpart with {sampler}"
            )
    return bool(predictions)


def _said_of_texts(texts: Sequence[str]) -> Iterator[str]:
    """Sentences about signs in prompts that ComfyUI reads otherwise."""
    if any(map(_OTHERWISE.search, texts)):
        yield "its prompt has weights or signs of ComfyUI's: alike and not equal"
    if any(map(_OF_PAGE.search, texts)):
        yield (
            "its prompt has alternatives or comments that ComfyUI's page had not resolved: they"
            " are words"
        )


def _enlarged(node: _Node, first: JSONObject) -> JSONDict:
    """The fields of the second pass that a node which enlarges a latent has."""
    method = str(node.value("upscale_method"))
    x = node.value("width", 0)
    y = node.value("height", 0)
    if method not in _UPSCALERS or x * first["height"] != y * first["width"]:
        raise JobError(
            f"node {node.name} ({node.kind}) cuts, or enlarges by {method[:40]}"
        )
    by = (
        {"hr_resize_x": x, "hr_resize_y": y}
        if x
        else {"hr_scale": node.value("scale_by")}
    )
    return {"hr_upscaler": f"Latent{_UPSCALERS[method]}", **by}
