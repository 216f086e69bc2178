"""`imagefleet keys`: short-lived SAS tokens with the least permissions for each role."""

import contextlib
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import typer

from cli import console, options
from cli.options import argument, option
from fleet.keys import mint as keys_mint
from fleet.keys.mint import Minted, Minter
from imagefleet import validation
from imagefleet.errors import SetupError
from imagefleet.job.prompt import SAFE_NAME
from imagefleet.signing import SigningKey
from imagefleet.storage.azure.roles import ROLES, explain
from imagefleet.storage.settings import StorageSettings

#: A run of a day or two, and a weekend on top; less with rotation.
DEFAULT_HOURS = 72.0

#: The role whose keys are no tokens: a pair that signs and checks jobs.
SIGNING = "signing"
DEFAULT_SIGNING_KEY = Path("signing-key.pem")

app = typer.Typer(
    no_args_is_help=True,
    help="Short-lived SAS tokens for workers and other roles, signed with the account key. Each"
    " allows what its role needs and no more. Only --policy makes a call to Azure.",
)


@dataclass(frozen=True)
class Scope:
    model: list[str] | None = option(
        "A model whose jobs they are for as well; repeatable.", metavar="NAME"
    )
    chains: bool = option(
        "For workers that draw jobs in several stages: they may read images, and add jobs"
        " to all queues.",
        default=False,
    )


@app.command("mint")
@options.flat
async def mint_command(
    settings: StorageSettings,
    *,
    role: str = argument(
        f"{', '.join(ROLES)}; or {SIGNING}, the key pair of signed jobs.",
        metavar="ROLE",
    ),
    scope: Scope,
    token_hours: float = option(
        "Lifetime of the tokens.",
        DEFAULT_HOURS,
        min=0.05,
        max=365 * 24,
        metavar="HOURS",
    ),
    policy: str | None = option(
        "Tie them to a stored policy, so that `imagefleet keys revoke NAME` ends them"
        " before they expire. The same name again makes more tokens of that policy.",
        metavar="NAME",
    ),
    file: Path | None = option(
        "Write them to this file, for IMAGEFLEET_SAS_FILE, and print none; of the private"
        f" signing key [default: {DEFAULT_SIGNING_KEY}].",
        metavar="FILE",
    ),
    as_json: bool = option("Print JSON, as --file writes it.", False, "--json"),
) -> None:
    """Creates tokens for a role, or the key pair of signed jobs.

    Prints shell commands, and on stderr what the tokens allow.

    imagefleet keys mint worker --token-hours 24

    imagefleet keys mint monitor --file tokens.json

    imagefleet keys mint signing
    """
    if role == SIGNING:
        if scope != Scope() or policy:
            raise SetupError(
                f"{SIGNING} makes a key pair, which is for all: only --file"
            )
        _make_signing_keys(file or DEFAULT_SIGNING_KEY, as_json=as_json)
        return
    found = validation.choose("role", role, ROLES, [SIGNING])
    if scope.chains and role != "worker":
        raise SetupError("--chains is for `imagefleet keys mint worker`")
    allowed = found.for_chains() if scope.chains else found
    models = scope.model or []
    for name in models:
        if not SAFE_NAME.fullmatch(name):
            raise SetupError(
                f"--model {name[:80]!r} is no model's name: letters, digits, spaces and _ . + ( ) -"
                " only, without a path or suffix"
            )
    minted = _minter(settings).mint(
        allowed, timedelta(hours=token_hours), policy, models
    )
    if policy is not None:
        await keys_mint.store_policy(settings, allowed, policy, models)
    _hand_out(settings, minted, file, as_json=as_json)
    rows = [
        (
            place.name(settings),
            "; ".join(explain(place.resource, place.letters(allowed))),
        )
        for place in minted.by_place
    ]
    console.print_tables(
        console.table(["resource"], texts=["allowed"], rows=rows), to=console.stderr
    )
    revoke = f", or until `imagefleet keys revoke {policy}`" if policy else ""
    console.print_note(f"valid until {minted.expires_at:%Y-%m-%d %H:%M} UTC{revoke}")
    if policy is None and token_hours > 7 * 24:  # worth stealing
        console.print_warning(
            f"tokens for {token_hours / 24:.0f} days cannot be revoked without --policy"
        )


def _hand_out(
    settings: StorageSettings,
    minted: Minted,
    file: Path | None,
    *,
    as_json: bool,
) -> None:
    if file is not None:
        console.write_file(file, console.json_text(minted.record), private=True)
        console.print_note(f"written to {file}")
    if as_json:
        facts = {key: minted.record[key] for key in ("role", "storage", "expires_at")}
        console.print_json(
            minted.record if file is None else {**facts, "file": str(file)}
        )
    elif file is None:
        _print_exports(
            {
                "IMAGEFLEET_STORAGE": minted.storage,
                "IMAGEFLEET_QUEUE": settings.queue,
                "IMAGEFLEET_CONTAINER": settings.container,
                "IMAGEFLEET_FILES_CONTAINER": settings.files_container,
                "IMAGEFLEET_SAS": minted.sas,
            }
        )


@app.command("revoke")
@options.flat
async def revoke_command(
    settings: StorageSettings,
    policy: str = argument(
        "The policy's name, as given to --policy.", metavar="POLICY"
    ),
    as_json: options.AsJson = False,
) -> None:
    """Revokes the tokens of a stored policy, which takes up to 30 s.

    Tokens without a policy end when they expire or the account key is regenerated. A policy of
    the same name would make revoked tokens valid again until they expire: take another name.

    imagefleet keys revoke spring
    """
    _minter(settings)  # raises without an account key
    removed = await keys_mint.remove_policy(settings, policy)
    console.show(
        {"policy": policy, "revoked": removed},
        f"revoked {policy} on {', '.join(removed)}",
        as_json=as_json,
    )


def _print_exports(variables: Mapping[str, str]) -> None:
    """Prints shell commands."""
    for name, value in variables.items():
        console.print_plain(f"export {name}={shlex.quote(value)}")


def _minter(settings: StorageSettings) -> Minter:
    if settings.local_folder is not None:
        raise SetupError(
            "a local folder needs no tokens; set IMAGEFLEET_STORAGE to an Azure connection string"
        )
    return Minter(settings)


def _make_signing_keys(file: Path, *, as_json: bool) -> None:
    """Writes a new private key to *file*, for its owner alone, and prints how both keys are set."""
    try:
        public = SigningKey.create(file.expanduser()).public
    except FileExistsError:
        found = "it is not a signing key"
        with contextlib.suppress(SetupError):
            found = f"its public key is {SigningKey.read(file).public}"
        raise SetupError(f"{file} exists and is not overwritten; {found}") from None
    except OSError as error:
        raise SetupError(f"cannot write {file}: {error.strerror}") from None
    path = str(file.expanduser().absolute())
    if as_json:
        console.print_json({"file": path, "public_key": public})
    else:
        _print_exports(
            {"IMAGEFLEET_SIGNING_KEY": path, "IMAGEFLEET_TRUSTED_KEY": public}
        )
    console.print_note(
        f"the private key is in {file}: for whoever fills the queue, and for no worker; workers get"
        " IMAGEFLEET_TRUSTED_KEY alone"
    )
