"""How an engine is told where compiled kernels are, and nothing of what others have compiled."""

import os
from pathlib import Path
from typing import Any


def forget_compiled(folder: Path) -> dict[str, str]:
    """Variables by which torch and Triton find nothing that this machine has compiled before.

    Beside the packages they keep parts of graphs, which a node that begins does not have.
    """
    return {
        "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"),
        "TRITON_CACHE_DIR": str(folder / "triton"),
    }


def engine_settings(packages: Path | None) -> dict[str, Any]:
    """Settings of an engine that finds compiled kernels in a folder, and keeps its own there.

    To be called before torch is imported, which reads the variables then.
    """
    if packages is None:
        return {}
    os.environ.update(forget_compiled(packages / f"process-{os.getpid()}"))
    return {"kernels": packages}
