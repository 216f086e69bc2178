"""Translates the exceptions of Azure's SDK into the tree of errors.

Of a refusal, it says in one sentence why the credentials in use were refused, and what to do.
"""

import traceback
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import NamedTuple
from urllib.parse import parse_qs

from aiohttp import (
    ClientConnectorCertificateError,
    ClientConnectorDNSError,
    ClientConnectorError,
    ClientError,
    ClientResponseError,
    ConnectionTimeoutError,
)
from azure.core.exceptions import (
    AzureError,
    ClientAuthenticationError,
    HttpResponseError,
)

from imagefleet import concurrency
from imagefleet.errors import (
    BusyError,
    FleetError,
    JobError,
    LeaseLost,
    MissingResourceError,
    SetupError,
    TransientError,
)
from imagefleet.storage.azure import roles, sas
from imagefleet.storage.settings import Resource
from imagefleet.telemetry import proxies

#: Another worker has the message, or it was deleted.
LEASE_LOST = {"MessageNotFound", "PopReceiptMismatch"}

#: The blob exists. Azure answers with the second code if the token may create, but not write.
TAKEN = {"BlobAlreadyExists", "UnauthorizedBlobOverwrite"}

MISSING = {"QueueNotFound", "ContainerNotFound"}

#: The name is taken until Azure has removed what was there.
_BEING_DELETED = {"QueueBeingDeleted", "ContainerBeingDeleted"}

#: The token is valid, but does not allow this request: a worker's SAS token may process messages
#: without reading the queue's properties, and create blobs without listing them.
LESS_PERMISSION = {
    "AuthorizationPermissionMismatch",
    "AuthorizationResourceTypeMismatch",
}

#: Answers to requests that no SAS token for one queue or container allows: to create it, say.
NOT_FOR_TOKENS = LESS_PERMISSION | {"AuthorizationFailure"}

#: The credentials are expired, revoked or not signed with the account's key. The second code is
#: Azurite's; in Azure it is that of the firewall.
_NOT_ACCEPTED = {
    "AuthenticationFailed",
    "AuthorizationFailure",
    "InvalidAuthenticationInfo",
}

#: The job is at fault; the next one may succeed.
_JOB_AT_FAULT = {
    "RequestBodyTooLarge",
    "MetadataTooLarge",
    "InvalidMetadata",
    "EmptyMetadataKey",
}

_NO_CODE = "no error code"

#: The server did nothing; after any other error of its own, it may have.
_TOO_MANY_REQUESTS = {429, 503}

_REASONS = {
    "AccountIsDisabled": "the storage account is disabled",
    "AuthorizationProtocolMismatch": "the SAS token requires https",
    "AuthorizationSourceIPMismatch": "the SAS token is for another IP address",
    "KeyBasedAuthenticationNotPermitted": "the account permits neither its key nor SAS tokens"
    " signed with it: use a workload identity",
}


class Credential(NamedTuple):
    """The credential that signed a request; without a token, the account key or an identity."""

    resource: Resource | None = None
    token: str = ""
    is_identity: bool = False
    is_from_broker: bool = False

    def field(self, name: str) -> str:
        return parse_qs(self.token.removeprefix("?")).get(name, [""])[0]


_ACCOUNT_KEY = Credential()


class ReplyLostError(TransientError):
    """The reply was lost: the request may have been carried out."""

    outcome_is_unknown = True


class RefusedError(SetupError):
    """The credentials are expired, revoked or wrong."""


@contextmanager
def translated(
    what: str, credential: Credential = _ACCOUNT_KEY, permission: str = ""
) -> Iterator[None]:
    """Translates the SDK's exceptions in the block; *what* names the resource in the messages.

    A refusal is explained by the *credential* and by the *permission* that the request needs. The
    cause is dropped, as aiohttp's traceback may show the URL with a SAS token.
    """
    try:
        yield
    except HttpResponseError as error:
        raise _from_response(error, what, credential, permission) from None
    except (AzureError, ClientError, OSError) as error:
        raise _from_connection(error, what) from None
    except (ValueError, TypeError, AttributeError, LookupError, SyntaxError) as error:
        # The SDK does not check that a success has the answer of Azure: a proxy may have sent it.
        if not _is_of_the_sdk(error):
            raise
        raise ReplyLostError(not_of_azure(what)) from None


def not_of_azure(what: str) -> str:
    return f"{what} sent an answer that is not one of Azure Storage"


@contextmanager
def tolerated(codes: Collection[str]) -> Iterator[None]:
    """Ends the block without an error if the answer has one of these error codes."""
    try:
        yield
    except HttpResponseError as error:
        if code_of(error) not in codes:
            raise


def code_of(error: HttpResponseError) -> str:
    """Azure's error code, from the SDK's enumeration or as text."""
    code = getattr(error, "error_code", None)
    return str(getattr(code, "value", code) or _NO_CODE)


def _headers(error: HttpResponseError) -> Mapping[str, str]:
    return getattr(error.response, "headers", {})


def is_azurites_overwrite(error: HttpResponseError) -> bool:
    """True for what Azurite may answer where Azure answers UnauthorizedBlobOverwrite."""
    server = _headers(error).get("Server", "")
    return server.startswith("Azurite") and code_of(error) in LESS_PERMISSION


def _from_response(
    error: HttpResponseError,
    what: str,
    credential: Credential,
    permission: str,
) -> FleetError:
    status = error.status_code
    code = code_of(error)
    if isinstance(error, ClientAuthenticationError) and code == _NO_CODE:
        reason = f"the account key for {what} is malformed"
        if credential.is_identity:
            cause = error.message.strip().partition("\n")[0]
            reason = f"Microsoft Entra refuses the pod's identity: {cause}"
        if credential.is_identity or status is None:
            return SetupError(reason)
    answer = f"{code} (HTTP {status})"
    if code in _BEING_DELETED:
        answer += ": it is being deleted, and its name is free again in a minute or so"
    if code in LEASE_LOST:
        return LeaseLost(f"the lease is lost: {what} answered {answer}")
    if code in MISSING:
        return MissingResourceError(
            f"{what} does not exist; `imagefleet load` creates it"
        )
    if status == 401 or status == 403:  # noqa: PLR1714, PLR2004 - narrows the type
        kind = RefusedError if code in _NOT_ACCEPTED else SetupError
        # Azure's time, by which it judges tokens; else this machine's.
        at = concurrency.http_date(_headers(error).get("Date")) or datetime.now(UTC)
        return kind(refusal(what, credential, permission, answer, at))
    if status == 413 or code in _JOB_AT_FAULT:  # noqa: PLR2004 - Content Too Large
        return JobError(f"{what} refuses the job: {answer}")
    if status is None or status < 400:  # noqa: PLR2004 - a success of a proxy, say
        status = 500
        answer = not_of_azure(what)
    else:
        answer = f"{what} answered {answer}"
    maybe_done = status == 408 or status >= 500  # noqa: PLR2004
    failed = ReplyLostError if maybe_done else TransientError
    transient = BusyError if status in _TOO_MANY_REQUESTS else failed
    return transient(answer)


def _is_of_the_sdk(error: Exception) -> bool:
    """True if the SDK, or the XML parser that it uses, raised the error, and not our own code."""
    frames = list(traceback.walk_tb(error.__traceback__))
    module = str(frames[-1][0].f_globals.get("__name__")) if frames else ""
    return module.startswith(("azure.", "xml.", "email.", "isodate"))


def _from_connection(error: Exception, what: str) -> FleetError:
    cause = getattr(error, "inner_exception", None) or error
    if isinstance(cause, ClientConnectorDNSError):
        return TransientError(
            f"cannot reach {what}: there is no host {cause.host!r}; check the account's name in"
            " --storage, and the network"
        )
    if isinstance(cause, ClientConnectorCertificateError):
        return proxies.unreachable(f"cannot reach {what}", cause)
    # The text of a ClientResponseError ends in the URL.
    text = cause.message if isinstance(cause, ClientResponseError) else str(cause)
    message = f"cannot reach {what}: {type(cause).__name__} {text}".rstrip()
    if isinstance(cause, (ClientConnectorError, ConnectionTimeoutError)):
        return TransientError(message)
    return ReplyLostError(message)


def refusal(
    what: str, credential: Credential, permission: str, answer: str, at: datetime
) -> str:
    """Why Azure refused a request that needs *permission* (a letter of `roles`), and what to do.

    *answer* begins with Azure's code; *at* is Azure's own time.
    """
    resource = credential.resource
    token = f"the SAS token of {what}"
    renewal = "; mint others: `imagefleet keys mint`"
    if credential.field("si"):  # one of the same name would bring revoked tokens back
        renewal += " with a --policy of another name"
    if credential.is_from_broker:
        renewal = ""
    ends_at = sas.expiry(credential.token)
    if ends_at and ends_at <= at:
        return f"{token} expired on {ends_at:%Y-%m-%d %H:%M} UTC, by Azure's clock{renewal}"
    code = answer.partition(" ")[0]
    allowed = credential.field("sp")
    is_denied = allowed and permission not in allowed + roles.ANY_PERMISSION
    if resource is not None and (code in LESS_PERMISSION or is_denied):
        words = roles.explain(resource, permission) or ["change the resource itself"]
        doing = f"may not {words[0].partition(',')[0]}"
        if credential.token:
            return f"{token} {doing} ({answer}){remedy(resource, permission)}"
        if credential.is_identity:
            role = roles.azure_role(resource, permission)
            return (
                f"the pod's identity {doing} of {what} ({answer}): assign it the Azure role"
                f" {role!r}"
            )
    reason = "the account key is wrong, or was regenerated"
    if credential.token:
        reason = (
            "the SAS token is not signed with the account's present key, was revoked with its"
            f" stored policy, is not valid yet, or is damaged{renewal}"
        )
    elif credential.is_identity:
        reason = "the pod's identity is not accepted: does it belong to the account's tenant?"
    if code == "AuthorizationFailure":
        reason += "; or the firewall of the storage account excludes this machine"
    reason = _REASONS.get(code, reason)
    return f"Azure refuses access to {what} ({answer}): {reason}"


def remedy(resource: Resource, permission: str) -> str:
    """The roles that suffice, the one with the fewest permissions first."""
    able = roles.with_permission(resource, permission) if permission else []
    choices = "; ".join(
        f"`imagefleet keys mint {role.name}` for {role.what}" for role in able
    )
    return f": mint others with {choices}" if able else ": that takes the account key"
