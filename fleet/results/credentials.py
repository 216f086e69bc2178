"""Content Credentials (C2PA): pictures are signed where they leave the fleet, not on nodes."""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Self

from cryptography.hazmat.primitives.asymmetric import ec, ed25519
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    load_pem_private_key,
)

from cli.options import option
from imagefleet.errors import SetupError
from imagefleet.files import picture
from imagefleet.records.pictures import Fault, Picture
from imagefleet.records.record import Record
from imagefleet.validation import JSONDict

if TYPE_CHECKING:
    from c2pa import Context, Signer

_CERTIFICATE = re.compile(
    b"-----BEGIN CERTIFICATE-----.+?-----END CERTIFICATE-----", re.DOTALL
)

#: What follows the name of the key's file where prompts are to be told.
_WITH_PROMPTS = "+prompt"

OPTION = option(
    "Add Content Credentials, signed with the private key and its certificates in this PEM file;"
    " +prompt tells the prompts, too.",
    metavar="KEY[+prompt]",
)

#: The assertion that tells how a picture was made: the job, its files, and its worker's proof.
RECEIPT = "org.imagefleet.receipt"

_OF_RECORD = (
    "campaign",
    "id",
    "digest",
    "sha256",
    "model",
    "seed",
    "sampler",
    "steps",
    "cfg_scale",
    "worker",
    "proof",
)
_PROMPTS = ("prompt", "negative_prompt")

_SOURCE_TYPES = "http://cv.iptc.org/newscodes/digitalsourcetype/"

_SETTINGS = {
    "builder": {"thumbnail": {"enabled": False}},
    "verify": {"verify_after_sign": False},
}


@dataclass(frozen=True)
class Credentials:
    """Signs pictures with a publisher's key."""

    #: What a picture's receipt has of its record.
    fields: tuple[str, ...]
    _signer: Signer
    _context: Context

    @classmethod
    def read(cls, text: str) -> Self:
        """Those of `--c2pa KEY`; raises SetupError if there is no such key, or no c2pa-python."""
        path = Path(text.removesuffix(_WITH_PROMPTS)).expanduser()
        prompts = _PROMPTS if text.endswith(_WITH_PROMPTS) else ()
        try:
            import c2pa
        except ImportError:
            raise SetupError(
                "--c2pa needs c2pa-python: pip install '.[c2pa]'"
            ) from None
        try:
            pem = path.read_bytes()
            key = load_pem_private_key(pem, password=None)
            private = key.private_bytes(
                Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()
            )
            chain = b"\n".join(_CERTIFICATE.findall(pem))
            signer = c2pa.Signer.from_info(
                c2pa.C2paSignerInfo(_algorithm(key), chain, private, None)
            )
        except (OSError, ValueError, TypeError, c2pa.C2paError) as error:
            why = getattr(error, "strerror", None) or error
            raise SetupError(
                "--c2pa: should be a PEM file of a private key without a password, its certificate"
                f" and those above it: {why}"
            ) from None
        settings = c2pa.Settings.from_dict(_SETTINGS)
        return cls((*_OF_RECORD, *prompts), signer, c2pa.Context(settings))

    def sign(self, found: Picture) -> Picture | Fault:
        """The picture with its credentials, and the record of that file."""
        import c2pa

        record = found.record
        data = found.data
        try:
            with picture.opened(data) as image:
                kind = str(image.format).lower()
                hashes = picture.lora_hashes(image)
            manifest = json.dumps(self._manifest(record, hashes))
            signed = BytesIO()
            with c2pa.Builder(manifest, self._context) as builder:
                builder.sign(self._signer, f"image/{kind}", BytesIO(data), signed)
        except (picture.DamagedImageError, c2pa.C2paError):
            return "misfit"  # as recorded, and no picture
        made = signed.getvalue()
        facts = {
            "size_bytes": len(made),
            "sha256": hashlib.sha256(made).hexdigest(),
        }
        return found._replace(data=made, record=record.model_copy(update=facts))

    def _manifest(self, record: Record, hashes: dict[str, str]) -> JSONDict:
        receipt = record.model_dump(
            mode="json", include={*self.fields}, exclude_none=True
        )
        receipt["loras"] = [
            {**lora._asdict(), "hash": hashes.get(lora.name)} for lora in record.loras
        ]
        agent = {"name": "imagefleet"}
        made = {
            "action": "c2pa.created",
            "digitalSourceType": _SOURCE_TYPES
            + (record.mark or "trainedAlgorithmicMedia"),
            "softwareAgent": agent,
        }
        return {
            "title": (record.blob or "").rpartition("/")[2],
            "claim_generator_info": [agent],
            "assertions": [
                {"label": "c2pa.actions.v2", "data": {"actions": [made]}},
                {"label": RECEIPT, "data": receipt},
            ],
        }


def signed_from(path: Path) -> str | None:
    """The SHA-256 of the file that a picture's credentials were added to; None without any."""
    import c2pa

    try:
        with c2pa.Reader(path) as reader:
            manifest = reader.get_active_manifest() or {}
    except (OSError, c2pa.C2paError):
        return None
    data = {each["label"]: each["data"] for each in manifest.get("assertions", ())}
    sha256 = data.get(RECEIPT, {}).get("sha256")
    return sha256 if isinstance(sha256, str) else None


def _algorithm(key: object) -> bytes:
    """C2PA's name of a key's signatures."""
    if isinstance(key, ec.EllipticCurvePrivateKey):
        return f"es{key.key_size}".encode()
    return b"ed25519" if isinstance(key, ed25519.Ed25519PrivateKey) else b"ps256"
