"""How requests to Azure are let in: a key, SAS tokens, tokens that change, a pod's identity.

Tokens that change never hold up a request while those in force are good. Once they are not, a
request waits for new ones as for a storage that is down: no job fails for it, and none is lost.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Awaitable, Callable
from typing import Any, Self, TypeVar

from azure.core.credentials import AzureSasCredential
from azure.core.credentials_async import AsyncTokenCredential
from azure.core.exceptions import ClientAuthenticationError
from pydantic import SecretStr

from imagefleet import errors
from imagefleet.storage.azure import errors as azure_errors
from imagefleet.storage.azure import sas as sas_tokens
from imagefleet.storage.azure.account import AzureAddress
from imagefleet.storage.settings import Resource, StorageSettings

log = logging.getLogger(__name__)

#: Set by Kubernetes for a pod with workload identity, and by nothing else.
FEDERATED_TOKEN_FILE = "AZURE_FEDERATED_TOKEN_FILE"  # noqa: S105 - a variable's name

#: A request whose token has ended waits for another for so long, before its caller is told. All
#: that wait go on together once it is there: renewals too, each of which may be a lease's last.
WAIT_SECONDS = 10.0
_PAUSE_SECONDS = 0.25

_Result = TypeVar("_Result")


class Access:
    """One resource's credential, for as long as the process runs; None leaves it to the address."""

    def __init__(self, credential: AzureSasCredential | AsyncTokenCredential | None) -> None:
        self.credential = credential

    async def attempt(self, what: str, request: Callable[[], Awaitable[_Result]]) -> _Result:
        """Makes a request once; its errors are those of our tree and name *what*."""
        with azure_errors.translated(what):
            return await request()


class RotatingAccess(Access):
    """One resource's token among those that a source gives anew."""

    def __init__(self, tokens: RotatingTokens, resource: Resource) -> None:
        self._tokens = tokens
        self._sas = tokens.credentials[resource]
        self._accepted = False
        super().__init__(self._sas)

    async def attempt(self, what: str, request: Callable[[], Awaitable[_Result]]) -> _Result:
        """As Access; a request whose token was refused is made again with a newer one.

        Raises:
            NoAccessError: Azure accepts the token no longer, and there is no other yet.
            SetupError: it never did, or the source says that there will be none.
        """
        while True:
            await self._tokens.look_if_due()
            used = self._sas.signature
            try:
                result = await super().attempt(what, request)
            except azure_errors.RefusedError as refusal:
                wait_seconds = WAIT_SECONDS if self._accepted else 0.0
                if await self._tokens.newer_than(used, wait_seconds):
                    continue
                if not self._accepted:
                    raise errors.SetupError(
                        f"{refusal.message}; it came from {self._tokens.source.name}"
                    ) from None
                raise errors.NoAccessError(
                    f"{refusal.message}; waiting for {self._tokens.source.name} to give another"
                ) from None
            self._accepted = True
            return result


class RotatingTokens:
    """The tokens in force, and the source that is looked at for newer ones, once at a time."""

    def __init__(self, source: sas_tokens.TokenSource) -> None:
        self.source = source
        self.credentials: dict[Resource, AzureSasCredential] = {
            "queue": AzureSasCredential(""),
            "poison": AzureSasCredential(""),
            "blob": AzureSasCredential(""),
        }
        self._looking: asyncio.Task[None] | None = None
        self._failure: errors.FleetError | None = None
        self._waiting_is_told = False

    async def look_if_due(self) -> None:
        """Waits for the first tokens; newer ones are fetched while the request goes on.

        Raises:
            SetupError, TransientError: there are no tokens at all.
        """
        if not self._has_tokens:
            await asyncio.shield(self._look())
            if not self._has_tokens and self._failure is not None:
                raise self._failure
        elif self.source.is_due():
            self._look()

    async def newer_than(self, refused: str, wait_seconds: float) -> bool:
        """Looks for tokens in place of a refused one, for a while; tells whether there are.

        Raises:
            SetupError: the source says that there will be none.
        """
        ends_at = time.monotonic() + wait_seconds
        while True:
            if self.source.may_be_asked_early() and self._is_in_force(refused):
                await asyncio.shield(self._look())
            if not self._is_in_force(refused):
                return True
            if isinstance(self._failure, errors.SetupError):
                raise self._failure
            if time.monotonic() >= ends_at:
                return False
            if not self._waiting_is_told:
                self._waiting_is_told = True
                log.warning(
                    "the SAS tokens are refused: waiting for %s to give others",
                    self.source.name,
                    extra={"action": "tokens_refused"},
                )
            await asyncio.sleep(_PAUSE_SECONDS)

    async def close(self) -> None:
        if self._looking is not None:
            self._looking.cancel()
            await asyncio.gather(self._looking, return_exceptions=True)

    def _is_in_force(self, token: str) -> bool:
        return any(each.signature == token for each in self.credentials.values())

    @property
    def _has_tokens(self) -> bool:
        return bool(self.credentials["queue"].signature)

    def _look(self) -> asyncio.Task[None]:
        if self._looking is None or self._looking.done():
            self._looking = asyncio.create_task(self._take_from_source(), name="new SAS tokens")
        return self._looking

    async def _take_from_source(self) -> None:
        try:
            tokens = await self.source.read()
        except errors.FleetError as error:
            if self._failure is None or self._failure.message != error.message:
                log.warning("%s", error, extra={"action": "tokens_not_renewed"})
            self._failure = error
            return
        self._failure = None
        if tokens is None:
            return
        self._waiting_is_told = False
        for resource, credential in self.credentials.items():
            credential.update(tokens.of(resource))
        log.info(
            "new SAS tokens from %s, good until %s",
            self.source.name,
            tokens.ends_at or "their policy ends",
            extra={"action": "tokens_renewed"},
        )


class WorkloadIdentity:
    """A pod's identity in Microsoft Entra. The one credential of azure-identity's that is used.

    Its `DefaultAzureCredential` never is: it looks for a managed identity at 169.254.169.254,
    which on SaladCloud is another service.
    """

    def __init__(self) -> None:
        try:
            from azure.identity import aio
        except ImportError:
            raise errors.SetupError(
                "for the pod's identity azure-identity is missing:"
                " pip install 'imagefleet[azure-identity]'"
            ) from None
        try:
            self._credential = aio.WorkloadIdentityCredential()
        except ValueError:
            raise errors.SetupError(
                f"{FEDERATED_TOKEN_FILE} is set, but AZURE_CLIENT_ID and AZURE_TENANT_ID are not:"
                " give the pod's service account the identity's client id"
            ) from None

    async def get_token(self, *scopes: str, **options: Any) -> Any:
        try:
            return await self._credential.get_token(*scopes, **options)
        except ClientAuthenticationError as error:
            reason = error.message.strip().partition("\n")[0]
            raise errors.SetupError(
                f"Microsoft Entra refuses the pod's identity: {reason}"
            ) from None

    async def close(self) -> None:
        await self._credential.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


class Credentials:
    """What a home's three clients are let in with.

    Raises:
        SetupError: there are no credentials, or two kinds of them.
    """

    def __init__(
        self,
        address: AzureAddress,
        settings: StorageSettings,
        identity_token: sas_tokens.IdentityToken | None = None,
    ) -> None:
        self._to_close: RotatingTokens | WorkloadIdentity | None = None
        source = sas_tokens.source_of(settings, identity_token)
        if source is not None:
            tokens = self._to_close = RotatingTokens(source)
            self.queue: Access = RotatingAccess(tokens, "queue")
            self.poison: Access = RotatingAccess(tokens, "poison")
            self.blob: Access = RotatingAccess(tokens, "blob")
            return
        other: AsyncTokenCredential | None = None
        queue_sas = settings.queue_sas or (SecretStr(address.sas) if address.sas else None)
        if queue_sas is None and not address.has_key and os.environ.get(FEDERATED_TOKEN_FILE):
            other = self._to_close = WorkloadIdentity()
        poison_sas, blob_sas = settings.poison_sas or queue_sas, settings.blob_sas or queue_sas
        self.queue = _fixed(settings.queue, queue_sas, other, address)
        self.poison = _fixed(settings.poison_queue, poison_sas, other, address)
        self.blob = _fixed(settings.container, blob_sas, other, address)

    async def close(self) -> None:
        if self._to_close is not None:
            await self._to_close.close()


def _fixed(
    name: str,
    sas: SecretStr | None,
    other: AsyncTokenCredential | None,
    address: AzureAddress,
) -> Access:
    if sas is not None:
        return Access(AzureSasCredential(sas.get_secret_value()))
    if other is None and not address.has_key:
        raise errors.SetupError(
            f"no credentials for {name!r}: set IMAGEFLEET_QUEUE_SAS (and, where they differ,"
            " IMAGEFLEET_POISON_SAS and IMAGEFLEET_BLOB_SAS), or IMAGEFLEET_SAS_FILE, or give a"
            f" connection string; a pod's workload identity is taken where {FEDERATED_TOKEN_FILE}"
            " is set"
        )
    return Access(other)
