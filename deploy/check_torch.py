"""Fails the build of an image whose torch does not fit the CUDA version asked for.

python deploy/check_torch.py 12.8    (or 13, or none)
"""

import sys

import torch

#: The generations of GPUs from GeForce RTX 20 to 50. A GPU also runs the code of an older one with
#: the same first digit, so the RTX 40 series (8.9) needs none of its own.
ARCHITECTURES = ("sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120")


def problem(wanted: str, cuda: str | None, architectures: list[str]) -> str | None:
    """What is wrong with a torch of these architectures for *cuda*, its CUDA version."""
    if wanted == "none":
        return f"it is for CUDA {cuda}, not for CPUs" if cuda else None
    if cuda is None:
        return f"it is for CPUs, not for CUDA {wanted}"
    if cuda != wanted and not cuda.startswith(f"{wanted}."):
        return f"it is for CUDA {cuda}, not {wanted}"
    missing = [each for each in ARCHITECTURES if each not in architectures]
    return f"it has no code for {', '.join(missing)}" if missing else None


def main(wanted: str) -> None:
    # torch.cuda.get_arch_list() is empty where there is no GPU, as in a build.
    flags = getattr(torch._C, "_cuda_getArchFlags", lambda: None)()  # noqa: SLF001
    found = problem(wanted, torch.version.cuda, (flags or "").split())
    if found:
        sys.exit(
            f"torch {torch.__version__} is the wrong one: {found}. Check the Dockerfile's argument"
            " CUDA, the file of constraints, and that pip reaches PyTorch's index"
        )


if __name__ == "__main__":
    main(*sys.argv[1:])
