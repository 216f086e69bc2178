"""Writes `demo_model/judges/clip.onnx`: how well a picture of the demo's world fits its prompt.

The judge of `evaluation/score/demo` sees the share of the picture of each object in each colour. The
prompt's tokens name objects, each in the colour before it; the score is 100 times the cosine of the
roots of both, as that of CLIP.

    PYTHONPATH=. python demo_model/training/make_judge.py
"""

import warnings
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import CLIPTokenizer

from evaluation.score.demo import judge
from evaluation.score.demo.extractor import _SYNONYMS
from imagefleet.job import clip

FILE = Path(__file__).parents[1] / "judges" / "clip.onnx"

#: Tokens of a prompt.
TOKENS = 77

#: No object, or no colour.
NONE = -1


class Fit(nn.Module):
    """Images [n, 3, 128, 128] of 0 to 1 and tokens [n, 77] -> scores [n]."""

    def __init__(self) -> None:
        super().__init__()
        self.judge = judge.load_judge()
        tokenizer = CLIPTokenizer.from_pretrained(clip.TOKENIZER, local_files_only=True)
        vocabulary = tokenizer.get_vocab()

        def table(words: dict[str, int]) -> Tensor:
            numbers = torch.full((clip.VOCABULARY_SIZE,), NONE, dtype=torch.int32)
            for word, number in words.items():
                if (token := vocabulary.get(f"{word}</w>")) is not None:
                    numbers[token] = number
            return numbers

        objects = {name: number for number, name in enumerate(self.judge.shapes)}
        plurals = {f"{name}s": number for name, number in objects.items()}
        others = {word: objects[name] for word, name in _SYNONYMS.items()}
        colours = {name: number for number, name in enumerate(self.judge.colours)}
        self.register_buffer("objects", table({**plurals, **others, **objects}))
        self.register_buffer("colours", table(colours))

    def forward(self, images: Tensor, tokens: Tensor) -> Tensor:
        return 100 * (self.shown(images) * self.named(tokens)).sum(1)

    def shown(self, images: Tensor) -> Tensor:
        objects, colours = self.judge(images)
        objects = objects.softmax(1)[:, 1:].flatten(2)
        shares = objects @ colours.softmax(1).flatten(2).transpose(1, 2)
        return self._roots(shares)

    def named(self, tokens: Tensor) -> Tensor:
        found = self.objects[tokens][:, 1:, None]
        colour = self.colours[tokens][:, :-1, None]
        objects = (found == torch.arange(len(self.judge.shapes))).float()
        colours = (colour == torch.arange(len(self.judge.colours))).float()
        colours = torch.where(colour == NONE, 1 / colours.shape[2], colours)
        return self._roots(objects.transpose(1, 2) @ colours + 1e-9)

    def _roots(self, shares: Tensor) -> Tensor:
        shares = shares.flatten(1)
        return (shares / shares.sum(1, keepdim=True)).sqrt()


def main() -> None:
    FILE.parent.mkdir(exist_ok=True)
    inputs = (
        torch.rand(2, 3, judge.IMAGE_PX, judge.IMAGE_PX),
        torch.zeros(2, TOKENS).long(),
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        torch.onnx.export(
            Fit().eval(),
            inputs,
            str(FILE),
            input_names=["images", "tokens"],
            output_names=["scores"],
            dynamic_axes={name: {0: "n"} for name in ("images", "tokens", "scores")},
            dynamo=False,
        )
    print(f"{FILE}: {FILE.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
