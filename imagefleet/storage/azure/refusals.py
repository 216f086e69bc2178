"""Why Azure refused a request with the credentials in use, and what to do: one sentence."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from urllib.parse import parse_qs

from imagefleet.storage.azure import roles, sas
from imagefleet.storage.settings import Resource

#: Clocks differ by seconds. Azure allows 15 minutes to requests that are signed with a key, and
#: nothing to a token's times.
_NOTABLE_SKEW = timedelta(minutes=5)

#: The token is valid, but does not allow this request: a worker's SAS token may process messages
#: without reading the queue's properties, and create blobs without listing them.
LESS_PERMISSION = frozenset(
    {"AuthorizationPermissionMismatch", "AuthorizationResourceTypeMismatch"}
)

_REASONS: Mapping[str, str] = {
    "AccountIsDisabled": "the storage account is disabled",
    "AuthorizationFailure": "the firewall of the storage account may exclude this machine",
    "AuthorizationProtocolMismatch": "the SAS token requires https",
    "AuthorizationSourceIPMismatch": "the SAS token is for another IP address",
    "KeyBasedAuthenticationNotPermitted": "the account permits neither its key nor SAS tokens"
    " signed with it: use a workload identity",
}


@dataclass(frozen=True, slots=True)
class Credential:
    """What a request was signed with; without a token, the account key or an identity."""

    resource: Resource | None = None
    token: str = ""
    is_identity: bool = False
    is_from_broker: bool = False


@dataclass(frozen=True, slots=True)
class Answer:
    """Azure's answer; *at* is its own time."""

    code: str
    status: int
    at: datetime


def sentence(what: str, credential: Credential, permission: str, answer: Answer) -> str:
    """Why a request for *what* that needs *permission* (a letter of `roles`) was refused."""
    if credential.is_identity:
        return _of_identity(what, credential, permission, answer)
    if credential.token:
        return _of_token(what, credential, permission, answer)
    return _refused(what, answer, "the account key is wrong, or was regenerated")


def missing_token(what: str, resource: Resource, permission: str) -> str:
    """There is no token for a request for *what* that needs *permission*."""
    return f"there is no SAS token for {what}{_remedy(resource, permission)}"


def _of_token(what: str, credential: Credential, permission: str, answer: Answer) -> str:
    token = f"the SAS token of {what}"
    ends_at, begins_at = sas.expiry(credential.token), sas.start(credential.token)
    if ends_at and ends_at <= answer.at:
        since = f"{_moment(ends_at)}, {_span(answer.at - ends_at)} ago{_skew(answer)}"
        return f"{token} expired on {since}{_renewal(credential)}"
    if begins_at and begins_at > answer.at:
        wait = f"{_moment(begins_at)}, in {_span(begins_at - answer.at)}{_skew(answer)}"
        return f"{token} is not valid before {wait}: wait, or mint one without a start"
    if _lacks(credential.token, permission, answer):
        return f"{token} may not {_doing(credential, permission)} ({_short(answer)})" + _remedy(
            credential.resource, permission
        )
    is_known = answer.code != "AuthorizationFailure"  # of tokens, more can be said about it
    if is_known and (reason := _REASONS.get(answer.code)):
        return f"Azure refuses access to {what}: {reason} ({_short(answer)})"
    reason = "it is not signed with the account's present key, or for another resource, or damaged"
    (policy,) = _fields(credential.token).get("si", [""])
    if policy:
        reason = f"its stored policy {policy!r} has ended or was revoked, or {reason[6:]}"
    elif answer.code == "AuthorizationFailure":
        reason += "; or the firewall of the storage account excludes this machine"
    return f"Azure does not accept {token} ({_short(answer)}): {reason}{_renewal(credential)}"


def _of_identity(what: str, credential: Credential, permission: str, answer: Answer) -> str:
    if answer.code in LESS_PERMISSION and credential.resource is not None:
        role = roles.azure_role(credential.resource, permission)
        return (
            f"the pod's identity may not {_doing(credential, permission)} of {what}"
            f" ({_short(answer)}): assign it the Azure role {role!r}"
        )
    reason = "the pod's identity is not accepted: does it belong to the account's tenant?"
    return _refused(what, answer, reason)


def _refused(what: str, answer: Answer, reason: str) -> str:
    """Says the *reason*, unless the answer's code tells another."""
    reason = _REASONS.get(answer.code, reason)
    return f"Azure refuses access to {what}: {reason}{_skew(answer)} ({_short(answer)})"


def _lacks(token: str, permission: str, answer: Answer) -> bool:
    if answer.code in LESS_PERMISSION:
        return True
    (letters,) = _fields(token).get("sp", [""])
    return bool(letters and permission) and permission not in letters + roles.ANY_PERMISSION


def _doing(credential: Credential, permission: str) -> str:
    if credential.resource is None or not permission:
        return "create or change the resource itself"
    if permission == roles.ANY_PERMISSION:
        return "be used for it"
    return roles.explain(credential.resource, permission)[0].partition(",")[0]


def _remedy(resource: Resource | None, permission: str) -> str:
    """The roles that suffice, the one with the fewest permissions first."""
    able = roles.with_permission(resource, permission) if resource and permission else []
    if not able:
        return ": that takes the account key"
    if len(able) == 1:
        return f": the role `{able[0].name}` may (`imagefleet keys mint {able[0].name}`)"
    choices = "; ".join(f"`imagefleet keys mint {role.name}` for {role.what}" for role in able)
    return f": mint new ones with {choices}"


def _renewal(credential: Credential) -> str:
    if credential.is_from_broker:
        return ""
    (letters,), (policy,) = (_fields(credential.token).get(name, [""]) for name in ("sp", "si"))
    found = roles.of_token(credential.resource, letters) if credential.resource else []
    # A policy of the same name would bring the revoked tokens back.
    end = " --policy NAME" if policy else ""
    names = [role.name for role in found] or ["ROLE"]
    commands = " or ".join(f"`imagefleet keys mint {name}{end}`" for name in names)
    return f": mint new ones with {commands}"


def _skew(answer: Answer) -> str:
    """The error of this machine's clock, if it is large."""
    ahead = datetime.now(UTC) - answer.at
    if abs(ahead) < _NOTABLE_SKEW:
        return ""
    side = "ahead of" if ahead > timedelta() else "behind"
    return f"; this machine's clock is {_span(abs(ahead))} {side} Azure's"


def _short(answer: Answer) -> str:
    return f"{answer.code}, HTTP {answer.status}"


def _fields(token: str) -> dict[str, list[str]]:
    return parse_qs(token.removeprefix("?"))


def _moment(at: datetime) -> str:
    return f"{at.astimezone(UTC):%Y-%m-%d %H:%M} UTC"


def _span(span: timedelta) -> str:
    seconds = span.total_seconds()
    for unit, length in (("day", 86_400), ("hour", 3600), ("minute", 60), ("second", 1)):
        if (count := int(seconds // length)) >= 1:
            return f"{count} {unit}" + "s" * (count > 1)
    return "less than a second"
