"""Writes CLIP's tokenizer files from open-clip's vocabulary file (MIT), as SD1.5 ships them."""

import argparse
import gzip
import json
from pathlib import Path

from transformers.convert_slow_tokenizer import bytes_to_unicode

VOCABULARY_SIZE = 49_408
MERGE_COUNT = 49_152 - 256 - 2
START, END = "<|startoftext|>", "<|endoftext|>"


def write_tokenizer(vocabulary_file: Path, folder: Path) -> None:
    lines = gzip.decompress(vocabulary_file.read_bytes()).decode("utf-8").split("\n")
    merges = lines[1 : MERGE_COUNT + 1]
    characters = list(bytes_to_unicode().values())
    tokens = characters + [c + "</w>" for c in characters]
    tokens += ["".join(merge.split()) for merge in merges] + [START, END]
    if len(tokens) != VOCABULARY_SIZE:
        message = f"{vocabulary_file} gives {len(tokens)} tokens, not CLIP's {VOCABULARY_SIZE}."
        raise ValueError(message)
    folder.mkdir(parents=True, exist_ok=True)
    vocabulary = {token: index for index, token in enumerate(tokens)}
    (folder / "vocab.json").write_text(
        json.dumps(vocabulary, ensure_ascii=False, separators=(",", ":")),
        encoding="utf-8",
    )
    (folder / "merges.txt").write_text(
        "#version: 0.2\n" + "\n".join(merges) + "\n", encoding="utf-8"
    )
    special = {
        name: {"content": content, "lstrip": False, "normalized": True, "rstrip": False,
               "single_word": False}
        for name, content in (("bos_token", START), ("eos_token", END), ("unk_token", END))
    } | {"pad_token": END}  # fmt: skip
    (folder / "special_tokens_map.json").write_text(
        json.dumps(special, indent=2) + "\n"
    )
    settings = {
        "tokenizer_class": "CLIPTokenizer", "model_max_length": 77, "do_lower_case": True,
        "add_prefix_space": False, "errors": "replace", "bos_token": START, "eos_token": END,
        "unk_token": END, "pad_token": END,
    }  # fmt: skip
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "vocabulary_file", type=Path, help="bpe_simple_vocab_16e6.txt.gz"
    )
    parser.add_argument(
        "--output", type=Path, default=Path("imagefleet/job/clip_tokenizer")
    )
    arguments = parser.parse_args()
    write_tokenizer(arguments.vocabulary_file, arguments.output)


if __name__ == "__main__":
    main()
