"""Archives in tar format, for tests of models that are packed in one."""

import io
import tarfile


def tar_of(names: dict[str, bytes], *others: tarfile.TarInfo) -> bytes:
    """An archive of files with these contents, and of *others*, which have none."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as tar:
        for name, content in names.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            tar.addfile(entry, io.BytesIO(content))
        for other in others:
            tar.addfile(other)
    return packed.getvalue()
