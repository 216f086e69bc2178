"""What a prompt says beside its words: AUTOMATIC1111's extra-network tags, `<lora:name:weight>`."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from jobs import errors

#: A LoRA's name comes from a prompt, so from a stranger: one path segment, no leading dot.
SAFE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_ .+()-]{0,127}")

#: Real LoRAs are used between -2 and 2; a typing error of `35` for `0.35` is caught here.
WEIGHT_LIMIT = 10.0

_TAG = re.compile(r"<(\w+):([^<>]*)>")
_LORA_KINDS = frozenset({"lora", "lyco"})


@dataclass(frozen=True, slots=True)
class LoraTag:
    """One LoRA of a prompt and its strength on each of the two networks it may change."""

    name: str
    text_encoder_weight: float
    unet_weight: float


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt's words, its tags removed as AUTOMATIC1111 removes them, and its LoRAs in order."""

    text: str
    loras: tuple[LoraTag, ...]


def read_prompt(prompt: str) -> Prompt:
    """Splits a prompt into words and LoRAs.

    Raises:
        JobError: a tag is malformed, its name unsafe, or its kind unsupported.
    """
    loras = []
    for kind, arguments in _TAG.findall(prompt):
        if kind.lower() not in _LORA_KINDS:
            raise errors.JobError(
                f"the prompt asks for <{kind}:...>, which is not supported; only <lora:name:weight>"
            )
        loras.append(_read_tag(arguments))
    return Prompt(_TAG.sub("", prompt), tuple(loras))


def _read_tag(arguments: str) -> LoraTag:
    """Reads `name[:text encoder weight[:unet weight]]` or the named forms `te=` and `unet=`.

    The text encoder's weight defaults to 1, the UNet's to the text encoder's.
    """
    name, *rest = arguments.split(":")
    if not SAFE_NAME.fullmatch(name):
        raise errors.JobError(
            f"the LoRA name {name[:80]!r} is refused: a name is letters, digits, spaces and"
            " _ . + ( ) - only, without a path"
        )
    positional = [text for text in rest if "=" not in text]
    named = dict(text.split("=", 1) for text in rest if "=" in text)
    unknown = sorted(named.keys() - {"te", "unet"})
    if unknown or len(positional) > 2:  # noqa: PLR2004 - te and unet
        raise errors.JobError(
            f"<lora:{arguments[:80]}> is not understood: write <lora:name:weight>,"
            " <lora:name:text_encoder_weight:unet_weight>, or name them te= and unet="
        )
    te_text = named.get("te", positional[0] if positional else "1")
    text_encoder_weight = _read_weight(te_text, arguments)
    unet_text = named.get("unet", positional[1] if len(positional) == 2 else te_text)  # noqa: PLR2004
    return LoraTag(name, text_encoder_weight, _read_weight(unet_text, arguments))


def _read_weight(text: str, tag: str) -> float:
    try:
        weight = float(text)
    except ValueError:
        weight = math.nan
    if not abs(weight) <= WEIGHT_LIMIT:  # also refuses NaN
        raise errors.JobError(
            f"<lora:{tag[:80]}> has the weight {text[:20]!r}; a weight is a number between"
            f" -{WEIGHT_LIMIT:g} and {WEIGHT_LIMIT:g}"
        )
    return weight
