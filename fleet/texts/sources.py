"""The sources of text states: a text encoder on this machine, or files made elsewhere."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Protocol

from imagefleet import errors
from imagefleet.job import chain
from imagefleet.job.message import Job
from worker.engine.pixel import text_states
from worker.files import safetensors


class States(Protocol):
    """Text states that are to be stored, by the stem of their files' names."""

    encoder: str

    @property
    def stems(self) -> Collection[str]: ...

    def describe(self, stem: str) -> str:
        """One of them, as a person knows it."""

    def read(self, stem: str) -> bytes:
        """The content of a file; takes seconds where an encoder has to make it.

        Raises:
            SetupError: it cannot be read, or the encoder cannot be loaded.
        """


class Prompts:
    """The prompts of jobs, each once: those of all stages, and the negative ones."""

    def __init__(self) -> None:
        self.jobs = 0
        self._texts: dict[str, None] = {}

    def add(self, _place: str, job: Job) -> None:
        self.jobs += 1
        for stage in chain.left(job):
            for prompt in (stage.parsed_prompt, stage.parsed_negative_prompt):
                self._texts[text_states.clean(str(prompt))] = None

    def by_stem(self, encoder: str) -> Mapping[str, str]:
        """The prompts by the names of the files with their states."""
        return {text_states.stem(text, encoder): text for text in self._texts}


class Encoded:
    """The states of prompts by the text encoder of a stage, which is loaded for the first."""

    def __init__(self, model: Path, prompts: Prompts, device: str) -> None:
        """*model* is the stage's folder.

        Raises:
            SetupError: it has no text encoder, or a library is missing.
        """
        from worker.engine.pixel import text_stage

        text_stage.require_encoder(model)
        self.encoder = text_stage.encoder_name(model)
        self._prompts = prompts.by_stem(self.encoder)
        self._model = model
        self._device = device
        self._stage: text_stage.TextStage | None = None

    @property
    def stems(self) -> Collection[str]:
        return self._prompts.keys()

    def describe(self, stem: str) -> str:
        return self._prompts[stem]

    def read(self, stem: str) -> bytes:
        from worker.engine import device
        from worker.engine.pixel import text_stage

        if self._stage is None:
            found = device.find_device(self._device)
            dtype = device.find_dtype("auto", found)
            self._stage = text_stage.TextStage(self._model, found, dtype)
        prompt = self._prompts[stem]
        # One by one, so that they do not depend on which prompts come together.
        (states,) = self._stage.encode([prompt])
        return text_states.content(prompt, self.encoder, states)


class Made:
    """A folder of states that `python -m worker.engine.pixel.text_stage` has made."""

    def __init__(self, folder: Path) -> None:
        """Raises SetupError if there is none in the *folder*, or a file is of another kind."""
        files = sorted(folder.glob(f"*{text_states.SUFFIX}"))
        encoders = {_encoder_of(each) for each in files}
        if len(encoders) != 1:
            said = ", ".join(sorted(encoders)) or "none"
            raise errors.SetupError(
                f"{str(folder)!r} should have the text states of one text encoder, and has {said}"
            )
        (self.encoder,) = encoders
        self._files = {each.stem: each for each in files}

    @property
    def stems(self) -> Collection[str]:
        return self._files.keys()

    def describe(self, stem: str) -> str:
        return self._files[stem].name

    def read(self, stem: str) -> bytes:
        try:
            return self._files[stem].read_bytes()
        except OSError as error:
            raise _unreadable(self._files[stem], error) from None


def _encoder_of(path: Path) -> str:
    """The encoder of a file's text states."""
    try:
        with path.open("rb") as file:
            header = safetensors.read_header(file)
        size = path.stat().st_size
    except safetensors.MalformedError:
        raise errors.SetupError(f"{str(path)!r} is not a readable .safetensors file") from None
    except OSError as error:
        raise _unreadable(path, error) from None
    if header.metadata.get("format") != text_states.FORMAT:
        raise errors.SetupError(f"{str(path)!r} has no text states")
    if size < header.file_bytes:
        raise errors.SetupError(
            f"{str(path)!r} is cut off: it has {size:,} of {header.file_bytes:,} bytes"
        )
    return header.metadata.get("encoder", "")


def _unreadable(path: Path, error: OSError) -> errors.SetupError:
    return errors.SetupError(f"{str(path)!r} cannot be read: {error.strerror}")
