"""`imagefleet prompt`: shows how a prompt is parsed and tokenized, without torch."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fleet import console, options
from imagefleet import errors
from imagefleet.job import clip
from imagefleet.job import prompt as prompts

if TYPE_CHECKING:
    import tokenizers

#: CLIP's pre-tokenization: words, digits and punctuation.
_WORD = (
    r"<\|startoftext\|>|<\|endoftext\|>|'s|'t|'re|'ve|'m|'ll|'d"
    r"|[\p{L}]+|[\p{N}]|[^\s\p{L}\p{N}]+"
)


def command(
    text: Annotated[str, typer.Argument(metavar="TEXT", help="The prompt.", show_default=False)],
    negative: Annotated[str, typer.Option(help="The negative prompt.")] = "",
    model: Annotated[
        Path | None,
        typer.Option(
            metavar="PATH",
            help="A checkpoint or its tokenizer folder; by default CLIP's tokenizer.",
        ),
    ] = None,
    as_json: options.AsJson = False,
) -> None:
    """Shows a prompt's chunks, tokens, weights and LoRAs.

    Exit code 2 if it uses unsupported syntax.

    imagefleet prompt 'a (red:1.3) castle, <lora:night-palette:0.8>' --negative 'blurry'
    """
    with console.one_line_errors():
        tokenizer = _load_tokenizer(_find_tokenizer(model))
        readings = {
            "prompt": _read(text, prompts.read_prompt, tokenizer),
            "negative": _read(negative, prompts.read_negative_prompt, tokenizer),
        }
    if as_json:
        console.print_json(readings)
    else:
        for name, reading in readings.items():
            _print(name, reading, tokenizer)
        if "<lora:" in negative.lower():
            console.print_plain("a LoRA tag in a negative prompt is plain text")
    unsupported = {name: one["unsupported"] for name, one in readings.items() if one["unsupported"]}
    for name, reason in unsupported.items():
        console.print_error(f"{name}: {reason}")
    if unsupported:
        raise typer.Exit(console.EXIT_OPERATOR_MUST_ACT)


def _read(
    text: str, read: Callable[[str], prompts.Prompt], tokenizer: tokenizers.Tokenizer
) -> dict[str, Any]:
    """The parsed prompt as JSON, or the reason why it is not supported."""

    def tokenise(texts: Sequence[str]) -> list[list[int]]:
        return [each.ids for each in tokenizer.encode_batch(list(texts), add_special_tokens=False)]

    try:
        parsed = read(text)
        cut = prompts.cut_into_chunks(parsed, tokenise, tokenizer.token_to_id(",</w>"))
    except errors.JobError as error:
        nothing: dict[str, Any] = {"tokens": 0, "chunks": [], "loras": [], "weight": 1.0}
        return nothing | {"unsupported": error.message}
    return {
        "tokens": sum(len(chunk.tokens) for chunk in cut),
        "chunks": [
            {
                "tokens": [tokenizer.id_to_token(token) for token in chunk.tokens],
                "ids": chunk.tokens,
                "weights": chunk.weights,
            }
            for chunk in cut
        ],
        "loras": [asdict(lora) for lora in parsed.loras],
        "weight": parsed.weight,
        "unsupported": None,
    }


def _find_tokenizer(model: Path | None) -> Path:
    if model is None or model.is_file():
        return clip.TOKENIZER  # a single file has none of its own
    candidates = [clip.tokenizer_of(model, _vocabulary_size(model)), model]
    for folder in candidates:
        if any((folder / name).is_file() for name in ("vocab.json", "tokenizer.json")):
            return folder
    raise errors.SetupError(f"no tokenizer in {str(candidates[0])!r}")


def _vocabulary_size(model: Path) -> int:
    """Of the text encoder of a checkpoint in diffusers format; 0 where there is none."""
    try:
        config = json.loads((model / "text_encoder" / "config.json").read_bytes())
        return int(config["vocab_size"])
    except (OSError, ValueError, KeyError, TypeError):
        return 0


def _load_tokenizer(folder: Path) -> tokenizers.Tokenizer:
    """CLIP's tokenizer, with the rules that transformers gives it."""
    import tokenizers
    from tokenizers import decoders, models, normalizers, pre_tokenizers

    try:
        if not (folder / "vocab.json").is_file():
            tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
            tokenizer.no_truncation()
            tokenizer.no_padding()
            return tokenizer
        model = models.BPE.from_file(
            str(folder / "vocab.json"),
            str(folder / "merges.txt"),
            end_of_word_suffix="</w>",
            unk_token="<|endoftext|>",  # noqa: S106 - not a secret
        )
    except Exception as error:  # the library raises only this class
        raise errors.SetupError(f"{str(folder)!r} is not a CLIP tokenizer: {error}") from error
    tokenizer = tokenizers.Tokenizer(model)
    spaces = normalizers.Replace(tokenizers.Regex(r"\s+"), " ")
    rules = [normalizers.NFC(), spaces, normalizers.Lowercase()]
    tokenizer.normalizer = normalizers.Sequence(rules)
    words = pre_tokenizers.Split(tokenizers.Regex(_WORD), behavior="removed", invert=True)
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([words, to_bytes])
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|startoftext|>", "<|endoftext|>"])
    return tokenizer


def _print(name: str, reading: dict[str, Any], tokenizer: tokenizers.Tokenizer) -> None:
    if reading["unsupported"]:
        return
    chunk_count = console.counted(len(reading["chunks"]), "chunk")
    console.print_plain(f"{name}: {console.counted(reading['tokens'], 'token')} in {chunk_count}")
    for number, chunk in enumerate(reading["chunks"], start=1):
        console.print_plain(f"  chunk {number}, {console.counted(len(chunk['ids']), 'token')}")
        pairs = zip(chunk["weights"], chunk["ids"], strict=True)
        for weight, run in itertools.groupby(pairs, key=lambda pair: pair[0]):
            words = tokenizer.decode([token for _, token in run], skip_special_tokens=False)
            console.print_plain(f"    {weight:<6.4g} {words.replace('</w>', ' ').strip()}")
    if reading["weight"] != 1:
        console.print_plain(f"  weight of the prompt as a whole: {reading['weight']:g}")
    for lora in reading["loras"]:
        console.print_plain(
            f"  LoRA {lora['name']}: {lora['unet_weight']:g} on the UNet,"
            f" {lora['text_encoder_weight']:g} on the text encoder"
        )
