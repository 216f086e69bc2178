"""AUTOMATIC1111's prompt syntax: emphasis, `BREAK` and `<lora:name:weight>`, without torch.

What it has beside those, and what is not supported here (prompt editing, alternation, `AND`), is
refused by name: drawn as words, it would give a picture that nobody asked for.
"""

from __future__ import annotations

import itertools
import math
import re
from dataclasses import dataclass

from imagefleet import errors
from imagefleet.job import prompt_editing

#: A LoRA's name comes from a prompt, so from a stranger: one path segment, no leading dot.
SAFE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_ .+()-]{0,127}")

#: Real LoRAs are used between -2 and 2; a typing error of `35` for `0.35` is caught here.
WEIGHT_LIMIT = 10.0

#: Words are weighted between 0 and 2. Far outside, the embeddings overflow in float16, and the
#: images that come out as NaN would make a sound GPU look broken.
EMPHASIS_LIMIT = 100.0

#: Brackets inside more brackets than this add nothing (1.1 ** 32 is 21 already). Without an end,
#: the time to read a prompt would grow with its square.
MAX_DEPTH = 32

_TAG = re.compile(r"<(\w+):([^>]*)>")
_LORA_KINDS = frozenset({"lora", "lyco"})

_PLAIN_FACTORS = {"(": 1.1, "[": 1 / 1.1}
_OPENED_BY = {")": "(", "]": "["}
#: Words, and each sign by itself; a colon that begins no weight goes with what follows it.
_EMPHASIS = re.compile(r"[()\[\]]|:\s*([+-]?[.\d]+)\s*\)|:?[^\\()\[\]:]+|:+(?=:)|:|\\[()\[\]\\]?")
_BREAK = re.compile(r"\bBREAK\b")

_AND = re.compile(r"\bAND\b")


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


@dataclass(frozen=True, slots=True)
class Part:
    """Words of one weight."""

    text: str
    weight: float


Section = tuple[Part, ...]
"""What stands between two BREAKs: parts, no two neighbours of one weight."""


def read_prompt(prompt: str) -> Prompt:
    """Splits a prompt into words and LoRAs.

    Raises:
        JobError: a tag is malformed, its name unsafe or its kind unsupported; or the words use
            AND, prompt editing or alternation, or give a weight that is no number or too large.
    """
    # Behind the last '>' no tag ends; looking for one would take time with the text's square.
    end = prompt.rfind(">") + 1
    loras = []
    for kind, arguments in _TAG.findall(prompt, 0, end):
        if kind.lower() not in _LORA_KINDS:
            raise errors.JobError(
                f"the prompt asks for <{kind[:80]}:...>, which is not supported; only"
                " <lora:name:weight>"
            )
        loras.append(_read_tag(arguments))
    text = _TAG.sub("", prompt[:end]) + prompt[end:]
    if _AND.search(text):
        raise errors.JobError(
            "the prompt joins prompts with AND, which is not supported; write 'and' for the word"
        )
    _check_words(text)
    return Prompt(text, tuple(loras))


def read_negative_prompt(prompt: str) -> Prompt:
    """As `read_prompt`, but AND and what looks like a tag are words, as in AUTOMATIC1111.

    Raises:
        JobError: it uses prompt editing or alternation, or a weight is no number or too large.
    """
    _check_words(prompt)
    return Prompt(prompt, ())


def weighted_parts(text: str) -> tuple[Section, ...]:
    """The words of a prompt with their weights, section by section; at least one section.

    `(x)` multiplies by 1.1, `[x]` divides by it, `(x:1.3)` multiplies by 1.3; they nest. A bracket
    that is never closed is closed at the end; one that was never opened is a letter like others.
    A backslash makes a bracket a letter. A BREAK ends its section inside brackets, too, where
    AUTOMATIC1111 draws the word instead, with a negative weight.

    Raises:
        JobError: a weight is no number or too large.
    """
    texts: list[list[str]] = []
    weights: list[float] = []
    breaks: list[int] = []
    opened: dict[str, list[int | None]] = {"(": [], "[": []}
    is_new = True
    for match in _EMPHASIS.finditer(text):
        token, number = match.group(0, 1)
        bracket = "(" if number else _OPENED_BY.get(token)
        if token in opened:
            counts = len(opened["("]) + len(opened["["]) < MAX_DEPTH
            opened[token].append(len(texts) if counts else None)
            is_new = is_new or counts
        elif bracket and opened[bracket]:
            start = opened[bracket].pop()
            if start is not None and start < len(texts):
                factor = _read_factor(number) if number else _PLAIN_FACTORS[bracket]
                _multiply(weights, start, factor)
                is_new = True
        else:
            words, *sections = _split_at_breaks(token)
            if is_new:
                texts.append([])
                weights.append(1.0)
                is_new = False
            texts[-1].append(words)
            for words in sections:
                breaks.append(len(texts))
                texts.append([words])
                weights.append(1.0)
    for bracket, starts in opened.items():
        for start in [start for start in starts if start is not None]:
            _multiply(weights, start, _PLAIN_FACTORS[bracket])
    edges = [0, *breaks, len(texts)]
    return tuple(
        _merge(texts[start:end], weights[start:end]) for start, end in itertools.pairwise(edges)
    )


def _split_at_breaks(token: str) -> list[str]:
    if "BREAK" not in token:
        return [token.removeprefix("\\")]  # only an escape begins with one
    words = _BREAK.split(token)
    # The white space around a BREAK goes with it.
    words[1:] = [after.lstrip() for after in words[1:]]
    words[:-1] = [before.rstrip() for before in words[:-1]]
    return words


def _multiply(weights: list[float], start: int, factor: float) -> None:
    weights[start:] = [weight * factor for weight in weights[start:]]


def _read_factor(number: str) -> float:
    try:
        return float(number)
    except ValueError:
        raise errors.JobError(f"the weight {number[:20]!r} in the prompt is no number") from None


def _merge(texts: list[list[str]], weights: list[float]) -> Section:
    """Neighbours of one weight become one text, so that they are tokenised as one."""
    parts = []
    for weight, same in itertools.groupby(range(len(texts)), key=weights.__getitem__):
        text = "".join(itertools.chain.from_iterable(texts[at] for at in same))
        if not abs(weight) <= EMPHASIS_LIMIT:  # also refuses NaN
            raise errors.JobError(
                f"the prompt gives {text[:40]!r} the weight {weight:.3g}; a weight is a number"
                f" between -{EMPHASIS_LIMIT:g} and {EMPHASIS_LIMIT:g}"
            )
        if text:
            parts.append(Part(text, weight))
    return tuple(parts)


def _check_words(text: str) -> None:
    prompt_editing.refuse(text)
    weighted_parts(text)


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
