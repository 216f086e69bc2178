"""The answer to a request that is not done, whatever the API."""

from collections.abc import Mapping


class Refused(Exception):  # noqa: N818 - an answer, not a fault of the server
    """A request that is answered with a *status* and a sentence, whatever the API."""

    #: OpenAI's word for what is wrong, if it has one.
    code: str | None = None

    def __init__(
        self, status: int, message: str, headers: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.headers = dict(headers or {})
