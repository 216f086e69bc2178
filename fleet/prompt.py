"""`imagefleet prompt`: shows how a prompt is read, without a GPU and without torch."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fleet import console
from imagefleet import errors
from imagefleet.job import chunks
from imagefleet.job import prompt as prompts

if TYPE_CHECKING:
    import tokenizers

#: CLIP's own vocabulary, which every SD1.x checkpoint shares.
_TOKENIZER = Path(__file__).resolve().parent.parent / "demo_model" / "tokenizer"

#: How CLIP cuts a text before it looks for the vocabulary's pieces in it.
_WORD = (
    r"<\|startoftext\|>|<\|endoftext\|>|'s|'t|'re|'ve|'m|'ll|'d"
    r"|[\p{L}]+|[\p{N}]|[^\s\p{L}\p{N}]+"
)


@dataclass(frozen=True, slots=True)
class _Reading:
    """What one prompt comes to; only a reason where it is refused."""

    loras: Sequence[prompts.LoraTag] = ()
    chunks: Sequence[chunks.Chunk] = ()
    unsupported: str | None = None

    @property
    def tokens(self) -> int:
        return sum(len(chunk.tokens) for chunk in self.chunks)


def command(
    text: Annotated[str, typer.Argument(metavar="TEXT", help="The prompt.", show_default=False)],
    negative: Annotated[str, typer.Option(help="The negative prompt.")] = "",
    model: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER",
            help="A checkpoint, or its tokenizer's folder; CLIP's vocabulary without it.",
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print it as JSON.")] = False,
) -> None:
    """Shows how a prompt is read: chunks, tokens, weights, LoRAs.

    Exit code 2 where it uses what is not supported.

    imagefleet prompt 'a (red:1.3) castle, <lora:night-palette:0.8>' --negative 'blurry'
    """
    with console.one_line_errors():
        tokenizer = _load_tokenizer(_find_tokenizer(model))
        readings = {
            "prompt": _read(text, prompts.read_prompt, tokenizer),
            "negative": _read(negative, prompts.read_negative_prompt, tokenizer),
        }
    if as_json:
        console.print_json({name: _record(one, tokenizer) for name, one in readings.items()})
    else:
        for name, reading in readings.items():
            _print(name, reading, tokenizer)
        if "<lora:" in negative.lower():
            _say("in a negative prompt, a LoRA's tag is words like any others")
    reasons = {name: one.unsupported for name, one in readings.items() if one.unsupported}
    for name, reason in reasons.items():
        console.print_error(f"{name}: {reason}")
    if reasons:
        raise typer.Exit(console.EXIT_OPERATOR_MUST_ACT)


def _read(
    text: str, read: Callable[[str], prompts.Prompt], tokenizer: tokenizers.Tokenizer
) -> _Reading:
    def tokenise(texts: Sequence[str]) -> list[list[int]]:
        encoded = tokenizer.encode_batch(list(texts), add_special_tokens=False)
        return [encoding.ids for encoding in encoded]

    try:
        parsed = read(text)
        cut = chunks.cut(parsed, tokenise, tokenizer.token_to_id(",</w>"))
    except errors.JobError as error:
        return _Reading(unsupported=error.message)
    return _Reading(parsed.loras, cut)


def _find_tokenizer(model: Path | None) -> Path:
    candidates = [_TOKENIZER] if model is None else [model / "tokenizer", model]
    for folder in candidates:
        if any((folder / name).is_file() for name in ("vocab.json", "tokenizer.json")):
            return folder
    if model is None:
        raise errors.SetupError("no tokenizer comes with this installation: name a --model FOLDER")
    raise errors.SetupError(f"there is no tokenizer in {str(candidates[0])!r}")


def _load_tokenizer(folder: Path) -> tokenizers.Tokenizer:
    """CLIP's tokenizer, as transformers builds it."""
    try:
        import tokenizers
        from tokenizers import decoders, models, normalizers, pre_tokenizers
    except ModuleNotFoundError as error:
        raise errors.SetupError(
            "to count tokens, tokenizers is missing: pip install tokenizers"
        ) from error
    try:
        if not (folder / "vocab.json").is_file():
            tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
            tokenizer.no_truncation()
            tokenizer.no_padding()
            return tokenizer
        vocabulary = json.loads((folder / "vocab.json").read_text(encoding="utf-8"))
        lines = (folder / "merges.txt").read_text(encoding="utf-8").splitlines()
        pairs = (line.split() for line in lines if line and not line.startswith("#version"))
        merges = [(left, right) for left, right in pairs]
        model = models.BPE(
            vocab=vocabulary,
            merges=merges,
            end_of_word_suffix="</w>",
            unk_token="<|endoftext|>",  # noqa: S106 - a token of another kind
        )
    except Exception as error:  # the library raises nothing narrower
        raise errors.SetupError(f"{str(folder)!r} holds no CLIP tokenizer: {error}") from error
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.normalizer = normalizers.Sequence(
        [
            normalizers.NFC(),
            normalizers.Replace(tokenizers.Regex(r"\s+"), " "),
            normalizers.Lowercase(),
        ]
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(tokenizers.Regex(_WORD), behavior="removed", invert=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|startoftext|>", "<|endoftext|>"])
    return tokenizer


def _record(reading: _Reading, tokenizer: tokenizers.Tokenizer) -> dict[str, Any]:
    return {
        "tokens": reading.tokens,
        "chunks": [
            {
                "tokens": [tokenizer.id_to_token(token) for token in chunk.tokens],
                "ids": chunk.tokens,
                "weights": chunk.weights,
            }
            for chunk in reading.chunks
        ],
        "loras": [asdict(lora) for lora in reading.loras],
        "unsupported": reading.unsupported,
    }


def _print(name: str, reading: _Reading, tokenizer: tokenizers.Tokenizer) -> None:
    if reading.unsupported:
        return
    chunk_count = console.counted(len(reading.chunks), "chunk")
    _say(f"{name}: {console.counted(reading.tokens, 'token')} in {chunk_count}")
    for number, chunk in enumerate(reading.chunks, start=1):
        _say(f"  chunk {number}, {console.counted(len(chunk.tokens), 'token')}")
        for weight, words in _runs(chunk, tokenizer):
            _say(f"    {weight:<6.4g} {words}")
    for lora in reading.loras:
        _say(
            f"  LoRA {lora.name}: {lora.unet_weight:g} on the UNet,"
            f" {lora.text_encoder_weight:g} on the text encoder"
        )


def _runs(chunk: chunks.Chunk, tokenizer: tokenizers.Tokenizer) -> Iterable[tuple[float, str]]:
    pairs = zip(chunk.weights, chunk.tokens, strict=True)
    for weight, run in itertools.groupby(pairs, key=lambda pair: pair[0]):
        words = tokenizer.decode([token for _, token in run], skip_special_tokens=False)
        yield weight, words.replace("</w>", " ").strip()


def _say(text: str) -> None:
    console.stdout.print(text, highlight=False, markup=False, soft_wrap=True)
