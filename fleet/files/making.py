"""Makes kernels of a model on this machine."""

from dataclasses import replace
from pathlib import Path

from cli import console
from imagefleet.errors import SetupError
from imagefleet.files.kinds import KERNELS
from imagefleet.storage.open import open_storage
from imagefleet.validation import JSONDict
from worker.engine import load
from worker.files import check, model
from worker.settings import WorkerSettings, require_libraries


def make_kernels(
    settings: WorkerSettings, output: Path, *, dry_run: bool, as_json: bool
) -> None:
    """Compiles what a worker does at its start, a file for each graph; raises SetupError."""
    require_libraries()
    from worker import process
    from worker.engine import device as devices

    check.check(settings)
    if not Path(settings.model).expanduser().exists():
        settings = console.run(_fetch_model(settings))
    is_gpu = devices.find_device(settings.device).type == "cuda"
    if settings.compile == "off" or not is_gpu:
        raise SetupError(
            "kernels are compiled for NVIDIA GPUs, and here is none that torch can use: run this on"
            " a machine with the GPU of the workers, without --device cpu and --compile off"
        )
    document: JSONDict = {"folder": str(output)}
    if dry_run:
        note = "would compile for this GPU, into"
        document["files"] = None
        console.show(document, str(output), notes=[note], as_json=as_json)
        return
    console.print_note("compiling for this GPU: some minutes, once")
    engine = load.load_engine(
        replace(process.engine_settings(settings), compile="auto", kernels=output)
    )
    graphs = engine.graphs
    engine.close()
    files = sorted(map(str, output.glob(f"*{KERNELS.suffixes[0]}")))
    if not files:
        raise SetupError("torch could not compile anything: the warnings above say why")
    note = f"{graphs['compiled']} compiled, {graphs['disk']} were there:"
    console.show({**document, "files": files}, *files, notes=[note], as_json=as_json)


async def _fetch_model(settings: WorkerSettings) -> WorkerSettings:
    async with open_storage(settings) as storage:
        return await model.fetch(settings, storage.files)
