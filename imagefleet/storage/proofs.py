"""Proofs of authorship (HMAC-SHA256): which machine has stored a drawing, or written a record.

Whoever has a worker's token can write any worker's name. A broker gives each machine a key besides,
made of a secret of the fleet and the machine's id, with which the names of its workers begin.
"""

import base64
import functools
import hashlib
import hmac
import re
from collections.abc import Iterable
from dataclasses import dataclass, field

from imagefleet.signing import CANONICAL
from imagefleet.storage.protocol import Metadata

#: The metadata of the container of files with the fleet's secrets: tokens are for what is in a
#: container, and read nothing of itself.
SECRETS = "proofsecrets"

#: The metadata of the poison queue that say that there are secrets, to whoever judges a fleet with
#: tokens. A worker's reads nothing of that queue, and no token writes metadata.
IN_USE = "proofs"

#: The metadata of a blob with its proof, and those that it proves.
PROOF = "proof"
_PROVEN = (
    *("worker", "job", "digest", "sha256", "seconds"),
    *("gpu", "price_per_hour", "start_up_seconds", "started_at"),
)

#: SaladCloud's id of a machine, alone or before the rest of a worker's name.
_MACHINE = re.compile(
    r"([0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12})(?:-.*)?", re.DOTALL | re.IGNORECASE
)

#: Of a code's 32 bytes: nobody finds one of 128 bits by trying, and half of most records are codes.
_CODE_BYTES = 16


def machine_of(worker: str) -> str | None:
    """The machine with whose id a worker's name begins; None for a name without one."""
    found = _MACHINE.fullmatch(worker)
    return found[1].lower() if found else None


@functools.lru_cache(4096)
def machine_key(secret: str, machine: str) -> str:
    """The key of one machine, from which neither the secret nor another's follows."""
    return hmac.new(secret.encode(), machine.encode(), "sha256").hexdigest()


@dataclass(frozen=True, slots=True)
class Prover:
    """Proves what the workers of one machine write."""

    machine: str
    key: str = field(repr=False)

    def proof(self, worker: str, claims: bytes) -> str | None:
        """The proof that *worker* makes these claims; None: it is of another machine."""
        return _code(self.key, claims) if machine_of(worker) == self.machine else None

    def proven(self, blob: str, metadata: Metadata) -> Metadata:
        """The metadata with which this machine stores a blob."""
        proof = self.proof(metadata["worker"], _claims(blob, metadata))
        return metadata if proof is None else {**metadata, PROOF: proof}


class Proofs:
    """Tells which names of workers are proven, in a fleet that has secrets."""

    def __init__(self, secrets: Iterable[str]) -> None:
        """*secrets*: none for credentials that do not read them, to which nothing is proven."""
        self._secrets = tuple(secrets)

    @property
    def are_hidden(self) -> bool:
        return not self._secrets

    def accept(self, worker: str, claims: bytes, proof: str | None) -> bool:
        machine = machine_of(worker)
        if machine is None or not proof:
            return False
        given = proof.encode(errors="replace")
        codes = (
            _code(machine_key(secret, machine), claims) for secret in self._secrets
        )
        return any(hmac.compare_digest(code.encode(), given) for code in codes)

    def author(self, blob: str, metadata: Metadata, data: bytes) -> str | None:
        """The worker that has stored a blob of these *metadata* and *data*; None: not proven.

        Metadata may come back with another file, once a blob's name is free again.
        """
        worker = metadata.get("worker", "")
        is_proven = self.accept(worker, _claims(blob, metadata), metadata.get(PROOF))
        is_file = metadata.get("sha256") == hashlib.sha256(data).hexdigest()
        return worker if is_proven and is_file else None


def _claims(blob: str, metadata: Metadata) -> bytes:
    return CANONICAL.encode([blob, *map(metadata.get, _PROVEN)]).encode("ascii")


def _code(key: str, claims: bytes) -> str:
    code = hmac.digest(key.encode(), claims, "sha256")[:_CODE_BYTES]
    return base64.urlsafe_b64encode(code).rstrip(b"=").decode()
