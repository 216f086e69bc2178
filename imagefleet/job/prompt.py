"""AUTOMATIC1111's prompts: comments, emphasis, `BREAK`, LoRAs.

Its other syntax is refused by name: as words, it would give an image that nobody asked for.
"""

from __future__ import annotations

import functools
import itertools
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

from imagefleet import errors

#: A LoRA's name comes from a prompt, so it is untrusted: one path segment, no leading dot.
SAFE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_ .+()-]{0,127}")

#: LoRAs are used between -2 and 2; this catches a typo such as `35` for `0.35`.
WEIGHT_LIMIT = 10.0

#: Usual are 0 to 2. Far outside, embeddings overflow in float16, which looks like a broken GPU.
EMPHASIS_LIMIT = 100.0

#: Deeper brackets add no weight (1.1 ** 32 is 21), and would be parsed in quadratic time.
MAX_DEPTH = 32

#: Per prompt: each is held in memory while an image is drawn.
MAX_LORAS = 16

_TAG = re.compile(r"<(\w+):([^>]*)>")
_LORA_KINDS = frozenset({"lora", "lyco"})

_PLAIN_FACTORS = {"(": 1.1, "[": 1 / 1.1}
_OPENED_BY = {")": "(", "]": "["}
#: Words, and each sign by itself; a colon that starts no weight joins the words after it.
_EMPHASIS = re.compile(r"[()\[\]]|:\s*([+-]?[.\d]+)\s*\)|:?[^\\()\[\]:]+|:+(?=:)|:|\\[()\[\]\\]?")
_BREAK = re.compile(r"\bBREAK\b")

#: What no prompt without weights has.
_WEIGHTED = re.compile(r"[()\[\]\\]")

#: The weight by which AUTOMATIC1111 knows a BREAK from the word; brackets change it.
_BREAK_WEIGHT = -1.0

#: Lines that are comments as a whole, then the ends of the others.
_COMMENT_LINE = re.compile(r"(?:^|\n)#.*(?:\n|$)")
_COMMENT = re.compile(r"#.*(?:\n|$)")

_AND = re.compile(r"\bAND\b")

_OWN_WEIGHT = re.compile(r"[+-]?(?:\d+\.?|\d*\.\d+)")

_SIGN = re.compile(r"\\.|[()\[\]:|]")
_WHEN = re.compile(r"\s*[+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?\s*")


@dataclass(frozen=True, slots=True)
class LoraTag:
    """One LoRA of a prompt and its strength on each of the two networks it may change."""

    name: str
    text_encoder_weight: float
    unet_weight: float


@dataclass(frozen=True, slots=True)
class Part:
    text: str
    weight: float


Section = tuple[Part, ...]
"""The parts between two BREAKs; no two neighbours have the same weight."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """A parsed prompt: its text without LoRA tags, the tags in order, the weighted parts."""

    text: str
    loras: tuple[LoraTag, ...]
    sections: tuple[Section, ...]
    weight: float = 1.0
    """The whole prompt's weight, from `:1.3` at its end: multiplies the guidance scale."""

    def __str__(self) -> str:
        return self.text


def without_comments(prompt: str) -> str:
    """The prompt without what is between `#` and the end of its line."""
    if "#" not in prompt:
        return prompt
    return _COMMENT.sub("\n", _COMMENT_LINE.sub("\n", prompt))


# The stages of a job mostly have one prompt.
@functools.lru_cache(maxsize=16)
def read_prompt(prompt: str, *, comments: bool = True) -> Prompt:
    """Splits a prompt into weighted words and LoRAs; without *comments*, `#` is a letter."""
    if comments:
        prompt = without_comments(prompt)
    # No tag ends after the last '>'; searching there would take quadratic time.
    end = prompt.rfind(">") + 1
    loras = []
    for kind, arguments in _TAG.findall(prompt, 0, end):
        if kind.lower() not in _LORA_KINDS:
            raise errors.JobError(
                f"the prompt asks for <{kind[:80]}:...>, which is not supported; only"
                " <lora:name:weight>"
            )
        loras.append(_read_tag(arguments))
    if len(loras) > MAX_LORAS:
        raise errors.JobError(f"the prompt has {len(loras)} LoRAs; at most {MAX_LORAS} work")
    text = _TAG.sub("", prompt[:end]) + prompt[end:]
    if _AND.search(text):
        raise errors.JobError(
            "the prompt joins prompts with AND, which is not supported; write 'and' for the word"
        )
    text, weight = _split_own_weight(text)
    refuse_editing(text)
    # A LoRA that is named twice is applied twice, both times with its last weights.
    last = {tag.name: tag for tag in loras}
    tags = tuple(last[tag.name] for tag in loras)
    return Prompt(text, tags, weighted_parts(text), weight)


def read_words(text: str) -> tuple[str, Sequence[LoraTag]]:
    """A prompt's words as they are drawn, and its LoRAs; one that cannot be read as it is.

    That is without weights, escapes and the signs that end sections.
    """
    try:
        read = read_prompt(text)
    except errors.JobError:
        return text, ()
    words = " ".join("".join(part.text for part in section) for section in read.sections)
    return " ".join(words.replace(" ,", "").split()).strip(" ,"), read.loras


def _split_own_weight(text: str) -> tuple[str, float]:
    """Splits off its own weight, `:1.3` at its end, as AUTOMATIC1111 does for the parts of AND."""
    words, colon, number = text.rstrip().rpartition(":")
    if not colon or not _OWN_WEIGHT.fullmatch(number := number.strip()):
        return text, 1.0
    weight = float(number)
    if abs(weight) > WEIGHT_LIMIT:
        raise errors.JobError(
            f"the prompt ends in {':' + number[:20]!r}, which is its weight as a whole and"
            f" multiplies cfg_scale: use a number between -{WEIGHT_LIMIT:g} and {WEIGHT_LIMIT:g},"
            " or write a comma after it if it is no weight"
        )
    return words.rstrip(), weight


# A campaign's jobs share a few negative prompts.
@functools.lru_cache(maxsize=256)
def read_negative_prompt(prompt: str, *, comments: bool = True) -> Prompt:
    """Reads it as `read_prompt` does, but takes AND, LoRA tags and `:1.3` at its end for words."""
    if comments:
        prompt = without_comments(prompt)
    refuse_editing(prompt)
    return Prompt(prompt, (), weighted_parts(prompt))


def weighted_parts(text: str) -> tuple[Section, ...]:
    """A prompt's words with their weights, section by section; at least one section.

    `(x)` multiplies by 1.1, `[x]` divides by it, `(x:1.3)` multiplies by 1.3; they nest. An open
    bracket is closed at the end of the prompt; a closing one without a partner is a letter, and so
    is one after a backslash. BREAK ends its section outside brackets only: inside, AUTOMATIC1111
    draws the word, with a negative weight. Raises JobError for a weight that is not valid.
    """
    if not (_WEIGHTED.search(text) or "BREAK" in text):
        return ((Part(text, 1.0),) if text else (),)
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
                texts += [["BREAK"], [words]]
                weights += [_BREAK_WEIGHT, 1.0]
    for bracket, starts in opened.items():
        for start in [start for start in starts if start is not None]:
            _multiply(weights, start, _PLAIN_FACTORS[bracket])
    edges = [-1, *(at for at in breaks if weights[at] == _BREAK_WEIGHT), len(texts)]
    return tuple(
        _merge(texts[start + 1 : end], weights[start + 1 : end])
        for start, end in itertools.pairwise(edges)
    )


def _split_at_breaks(token: str) -> list[str]:
    if "BREAK" not in token:
        return [token.removeprefix("\\")]  # only an escape begins with one
    words = _BREAK.split(token)
    # BREAK swallows the white space around it.
    words[1:] = [after.lstrip() for after in words[1:]]
    words[:-1] = [before.rstrip() for before in words[:-1]]
    return words


def _multiply(weights: list[float], start: int, factor: float) -> None:
    weights[start:] = [weight * factor for weight in weights[start:]]


def _read_factor(number: str) -> float:
    try:
        return float(number)
    except ValueError:
        raise errors.JobError(f"the weight {number[:20]!r} in the prompt is not a number") from None


def _merge(texts: list[list[str]], weights: list[float]) -> Section:
    """Joins neighbours of the same weight, so that they are tokenised together."""
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


@dataclass(slots=True)
class _Open:
    start: int
    colons: int = 0
    last_colon: int = 0
    bars: int = 0


def refuse_editing(text: str) -> None:
    """Raises JobError for prompt editing `[from:to:when]` and alternation `[a|b]`."""
    if ":" not in text and "|" not in text:
        return
    opened: list[_Open] = []
    for match in _SIGN.finditer(text, max(0, text.find("[")), text.rfind("]") + 1):
        sign = match[0]
        if sign in _PLAIN_FACTORS:
            opened.append(_Open(match.start()))
        elif not opened:
            continue
        elif sign == ":":
            opened[-1].colons += 1
            opened[-1].last_colon = match.start()
        elif sign == "|":
            opened[-1].bars += 1
        elif sign in _OPENED_BY and not _is_group(text, opened.pop(), match.start()):
            opened.clear()


def _is_group(text: str, bracket: _Open, end: int) -> bool:
    """Whether a bracketed span is emphasis; raises JobError for editing and alternation."""
    start, colons, bars = bracket.start, bracket.colons, bracket.bars
    if text[start] != _OPENED_BY[text[end]]:
        return False
    if text[start] == "(":
        return not bars and colons <= 1
    changing = None
    if bars and not colons:
        changing = "alternation [a|b]"
    elif not bars and colons in {1, 2}:
        when = _WHEN.match(text, bracket.last_colon + 1)
        changing = "prompt editing [from:to:when]" if when and when.end() == end else None
    if changing:
        shown = text[start : min(end + 1, start + 80)]
        raise errors.JobError(f"the prompt uses {changing}, which is not supported: {shown!r}")
    return not bars and not colons


def _read_tag(arguments: str) -> LoraTag:
    """Reads `name[:text encoder weight, 1[:UNet weight, the same]]`; also `te=` and `unet=`."""
    name, *rest = arguments.split(":")
    if not SAFE_NAME.fullmatch(name):
        raise errors.JobError(
            f"the LoRA name {name[:80]!r} is refused: use letters, digits, spaces and"
            " _ . + ( ) - only, without a path"
        )
    positional = [text for text in rest if "=" not in text]
    named = dict(text.split("=", 1) for text in rest if "=" in text)
    unknown = sorted(named.keys() - {"te", "unet"})
    if unknown or len(positional) > 2:  # noqa: PLR2004 - te and unet
        raise errors.JobError(
            f"cannot read <lora:{arguments[:80]}>: write <lora:name:weight>,"
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
