"""Reads the tensors of a LoRA file by their names, types and shapes: one reader for all places.

`files add`, `load --check` and the engine refuse a file by it, in the same words. It takes the
kinds of AUTOMATIC1111's built-in Lora extension (release 1.10) by its rules: the first kind counts
whose tensors a layer has, and whatever else is there is skipped.
"""

import functools
import json
import math
import re
import unicodedata
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Self

from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, model_validator

from imagefleet.files import contents, embedding
from imagefleet.files.embedding import Shapes
from imagefleet.files.safetensors import Header, UnusableError
from imagefleet.job.prompt import is_safe_name

#: What follows the layer's name in a key, and our name of the tensor.
_TENSORS = {
    r"(?:\.lora_down|\.lora_A|\.lora(?:_linear_layer)?\.down|_lora\.down)\.weight": "down",
    r"(?:\.lora_up|\.lora_B|\.lora(?:_linear_layer)?\.up|_lora\.up)\.weight": "up",
    r"\.lora_mid\.weight": "mid",
    r"\.(hada_(?:w[12]_[ab]|t[12]))": r"\2",
    r"\.(lokr_(?:w[12](?:_[ab])?|t2))": r"\2",
    r"\.(alpha|scale|dora_scale|oft_blocks|oft_diag|rescale|on_input)": r"\2",
    r"\.([ab][12])\.weight": r"\2",
    r"\.(?:diff|w_norm)": "diff",
    r"\.(?:diff_b|b_norm)": "bias",
    r"\.lora_magnitude_vector(?:\.weight)?": "magnitude",
    r"\.weight": "weight",
}
_TENSORS_BY_PATTERN = [
    (re.compile(f"(.+?){ending}"), name) for ending, name in _TENSORS.items()
]

#: How peft begins the names of a network's tensors, and of its layers' among them.
PEFT_PREFIX = "base_model."
PEFT_LAYER_PREFIX = f"{PEFT_PREFIX}model."

#: The networks that LoRAs change, by their names in diffusers.
NETWORKS = ("unet", "transformer", "text_encoder", "text_encoder_2")

#: Tensors of any kind: DoRA's norms by LyCORIS' and peft's name, and single numbers.
NORMS = {"dora_scale", "magnitude"}
NUMBERS = {"alpha", "scale", "on_input"}

#: Tensors that a kind may have beside its own.
_OPTIONAL = {"full": {"bias"}, "oft": {"rescale"}, "turn": {"diff"}}

#: Keys of tensors by their roles in one layer.
Parts = dict[str, str]

#: A kind, and the dimensions of its tensors.
_Kind = tuple[str, Mapping[str, str]]

#: Each kind's tensors and their dimensions, in the order of preference. The outputs are `o` and the
#: inputs `i`, times `p`, `q` and the taps `k`, or without taps `j`; other letters are ranks. The
#: last letter of a tensor is the product of all its further dimensions.
_KINDS: Sequence[_Kind] = (
    ("lora", {"mid": "rsk", "up": "or", "down": "si"}),
    ("lora", {"up": "or", "down": "ri"}),
    (
        "loha",
        {"hada_t1": "rsk", "hada_w1_a": "ro", "hada_w1_b": "si"}
        | {"hada_t2": "tuk", "hada_w2_a": "to", "hada_w2_b": "ui"},
    ),
    (
        "loha",
        {"hada_w1_a": "or", "hada_w1_b": "ri", "hada_w2_a": "os", "hada_w2_b": "si"},
    ),
    ("ia3", {"weight": ""}),
    *(
        ("lokr", first | second)
        for first in ({"lokr_w1": "pq"}, {"lokr_w1_a": "pr", "lokr_w1_b": "rq"})
        for second in (
            {"lokr_w2": "oi"},
            {"lokr_t2": "stk", "lokr_w2_a": "so", "lokr_w2_b": "ti"},
            {"lokr_w2_a": "os", "lokr_w2_b": "si"},
        )
    ),
    ("turn", {"turn": "ii", "turn_scale": "o"}),
    ("full", {"diff": "oi"}),
    ("glora", {"a1": "rj", "a2": "jr", "b1": "si", "b2": "os"}),
    ("glora", {"down_a": "rj", "up_a": "jr", "down_b": "si", "up_b": "os"}),
    ("oft", {"oft_blocks": "poo"}),
    ("oft", {"oft_diag": "poo"}),
)

#: LyCORIS exchanged the names of a GLoRA's matrices, which A1111 1.10 does not know. Since their
#: strength is alpha's share of the rank only then, they have names of their own here.
_TODAYS_GLORA = {"a1": "up_a", "a2": "down_a", "b1": "up_b", "b2": "down_b"}

_EMBEDDING = re.compile(r"bundle_emb\.([^.]+)\.(.+)")

#: How names of layers of FLUX.2's transformer begin, in diffusers and in its makers' code.
_OF_TRANSFORMER = (
    r"(?:(?:(?:lora_|lycoris_)?transformer|lycoris)[._])?(?:(?:single_)?transformer_blocks"
    r"|sformer_blocks|(?:double|single)_blocks|(?:img|txt|time)_in|final_layer|proj_out|norm_out"
    r"|(?:x|context)_embedder|time_guidance_embed|(?:double|single)_stream_modulation)(?:[._]|$)"
)

#: How names of layers of Stable Diffusion's networks begin, in any program's way, or those.
_LAYER = re.compile(
    rf"(?:base_model\.model\.)?{_OF_TRANSFORMER}"
    r"|(?:base_model\.model\.)?(?:(?:lora_|oft_)?unet[_.]|diffusion_model\.|(?:lora_)?te?[12]?_"
    r"|text_encoders?(?:_2)?[_.]|text_model[_.])|(?:base_model\.model\.)?"
    r"(?:(?:down|up|mid|input|output|middle)_blocks?|conv_(?:in|out)|time_embed(?:ding)?)[_.]"
)

#: A key of peft's alpha_pattern: formally a regular expression, in practice a layer's name. Never
#: matched as an expression: a malicious one could block all threads for years.
_LayerName = Annotated[str, Field(pattern=r"^\^?[\w.]+$")]

_NO_ALIASES = {"none", "addams"}

#: A convolution's.
_MOST_DIMENSIONS = 4

#: The most characters of a tensor's name in a message: whoever made it may have made it megabytes.
SHOWN = 200


@dataclass
class Contents:
    """The tensors of a LoRA file, by their keys there."""

    #: Tensors per layer, keyed by their role (up, down, alpha ...) in that LoRA type.
    layers: dict[str, Parts] = field(default_factory=dict)
    #: Tensors of the textual inversions that come with it, by the inversion's name.
    embeddings: dict[str, Parts] = field(default_factory=dict)
    #: Outputs and inputs, of all taps, of each layer's change; 0 where its shapes fit any.
    sizes: dict[str, tuple[int, int]] = field(default_factory=dict)
    #: Tensors that change nothing.
    skipped: list[str] = field(default_factory=list)


def alias_of(header: Header) -> str:
    """The name that AUTOMATIC1111's page writes for a LoRA, beside its file's; '' for none.

    That is its trainer's, unless the setting `lora_preferred_name` says otherwise; 1.10 finds no
    file by those of `_NO_ALIASES`.
    """
    alias = unicodedata.normalize("NFC", header.metadata.get("ss_output_name", ""))
    return alias if is_safe_name(alias) and alias.lower() not in _NO_ALIASES else ""


def split_key(key: str) -> tuple[str, str]:
    """The layer's name and the tensor's; '' if the key has no known suffix."""
    plain = re.sub(r"\.default(?=\.weight$|$)", "", key)
    for pattern, name in _TENSORS_BY_PATTERN:
        if match := pattern.fullmatch(plain):
            return match[1], match.expand(name)
    return "", ""


@functools.lru_cache(1_000)  # most layers are alike
def kind_of(names: frozenset[str]) -> _Kind:
    """The kind of a change with tensors of these names, and its row of `_KINDS`; '' for none."""
    return next((row for row in _KINDS if names.issuperset(row[1])), ("", {}))


def read(shapes: Shapes, integers: Collection[str] = ()) -> Contents:
    """The tensors that the *shapes* are of; *integers*: the keys of those of no floating point.

    Raises UnusableError if it is no LoRA for Stable Diffusion, or if one of its layers has tensors
    of no known kind or of shapes that do not fit each other.
    """
    if not shapes:
        raise UnusableError("holds no weights")
    found = _by_layer(shapes)
    for name, parts in found.layers.items():
        if _is_todays_glora(parts, shapes):
            for old, new in _TODAYS_GLORA.items():
                parts[new] = parts.pop(old)
        of_layer = {part: shapes[key] for part, key in parts.items()}
        kind, dimensions = kind_of(frozenset(of_layer))
        try:
            found.sizes[name] = _size_of(kind, dimensions, of_layer)
        except ValueError as error:
            shown = ", ".join(
                f"{part} {list(shape)}" for part, shape in of_layer.items()
            )
            raise UnusableError(
                f"is damaged or of an unknown kind: for {name[:SHOWN]!r} it has {shown[:1000]}"
            ) from error
        used = {*dimensions, *NORMS, *NUMBERS, *_OPTIONAL.get(kind, ())}
        found.skipped += [parts.pop(part) for part in [*parts] if part not in used]
        if whole := [
            parts[part] for part in parts.keys() - NUMBERS if parts[part] in integers
        ]:
            raise damaged(whole[0])
    for parts in found.embeddings.values():
        whole = [part for part, key in parts.items() if key in integers]
        embedding.read({part: shapes[key] for part, key in parts.items()}, whole)
    return found


def _is_todays_glora(parts: Parts, shapes: Shapes) -> bool:
    """True if a layer's first matrix is the one that widens: [inputs, rank]."""
    if not parts.keys() >= _TODAYS_GLORA.keys():
        return False
    first, second = (shapes[parts[part]] for part in ("a1", "a2"))
    return bool(first and second) and first[0] > second[0]


def _by_layer(shapes: Shapes) -> Contents:
    found = Contents()
    for key in sorted(shapes):
        name, part = split_key(key)
        if embedding := _EMBEDDING.fullmatch(key):
            found.embeddings.setdefault(embedding[1], {})[embedding[2]] = key
        elif not _LAYER.match(name):
            found.skipped.append(key)
        elif part in found.layers.setdefault(name, {}):
            raise UnusableError(f"has {key[:SHOWN]!r} twice, under two names")
        else:
            found.layers[name][part] = key
    if not (found.layers or found.embeddings):
        raise UnusableError(
            f"changes no layer of Stable Diffusion's: it has {key[:SHOWN]!r}"
        )
    return found


def damaged(key: str) -> UnusableError:
    return UnusableError(f"is damaged: {key[:SHOWN]!r} holds NaN, infinity or integers")


def _size_of(
    kind: str, dimensions: Mapping[str, str], shapes: Shapes
) -> tuple[int, int]:
    """See `Contents.sizes`; raises ValueError if the shapes do not fit each other."""
    size = {part: math.prod(shape) for part, shape in shapes.items()}
    sizes: dict[str, int] = {}
    for part, letters in dimensions.items():
        first = shapes[part][: len(letters) - 1]
        rest = shapes[part][len(letters) - 1 :]
        for letter, length in zip(
            letters, (*first, math.prod(rest)), strict=bool(letters)
        ):
            if (
                sizes.setdefault(letter, length) != length
                or len(shapes[part]) > _MOST_DIMENSIONS
            ):
                raise ValueError(f"{part} does not fit the others")
    outputs = sizes.get("o", 0) * sizes.get("p", 1)
    inputs = sizes.get("i", 0) * sizes.get("q", 1) * sizes.get("k", 1)
    norms = size.get("dora_scale", 1)  # of the outputs, or of the inputs without taps
    if (
        not (kind and all(size.values()))
        or any(size.get(name, 1) != 1 for name in NUMBERS)
        or any(
            size.get(name, outputs) != outputs
            for name in ("bias", "magnitude", "rescale")
        )
        or (norms != outputs and inputs % norms)
        or inputs % sizes.get("j", 1)
        or (kind == "ia3" and "on_input" not in shapes)
        or (
            kind == "oft" and len(shapes[next(iter(dimensions))]) > len("poo")
        )  # a BOFT
    ):
        raise ValueError("it is of no known kind")
    return outputs, inputs


#: Ways to begin a LoRA that change the checkpoint's weights as well, which the file does not hold.
_CHANGES_CHECKPOINT = re.compile("pissa|olora|corda|loftq", re.IGNORECASE)


class PeftConfig(BaseModel):
    """A network's peft configuration, with all that peft's own class for its type has."""

    model_config = ConfigDict(extra="allow")

    peft_type: str = "LORA"
    init_lora_weights: Any = True
    lora_alpha: FiniteFloat | None = None
    alpha_pattern: dict[_LayerName, FiniteFloat] | None = None
    use_rslora: bool = False

    def alpha_of(self, path: str) -> float | None:
        """The alpha of the first pattern that is the path's end, or with ^ the whole path."""
        whole = (path, f"text_model.{path}")  # transformers 5.6 dropped the level
        for name, alpha in (self.alpha_pattern or {}).items():
            bare = name.removeprefix("^")
            if bare in whole or (bare == name and path.endswith(f".{name}")):
                return alpha
        return self.lora_alpha

    @model_validator(mode="after")
    def _keeps_checkpoint(self) -> Self:
        if _CHANGES_CHECKPOINT.match(str(self.init_lora_weights)):
            raise ValueError(
                f"a LoRA begun by {self.init_lora_weights!r} changes the checkpoint, too: save it"
                " with peft's path_initial_model_for_weight_conversion"
            )
        return self


def peft_type(configs: Mapping[str, PeftConfig]) -> str | None:
    """The type of an adapter that only peft computes; None for LoRAs."""
    return next(
        (
            config.peft_type
            for config in configs.values()
            if config.peft_type.upper() != "LORA"
        ),
        None,
    )


def peft_configs(metadata: Mapping[str, str]) -> dict[str, PeftConfig]:
    """Each network's peft configuration, which diffusers writes into the header."""
    try:
        stated = json.loads(metadata.get(contents.ADAPTER_METADATA, "{}"))
        return {
            network: PeftConfig.model_validate(
                {
                    key.removeprefix(f"{network}."): value
                    for key, value in stated.items()
                    if key.startswith(f"{network}.") or "." not in key
                }
            )
            for network in NETWORKS
        }
    except (ValueError, AttributeError, RecursionError) as error:
        raise UnusableError(f"has damaged metadata: {str(error)[:300]}") from error
