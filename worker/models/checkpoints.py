"""The checkpoints that a worker is given, each with the name by which jobs ask for it."""

import asyncio
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from imagefleet.errors import NodeError, SetupError, TransientError, UnusableFileError
from imagefleet.files.kinds import MODEL, OTHER_MODEL
from imagefleet.job.prompt import SAFE_NAME
from imagefleet.storage.enqueue import MODELS
from imagefleet.storage.protocol import BlobStore
from worker.files import check as file_check
from worker.files import model
from worker.files.addresses import STORE_SCHEME
from worker.files.disk_cache import SUFFIX
from worker.settings import WorkerSettings

#: Every model of the storage.
_ALL_STORED = frozenset({f"{STORE_SCHEME}*", f"{STORE_SCHEME}{MODELS}*"})

#: A worker measures the queues of each.
MAX_CHECKPOINTS = 50


@dataclass(frozen=True)
class Checkpoint:
    """One model, and the worker's settings with this model alone."""

    name: str
    settings: WorkerSettings


def given(settings: WorkerSettings) -> list[str]:
    """The models that `--model` names: one, or several separated by commas."""
    text = settings.model
    if "," not in text or Path(text).expanduser().exists():
        return [text]
    return [part.strip() for part in text.split(",") if part.strip()]


def check(settings: WorkerSettings) -> None:
    """Raises SetupError if the worker could never load one of its models; no network is used."""
    for text in given(settings):
        if text not in _ALL_STORED:
            file_check.check(settings.model_copy(update={"model": text}))


async def find(settings: WorkerSettings, files: BlobStore) -> list[Checkpoint]:
    """The checkpoints of the settings, that of jobs without a model first.

    Raises SetupError if jobs cannot name one, or tell two apart, the storage has none, or a setting
    fits only one model.
    """
    texts: list[str] = []
    for text in given(settings):
        texts += await _stored(files) if text in _ALL_STORED else [text]
    texts = list(dict.fromkeys(texts))
    if len(texts) == 1:
        return [_checkpoint(settings, texts[0])]
    if len(texts) > MAX_CHECKPOINTS:
        raise SetupError(
            f"--model: {len(texts):,} models; a worker serves {MAX_CHECKPOINTS} at most"
        )
    for name in ("model_sha256", "config"):
        if getattr(settings, name) is not None:
            raise SetupError(
                f"--{name.replace('_', '-')} is for one model, and --model names {len(texts)}"
            )
    found = [_checkpoint(settings, text) for text in texts]
    refuse_unusable_names(found)
    return found


def _checkpoint(settings: WorkerSettings, text: str) -> Checkpoint:
    own = settings.model_copy(update={"model": text})
    return Checkpoint(model.name_of(own), own)


async def _stored(files: BlobStore) -> list[str]:
    """The addresses of all models in the storage, in the order of their names."""
    names = sorted(
        [name async for name in files.names(MODELS) if name.endswith(MODEL.suffixes)]
    )
    if not names:
        raise SetupError(
            f"there is no model in {MODELS} of the container {files.name!r}: `imagefleet files"
            " add model` puts one there"
        )
    return [STORE_SCHEME + name.removeprefix(MODELS) for name in names]


def refuse_unusable_names(checkpoints: Sequence[Checkpoint]) -> None:
    """Raises SetupError if jobs cannot name a model but the first, or not tell two apart."""
    for checkpoint in checkpoints[1:]:
        if not SAFE_NAME.fullmatch(checkpoint.name):
            raise SetupError(
                f"--model: no job can name the model {checkpoint.name[:80]!r}: rename it to at most"
                " 128 letters, digits, spaces and _ . + ( ) -"
            )
    counts = Counter(each.name for each in checkpoints)
    if repeated := [name for name, count in counts.items() if count > 1]:
        raise SetupError(
            f"--model: two models have the name {repeated[0]!r}, by which jobs ask for them"
        )


@dataclass(eq=False)
class OtherModels:
    """Finds the checkpoints that jobs name beside their own: refiners, and those of second passes.

    By name: of the worker's own models, else of the storage; each is fetched once.
    """

    _settings: WorkerSettings
    _blobs: BlobStore
    _fetched: dict[str, Path] = field(default_factory=dict)
    _fetching: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def find(self, name: str | None, own: str) -> Path | None:
        """A model's path on this machine; None for the engine's *own*.

        Raises UnusableFileError if there is none, or another kind of file, and TransientError.
        """
        if name in (None, own):
            return None
        async with self._fetching:
            if name not in self._fetched or not self._fetched[name].exists():
                self._fetched[name] = await self._fetch(name)
            return self._fetched[name]

    async def _fetch(self, name: str) -> Path:
        try:
            settings = self._settings_of(name)
            fetched = await model.fetch(settings, self._blobs, wanted=OTHER_MODEL)
        except SetupError as error:
            raise UnusableFileError(
                f"the checkpoint {name!r}: {error.message}"
            ) from error
        except NodeError as error:  # whose own model is there
            raise TransientError(f"the checkpoint {name!r}: {error.message}") from error
        return model.local_path(fetched)

    def _settings_of(self, name: str) -> WorkerSettings:
        for text in given(self._settings):
            own = self._settings.model_copy(update={"model": text})
            if "*" not in text and model.name_of(own) == name:
                return own
        stored = {
            "model": f"{STORE_SCHEME}{name}{SUFFIX}",
            "model_sha256": None,
            "config": None,
        }
        return self._settings.model_copy(update=stored)
