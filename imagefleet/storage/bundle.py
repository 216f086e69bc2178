"""Bundles: messages that hold many jobs, with the fields that they share written once.

A bundle is `{"bundle": NAME, ...shared fields..., "jobs": [{...own fields...}, ...]}`. A field that
is null among the shared ones is each job's own. Expanded, it is exactly the messages of its jobs,
whose signatures and digests it carries unchanged.
"""

import hashlib
import re
import secrets
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from imagefleet.job import chain, sizes
from imagefleet.job.message import (
    BUNDLE_FIELD,
    DEFAULT_CAMPAIGN,
    JOBS_FIELD,
    compact_text,
    fields_if_any,
    images_of,
    is_bundle,
    is_safe_id,
    message_text,
)
from imagefleet.signing import SIGNATURE_FIELD
from imagefleet.validation import JSONDict, JSONObject

#: The most jobs of a bundle: more save little, and are lost for longer with a worker that dies.
MAX_JOBS = 64

#: The most bytes of a bundle's message without its jobs' signatures: these have to fit as well, and
#: what workers add to it.
MAX_BYTES = 48_000

_NAME = re.compile(r"[0-9a-f]{32}")

#: The least messages that jobs become, so that many workers have some and end at the same time.
_LEAST_MESSAGES = 500

#: The most work of a bundle, in UNet calls for one row of 512x512: 30 seconds of a card that draws
#: one image/s of SD1.5 with 15 steps. Decoding takes as long as three of them.
_MOST_CALLS = 1_000.0
_DECODING = 3
_USUAL = {"steps": 15, "width": 512, "height": 512, "cfg_scale": 7, "hr_scale": 2}
_USUAL_PIXELS = 512 * 512

#: Larger images take more than their pixels do, of models which are larger mostly.
_BY_PIXELS = 1.4

#: Fields of a bundle that no job of it has.
_OWN = {BUNDLE_FIELD, JOBS_FIELD}

#: Fields of jobs that are sent by themselves: somebody waits for them, or they are other messages'.
_ALONE = (chain.THEN_FIELD, chain.STAGE_FIELD, "verify", "awaited")

#: Fields that all jobs of a bundle have in common: one worker draws them for one file.
_COMMON = ("campaign", "model", "output")

#: Names the bundle of some messages.
NameOf = Callable[[Sequence[str]], str]


class Bundle(NamedTuple):
    """A bundle that was read; *problem* says why none of its jobs may be drawn."""

    name: str
    campaign: str
    #: The messages of its jobs.
    messages: list[str]
    ids: list[str]
    problem: str | None = None


def any_name(_: Sequence[str]) -> str:
    """A new name, which nobody guesses."""
    return secrets.token_hex(16)


def name_by(secret: str, messages: Sequence[str]) -> str:
    """The name of a bundle of these messages, which nobody guesses without the *secret*."""
    named = hashlib.blake2b(key=secret.encode(), digest_size=16)
    for message in messages:
        named.update(message.encode(errors="surrogatepass") + b"\n")
    return named.hexdigest()


def jobs_per_bundle(count: int) -> int:
    """Jobs of a bundle, by default, of *count* that are sent together."""
    return max(1, min(MAX_JOBS, count // _LEAST_MESSAGES))


def read(body: str) -> Bundle:
    """The jobs of a bundle as messages of their own; none if it is none, or cannot be read."""
    fields = fields_if_any(body)
    own = fields.get(JOBS_FIELD)
    if not isinstance(own, list) or not all(isinstance(each, dict) for each in own):
        return Bundle("", "", [], [], "the bundle has no list of jobs, or was cut")
    jobs = [_merged(fields, each) for each in own]
    name = fields.get(BUNDLE_FIELD)
    campaign = str(fields.get("campaign") or DEFAULT_CAMPAIGN)
    messages = [compact_text(job) for job in jobs]
    ids = [str(job.get("id")) for job in jobs]
    return Bundle(str(name), campaign, messages, ids, _problem(name, jobs, messages))


def jobs_of(body: str) -> int:
    """Number of jobs that a message holds, valid or not."""
    if not is_bundle(body):
        return 1
    jobs = fields_if_any(body).get(JOBS_FIELD)
    return max(1, len(jobs)) if isinstance(jobs, list) else 1


def messages_of(body: str) -> list[str]:
    """The messages of a bundle's jobs; the message itself if it is no bundle."""
    if not is_bundle(body):
        return [body]
    return read(body).messages or [body]


def _problem(
    name: object, jobs: Sequence[JSONObject], messages: Sequence[str]
) -> str | None:
    """The reason why a bundle is not drawn; None for a good one."""
    ids = [job.get("id") for job in jobs]
    if not (isinstance(name, str) and _NAME.fullmatch(name)):
        problem = "its name should be 32 hexadecimal digits"
    elif not 0 < len(jobs) <= MAX_JOBS:
        problem = f"{len(jobs)} jobs: 1 to {MAX_JOBS} are allowed"
    elif not all(map(is_safe_id, ids)):
        problem = "a job without an id, or with one that none may have"
    elif len(set(ids)) < len(ids):
        problem = "a job twice"
    elif odd := next((field for field in _COMMON if _differs(field, jobs)), None):
        problem = f"jobs of which {odd} differs"
    elif not is_safe_id(jobs[0].get("campaign") or DEFAULT_CAMPAIGN):
        problem = "a campaign that no job may have"
    elif any(map(_is_alone, jobs, messages)):
        problem = "a job that is sent by itself, as one of several images"
    elif not all(map(sizes.fits, messages)):
        problem = "a job that is larger than a message"
    else:
        return None
    return f"the bundle is not valid, so none of its jobs is drawn: {problem}"


def _differs(field: str, jobs: Sequence[JSONObject]) -> bool:
    return any(job.get(field) != jobs[0].get(field) for job in jobs)


def _is_alone(job: JSONObject, message: str) -> bool:
    return any(job.get(field) for field in _ALONE) or images_of(message) > 1


class Sent(NamedTuple):
    """The message of a job at its place in a source; left out if it *is_sent* by nobody now."""

    message: str
    is_sent: bool = True


class _Job(NamedTuple):
    message: str
    is_sent: bool
    fields: JSONObject

    @property
    def unsigned(self) -> JSONObject:
        if SIGNATURE_FIELD not in self.fields:
            return self.fields
        return {
            key: value for key, value in self.fields.items() if key != SIGNATURE_FIELD
        }


def bundled(jobs: Sequence[Sent], most: int, name: NameOf) -> list[str]:
    """The messages in as few as can hold them: bundles of up to *most* jobs of one kind.

    The same jobs give the same groups, whichever of them are sent and whenever they were signed.
    *name* is given a group's messages without their signatures.
    """
    groups: dict[str, list[_Job]] = {}
    result = []
    for message, is_sent in jobs:
        fields = fields_if_any(message)
        if is_bundle(message) or _is_alone(fields, message):
            result += [message] * is_sent
            continue
        kind = compact_text({field: fields.get(field) for field in _COMMON})
        groups.setdefault(kind, []).append(_Job(message, is_sent, fields))
    for group in groups.values():
        for part in _parts(group, most):
            result += _fitting(part, name)
    return result


def _parts(jobs: Sequence[_Job], most: int) -> Iterator[list[_Job]]:
    """The jobs in groups that are neither too many nor too much work."""
    part: list[_Job] = []
    calls = 0.0
    for job in jobs:
        own = _calls(job.fields)
        if part and (len(part) >= most or calls + own > _MOST_CALLS):
            yield part
            part = []
            calls = 0.0
        part.append(job)
        calls += own
    if part:
        yield part


def _calls(fields: JSONObject) -> float:
    """About the work of a job, valid or not, in the unit of `_MOST_CALLS`."""
    steps, width, height, guidance, scale = (
        given if isinstance(given := fields.get(name), int | float) else usual
        for name, usual in _USUAL.items()
    )
    rows = 1 if guidance == 1 else 2
    pixels = max(1.0, width * height / _USUAL_PIXELS)
    passes = 1 + (scale**2) ** _BY_PIXELS * bool(fields.get("enable_hr"))
    return float((rows * steps + _DECODING) * pixels**_BY_PIXELS * passes)


def _fitting(group: Sequence[_Job], name: NameOf) -> Iterator[str]:
    """The jobs as one bundle, or as several of half of them where that is too large."""
    sent = [job for job in group if job.is_sent]
    if not sent:
        return
    text = None
    if len(group) > 1:
        unsigned = [job.unsigned for job in group]
        own_name = name([compact_text(job) for job in unsigned])
        text = _compact(own_name, unsigned)
        fits = sizes.message_bytes(text) <= MAX_BYTES
        fields = [job.fields for job in sent]
        if fits and fields != unsigned:
            text = _compact(own_name, fields)
        text = _exactly(text, [job.message for job in sent]) if fits else None
    if text is not None:
        yield text
    elif len(group) == 1:
        yield group[0].message
    else:
        half = len(group) // 2
        yield from _fitting(group[:half], name)
        yield from _fitting(group[half:], name)


def _exactly(text: str, messages: Sequence[str]) -> str | None:
    """The text of a bundle; None if it is not read as these messages, or is too large."""
    found = read(text)
    is_exact = found.messages == list(messages) and found.problem is None
    return text if is_exact and sizes.fits(text) else None


def _compact(name: str, jobs: Sequence[JSONObject]) -> str:
    """The text of a bundle, whether it can be read again or not."""
    fields = {BUNDLE_FIELD: name, **_shared(jobs)}
    own = [_differences(fields, job) for job in jobs]
    return message_text({**fields, JOBS_FIELD: own})


def _shared(jobs: Sequence[JSONObject]) -> JSONDict:
    """The fields of all jobs in their order: what they share, null for what differs."""
    order: list[str] = []
    for job in jobs:
        at = 0
        for name in job:
            if name not in order:
                order.insert(at, name)
            at = order.index(name) + 1
    shared: JSONDict = {}
    for name in order:
        values = [job.get(name) for job in jobs]
        if name == SIGNATURE_FIELD and all(isinstance(each, dict) for each in values):
            shared[name] = _shared([value or {} for value in values])
        else:
            is_same = all(value == values[0] for value in values)
            shared[name] = values[0] if is_same else None
    return shared


def _differences(shared: JSONObject, job: JSONObject) -> JSONDict:
    """The fields in which a job differs from the shared ones."""
    own = {}
    for name, value in job.items():
        of_all = shared[name]
        if name == SIGNATURE_FIELD and isinstance(of_all, dict):
            own[name] = _differences(of_all, value)
        elif of_all is None or type(value) is not type(of_all) or value != of_all:
            own[name] = value
    return own


def _merged(shared: JSONObject, own: JSONObject) -> JSONDict:
    """A job's fields: its own, and those shared ones that are not null."""
    job = {}
    for name, value in shared.items():
        if name in _OWN:
            continue
        if name == SIGNATURE_FIELD and isinstance(value, dict):
            job[name] = _merged(value, own.get(name) or {})
        elif name in own or value is not None:
            job[name] = own.get(name, value)
    for name, value in own.items():
        job.setdefault(name, value)
    return job
