"""A prompt's words for CLIP: its tokenizer, how texts are cleaned for it, and embeddings in tokens.

The tokenizer is part of the package, since a single-file checkpoint carries none. The files are
OpenAI's vocabulary, as open-clip has it; `benchmarks/demo_world/make_tokenizer.py` writes them.
"""

from __future__ import annotations

import html
import html.entities
import itertools
import re
import unicodedata
from pathlib import Path

#: CLIP's tokenizer in the format of transformers: vocab.json and merges.txt.
TOKENIZER = Path(__file__).with_name("clip_tokenizer")

#: A text encoder with a vocabulary of another size needs a tokenizer of its own.
VOCABULARY_SIZE = 49_408


def tokenizer_of(folder: Path, vocabulary_size: int) -> Path:
    """The tokenizer of a checkpoint in *folder*: its own, else CLIP's where it fits.

    It may not exist: then there is none.
    """
    own = folder / "tokenizer"
    has_own = any((own / name).is_file() for name in ("vocab.json", "tokenizer.json"))
    return TOKENIZER if vocabulary_size == VOCABULARY_SIZE and not has_own else own


#: Text to leave as it is: ASCII without control characters and HTML's names of characters.
_CLEAN = re.compile(r"[\t\n\f\r !-%'-~]*")

#: HTML's whole names of characters: "this&not that" is no "this¬ that".
_NAMED = re.compile(r"&(#[0-9]{1,7};|#[xX][0-9a-fA-F]{1,6};|[0-9A-Za-z]{1,24};)")

#: Names within names (`&amp;quot;`) are read as deep as this; without a limit, time is quadratic.
_MAX_NAMED = 4

_DROPPED = [*range(9), 0x0B, *range(0x0E, 0x20), 0x7F, *range(0x206A, 0x2070), 0xFEFF]
_DROPPED += range(0xFFF9, 0xFFFD)
_LIGATURES = (0x132, 0x133, *range(0x1C4, 0x1CD), *range(0x1F1, 0x1F4), *range(0xFB00, 0xFB07))
_REPLACED = {
    **dict.fromkeys(_DROPPED, ""),
    **{
        each: unicodedata.normalize("NFKC", chr(each))
        for each in itertools.chain(_LIGATURES, range(0xFF01, 0xFFF0))
    },
    **dict.fromkeys((0x2BC, *range(0x2018, 0x201C)), "'"),
    **dict.fromkeys(range(0x201C, 0x2020), '"'),
    0x149: "'n",
    0x3000: " ",
    0xFB05: "\u017ft",
}


def cleaned(text: str) -> str:
    """A prompt's words as AUTOMATIC1111's tokenizers clean them, with ftfy.

    Curly quotes are straight, wide signs (as of Chinese and Japanese keyboards) and ligatures the
    usual ones, control characters are dropped, and HTML's names of characters (`&amp;`) are read,
    unless a `<` is in the same line or before. What was decoded wrongly is not repaired.
    """
    if _CLEAN.fullmatch(text):
        return text
    sign = text.find("<")
    end = len(text) if sign < 0 else text.rfind("\n", 0, sign) + 1
    head, rest = text[:end].translate(_REPLACED), text[end:].translate(_REPLACED)
    for _ in range(_MAX_NAMED):
        if not _NAMED.search(head):
            break
        head = _NAMED.sub(_character, head).translate(_REPLACED)
    return head + rest


def _character(name: re.Match[str]) -> str:
    if name[1].startswith("#"):
        return html.unescape(name[0])
    return html.entities.html5.get(name[1], name[0])
