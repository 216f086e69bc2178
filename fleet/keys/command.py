"""`imagefleet keys`: SAS tokens that can do no more than their bearer needs, until they end."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import sys
import tempfile
from collections.abc import Callable, Mapping
from datetime import datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from fleet import console, options
from fleet.keys.roles import RESOURCES, ROLES, Role, explain, name_of
from imagefleet import errors
from imagefleet.storage.settings import StorageSettings

if TYPE_CHECKING:
    from fleet.keys.check import Checked
    from fleet.keys.mint import Minted

#: A run of a day or two, and a weekend on top; who rotates asks for less.
DEFAULT_HOURS = 72.0

MOST_HOURS = 365 * 24.0

#: Beyond this, a token that leaks is a standing invitation.
WARNED_AFTER_HOURS = 7 * 24.0

#: The names that hold the tokens, in the environment and in a file of tokens.
_VARIABLES = {resource: f"IMAGEFLEET_{resource.upper()}_SAS" for resource in RESOURCES}

app = typer.Typer(
    no_args_is_help=True,
    help="SAS tokens for workers and others, made with the account's key: each can do what its"
    " bearer needs and no more, and ends. Making them asks Azure nothing.",
)

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
PolicyName = Annotated[
    str, typer.Argument(metavar="POLICY", help="The policy's name, as given to --policy.")
]


def _mint_command(role: Role) -> Callable[..., None]:
    @options.from_settings(StorageSettings)
    def mint(
        settings: StorageSettings,
        hours: Annotated[
            float, typer.Option(min=0.05, max=MOST_HOURS, help="How long the tokens hold.")
        ] = DEFAULT_HOURS,
        policy: Annotated[
            str | None,
            typer.Option(
                metavar="NAME",
                help="Tie them to a stored policy of this name: it can be revoked, and the same"
                " command again prolongs the tokens that are out.",
            ),
        ] = None,
        file: Annotated[
            Path | None,
            typer.Option(help="Write them to this file, for IMAGEFLEET_SAS_FILE; print none."),
        ] = None,
        as_json: Annotated[
            bool, typer.Option("--json", help="Print what --file would write.")
        ] = False,
    ) -> None:
        minted = console.run(_mint(settings, role, timedelta(hours=hours), policy))
        if file is not None:
            write_tokens(file, minted)
            _say(f"written to {file}")
        elif as_json:
            console.print_json(record(minted))
        else:
            sys.stdout.writelines(f"{line}\n" for line in export_lines(settings, minted))
            sys.stdout.flush()
        _explain(settings, role, minted)
        if hours > WARNED_AFTER_HOURS:
            _say(
                f"warning: {hours / 24:.0f} days are long for tokens that cannot be taken back"
                if policy is None
                else f"warning: {hours / 24:.0f} days are long; revoke {policy!r} when it is over"
            )

    mint.__doc__ = f"""Makes tokens for {role.what}.

    Prints lines for a shell, and on standard error what they allow.

    imagefleet keys {role.name} --hours 24

    imagefleet keys {role.name} --hours 24 --file tokens.json
    """
    return mint


for _role in ROLES.values():
    app.command(_role.name, short_help=f"For {_role.what}.")(_mint_command(_role))


@app.command("check")
@options.from_settings(StorageSettings)
def check_command(
    settings: StorageSettings,
    role: Annotated[
        str | None,
        typer.Argument(metavar="ROLE", help=f"Whom they should suffice for: {', '.join(ROLES)}."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Tries what the credentials in force may do, and changes nothing.

    With a role it fails where a permission is missing, and names those that are too many.

    IMAGEFLEET_SAS_FILE=tokens.json imagefleet keys check worker
    """
    if role is not None and role not in ROLES:
        raise errors.SetupError(f"{role!r} is no role: choose one of {', '.join(ROLES)}")
    checked = console.run(_check(settings))
    if as_json:
        console.print_json({"resources": [_checked_record(each) for each in checked]})
    else:
        console.stdout.print(_checked_table(checked))
    if role is not None:
        _compare(checked, ROLES[role])


@app.command("revoke")
@options.from_settings(StorageSettings)
def revoke_command(settings: StorageSettings, policy: PolicyName) -> None:
    """Revokes the tokens of a stored policy; Azure refuses them within half a minute.

    Tokens without a policy end at their time, or when the account's key is regenerated.

    imagefleet keys revoke spring
    """
    removed = console.run(_revoke(settings, policy))
    console.stdout.print(f"revoked {policy} on {', '.join(removed)}", soft_wrap=True)


def record(minted: Minted) -> dict[str, Any]:
    """The file of tokens, and what a broker answers with."""
    return {
        "role": minted.role,
        "storage": minted.storage,
        "expires_at": f"{minted.expires_at:%Y-%m-%dT%H:%M:%SZ}",
        **{str(resource): token for resource, token in minted.tokens.items()},
    }


def export_lines(settings: StorageSettings, minted: Minted) -> list[str]:
    """The same as variables, for a shell."""
    variables: Mapping[str, str] = {
        "IMAGEFLEET_STORAGE": minted.storage,
        "IMAGEFLEET_QUEUE": settings.queue,
        "IMAGEFLEET_CONTAINER": settings.container,
        **{_VARIABLES[resource]: token for resource, token in minted.tokens.items()},
    }
    return [f"export {name}={shlex.quote(value)}" for name, value in variables.items()]


def write_tokens(path: Path, minted: Minted) -> None:
    """Replaces the file of tokens whole, so that no reader sees a half; only its owner reads it.

    Raises:
        SetupError: it cannot be written.
    """
    try:
        number, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")  # mode 600
        try:
            with os.fdopen(number, "w", encoding="utf-8") as file:
                json.dump(record(minted), file, indent=2)
                file.write("\n")
            Path(name).replace(path)
        except BaseException:
            with contextlib.suppress(FileNotFoundError):
                Path(name).unlink()
            raise
    except OSError as error:
        raise errors.SetupError(f"{path} cannot be written: {error.strerror}") from None


async def _mint(
    settings: StorageSettings, role: Role, life: timedelta, policy: str | None
) -> Minted:
    from fleet.keys import mint as keys_mint

    minted = keys_mint.Minter(_on_azure(settings)).mint(role, life, policy)
    if policy is not None:
        await keys_mint.store_policy(settings, role, policy, minted.expires_at)
    return minted


async def _check(settings: StorageSettings) -> list[Checked]:
    from fleet.keys import check as keys_check

    return await keys_check.check(_on_azure(settings))


async def _revoke(settings: StorageSettings, policy: str) -> list[str]:
    from fleet.keys import mint as keys_mint

    keys_mint.Minter(_on_azure(settings))  # says so where there is no key
    return await keys_mint.remove_policy(settings, policy)


def _on_azure(settings: StorageSettings) -> StorageSettings:
    from imagefleet.storage.open import LOCAL_SCHEME

    if settings.storage.strip().startswith(LOCAL_SCHEME):
        raise errors.SetupError(
            "a folder needs no keys; IMAGEFLEET_STORAGE should be an Azure connection string"
        )
    return settings


def _explain(settings: StorageSettings, role: Role, minted: Minted) -> None:
    table = Table("on", "allows", box=None)
    for resource in minted.tokens:
        table.add_row(
            name_of(settings, resource), "; ".join(explain(resource, role.letters(resource)))
        )
    console.stderr.print(table)
    until = f"until {minted.expires_at:%Y-%m-%d %H:%M} UTC"
    if minted.policy is not None:
        until += f", or until `imagefleet keys revoke {minted.policy}`"
    _say(until)


def _checked_record(checked: Checked) -> dict[str, Any]:
    return {
        "resource": checked.resource,
        "name": checked.name,
        "allowed": checked.allowed,
        "denied": checked.denied,
        "until": checked.until.isoformat() if checked.until else None,
        "policy": checked.policy,
    }


def _checked_table(checked: list[Checked]) -> Table:
    table = Table("on", "may", "may not", "until")
    for each in checked:
        table.add_row(
            each.name,
            "\n".join(explain(each.resource, each.allowed)) or "nothing",
            "\n".join(explain(each.resource, each.denied)) or "-",
            _until(each.until, each.policy),
        )
    return table


def _until(until: datetime | None, policy: str | None) -> str:
    if until is not None:
        return f"{until:%Y-%m-%d %H:%M} UTC"
    return f"the policy {policy} ends" if policy else "no end: a key, or an identity"


def _compare(checked: list[Checked], role: Role) -> None:
    missing, too_many = [], []
    for each in checked:
        needed = role.letters(each.resource)
        lacks = [letter for letter in needed if letter not in each.allowed]
        spare = [letter for letter in each.allowed if letter not in needed]
        if lacks:
            missing.append(f"on {each.name}: {'; '.join(explain(each.resource, ''.join(lacks)))}")
        if spare:
            too_many.append(f"on {each.name}: {'; '.join(explain(each.resource, ''.join(spare)))}")
    for line in too_many:
        _say(f"more than {role.name} needs, {line}")
    if missing:
        raise errors.SetupError("\n".join(f"{role.name} lacks, {line}" for line in missing))


def _say(text: str) -> None:
    console.stderr.print(text, highlight=False, markup=False, soft_wrap=True)
