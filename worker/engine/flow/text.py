"""Text states of a chat model: what its encoder says of a prompt, read whole and as it stands.

A prompt is the user's turn of Qwen3's chat. The states of some of the encoder's layers lie side by
side, for as many tokens whatever the prompt's length; the encoder's last layers are not loaded.
"""

import functools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import Module
from transformers import Qwen3Config, Qwen3Model

from imagefleet.errors import JobError, SetupError
from imagefleet.telemetry.logs import log
from worker.engine.families import prompts, reading
from worker.engine.families.prompts import PromptEncoder
from worker.engine.pixel.text_states import CHAT_MARK

#: The encoder's `model_type`.
KIND = "qwen3"


@dataclass(frozen=True)
class TextRule:
    """How a family reads its text encoder."""

    #: The layers whose states are taken, from 1; negative ones are counted from the end.
    layers: tuple[int, ...]
    #: Tokens that every prompt is padded to, or cut off at.
    tokens: int = 512
    #: True if the chat's answer may begin with thoughts.
    thinks: bool = False
    #: True for networks that see a prompt's own tokens alone: the states of others are zero.
    zeroes_padding: bool = False


class ChatEncoder(PromptEncoder):
    """A Qwen3 encoder; its states are those of diffusers' `Flux2KleinPipeline.encode_prompt`."""

    def __init__(
        self, folder: Path, rule: TextRule, device: torch.device, dtype: torch.dtype
    ) -> None:
        """*folder* has the subfolders `text_encoder` and `tokenizer`.

        Raises SetupError if one of them is missing or damaged.
        """
        self._rule = rule
        own = folder / "text_encoder"
        config = reading.read_json(own / "config.json")
        whole = int(config.get("num_hidden_layers", 0))
        if not whole:
            raise SetupError(f"{str(own)!r} has no config.json of a text encoder")
        self._layers = [layer % (whole + 1) for layer in rule.layers]
        # Without what follows on the last layer that is taken.
        last = max(self._layers)
        config["num_hidden_layers"] = last
        config.pop("layer_types", None)
        config.pop("max_window_layers", None)
        encoder = reading.read_network(Qwen3Model, own, config)
        if last < whole:
            encoder.norm = nn.Identity()
        # Its frequencies were made without memory, and no file has them.
        encoder.rotary_emb = type(encoder.rotary_emb)(Qwen3Config.from_dict(config))
        Module.to(encoder, dtype=dtype)
        self.size_bytes = sum(each.nbytes for each in encoder.parameters())
        super().__init__(folder, encoder, device, rule.tokens, self._chat)

    def place(self, *, may_stay: bool) -> None:
        """Moves the encoder to the device, or its layers only while each of them computes."""
        if may_stay:
            self._encoder.to(self._device)
            return
        log.info(
            "the text encoder's layers are copied to the GPU for each batch of prompts",
            action="text_streamed",
        )
        for part in (self._encoder.rotary_emb, self._encoder.norm):
            part.to(self._device)
        for layer in self._encoder.layers:
            held = {each: each.data for each in layer.parameters()}
            if torch.cuda.is_available():
                held = {each: data.pin_memory() for each, data in held.items()}
            layer.register_forward_pre_hook(
                functools.partial(_enter, held, self._device)
            )
            layer.register_forward_hook(
                functools.partial(_enter, held, torch.device("cpu")), always_call=True
            )

    def refuse_long(self, prompts: Iterable[str]) -> None:
        """Raises JobError for a prompt of more tokens than are read."""
        for prompt in prompts:
            chat = self._chat(prompt)
            with self._tokenizing:
                tokens = len(self._tokenizer(chat).input_ids)
            if tokens > self._rule.tokens:
                raise JobError(
                    f"the prompt {prompt[:40]!r} has {tokens:,} tokens with its chat's frame, and"
                    f" this model reads {self._rule.tokens}: shorten it"
                )

    def _chat(self, prompt: str) -> str:
        chat: str = self._tokenizer.apply_chat_template(
            [{"role": "user", "content": prompt}],
            tokenize=False,
            add_generation_prompt=True,
            enable_thinking=self._rule.thinks,
        )
        return chat

    def _states(self, ids: Tensor, mask: Tensor) -> Tensor:
        embed = self._encoder.embed_tokens
        output = self._encoder(
            inputs_embeds=embed(ids.to(embed.weight.device)).to(self._device),
            attention_mask=mask,
            output_hidden_states=True,
            use_cache=False,
        )
        states = torch.cat(
            [output.hidden_states[layer] for layer in self._layers], dim=-1
        )
        if self._rule.zeroes_padding:
            states *= mask.to(states)[..., None]
        return states


def _enter(
    held: Mapping[nn.Parameter, Tensor], device: torch.device, *_called: object
) -> None:
    for parameter, weight in held.items():
        parameter.data = weight.to(device, non_blocking=True)


def encoder_name(folder: Path, rule: TextRule) -> str:
    """The name of a folder's text encoder and of what is taken of it, for text states."""
    width = prompts.config_of(folder).get("hidden_size")
    layers = "-".join(map(str, rule.layers))
    return f"{prompts.name_of(folder, 'Qwen3')} {width}{CHAT_MARK}{layers}"


def states_width(folder: Path, rule: TextRule) -> int:
    return len(rule.layers) * int(prompts.config_of(folder).get("hidden_size", 0))
