"""`imagefleet prompt`: shows how a prompt is parsed and tokenized, without torch."""

import functools
import itertools
import operator
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict

import typer
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from cli import console, options
from cli.options import argument, option
from imagefleet.errors import JobError
from imagefleet.job import clip
from imagefleet.job import prompt as prompts
from imagefleet.job.prompt import Prompt, State
from imagefleet.storage import deliveries
from imagefleet.validation import JSONDict, JSONObject

#: CLIP's pre-tokenization: words, digits and punctuation.
_WORD = (
    r"<\|startoftext\|>|<\|endoftext\|>|'s|'t|'re|'ve|'m|'ll|'d"
    r"|[\p{L}]+|[\p{N}]|[^\s\p{L}\p{N}]+"
)


@options.flat
def command(
    text: str = argument("The prompt.", metavar="TEXT", show_default=False),
    negative: str = option("The negative prompt.", ""),
    steps: int = option("Steps, which prompt editing counts.", 20, min=1, max=150),
    as_json: options.AsJson = False,
) -> None:
    """Shows a prompt's tokens, weights and LoRAs.

    Of prompt editing it shows the words of each step, with a sampler of one call a step. The names
    of embeddings are words here. Exit code 2 if it uses unsupported syntax.

    imagefleet prompt 'a (red:1.3) castle, <lora:night-palette:0.8>' --negative 'blurry'
    """
    readings = {
        "prompt": _read(prompts.read_prompt, text, steps),
        "negative": _read(prompts.read_negative_prompt, negative, steps),
    }
    if as_json:
        console.print_json(readings)
    else:
        for name, reading in readings.items():
            _print(name, reading)
        if "<lora:" in negative.lower():
            console.print_plain("a LoRA tag in a negative prompt is plain text")
    unsupported = {
        name: one["unsupported"] for name, one in readings.items() if one["unsupported"]
    }
    for name, reason in unsupported.items():
        console.print_error(f"{name}: {reason}")
    if unsupported:
        raise typer.Exit(console.EXIT_OPERATOR_MUST_ACT)


def _tokenise(texts: Sequence[str]) -> list[list[int]]:
    cleaned = [clip.cleaned(each) for each in texts]
    return [
        each.ids for each in tokenizer().encode_batch(cleaned, add_special_tokens=False)
    ]


def _read(read: Callable[..., Prompt], text: str, steps: int) -> JSONDict:
    """The prompt as JSON, or the reason why it is not supported."""
    texts = []
    loras = []
    unsupported = None
    try:
        parsed = read(text, steps=steps)
        for number, part in enumerate(parsed.subprompts, start=1):
            drawn = [part.at(call) for call in range(steps)]
            for state in {state.text: state for state in part.states}.values():
                calls = enumerate(drawn, start=1)
                texts.append(
                    {
                        "part": number,
                        "weight": part.weight,
                        **_text(state),
                        "steps": [step for step, at in calls if at.text == state.text],
                    }
                )
        loras = [asdict(lora) for lora in parsed.loras]
    except JobError as error:
        texts = []
        unsupported = error.message
    return {
        "texts": texts,
        "loras": loras,
        "unsupported": unsupported,
        "comments": re.findall("#.*", text),
    }


def chunks_of(text: State) -> tuple[clip.Chunk, ...]:
    """A prompt's words in chunks of 75 tokens, without embeddings; JobError for too many."""
    return clip.cut_into_chunks(text, _tokenise, tokenizer().token_to_id(",</w>"))


def _text(state: State) -> JSONDict:
    cut = chunks_of(state)
    name = tokenizer().id_to_token
    chunks = [
        {
            "tokens": [name(token) for token in chunk.tokens],
            "ids": chunk.tokens,
            "weights": chunk.weights,
        }
        for chunk in cut
    ]
    return {"tokens": sum(len(chunk.tokens) for chunk in cut), "chunks": chunks}


@functools.cache
def tokenizer() -> Tokenizer:
    """CLIP's tokenizer, with the rules that transformers gives it."""
    model = models.BPE.from_file(
        str(clip.TOKENIZER / "vocab.json"),
        str(clip.TOKENIZER / "merges.txt"),
        end_of_word_suffix="</w>",
        unk_token="<|endoftext|>",  # noqa: S106 - not a secret
    )
    found = Tokenizer(model)
    found.normalizer = normalizers.Sequence(
        [
            normalizers.NFC(),
            normalizers.Replace(Regex(r"\s+"), " "),
            normalizers.Lowercase(),
        ]
    )
    found.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_WORD), behavior="removed", invert=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    found.decoder = decoders.ByteLevel()
    found.add_special_tokens(["<|startoftext|>", "<|endoftext|>"])
    return found


def _print(name: str, reading: JSONDict) -> None:
    if reading["unsupported"]:
        return
    parts = max(text["part"] for text in reading["texts"])
    last = max(text["steps"][-1] for text in reading["texts"])
    for text in reading["texts"]:
        at = f", part {text['part']} of {parts}" if parts > 1 else ""
        if len(text["steps"]) < last:
            at += f", steps {deliveries.shown_images(text['steps'])}"
        chunk_count = console.counted(len(text["chunks"]), "chunk")
        tokens = console.counted(text["tokens"], "token")
        console.print_plain(f"{name}{at}: {tokens} in {chunk_count}")
        for number, chunk in enumerate(text["chunks"], start=1):
            console.print_plain(
                f"  chunk {number}, {console.counted(len(chunk['ids']), 'token')}"
            )
            for weight, words in _words(chunk):
                console.print_plain(f"    {weight:<6.4g} {words}")
        if text["weight"] != 1:
            console.print_plain(
                f"  weight of the prompt as a whole: {text['weight']:g}"
            )
    for lora in reading["loras"]:
        console.print_plain(
            f"  LoRA {lora['name']}: {lora['unet_weight']:g} on the UNet,"
            f" {lora['text_encoder_weight']:g} on the text encoder"
        )
    for comment in reading["comments"]:
        console.print_plain(f"  left out: {comment}")


def _words(chunk: JSONObject) -> Iterator[tuple[float, str]]:
    """The words of each weight."""
    parts = zip(chunk["weights"], chunk["tokens"], strict=True)
    for weight, run in itertools.groupby(parts, key=operator.itemgetter(0)):
        text = tokenizer().decoder.decode([token for _, token in run])
        yield weight, " ".join(text.replace("</w>", " ").split())
