"""`imagefleet keys mint signing`: the key pair of signed jobs."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

from fleet import console
from imagefleet import errors
from imagefleet.signing import SigningKey

DEFAULT_FILE = Path("signing-key.pem")


def make_keys(file: Path, *, as_json: bool) -> None:
    """Makes the keys with which jobs are signed and checked.

    The private key is written to *file*, which only its owner may read. Prints shell commands that
    set it, and the public key, which workers get: they then refuse jobs, LoRAs and models that are
    not signed. An existing file is never overwritten.
    """
    with console.one_line_errors():
        try:
            public = SigningKey.create(file.expanduser()).public
        except FileExistsError:
            raise errors.SetupError(_exists(file)) from None
        except OSError as error:
            raise errors.SetupError(f"cannot write {file}: {error.strerror}") from None
    path = str(file.expanduser().absolute())
    if as_json:
        console.print_json({"file": path, "public_key": public})
    else:
        variables = {"IMAGEFLEET_SIGNING_KEY": path, "IMAGEFLEET_TRUSTED_KEY": public}
        for name, value in variables.items():
            sys.stdout.write(f"export {name}={shlex.quote(value)}\n")
        sys.stdout.flush()
    console.print_note(
        f"the private key is in {file}: for whoever fills the queue, and for no worker; workers get"
        " IMAGEFLEET_TRUSTED_KEY alone"
    )


def _exists(file: Path) -> str:
    try:
        found = f"its public key is {SigningKey.read(file).public}"
    except errors.SetupError:
        found = "it is not a signing key"
    return f"{file} exists and is not overwritten; {found}"
