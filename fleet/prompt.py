"""`imagefleet prompt`: shows how a prompt is parsed and tokenized, without torch."""

from __future__ import annotations

import itertools
import json
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, cast

import tokenizers
import typer
from tokenizers import decoders, models, normalizers, pre_tokenizers

from fleet import console, options
from fleet.files import known
from fleet.files.known import Known
from fleet.options import argument, option
from imagefleet import errors
from imagefleet.job import clip
from imagefleet.job import prompt as prompts
from worker.files import check

#: CLIP's pre-tokenization: words, digits and punctuation.
_WORD = (
    r"<\|startoftext\|>|<\|endoftext\|>|'s|'t|'re|'ve|'m|'ll|'d"
    r"|[\p{L}]+|[\p{N}]|[^\s\p{L}\p{N}]+"
)


@options.flat
def command(
    text: str = argument("The prompt.", metavar="TEXT", show_default=False),
    negative: str = option("The negative prompt.", ""),
    model: Path | None = option(
        "A checkpoint or its tokenizer folder; by default CLIP's tokenizer.", metavar="PATH"
    ),
    embedding_directory: Path | None = option(
        "A folder of textual inversion embeddings, as the worker's."
        f" [env: {options.variable('embedding_directory')}]",
        metavar="PATH",
        envvar=options.variable("embedding_directory"),
        show_envvar=False,
    ),
    storage: str | None = option(
        "Also the embeddings in this storage, local:PATH say.", metavar="URL"
    ),
    as_json: options.AsJson = False,
) -> None:
    """Shows a prompt's tokens, weights, LoRAs and embeddings.

    Without --embedding-directory or --storage the names of embeddings are words. Exit code 2 if it
    uses unsupported syntax, or an embedding that cannot be used.

    imagefleet prompt 'a (red:1.3) castle, <lora:night-palette:0.8>' --negative 'blurry'

    imagefleet prompt 'a castle' --negative 'EasyNegative' --storage local:./imagefleet-data
    """
    tokenizer = _load_tokenizer(_find_tokenizer(model))
    tokenise = partial(_tokenise, tokenizer)
    parsed = {
        "prompt": _parse(text, prompts.read_prompt),
        "negative": _parse(negative, prompts.read_negative_prompt),
    }
    found: Sequence[Known] = ()
    if embedding_directory or storage:
        texts = [each for each in parsed.values() if isinstance(each, prompts.Prompt)]
        has_family = model is not None and (model.is_file() or (model / "unet").is_dir())
        family = check.family(model) if model is not None and has_family else None
        found = console.run(known.find(texts, tokenise, embedding_directory, storage, family))
    named = clip.Names[clip.Embedding](
        zip(tokenise([each.name for each in found]), found, strict=True)
    )
    readings = {name: _read(each, tokenizer, named) for name, each in parsed.items()}
    if as_json:
        console.print_json(readings)
    else:
        for name, reading in readings.items():
            _print(name, reading, tokenizer)
        if embedding_directory or storage:
            for name in known.missing(f"{text} {negative}", found):
                console.print_note(
                    f"'embedding:{name}' is ComfyUI's, and there is no embedding {name!r} here:"
                    " words"
                )
        if "<lora:" in negative.lower():
            console.print_plain("a LoRA tag in a negative prompt is plain text")
    unsupported = {name: one["unsupported"] for name, one in readings.items() if one["unsupported"]}
    for name, reason in unsupported.items():
        console.print_error(f"{name}: {reason}")
    if unsupported:
        raise typer.Exit(console.EXIT_OPERATOR_MUST_ACT)


def _parse(text: str, read: Callable[[str], prompts.Prompt]) -> prompts.Prompt | errors.JobError:
    """The parsed prompt, or why it is not supported."""
    try:
        return read(text)
    except errors.JobError as error:
        return error


def _tokenise(tokenizer: tokenizers.Tokenizer, texts: Sequence[str]) -> list[list[int]]:
    cleaned = [clip.cleaned(each) for each in texts]
    return [each.ids for each in tokenizer.encode_batch(cleaned, add_special_tokens=False)]


def _read(
    parsed: prompts.Prompt | errors.JobError,
    tokenizer: tokenizers.Tokenizer,
    named: clip.Names[clip.Embedding],
) -> dict[str, Any]:
    """The prompt as JSON, or the reason why it is not supported."""
    try:
        if isinstance(parsed, errors.JobError):
            raise parsed
        comma = tokenizer.token_to_id(",</w>")
        cut = clip.cut_into_chunks(parsed, partial(_tokenise, tokenizer), comma, named)
    except errors.JobError as error:
        nothing: dict[str, Any] = {name: [] for name in ("chunks", "loras", "embeddings")}
        return nothing | {"tokens": 0, "weight": 1.0, "unsupported": error.message}
    used = [
        {
            "name": (found := cast(Known, insert.embedding)).name,
            "family": found.family,
            "tokens": found.length,
            "chunk": number,
            "at": insert.at,
            "unusable": found.reason,
        }
        for number, chunk in enumerate(cut, start=1)
        for insert in chunk.inserts
    ]
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
        "embeddings": used,
        "weight": parsed.weight,
        "unsupported": next((each["unusable"] for each in used if each["unusable"]), None),
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
    """Tokens that a diffusers checkpoint's text encoder knows; 0 where there is none."""
    try:
        config = json.loads((model / "text_encoder" / "config.json").read_bytes())
        return int(config["vocab_size"])
    except (OSError, ValueError, KeyError, TypeError):
        return 0


def _load_tokenizer(folder: Path) -> tokenizers.Tokenizer:
    """CLIP's tokenizer, with the rules that transformers gives it."""
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
        named = {each["at"]: each for each in reading["embeddings"] if each["chunk"] == number}
        for weight, words in _words(chunk, named, tokenizer):
            console.print_plain(f"    {weight:<6.4g} {words}")
        for found in named.values():
            tokens = console.counted(found["tokens"], "token")
            console.print_plain(f"    embedding {found['name']} ({found['family']}): {tokens}")
    if reading["weight"] != 1:
        console.print_plain(f"  weight of the prompt as a whole: {reading['weight']:g}")
    for lora in reading["loras"]:
        console.print_plain(
            f"  LoRA {lora['name']}: {lora['unet_weight']:g} on the UNet,"
            f" {lora['text_encoder_weight']:g} on the text encoder"
        )


def _words(
    chunk: Mapping[str, Any],
    named: Mapping[int, Mapping[str, Any]],
    tokenizer: tokenizers.Tokenizer,
) -> Iterator[tuple[float, str]]:
    """The words of each weight, with the names of embeddings in place of theirs."""
    parts: list[tuple[float, int | str]] = [*zip(chunk["weights"], chunk["ids"], strict=True)]
    for at, embedding in sorted(named.items(), reverse=True):
        parts[at : at + embedding["tokens"]] = [(parts[at][0], f"[{embedding['name']}]")]
    for weight, run in itertools.groupby(parts, key=operator.itemgetter(0)):
        texts: list[str] = []
        for kind, group in itertools.groupby((part for _, part in run), type):
            if kind is str:
                texts += map(str, group)
            else:
                text = tokenizer.decode([*map(int, group)], skip_special_tokens=False)
                texts.append(text.replace("</w>", " ").strip())
        yield weight, " ".join(texts)
