"""The options of commands that act on a storage."""

from imagefleet.storage.settings import StorageSettings


def flags(settings: StorageSettings) -> list[str]:
    names = ("storage", "queue", "container", "files_container")
    return [
        part
        for name in names
        for part in (f"--{name.replace('_', '-')}", str(getattr(settings, name)))
    ]
