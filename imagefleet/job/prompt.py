"""AUTOMATIC1111's prompts: comments, emphasis, `BREAK`, LoRAs, `AND`, editing.

Its other syntax is refused by name: as words, it would give an image that nobody asked for.
"""

import functools
import itertools
import math
import re
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import NamedTuple

from imagefleet.errors import JobError
from imagefleet.job import editing

#: The name of a model or of a file that a field names, which is untrusted: one path segment.
SAFE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_ .+()-]{0,127}")

#: Signs that a LoRA's or an embedding's name has not, which prompts name: those of paths, and what
#: Windows takes for none.
_UNSAFE = re.compile(r'^\.|[/\\:*?"<>|]')

#: File systems take names of 255, with the suffix.
_MAX_NAME_BYTES = 200

#: LoRAs are used between -2 and 2; this catches a typo such as `35` for `0.35`.
WEIGHT_LIMIT = 10.0

#: Usual are 0 to 2. Far outside, embeddings overflow in float16, which looks like a broken GPU.
EMPHASIS_LIMIT = 100.0

#: Deeper brackets add no weight (1.1 ** 32 is 21), and would be parsed in quadratic time.
MAX_DEPTH = 32

#: Per prompt: each is held in memory while an image is drawn.
MAX_LORAS = 16

#: Prompts joined with AND: each takes a row of the UNet's calls.
MAX_SUBPROMPTS = 8

#: The steps of a prompt that is read for no job: the API's default of this program.
_USUAL_STEPS = 20

_TAG = re.compile(r"<(\w+):([^>]*)>")
_LORA_KINDS = {"lora", "lyco"}

_PLAIN_FACTORS = {"(": 1.1, "[": 1 / 1.1}
_OPENED_BY = {")": "(", "]": "["}
#: Words, and each sign by itself; a colon that starts no weight joins the words after it.
_EMPHASIS = re.compile(
    r"[()\[\]]|:\s*([+-]?[.\d]+)\s*\)|:?[^\\()\[\]:]+|:+(?=:)|:|\\[()\[\]\\]?"
)
_BREAK_WORD = "BREAK"
_BREAK = re.compile(rf"\b({_BREAK_WORD})\b")

#: What no prompt without weights has.
_WEIGHTED = re.compile(r"[()\[\]\\]")

#: The weight by which AUTOMATIC1111 knows a BREAK from the word; brackets change it.
_BREAK_WEIGHT = -1.0

#: Lines that are comments as a whole, then the ends of the others.
_COMMENT_LINE = re.compile(r"(?:^|\n)#.*(?:\n|$)")
_COMMENT = re.compile(r"#.*(?:\n|$)")

_AND = re.compile(r"\bAND\b")

_OWN_WEIGHT = re.compile(r"[+-]?(?:\d+\.?|\d*\.\d+)")


@dataclass(frozen=True, slots=True)
class LoraTag:
    """One LoRA of a prompt and its strength on each of the two networks it may change."""

    name: str
    text_encoder_weight: float
    unet_weight: float


class Part(NamedTuple):
    text: str
    weight: float


#: The parts between two BREAKs; no two neighbours have the same weight.
Section = tuple[Part, ...]
Sections = tuple[Section, ...]


class State(NamedTuple):
    """The words of a prompt in some of the UNet's calls."""

    #: The last call that has them, counted from 0; calls beyond the last state have the first.
    until: int
    text: str
    sections: Sections


class Subprompt(NamedTuple):
    """One of the prompts that AND joins, or the only one."""

    #: Texts in the course of the steps, ordered by `until`; several may have the same words.
    states: tuple[State, ...]
    #: Factor of the guidance scale: 1.3 of a prompt that ends with `:1.3`.
    weight: float = 1.0

    def at(self, call: int) -> State:
        return next(
            (state for state in self.states if call <= state.until), self.states[0]
        )


class Prompt(NamedTuple):
    """A parsed prompt: its text without LoRA tags, the tags in order, its words by step."""

    text: str
    loras: tuple[LoraTag, ...]
    subprompts: tuple[Subprompt, ...]

    def __str__(self) -> str:
        return self.text

    @property
    def weights(self) -> tuple[float, ...]:
        """Factor of the guidance scale, for each subprompt."""
        return tuple(subprompt.weight for subprompt in self.subprompts)

    @property
    def states(self) -> tuple[State, ...]:
        """The states of all subprompts, one of each text."""
        states = (state for subprompt in self.subprompts for state in subprompt.states)
        return tuple({state.text: state for state in states}.values())

    @property
    def sections(self) -> Sections:
        """Sections of all its texts, one after the other."""
        return tuple(section for state in self.states for section in state.sections)


#: What `is_safe_name` takes, for messages.
SAFE_NAMES = (
    f"give one of at most {_MAX_NAME_BYTES} bytes, with no path, no dot at the start, and none of"
    ' \\ : * ? " < > |'
)


def is_safe_name(name: str) -> bool:
    """True if a LoRA or an embedding may have this name, of letters and signs of any language."""
    is_short = 0 < len(name.encode(errors="replace")) <= _MAX_NAME_BYTES
    return is_short and name.isprintable() and not _UNSAFE.search(name)


def without_comments(prompt: str) -> str:
    """The prompt without what is between `#` and the end of its line."""
    if "#" not in prompt:
        return prompt
    return _COMMENT.sub("\n", _COMMENT_LINE.sub("\n", prompt))


# The stages of a job mostly have one prompt.
@functools.lru_cache(maxsize=64)
def read_prompt(
    prompt: str,
    *,
    comments: bool = True,
    steps: int = _USUAL_STEPS,
    first_steps: int = 0,
) -> Prompt:
    """Splits a prompt into weighted words and LoRAs; without *comments*, `#` is a letter.

    *steps* are those that prompt editing counts (`samplers.editing_steps`), of a second pass with
    the *first_steps* of the first. Raises JobError for what cannot be drawn.
    """
    if comments:
        prompt = without_comments(prompt)
    # No tag ends after the last '>'; searching there would take quadratic time.
    end = prompt.rfind(">") + 1
    loras = []
    for kind, arguments in _TAG.findall(prompt, 0, end):
        if kind.lower() not in _LORA_KINDS:
            raise JobError(
                f"the prompt asks for <{kind[:80]}:...>, which is not supported; only"
                " <lora:name:weight>"
            )
        loras.append(_read_tag(arguments))
    if len(loras) > MAX_LORAS:
        raise JobError(f"the prompt has {len(loras)} LoRAs; at most {MAX_LORAS} work")
    text = _TAG.sub("", prompt[:end]) + prompt[end:]
    joined = [_split_own_weight(each) for each in _AND.split(text)]
    if len(joined) > MAX_SUBPROMPTS:
        raise JobError(
            f"the prompt joins {len(joined)} prompts with AND; at most {MAX_SUBPROMPTS} work"
        )
    subprompts = tuple(
        Subprompt(_read_states(words, steps, first_steps), weight)
        for words, weight in joined
    )
    # A LoRA that is named twice is applied twice, both times with its last weights.
    last = {tag.name: tag for tag in loras}
    tags = tuple(last[tag.name] for tag in loras)
    read = Prompt(text if len(joined) > 1 else joined[0][0], tags, subprompts)
    if len(subprompts) > 1:
        editing.refuse_more(len(read.states))
    return read


def read_words(text: str) -> tuple[str, Sequence[LoraTag]]:
    """A prompt's words as they are drawn last, and its LoRAs; one that cannot be read as it is.

    That is without weights, escapes and the signs that end sections.
    """
    try:
        read = read_prompt(text)
    except JobError:
        return text, ()
    sections = [
        each for joined in read.subprompts for each in joined.states[-1].sections
    ]
    words = " ".join("".join(part.text for part in section) for section in sections)
    return " ".join(words.replace(" ,", "").split()).strip(" ,"), read.loras


def _split_own_weight(text: str) -> tuple[str, float]:
    """Splits off its own weight, `:1.3` at its end, as AUTOMATIC1111 does for what AND joins."""
    words, colon, number = text.rstrip().rpartition(":")
    if not colon or not _OWN_WEIGHT.fullmatch(number := number.strip()):
        return text.rstrip(), 1.0
    weight = float(number)
    if abs(weight) > WEIGHT_LIMIT:
        raise JobError(
            f"the prompt ends in {':' + number[:20]!r}, which is its weight as a whole and"
            f" multiplies cfg_scale: use a number between -{WEIGHT_LIMIT:g} and {WEIGHT_LIMIT:g},"
            " or write a comma after it if it is no weight"
        )
    return words.rstrip(), weight


# A campaign's jobs share a few negative prompts.
@functools.lru_cache(maxsize=256)
def read_negative_prompt(
    prompt: str,
    *,
    comments: bool = True,
    steps: int = _USUAL_STEPS,
    first_steps: int = 0,
) -> Prompt:
    """Reads it as `read_prompt` does, but takes AND, LoRA tags and `:1.3` at its end for words."""
    if comments:
        prompt = without_comments(prompt)
    return Prompt(prompt, (), (Subprompt(_read_states(prompt, steps, first_steps)),))


def weighted_parts(text: str) -> Sections:
    """A prompt's words with their weights, section by section; at least one section.

    `(x)` multiplies by 1.1, `[x]` divides by it, `(x:1.3)` multiplies by 1.3; they nest. An open
    bracket is closed at the end of the prompt; a closing one without a partner is a letter, and so
    is one after a backslash. BREAK ends its section outside brackets only: inside, AUTOMATIC1111
    draws the word, with a negative weight. Raises JobError for a weight that is not valid.
    """
    if not (_WEIGHTED.search(text) or "BREAK" in text):
        return ((Part(text, 1.0),) if text else (),)
    words: list[str] = []
    weights: list[float] = []
    opened: dict[str, list[int | None]] = {"(": [], "[": []}
    for match in _EMPHASIS.finditer(text):
        token, number = match.group(0, 1)
        bracket = "(" if number else _OPENED_BY.get(token)
        if token in opened:
            counts = len(opened["("]) + len(opened["["]) < MAX_DEPTH
            opened[token].append(len(words) if counts else None)
        elif bracket and opened[bracket]:
            start = opened[bracket].pop()
            if start is not None:
                factor = _read_factor(number) if number else _PLAIN_FACTORS[bracket]
                _multiply(weights, start, factor)
        else:
            found = _split_at_breaks(token)
            words += found
            weights += [_BREAK_WEIGHT if it == _BREAK_WORD else 1.0 for it in found]
    for bracket, starts in opened.items():
        for start in [start for start in starts if start is not None]:
            _multiply(weights, start, _PLAIN_FACTORS[bracket])
    sections: list[list[tuple[str, float]]] = [[]]
    for part in zip(words, weights, strict=True):
        if part == (_BREAK_WORD, _BREAK_WEIGHT):
            sections.append([])
        else:
            sections[-1].append(part)
    return tuple(map(_merge, sections))


def _split_at_breaks(token: str) -> list[str]:
    """The words before, between and after the BREAKs of a token, and these, in turn."""
    words = _BREAK.split(token.removeprefix("\\"))  # only an escape begins with one
    # BREAK swallows the white space around it.
    words[2::2] = [after.lstrip() for after in words[2::2]]
    words[:-1:2] = [before.rstrip() for before in words[:-1:2]]
    return words


def _multiply(weights: list[float], start: int, factor: float) -> None:
    weights[start:] = [weight * factor for weight in weights[start:]]


def _read_factor(number: str) -> float:
    try:
        return float(number)
    except ValueError:
        raise JobError(
            f"the weight {number[:20]!r} in the prompt is not a number"
        ) from None


def _merge(words: list[tuple[str, float]]) -> Section:
    """Joins neighbours of the same weight, so that they are tokenised together."""
    parts = []
    for weight, same in itertools.groupby(words, key=itemgetter(1)):
        text = "".join(each for each, _ in same)
        if not abs(weight) <= EMPHASIS_LIMIT:  # also refuses NaN
            raise JobError(
                f"the prompt gives {text[:40]!r} the weight {weight:.3g}; a weight is a number"
                f" between -{EMPHASIS_LIMIT:g} and {EMPHASIS_LIMIT:g}"
            )
        if text:
            parts.append(Part(text, weight))
    return tuple(parts)


def _read_states(text: str, steps: int, first_steps: int) -> tuple[State, ...]:
    found = (
        editing.schedule(text, steps, first_steps) if "[" in text else [(steps, text)]
    )
    sections = {
        words: weighted_parts(words)
        for words in dict.fromkeys(each for _, each in found)
    }
    return tuple(State(until, words, sections[words]) for until, words in found)


def _read_tag(arguments: str) -> LoraTag:
    """Reads `name[:text encoder weight, 1[:UNet weight, the same]]`; also `te=` and `unet=`."""
    name, *rest = arguments.split(":")
    name = unicodedata.normalize("NFC", name)
    if not is_safe_name(name):
        raise JobError(f"the LoRA name {name[:80]!r} is refused: {SAFE_NAMES}")
    positional = [text for text in rest if "=" not in text]
    named = dict(text.split("=", 1) for text in rest if "=" in text)
    unknown = sorted(named.keys() - {"te", "unet"})
    if unknown or len(positional) > 2:  # noqa: PLR2004 - te and unet
        raise JobError(
            f"cannot read <lora:{arguments[:80]}>: write <lora:name:weight>,"
            " <lora:name:text_encoder_weight:unet_weight>, or name them te= and unet="
        )
    te_text = named.get("te", positional[0] if positional else "1")
    unet_text = named.get("unet", positional[1] if len(positional) == 2 else te_text)  # noqa: PLR2004
    return LoraTag(
        name, _read_weight(te_text, arguments), _read_weight(unet_text, arguments)
    )


def _read_weight(text: str, tag: str) -> float:
    try:
        weight = float(text)
    except ValueError:
        weight = math.nan
    if not abs(weight) <= WEIGHT_LIMIT:  # also refuses NaN
        raise JobError(
            f"<lora:{tag[:80]}> has the weight {text[:20]!r}; a weight is a number between"
            f" -{WEIGHT_LIMIT:g} and {WEIGHT_LIMIT:g}"
        )
    return weight
