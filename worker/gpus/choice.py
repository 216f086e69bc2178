"""The GPUs that `--gpus` means, by the driver and CUDA_VISIBLE_DEVICES; without torch or CUDA."""

import os
from collections.abc import Iterator
from dataclasses import dataclass

import pynvml

from imagefleet import concurrency
from imagefleet.errors import SetupError
from worker import replica
from worker.settings import MachineSettings

ALL = "all"

_VISIBLE = "CUDA_VISIBLE_DEVICES"


@dataclass(frozen=True)
class Gpu:
    """One GPU: its name in logs and metrics, and its name in CUDA_VISIBLE_DEVICES."""

    name: str
    visible: str | None = None  # for a process on the CPU

    def environment(self, processes: int) -> dict[str, str]:
        """The variables of its process, one of so many."""
        if self.visible is not None and processes == 1:
            return {_VISIBLE: self.visible}
        variables = {"OMP_NUM_THREADS": threads(processes)}
        return (
            variables if self.visible is None else {_VISIBLE: self.visible, **variables}
        )


def threads(processes: int) -> str:
    """Torch's threads for one of so many processes: OMP_NUM_THREADS, where that is set."""
    # With every core for each, they would wait for each other.
    return os.environ.get(
        "OMP_NUM_THREADS", str(max(1, concurrency.cores() // processes))
    )


def choose(settings: MachineSettings) -> list[Gpu]:
    given = settings.gpus or ALL
    names = [each.strip() for each in given.split(",")]
    if len(set(names)) < len(names):
        raise SetupError(f"--gpus {given}: a GPU is named twice")
    if settings.device == "cpu":
        if not all(name.isdecimal() for name in names):
            raise SetupError(
                f"--gpus {given}: with --device cpu give a number for each process, such as 0,1"
            )
        return [Gpu(name) for name in names]
    if settings.device.startswith("cuda:"):
        raise SetupError(
            f"--gpus {given} and --device {settings.device} both choose a GPU: leave out --device"
        )
    there = _visible_gpus(given)
    if given == ALL:
        return there
    known = {each.name: each for each in there}
    if unknown := [name for name in names if name not in known]:
        among = (
            f" among CUDA_VISIBLE_DEVICES={os.environ[_VISIBLE]}"
            if _VISIBLE in os.environ
            else ""
        )
        raise SetupError(
            f"--gpus {given}: there is no GPU {', '.join(unknown)}{among}; there are"
            f" {', '.join(each.name for each in there)}"
        )
    return [known[name] for name in names]


def _visible_gpus(given: str) -> list[Gpu]:
    """The GPUs that a process started from here can use; raises SetupError if there are none."""
    if (visible := os.environ.get(_VISIBLE)) is not None:
        # In CUDA's order, which need not be the driver's: only CUDA knows the cards.
        entries = [each.strip() for each in visible.split(",")]
        found = [
            Gpu(str(number), entry) for number, entry in enumerate(entries) if entry
        ]
        if len({each.visible for each in found}) < len(found):
            raise SetupError(f"--gpus {given}: {_VISIBLE}={visible} names a GPU twice")
        if not found:
            raise SetupError(f"--gpus {given}: {_VISIBLE}={visible} leaves no GPU")
        return found
    cards = replica.ask_driver(lambda: list(_cards()))
    if isinstance(cards, Exception) and not isinstance(cards, replica.NO_DRIVER):
        raise SetupError(f"--gpus {given}: the GPUs cannot be listed: {cards}")
    if isinstance(cards, Exception) or not cards:
        raise SetupError(
            f"--gpus {given}: this machine has no NVIDIA GPU, or no driver for it; to use the CPU,"
            " leave out --gpus"
        )
    return cards


def _cards() -> Iterator[Gpu]:
    """The machine's GPUs by UUID: CUDA may number cards otherwise than the driver does."""
    for number in range(pynvml.nvmlDeviceGetCount()):
        handle = pynvml.nvmlDeviceGetHandleByIndex(number)
        yield Gpu(str(number), str(pynvml.nvmlDeviceGetUUID(handle)))
