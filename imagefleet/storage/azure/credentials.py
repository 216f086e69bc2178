"""Credentials for Azure: a key, fixed or changing SAS tokens, or a pod's workload identity.

Changing tokens delay no request while those in force are valid. Once Azure refuses them, requests
wait for new ones as for a storage that is down: no job fails for it, and none is lost.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial

from azure.core.credentials import AzureSasCredential
from azure.core.credentials_async import AsyncTokenCredential

from imagefleet import concurrency
from imagefleet.concurrency import Operation, Result
from imagefleet.errors import FleetError, NoAccessError, NoTokenError, SetupError
from imagefleet.storage.azure import errors as azure_errors
from imagefleet.storage.azure import roles
from imagefleet.storage.azure import sas as sas_tokens
from imagefleet.storage.azure.account import AzureAddress
from imagefleet.storage.azure.errors import Credential, RefusedError
from imagefleet.storage.proofs import Prover
from imagefleet.storage.settings import Resource, StorageSettings
from imagefleet.telemetry.logs import log

#: Set by Kubernetes for a pod with workload identity, and by nothing else.
FEDERATED_TOKEN_FILE = "AZURE_FEDERATED_TOKEN_FILE"  # noqa: S105 - a variable's name


@dataclass(eq=False)
class Access:
    """The requests to one queue or container: with its credential, retries and our errors."""

    _resource: Resource
    #: Names it in messages.
    what: str
    #: None: the address has it.
    credential: AzureSasCredential | AsyncTokenCredential | None
    retry_policy: concurrency.RetryPolicy
    _tokens: RotatingTokens | None
    _accepted: bool = False

    async def call(self, permission: str, request: Operation[Result]) -> Result:
        """Makes a request, with retries; for *permission* see `attempt`."""
        return await self.retry_policy.call(partial(self.attempt, permission, request))

    async def call_in_doubt(
        self, permission: str, request: Callable[[bool], Awaitable[Result]]
    ) -> Result:
        """Makes a request, with retries; it gets whether a lost attempt may have done it."""
        return await self.retry_policy.call_in_doubt(
            lambda is_in_doubt: self.attempt(permission, partial(request, is_in_doubt))
        )

    async def attempt(self, permission: str, request: Operation[Result]) -> Result:
        """Makes a request once; repeats it with a newer token if its token was refused.

        *permission* is the letter (`roles`) that it needs; empty for what no token allows. Raises
        NoTokenError without a token for it, NoAccessError if Azure no longer accepts the token and
        there is no newer one yet, SetupError if it never did, or there will be no other.
        """
        while True:
            if self._tokens is not None:
                await self._tokens.refresh_if_due()
            used = self._in_use()
            if isinstance(self.credential, AzureSasCredential) and not used.token:
                who_may = azure_errors.remedy(self._resource, permission)
                raise NoTokenError(f"there is no SAS token for {self.what}{who_may}")
            try:
                with azure_errors.translated(self.what, used, permission):
                    result = await request()
            except RefusedError as refusal:
                await self._renew(used.token, refusal)
            else:
                self._accepted = True
                return result

    async def _renew(self, refused: str, refusal: RefusedError) -> None:
        if self._tokens is None or not isinstance(self.credential, AzureSasCredential):
            raise refusal
        if await self._tokens.renew(self.credential, refused):
            return
        source = self._tokens.source.name
        if self._accepted:
            raise NoAccessError(
                f"{refusal.message}; waiting for {source} to provide a new one"
            ) from None
        raise SetupError(f"{refusal.message} (the token came from {source})") from None

    def _in_use(self) -> Credential:
        credential = self.credential
        token = (
            credential.signature if isinstance(credential, AzureSasCredential) else ""
        )
        return Credential(
            self._resource,
            token,
            is_identity=credential is not None and not token,
            is_from_broker=self._tokens is not None
            and isinstance(self._tokens.source, sas_tokens.TokenBroker),
        )


class RotatingTokens:
    """The tokens in force, and the source of newer ones, which one task at a time reads."""

    def __init__(self, source: sas_tokens.TokenSource) -> None:
        self.source = source
        self.credentials: dict[tuple[Resource, str | None], AzureSasCredential] = {}
        self.tokens: sas_tokens.Tokens | None = None
        self._refreshing: asyncio.Task[None] | None = None
        self._failure: FleetError | None = None

    def credential(self, resource: Resource, model: str | None) -> AzureSasCredential:
        key = resource, model
        if key not in self.credentials:
            token = self.tokens.of(*key) if self.tokens else ""
            self.credentials[key] = AzureSasCredential(token)
        return self.credentials[key]

    async def refresh_if_due(self) -> None:
        """Waits for the first tokens, or raises why there are none; later ones come meanwhile."""
        if self.tokens is None:
            await asyncio.shield(self._refresh())
            if self.tokens is None and self._failure is not None:
                raise self._failure
        elif time.monotonic() >= self.source.due_at:
            self._refresh()

    async def renew(self, credential: AzureSasCredential, refused: str) -> bool:
        """True if there is another token than *refused*; raises SetupError if none will come."""
        if credential.signature == refused and time.monotonic() >= self.source.retry_at:
            await asyncio.shield(self._refresh())
        is_newer = credential.signature != refused
        if not is_newer and isinstance(self._failure, SetupError):
            raise self._failure
        return is_newer

    async def close(self) -> None:
        if self._refreshing is not None:
            self._refreshing.cancel()
            await asyncio.gather(self._refreshing, return_exceptions=True)

    def _refresh(self) -> asyncio.Task[None]:
        if self._refreshing is None or self._refreshing.done():
            self._refreshing = asyncio.create_task(
                self._read_source(), name="new SAS tokens"
            )
        return self._refreshing

    async def _read_source(self) -> None:
        try:
            tokens = await self.source.read()
        except FleetError as error:
            if self._failure is None or self._failure.message != error.message:
                log.warning(str(error), action="tokens_not_renewed")
            self._failure = error
            return
        self._failure = None
        if tokens is None:
            return
        self.tokens = tokens
        for key, credential in self.credentials.items():
            if token := tokens.of(*key):  # not every model's queue has one
                credential.update(token)
        end = tokens.ends_at or "their access policy ends"
        log.info(
            f"new SAS tokens from {self.source.name}, valid until {end}",
            action="tokens_renewed",
        )


class Credentials:
    """The credentials of the queues and containers; a SetupError without any, or with two kinds."""

    def __init__(
        self,
        address: AzureAddress,
        settings: StorageSettings,
        identity_token: sas_tokens.IdentityToken | None,
        retry_policy: concurrency.RetryPolicy,
    ) -> None:
        self._settings = settings
        self._retry_policy = retry_policy
        source = sas_tokens.source_of(settings, identity_token)
        self._rotating = None if source is None else RotatingTokens(source)
        self._fixed: sas_tokens.Tokens | None = None
        self._identity: AsyncTokenCredential | None = None
        if self._rotating is None:
            self._fixed = sas_tokens.fixed_tokens(settings, address.sas)
            if self._fixed is None and not address.has_key:
                self._identity = _workload_identity(settings.queue)

    def of(self, resource: Resource, model: str | None = None) -> Access:
        """The credential of a queue or container; a job queue may be a *model*'s."""
        credential: AzureSasCredential | AsyncTokenCredential | None = self._identity
        if self._rotating is not None:
            credential = self._rotating.credential(resource, model)
        elif self._fixed is not None:
            credential = AzureSasCredential(self._fixed.of(resource, model))
        kind = "container" if roles.is_container(resource) else "queue"
        return Access(
            resource,
            f"the {kind} {roles.name_of(self._settings, resource, model)!r}",
            credential,
            self._retry_policy,
            self._rotating,
        )

    @property
    def prover(self) -> Prover | None:
        """Proves what this machine stores, with the key that came with the tokens in force."""
        tokens = self._rotating.tokens if self._rotating else None
        return tokens.prover if tokens else None

    async def close(self) -> None:
        if to_close := self._rotating or self._identity:
            await to_close.close()


def _workload_identity(queue: str) -> AsyncTokenCredential:
    """A pod's identity in Microsoft Entra.

    azure-identity's `DefaultAzureCredential` would look for a managed identity at 169.254.169.254,
    where SaladCloud has another service.
    """
    if not os.environ.get(FEDERATED_TOKEN_FILE):
        raise SetupError(
            f"no credentials for {queue!r}: set IMAGEFLEET_SAS or IMAGEFLEET_SAS_FILE"
            " (`imagefleet keys` makes both), or give a connection string; a pod with workload"
            f" identity has {FEDERATED_TOKEN_FILE} set"
        )
    try:
        from azure.identity.aio import WorkloadIdentityCredential
    except ImportError:
        raise SetupError(
            "a pod's workload identity needs azure-identity: pip install '.[azure-identity]'"
        ) from None

    try:
        return WorkloadIdentityCredential()
    except ValueError:
        raise SetupError(
            f"{FEDERATED_TOKEN_FILE} is set, but AZURE_CLIENT_ID and AZURE_TENANT_ID are not:"
            " give the pod's service account the identity's client id"
        ) from None
