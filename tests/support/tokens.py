"""Settings of a storage that is opened by a role's tokens in place of its key."""

from collections.abc import Iterable
from datetime import timedelta

from pydantic import SecretStr

from fleet.keys import mint
from imagefleet.storage.azure.roles import Role
from imagefleet.storage.settings import StorageSettings


def by_tokens(
    settings: StorageSettings, role: Role, models: Iterable[str] = ()
) -> StorageSettings:
    """The settings with tokens of *role* for an hour, for the queues of *models* too."""
    minted = mint.Minter(settings).mint(role, timedelta(hours=1), models=list(models))
    tokens = {"storage": minted.storage, "sas": SecretStr(minted.sas)}
    return settings.model_copy(update=tokens)
