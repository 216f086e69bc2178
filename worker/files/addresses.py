"""Reads `--model`: a path on this machine, or an address to fetch a checkpoint from."""

import hashlib
import json
import re
import shlex
from dataclasses import dataclass
from pathlib import PurePosixPath

from yarl import URL

from imagefleet import redaction
from imagefleet.errors import JobError, SetupError
from imagefleet.storage import protocol
from worker.settings import WorkerSettings

STORE_SCHEME = "store:"

#: A plain name with the suffix of a single file or of a packed folder.
FILE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9 ._+-]{0,150}\.(safetensors|tar)")

#: A plain file name without its suffix.
STEM = re.compile(r"[A-Za-z0-9][A-Za-z0-9 ._+-]{0,150}")

PICKLE_SUFFIXES = frozenset({".ckpt", ".pt", ".pth", ".bin"})

#: A repository on Hugging Face, which also looks like a relative path.
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}")

#: Repositories that are gone, and where their files are now.
_MOVED = {
    "runwayml/stable-diffusion-v1-5": "stable-diffusion-v1-5/stable-diffusion-v1-5",
    "runwayml/stable-diffusion-inpainting": "stable-diffusion-v1-5/stable-diffusion-inpainting",
}

#: Addresses of web pages instead of files, and the address to take.
_PAGES = {
    r"https?://(www\.)?(huggingface\.co|hf\.co)/(?!.+/.+/resolve/.+/.)": "the file itself is at an"
    " address with /resolve/ in the place of /blob/; a whole repository is downloaded by"
    " `hf download OWNER/NAME --local-dir ./model`, and then --model ./model",
    r"https?://(www\.)?civitai\.com/(?!api/download/)": "--model"
    " https://civitai.com/api/download/models/NUMBER downloads the file, with the number from the"
    " page's download button; many models also need a token: append ?token=YOUR_TOKEN",
}

#: Parameters of signed addresses: they are renewed, and the file stays the same.
_CREDENTIALS = re.compile(
    r"token|(api_?)?key|signature|expires|policy|key-pair-id|x-(amz|goog)-.*|response-content-.*"
    r"|sig|s[veprtsi]|spr|srt|sdd|sk(oid|tid|t|e|s|v)",  # Azure's
    re.IGNORECASE,
)

#: What a pickle holds, by the thing that it should be, and how it is taken out of it.
_MODEL_TENSORS = (
    ' w = w.get("state_dict", w);'
    " save_file({k: v.clone().contiguous() for k, v in w.items() if torch.is_tensor(v)}, "
)
_EMBEDDING_TENSORS = (
    ' (v,) = w.get("string_to_param", w).values();'
    ' save_file({"emb_params": v.detach().clone().contiguous()}, '
)


@dataclass(frozen=True)
class Address:
    """The place that a model is fetched from.

    The same *identity* means the same model, whatever token the address has. *file_name* is None
    where the address does not tell; *stem* is its name until the server says a better one.
    """

    text: str
    identity: str
    file_name: str | None
    stem: str

    @property
    def blob(self) -> str | None:
        """The name below models/ in the storage, of an address there."""
        is_in_storage = self.text.startswith(STORE_SCHEME)
        return self.text.removeprefix(STORE_SCHEME) if is_in_storage else None

    def folder_name(self, sha256: str | None) -> str:
        return hashlib.sha256(f"{self.identity}\n{sha256}".encode()).hexdigest()[:16]


def read_address(text: str, sha256: str | None, storage: str) -> Address | None:
    """The address in *text*, None if it is a path; raises SetupError if it can be neither.

    *storage* identifies the fleet's storage.
    """
    if re.match(r"https?://", text, re.IGNORECASE):
        address = _read_url(text)
    elif text.startswith(STORE_SCHEME):
        address = _read_store(text, storage)
    else:
        if sha256 is not None:
            raise SetupError(
                "--model-sha256 is for a model that is fetched; this is a path"
            )
        return None
    if text.lower().startswith("http:") and sha256 is None:
        raise SetupError(
            "a model could be changed on its way over plain http: set --model-sha256 or use https"
        )
    return address


def of_model(settings: WorkerSettings) -> Address | None:
    """The address of the settings' model; None if it is a path. Raises as `read_address`."""
    storage = f"{settings.storage} {settings.files_container}"
    return read_address(settings.model, settings.model_sha256, storage)


def hub_advice(text: str) -> str | None:
    """Advice for the id of a repository on Hugging Face; None if *text* is none."""
    if not _HUB_ID.fullmatch(text):
        return None
    start = "if it is a model on Hugging Face, download it:"
    if text in _MOVED:
        start = "its repository on Hugging Face is gone; download its copy:"
    command = f"hf download {_MOVED.get(text, text)} --local-dir ./model"
    return f"{start} `{command}`, and then --model ./model"


def pickle_advice(path: str, *, is_embedding: bool = False) -> str:
    """Advice that converts a pickled checkpoint or embedding: one sentence with a command."""
    new = str(PurePosixPath(path).with_suffix(".safetensors"))
    program = (
        "import torch; from safetensors.torch import save_file;"
        f' w = torch.load({json.dumps(path)}, map_location="cpu", weights_only=True);'
        f"{_EMBEDDING_TENSORS if is_embedding else _MODEL_TENSORS}{json.dumps(new)})"
    )
    return (
        "a pickle, which may run any program when it is loaded, so it never is: take the"
        f" {'embedding' if is_embedding else 'model'}'s .safetensors version, or convert it:"
        f" python -c {shlex.quote(program)}"
    )


def _read_url(text: str) -> Address:
    try:
        url = URL(redaction.check_address(text))
    except ValueError as error:
        raise SetupError(
            f"--model is not a valid address: {redaction.reason(error)}"
        ) from None
    shown = redaction.address(text)
    for page, advice in _PAGES.items():
        if re.match(page, text, re.IGNORECASE):
            raise SetupError(f"{shown!r} is a web page, not a file; {advice}")
    bare = url.with_query(None).with_user(None).with_fragment(None)
    suffix = PurePosixPath(url.name).suffix.lower()
    if suffix in PICKLE_SUFFIXES:
        raise SetupError(f"{shown!r} is {pickle_advice(url.name[:200])}")
    if suffix in {".safetensors", ".tar"}:
        if not FILE_NAME.fullmatch(url.name):
            raise _refused_name(url.name)
        return Address(text, str(bare), url.name, PurePosixPath(url.name).stem)
    if not url.name or "/" in url.name:
        raise _refused_name(url.name)
    # Without a suffix, the parameters may name the file, and its content tells what it is.
    kept = [
        (key, value)
        for key, value in url.query.items()
        if not _CREDENTIALS.fullmatch(key)
    ]
    stem = url.name if STEM.fullmatch(url.name) else "model"
    return Address(text, str(bare.with_query(sorted(kept))), None, stem)


def _read_store(text: str, storage: str) -> Address:
    blob = text.removeprefix(STORE_SCHEME)
    name = blob.rpartition("/")[2]
    try:
        protocol.check_blob_name(blob)
    except JobError as error:
        raise SetupError(f"the model cannot be fetched: {error.message}") from None
    if not FILE_NAME.fullmatch(name):
        raise _refused_name(name)
    return Address(text, f"{storage} {text}", name, PurePosixPath(name).stem)


def _refused_name(name: str) -> SetupError:
    return SetupError(
        f"the model {name[:80]!r} cannot be fetched: its name must end in .safetensors, or in"
        " .tar for a folder in diffusers format"
    )
