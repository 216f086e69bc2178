"""Clients of the gateway: keys, each with a campaign, a priority and a limit."""

import hashlib
from collections.abc import Collection, Mapping
from pathlib import Path

from aiohttp import BasicAuth, web
from pydantic import Field, TypeAdapter

from imagefleet import validation, yaml_file
from imagefleet.errors import SetupError
from imagefleet.http.pages import Pages
from imagefleet.http.refused import Refused
from imagefleet.job.message import SafeId
from imagefleet.storage.settings import Priority
from imagefleet.telemetry import probes
from imagefleet.validation import Strict


class Client(Strict, hide_input_in_errors=True):
    """The holder of a key; of the key itself the gateway knows the SHA-256 alone."""

    name: SafeId
    sha256: str = Field(pattern=r"^[0-9a-fA-F]{64}$")
    #: The campaign of all its jobs, the only one of which it sees anything.
    campaign: SafeId
    priority: Priority = "normal"
    #: The most images that it may wait for at once.
    max_waiting: int = Field(default=100, ge=1, le=10_000)
    #: The models that the client's names stand for, as `dall-e-3`.
    models: Mapping[str, str] = Field(default_factory=dict)

    def __hash__(self) -> int:
        return hash(self.sha256)


#: Whoever is on this machine, where there is no file of keys.
LOCAL = Client(name="local", sha256="0" * 64, campaign="gateway", max_waiting=10_000)


class Door:
    """Lets clients in by their key; without keys, this machine's own programs."""

    def __init__(
        self, path: Path | None, host: str, origins: Collection[str] = ()
    ) -> None:
        """Raises SetupError for a file that is not valid, or without one beyond this machine.

        *origins*: web pages that may use it, beside its own.
        """
        self.pages = Pages(origins)
        self._by_hash = None if path is None else _read(path)
        if self._by_hash is None and not probes.is_loopback(probes.authority(host, 0)):
            raise SetupError(
                f"anybody who reaches {host} could have images drawn: name a file of keys with"
                " --clients, or listen on 127.0.0.1"
            )

    def client(self, request: web.Request) -> Client:
        """The client that sent a request; raises Refused without a valid key."""
        self.pages.check(request)
        if self._by_hash is None:
            # A page of another site may be open in a browser here, under a name that leads here.
            if not probes.is_loopback(request.host):
                raise Refused(
                    403, "without keys, only programs of this machine may use it"
                )
            return LOCAL
        digest = hashlib.sha256(
            _key(request.headers.get("Authorization", ""))
        ).hexdigest()
        if (found := self._by_hash.get(digest)) is None:
            raise Refused(
                401,
                "no valid key: send one as Authorization: Bearer KEY, or as Basic's password",
                {"WWW-Authenticate": 'Basic realm="imagefleet", Bearer'},
            )
        return found


def _read(path: Path) -> Mapping[str, Client]:
    with validation.as_error(SetupError, f"{path}: ", Client.model_fields):
        found = TypeAdapter(list[Client]).validate_python(
            yaml_file.read(path, "clients")
        )
    by_hash = {client.sha256.lower(): client for client in found}
    if not found or len(by_hash) < len(found):
        raise SetupError(
            f"{path}: should be a list of clients, each with a key of its own"
        )
    return by_hash


def _key(header: str) -> bytes:
    try:
        return str(BasicAuth.decode(header).password).encode("latin1")
    except ValueError:
        return header.partition(" ")[2].strip().encode(errors="replace")
