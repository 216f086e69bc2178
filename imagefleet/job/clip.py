"""CLIP's tokenizer, which Stable Diffusion 1.x checkpoints share: part of the package.

A single-file checkpoint carries none. The files are OpenAI's vocabulary, as open-clip has it;
`benchmarks/demo_world/make_tokenizer.py` writes them.
"""

from __future__ import annotations

from pathlib import Path

#: In the format of transformers and tokenizers: vocab.json and merges.txt.
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
