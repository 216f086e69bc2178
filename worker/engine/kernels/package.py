"""Compiled calls that travel: one file each, which other processes load and bind to their tensors.

Nothing is traced where a package is loaded. Loading it runs the code in it: whoever can write such
a file where workers find it can run programs there.
"""

import functools
import hashlib
import platform
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from filelock import FileLock
from torch import Tensor

import worker
from imagefleet.files import kernels
from imagefleet.files.kinds import KERNELS
from worker.engine import phases
from worker.engine.kernels.description import Description, imitate

_ARTIFACT = "artifact"

#: As matrix products, 1x1 convolutions can be fused with what follows.
_INDUCTOR_OPTIONS = {"conv_1x1_as_mm": True}

_HASH_CHARACTERS = 16

_preparing = threading.Lock()


class UnusablePackageError(Exception):
    """A package is damaged, or its kernels cannot be loaded here."""


class _TakenError(Exception):
    """Raised in place of a traced call's first run."""


def prepare() -> None:
    """Imports what packages are loaded with and reads torch's sources: two seconds, once a process.

    Nothing else has to wait for it: for a thread of its own while the weights are read.
    """
    with _preparing:
        from torch._inductor.codecache import torch_key

        torch_key()


def compile_package(content: bytes, target: Path) -> None:
    """Traces a described call, compiles it for its device and writes the package.

    For a process of its own: torch keeps the interpreter's lock for most of the time. Of several
    processes that want the same, one compiles it. Raises whatever torch's compiler does.
    """
    # The system frees the lock of a process that dies.
    with FileLock(target.with_suffix(".lock")):
        if not target.exists():
            _compile(content, target)


def _compile(content: bytes, target: Path) -> None:
    def compile_graph(
        graph: torch.fx.GraphModule, inputs: Sequence[Any], places: Sequence[int]
    ) -> None:
        with phases.timed("compile"):
            artifact = torch._inductor.standalone_compile(  # noqa: SLF001
                graph,
                list(inputs),
                dynamic_shapes="from_tracing_context",
                options={"config_patches": _INDUCTOR_OPTIONS},
                aot=True,
            )
        with TemporaryDirectory(dir=target.parent) as folder:
            saved = Path(folder) / _ARTIFACT
            artifact.save(path=str(saved))
            part = Path(folder) / target.name
            device = inputs[0].device
            made_for = platform.machine()
            if device.type == "cuda":
                made_for = torch.cuda.get_device_name(device)
            made_for += f", torch {torch.__version__.partition('+')[0]}"
            kernels.write(part, kernels.Header(made_for, places), saved.read_bytes())
            part.replace(target)

    trace(content, compile_graph)


def trace(
    content: bytes,
    take: Callable[[torch.fx.GraphModule, Sequence[Any], Sequence[int]], None],
) -> None:
    """Traces a described call to one graph, which *take* gets, and runs nothing.

    With it come the graph's inputs, and their places among the description's tensors.
    """
    (function, arguments), tensors = imitate(content)
    places = {id(tensor): place for place, tensor in enumerate(tensors)}

    def backend(graph: torch.fx.GraphModule, inputs: Sequence[Any]) -> Any:
        held = [
            node.meta["grapharg"].example
            for node in graph.graph.nodes
            if node.op == "placeholder"
        ]
        take(graph, inputs, [places[id(each)] for each in held])
        raise _TakenError

    traced = torch.compile(function, fullgraph=True, dynamic=False, backend=backend)
    try:
        with phases.timed("trace"), torch.no_grad():
            traced(*arguments)
    except Exception as error:
        if _TakenError.__name__ not in f"{type(error).__name__} {error}":
            raise  # Dynamo gives a backend's errors a type of its own


@dataclass(frozen=True)
class Package:
    """The kernels of a call, loaded."""

    _artifact: Callable[..., Any]
    _inputs: Sequence[int]

    @classmethod
    def load(cls, path: Path) -> "Package":
        """Takes a second or two; raises UnusablePackageError."""
        try:
            header, content = kernels.read(path)
            prepare()
            with TemporaryDirectory(dir=path.parent) as folder:
                artifact = Path(folder) / _ARTIFACT
                artifact.write_bytes(content)
                loaded = torch._inductor.CompiledArtifact.load(path=str(artifact))  # type: ignore[attr-defined]  # noqa: SLF001
        except Exception as error:  # torch may raise anything
            raise UnusablePackageError(f"{path.name}: {error}") from error
        return cls(loaded, header.inputs)

    def bind(self, tensors: Sequence[Tensor]) -> Callable[[], Any]:
        """The call of a description's tensors, without arguments."""
        bound = [tensors[place] for place in self._inputs]
        return functools.partial(self._artifact, *bound)


def name_of(label: str, description: Description, device: torch.device) -> str:
    """The file of a call's package: another for other versions, another card or another call."""
    digest = hashlib.sha256(repr(_surroundings(device)).encode())
    digest.update(description.content)
    return f"{label}-{digest.hexdigest()[:_HASH_CHARACTERS]}{KERNELS.suffixes[0]}"


@functools.cache
def _surroundings(device: torch.device) -> dict[str, object]:
    """All that kernels depend on beside what is compiled."""
    # Any of the engine's files may change what is compiled.
    folder = Path(worker.__file__).parent / "engine"
    sources = hashlib.sha256()
    for path in sorted(folder.rglob("*.py")):
        sources.update(path.relative_to(folder).as_posix().encode())
        sources.update(path.read_bytes())
    found: dict[str, object] = {
        "torch": torch.__version__,
        "python": platform.python_version_tuple()[:2],
        "machine": platform.machine(),
        "sources": sources.hexdigest(),
        "fp16_accumulation": getattr(
            torch.backends.cuda.matmul, "allow_fp16_accumulation", False
        ),
    }
    if device.type == "cuda":
        found["gpu"] = torch.cuda.get_device_name(device)
        found["capability"] = torch.cuda.get_device_capability(device)
        found["triton"] = metadata.version("triton")
    return found
