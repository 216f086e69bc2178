"""The GPUs that `--gpus` means, by the driver and CUDA_VISIBLE_DEVICES; without torch or CUDA."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import pynvml

from imagefleet import concurrency, errors
from worker import replica
from worker.settings import MachineSettings

ALL = "all"

_VISIBLE = "CUDA_VISIBLE_DEVICES"

#: Errors of NVML on a card that knows nothing of MIG, or has less of it than its type could.
_NO_MIG = (
    pynvml.NVMLError_NotSupported,
    pynvml.NVMLError_NotFound,
    pynvml.NVMLError_InvalidArgument,
)


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU: its name in logs and metrics, its UUID, and its name in CUDA_VISIBLE_DEVICES.

    *visible* is None for a process on the CPU.
    """

    name: str
    uuid: str = ""
    visible: str | None = None

    def environment(self, processes: int) -> dict[str, str]:
        """The variables of its process, one of so many."""
        if self.visible is not None and processes == 1:
            return {_VISIBLE: self.visible}
        variables = {"OMP_NUM_THREADS": threads(processes)}
        return variables if self.visible is None else {_VISIBLE: self.visible, **variables}


def threads(processes: int) -> str:
    """Torch's threads for one of so many processes: OMP_NUM_THREADS, where that is set."""
    # With every core for each, they would wait for each other.
    return os.environ.get("OMP_NUM_THREADS", str(max(1, concurrency.cores() // processes)))


def choose(settings: MachineSettings) -> list[Gpu]:
    given = settings.gpus or ALL
    names = [each.strip() for each in given.split(",")]
    if len(set(names)) < len(names):
        raise errors.SetupError(f"--gpus {given}: a GPU is named twice")
    if settings.device == "cpu":
        if not all(name.isdecimal() for name in names):
            raise errors.SetupError(
                f"--gpus {given}: with --device cpu give a number for each process, such as 0,1"
            )
        return [Gpu(name) for name in names]
    if settings.device.startswith("cuda:"):
        raise errors.SetupError(
            f"--gpus {given} and --device {settings.device} both choose a GPU: leave out --device"
        )
    there = _visible_gpus(given)
    if given == ALL:
        return there
    known = {each.uuid: each for each in there} | {each.name: each for each in there}
    if unknown := [name for name in names if name not in known]:
        among = (
            f" among CUDA_VISIBLE_DEVICES={os.environ[_VISIBLE]}" if _VISIBLE in os.environ else ""
        )
        raise errors.SetupError(
            f"--gpus {given}: there is no GPU {', '.join(unknown)}{among}; there are"
            f" {', '.join(each.name for each in there)}"
        )
    chosen = [known[name] for name in names]
    if len(set(chosen)) < len(chosen):
        raise errors.SetupError(f"--gpus {given}: a GPU is named twice, by its number and its UUID")
    return chosen


def _visible_gpus(given: str) -> list[Gpu]:
    """The GPUs that a process started from here can use; raises SetupError if there are none."""
    cards = replica.ask_driver(lambda: list(_cards()))
    if isinstance(cards, Exception) and not isinstance(cards, replica.NO_DRIVER):
        raise errors.SetupError(f"--gpus {given}: the GPUs cannot be listed: {cards}")
    if isinstance(cards, Exception) or not cards:
        raise errors.SetupError(
            f"--gpus {given}: this machine has no NVIDIA GPU, or no driver for it; to use the CPU,"
            " leave out --gpus"
        )
    if _VISIBLE not in os.environ:
        return cards
    found = list(_listed(os.environ[_VISIBLE], cards))
    if not found:
        raise errors.SetupError(
            f"--gpus {given}: CUDA_VISIBLE_DEVICES={os.environ[_VISIBLE]} leaves no GPU of"
            f" {', '.join(each.name for each in cards)}"
        )
    if len({each.visible for each in found}) < len(found):
        raise errors.SetupError(
            f"--gpus {given}: CUDA_VISIBLE_DEVICES={os.environ[_VISIBLE]} names a GPU twice"
        )
    return found


def _cards() -> Iterator[Gpu]:
    """The machine's GPUs by UUID: CUDA may number cards otherwise than the driver does."""
    for number in range(pynvml.nvmlDeviceGetCount()):
        handle = pynvml.nvmlDeviceGetHandleByIndex(number)
        instances = list(_instances(number, handle))
        uuid = str(pynvml.nvmlDeviceGetUUID(handle))
        yield from instances or [Gpu(str(number), uuid, uuid)]


def _instances(number: int, handle: object) -> Iterator[Gpu]:
    """The instances of a card in MIG mode, named as Docker and nvidia-smi number them."""
    try:
        mode, _ = pynvml.nvmlDeviceGetMigMode(handle)
        count = pynvml.nvmlDeviceGetMaxMigDeviceCount(handle) if mode else 0
    except _NO_MIG:
        return
    for instance in range(count):
        try:
            found = pynvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, instance)
        except _NO_MIG:
            continue
        uuid = str(pynvml.nvmlDeviceGetUUID(found))
        yield Gpu(f"{number}:{instance}", uuid, uuid)


def _listed(variable: str, cards: Sequence[Gpu]) -> Iterator[Gpu]:
    """The GPUs in CUDA_VISIBLE_DEVICES, numbered from 0 on; like CUDA, none after one it lacks."""
    whole_cards = len({each.name.partition(":")[0] for each in cards})
    for number, entry in enumerate(each.strip() for each in variable.split(",")):
        if entry.isdecimal():
            if int(entry) >= whole_cards:
                return
            # In CUDA's order, which need not be the driver's: only CUDA knows the card.
            yield Gpu(str(number), visible=entry)
            continue
        uuid = next((each.uuid for each in cards if entry and each.uuid.startswith(entry)), None)
        if uuid is None:
            return
        yield Gpu(str(number), uuid, uuid)
