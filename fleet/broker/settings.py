"""Settings of the broker."""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from imagefleet.job.prompt import SAFE_NAME
from imagefleet.storage.azure.roles import ROLES, Role
from imagefleet.storage.settings import StorageSettings

_NAME = re.compile(r"[a-z][a-z0-9-]{0,61}[a-z0-9]")


def _names(text: str) -> str:
    if not all(_NAME.fullmatch(name) for name in text.split(",")):
        raise ValueError("should be names of fleets, separated by commas")
    return text


def _models(text: str) -> str:
    if not all(SAFE_NAME.fullmatch(name) for name in text.split(",")):
        raise ValueError("should be names of models, separated by commas")
    return text


class BrokerSettings(StorageSettings):
    """Settings of a broker: who gets tokens, and for how long."""

    organization: str = Field(
        default="",
        pattern=r"^[A-Za-z0-9-]*$",
        description="Your organization at SaladCloud, by its name in the portal's address or by its"
        " id. Required.",
    )
    salad_fleets: Annotated[str, AfterValidator(_names)] | None = Field(
        default=None,
        description="Names of the fleets, as in their fleet files, or of single container groups,"
        " separated by commas; by default the whole organization.",
    )
    policy: str = Field(
        default="broker",
        pattern=r"^[a-z0-9][a-z0-9-]{0,49}$",
        description="Stored policies of the tokens are named POLICY-NUMBER; `imagefleet keys revoke"
        " POLICY` ends all tokens at once, and nodes get new ones.",
    )
    token_hours: float = Field(
        default=2, ge=0.1, le=24, description="Hours that a token is valid; nodes renew theirs."
    )
    models: Annotated[str, AfterValidator(_models)] | None = Field(
        default=None,
        description="Names of the models whose jobs the workers may take, separated by commas; by"
        " default only jobs without a model.",
    )
    chains: bool = Field(
        default=False,
        description="Tokens for jobs in several stages, whose models --models names: they allow to"
        " read images, and to add jobs to these queues.",
    )
    host: str = Field(
        default="127.0.0.1",
        description="Address that it listens on; 0.0.0.0 for all interfaces.",
    )
    port: int = Field(default=8081, ge=0, le=65_535, description="Port; 0 picks a free one.")
    log_format: Literal["auto", "json", "text"] = Field(
        default="auto", description="auto logs text on a terminal, and JSON lines elsewhere."
    )

    @property
    def role(self) -> Role:
        """What the tokens allow."""
        return ROLES["worker"].for_chains() if self.chains else ROLES["worker"]

    @property
    def model_names(self) -> list[str]:
        return self.models.split(",") if self.models else []
