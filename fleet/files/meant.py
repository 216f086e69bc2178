"""Words of prompts that look like names of embeddings which workers have not, and are drawn so."""

import difflib
import re
from collections.abc import Collection, Iterator
from pathlib import Path

from imagefleet.job.message import Job

_LINES = (
    Path(__file__).with_name("embeddings.txt").read_text(encoding="utf-8").splitlines()
)

#: Names of embeddings that are no words, in small letters: see the file.
KNOWN = frozenset(line.lower() for line in _LINES if not line.startswith("#"))

_WORD = re.compile(r"[^\W\d_][\w.+-]{3,80}")

#: What most names have and few words: a digit, a joining sign, a capital within.
_LIKE_A_NAME = re.compile(r"\w[\d_-]|[a-z][A-Z]")

#: How alike a word and a name must be, from 0 to 1.
_ALIKE = 0.85


def words(job: Job) -> Iterator[str]:
    """The words of a job's prompts that may be meant for embeddings, without its LoRAs."""
    for prompt in {str(each) for each in job.all_prompts}:
        for word in _WORD.findall(prompt):
            name = word.rstrip(".+-")
            if _LIKE_A_NAME.search(name) or name.lower() in KNOWN:
                yield name


def reason(word: str, names: Collection[str]) -> str:
    """Why a word is no name of the *names* of embeddings, in small letters, though it seems so."""
    lower = word.lower()
    if lower in names:
        return ""
    begin_so = {name.replace("_", "-"): name for name in names if name[:1] == lower[:1]}
    if alike := difflib.get_close_matches(lower.replace("_", "-"), begin_so, 1, _ALIKE):
        return f"a word, much like the embedding {begin_so[alike[0]]!r}"
    return (
        "a word: no embedding of this name is in embeddings/" if lower in KNOWN else ""
    )
