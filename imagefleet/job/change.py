"""Changes to failed jobs that are sent again: steps=20, say."""

import json
from collections.abc import Iterable
from typing import Any, Self, get_args

from pydantic_core import to_jsonable_python

from imagefleet import validation
from imagefleet.errors import InvalidMessageError, JobError, SetupError
from imagefleet.job import chain, sizes
from imagefleet.job.message import (
    DELIVERIES_FIELD,
    DIGEST_FIELD,
    Job,
    fields_if_any,
    is_signed,
)
from imagefleet.job.settings_table import SETTINGS
from imagefleet.signing import SIGNATURE_FIELD, JobSigner
from imagefleet.validation import JSONDict, JSONObject

#: A job of another id is another job; and a second drawing is none of an operator's.
_FIXED = {"id", "verify"}

_FIELDS = sorted(Job.model_fields.keys() - _FIXED)


class Change:
    """New values of some fields, for each job."""

    def __init__(self, values: JSONObject, signer: JobSigner | None = None) -> None:
        """Changed jobs are signed by *signer*; raises SetupError for a field that no job has."""
        self._signer = signer
        for name in values:
            _check_name(name)
        self.values: JSONDict = to_jsonable_python(dict(values))

    @classmethod
    def read(cls, texts: Iterable[str], signer: JobSigner | None = None) -> Self:
        """Reads NAME=VALUE, each value by the type of its field; raises SetupError for others."""
        values = {}
        for text in texts:
            name, separator, value = text.partition("=")
            if not separator:
                raise SetupError(
                    f"--set {text[:80]}: should be NAME=VALUE, say steps=20"
                )
            values[name] = _value(name, value)
        return cls(values, signer)

    def apply(self, body: str, job_id: str) -> tuple[str, Job]:
        """The changed job's message, and the job; JobError says why it cannot be."""
        if not (fields := fields_if_any(body)):
            raise InvalidMessageError(
                "its message is no job in JSON, so nothing can be set"
            )
        if is_signed(body) and self._signer is None:
            raise JobError(
                "it is signed, and changed it has to be signed again: give your signing key"
            )
        for name in (DELIVERIES_FIELD, DIGEST_FIELD, SIGNATURE_FIELD):
            fields.pop(name, None)
        place = fields.pop(chain.STAGE_FIELD, None)
        with validation.as_error(
            InvalidMessageError,
            "its job is not valid even with the change: ",
            Job.model_fields,
        ):
            job = Job.model_validate(self._changed(fields, place))
        job = job.identified(job_id)
        if place is not None:
            job = job.stage_of_message(place)
        (message,) = sizes.checked_messages([job.to_message(self._signer)])
        return message, job

    def _changed(self, fields: JSONDict, place: object) -> JSONDict:
        """The fields of a job with the new values, in the stage that has failed."""
        own = fields
        try:
            if isinstance(place, dict):
                own = fields[chain.THEN_FIELD][place["number"] - 2]
            _drop_aliases(own, self.values)
            own |= self.values
        except (LookupError, TypeError, AttributeError):
            raise InvalidMessageError(
                f"{chain.STAGE_FIELD}: it names no stage of the job"
            ) from None
        return fields


def _check_name(name: str) -> None:
    if name in _FIXED:
        raise SetupError(
            f"set {name}: a replay keeps it; for another, `imagefleet failed --export` the"
            " jobs and load them"
        )
    if name not in _FIELDS:
        hint = validation.suggestion(name, _FIELDS)
        raise SetupError(f"set {name[:80]}: a job has no such field{hint}")


def _value(name: str, text: str) -> Any:
    _check_name(name)
    annotation = Job.model_fields[name].annotation
    kinds = get_args(annotation) or (annotation,)
    if text == "" and type(None) in kinds:
        return None
    if str in kinds:
        return text
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text  # which its field refuses, and says what it should be


def _drop_aliases(fields: JSONDict, values: JSONObject) -> None:
    """Takes out what gives a field that is set by AUTOMATIC1111's other names for it."""
    if "sampler_name" in values:
        fields.pop("sampler_index", None)
    settings = fields.get("override_settings")
    if isinstance(settings, dict):
        fields["override_settings"] = {
            name: each
            for name, each in settings.items()
            if name not in SETTINGS or SETTINGS[name].field not in values
        }
