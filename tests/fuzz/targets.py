"""What is fuzzed: everything that reads what others wrote, with valid examples to start from.

A target may raise only the errors that it declares, within a fifth of a second, and with a message
that a terminal and a log can take.
"""

import asyncio
import io
import json
import re
import struct
import time
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import jwt
from cryptography.hazmat.primitives.asymmetric import ec
from pydantic import ValidationError

import bombs
import job_inputs
from cli import console
from fleet.gallery import images
from fleet.keys import broker
from fleet.monitor import prometheus
from fleet.plan import estimate
from fleet.report import figures, records
from fleet.salad import file as salad_file
from fleet.settings import BrokerSettings
from header_files import LORA, REFINER, SD1
from imagefleet import errors, redaction
from imagefleet.files import contents, picture, safetensors
from imagefleet.job import clip, message, prompt, sizes
from imagefleet.pricing import prices
from imagefleet.records.record import Record
from imagefleet.storage import deliveries, protocol
from imagefleet.storage.azure import account, roles, sas
from imagefleet.storage.dead_letter import FailedJob
from imagefleet.storage.proofs import Proofs
from imagefleet.validation import JSONDict
from in_memory import InMemory
from loadgen import sources
from worker.files import addresses, manifest

ROOT = Path(__file__).parents[2]

#: Of CPU, on an input of up to 200 KB.
MAX_SECONDS = 0.2

#: PyYAML reads 100 KB/s. Such files are the operator's own.
MAX_YAML_SECONDS = 4.0

#: A log's line, or a few lines of a terminal.
MAX_MESSAGE_CHARACTERS = 3_000

NOON = datetime(2026, 11, 1, 12, tzinfo=UTC)
PROOFS = Proofs(["5ec2e7"])
LOOP = asyncio.new_event_loop()


class FoundError(AssertionError):
    """A target broke its promise with an input."""


@dataclass(frozen=True)
class Target:
    """A function that reads bytes, the errors that it may raise, and valid examples."""

    read: Callable[[bytes], object]
    declared: tuple[type[Exception], ...]
    seeds: tuple[bytes, ...]
    max_seconds: float = MAX_SECONDS

    def check(self, data: bytes) -> bool:
        """True if *data* was accepted; raises FoundError for what must not be."""
        refusal, seconds = self._timed(data)
        if seconds > self.max_seconds:  # again: Python may have collected garbage
            refusal, again = self._timed(data)
            if min(seconds, again) > self.max_seconds:
                raise FoundError(f"it took {min(seconds, again):.2f} s of CPU")
        if refusal is not None:
            text = str(refusal)
            if len(text) > MAX_MESSAGE_CHARACTERS:
                raise FoundError(
                    f"a message of {len(text):,} characters: {text[:200]!r}"
                )
            if redaction.CONTROLS.search(console.untrusted(text).plain):
                raise FoundError(f"a message that controls a terminal: {text[:200]!r}")
            console.json_text({"reason": text}).encode()
        return refusal is None

    def _timed(self, data: bytes) -> tuple[Exception | None, float]:
        """The declared error, if there was one, and the seconds of CPU."""
        began = time.thread_time()
        refusal = None
        try:
            self.read(data)
        except self.declared as error:
            refusal = error
        except Exception as error:
            raise FoundError(f"{type(error).__name__}: {str(error)[:300]}") from error
        return refusal, time.thread_time() - began


def _text(data: bytes) -> str:
    """As a queue or a header may hold it: any characters, half surrogate pairs included."""
    return data.decode("utf-8", "surrogatepass" if b"\xed" in data else "replace")


def _lenient(data: bytes) -> str:
    try:
        return _text(data)
    except UnicodeDecodeError:
        return data.decode("latin-1")


def _job(data: bytes) -> None:
    job = message.read_job(text := _lenient(data), "an-id")
    again = message.read_job(job.to_message(), "another-id")
    assert again.model_dump() == job.model_dump(), "a job is the same after its message"
    job_inputs.check_stages(job, again, text)
    assert 0 <= job.image_seed(job.images - 1) < 2**63
    protocol.check_blob_name(job.blob_name(0))
    protocol.check_metadata({"metadata": json.dumps(job.metadata)})
    job_inputs.check_sources(job)


def _prompt(data: bytes) -> None:
    text = _lenient(data)[:65_536]
    for read in (prompt.read_prompt, prompt.read_negative_prompt):
        parsed = read(text)
        weights = [part.weight for section in parsed.sections for part in section]
        assert all(abs(weight) <= prompt.EMPHASIS_LIMIT for weight in weights)
        assert all(prompt.SAFE_NAME.fullmatch(lora.name) for lora in parsed.loras)
        cut = clip.cut_into_chunks(parsed, job_inputs.tokenise, 7)
        assert len(cut) <= clip.MAX_CHUNKS


def _safetensors(data: bytes) -> None:
    if data[:1] in {b"{", b"["}:  # a header, as the mutations of JSON make it
        data = len(data).to_bytes(8, "little") + data
    header = safetensors.read_header(io.BytesIO(data))
    assert contents.identify(header).name
    contents.prediction_type(header)


def _png(*chunks: tuple[bytes, bytes], size: tuple[int, int] = (8, 8)) -> bytes:
    header = struct.pack(">IIBBBBB", *size, 8, 2, 0, 0, 0)
    rows = zlib.compress(bytes(8 * 25))
    return bombs.png((b"IHDR", header), *chunks, (b"IDAT", rows))


INFOTEXT = (
    b"a (red:1.2) house <lora:rocket:0.5>\nNegative prompt: blurry\nSteps: 15, Sampler: Euler a,"
    b' CFG scale: 7, Seed: 1, Size: 8x8, Model: "a, b", RNG: CPU, Version: imagefleet'
)


def _image(data: bytes) -> None:
    if not data.startswith(b"\x89PNG"):  # text, as each kind of chunk has it
        which = zlib.crc32(data) % 3
        chunk = (
            (b"tEXt", b"parameters\0" + data),
            (b"zTXt", b"parameters\0\0" + zlib.compress(data)),
            (b"iTXt", b"parameters\0\1\0\0\0" + zlib.compress(data)),
        )[which]
        data = _png(chunk)
    assert images.shrink(data)
    with picture.opened(data) as image:
        prompt.read_words(picture.parameters(image, 150_000))


def _blob_metadata(data: bytes) -> None:
    if isinstance(facts := json.loads(data), dict):
        facts = {str(name): str(value) for name, value in facts.items()}
        Record.of_blob({"outcome": "completed", "id": "a", "at": NOON}, facts)
        assert PROOFS.author("a.png", facts, data) is None


def _reported_record(data: bytes) -> None:
    record = Record.read(data)
    for proofs in (None, PROOFS):
        found = records.Records("spring", proofs=proofs)
        for at in (record.at, NOON):
            records._count_image(found, record.model_copy(update={"at": at}))
        computed = figures.compute(found, "local:x", prices.BUILT_IN)
        json.loads(console.json_text(computed), parse_constant=_no)


def _no(constant: str) -> None:
    raise AssertionError(f"{constant} is no JSON")


def _poison_record(data: bytes) -> None:
    record = FailedJob.parse(_lenient(data))
    if record is None:
        raise errors.JobError("it is not a record of a failed job")
    console.json_text(record.model_dump(mode="json")).encode()
    console.untrusted(f"{record.id} {record.error} {record.reason}")
    sizes.checked_messages([record.body or ""])


def _deliveries(data: bytes) -> None:
    for count in (1, 2, 7):
        leased = protocol.Message("m", _lenient(data), count, NOON)
        found = deliveries.Deliveries.of(leased)
        assert found.known == count - 1
        written = found.ended(failed=True).marked_alone().write_to(leased.body)
        assert written is None or sizes.fits(written)


def _price_file(data: bytes) -> None:
    table = prices.read_table(InMemory(data, "prices.yaml"))  # type: ignore[arg-type]
    for gpu in table.gpus.values():
        assert all(0 <= price <= 1000 for price in gpu.dollars_per_hour.values())


def _fleet_file(data: bytes) -> None:
    salad_file.read_file(InMemory(data, "fleet.yaml"))  # type: ignore[arg-type]


def _template(suffix: str) -> Callable[[bytes], None]:
    def read(data: bytes) -> None:
        source = sources.TemplateSource(InMemory(data, f"jobs.{suffix}"), count=3)  # type: ignore[arg-type]
        for body in source.bodies():
            message.read_job(body, "an-id")

    return read


def _tokens(data: bytes) -> None:
    assert sas.read_tokens(data).of("queue") is not None


def _manifest(data: bytes) -> None:
    hashes = manifest.parse("the manifest", data).files
    assert all(isinstance(each, str) for each in hashes.values())


def _metrics_reply(data: bytes) -> None:
    try:
        reply = prometheus._Reply.model_validate_json(data)
    except ValidationError:  # its text is not shown
        raise errors.SetupError("not a reply of Prometheus") from None
    for series in (each for each in reply.result if each.is_known):
        assert console.number(series.last)


def _bench_report(data: bytes) -> None:
    estimate.read_bench(InMemory(data, "bench.json"), prices.BUILT_IN)  # type: ignore[arg-type]


def _address(data: bytes) -> None:
    text = _lenient(data)
    shown = redaction.address(text)
    assert "?" not in shown
    assert not re.search(r"://[^/]*@", shown)
    redaction.message(text)
    for read in (account.read_address, lambda it: addresses.read_address(it, None, "")):
        read(text)


def _broker() -> Callable[[bytes], None]:
    private = ec.generate_private_key(ec.SECP256R1())
    public = json.loads(jwt.algorithms.ECAlgorithm.to_jwk(private.public_key())) | {
        "kid": "k"
    }
    settings = BrokerSettings(organization="organization", salad_fleets="group")
    identities = broker.Identities(settings, "http://127.0.0.1:1")
    identities._keys.get_jwk_set = lambda *_, **__: jwt.PyJWKSet([public])  # type: ignore[method-assign]

    def read(data: bytes) -> None:
        token = data.decode("latin-1")
        try:
            given = json.loads(data)
            token = jwt.encode(given["claims"], private, "ES256", given["header"])
        except (
            ValueError,
            TypeError,
            KeyError,
            AttributeError,
            RecursionError,
            jwt.PyJWTError,
        ):
            pass  # not a token's content, but perhaps a token
        LOOP.run_until_complete(identities.verify(token))

    read.declared = broker.RefusedError  # type: ignore[attr-defined]
    return read


BROKER = _broker()

JOB = (
    b'{"prompt": "a (red:1.2) house, <lora:rocket:0.5>", "negative_prompt": "(blurry:1.4)",'
    b' "sampler_name": "k_euler_a", "steps": 15, "cfg_scale": 7, "width": 512, "height": 640,'
    b' "seed": 4294967295, "batch_size": 2, "n_iter": 1, "id": "0001", "campaign": "spring",'
    b' "override_settings": {"CLIP_stop_at_last_layers": 2}, "output": {"format": "webp"},'
    b' "metadata": {"order": [1, null, "x"]}, "deliveries": {"known": 3, "failed": 1}}'
)

RECORD = (
    b'{"outcome": "failed", "id": "0001", "campaign": "spring", "error": "MissingFileError",'
    b' "reason": "no LoRA x", "at": "2026-11-01T00:00:00Z", "source": "m", '
)

_NONE: JSONDict = {"dtype": "F16", "shape": [4, 320], "data_offsets": [0, 2560]}
_SAS = "sv=2024-11-04&se=2030-01-01T00%3A00%3A00Z&sp=up&sig=S3cr3t%3D"


def _header(names: tuple[str, ...]) -> bytes:
    return json.dumps(
        {"__metadata__": {"a": "b"}, **dict.fromkeys(names, _NONE)}
    ).encode()


def _claims(**changes: object) -> bytes:
    claims = {
        "exp": 4_000_000_000,
        "aud": "organization",
        "sub": "machine",
        "salad_organization_name": "organization",
        "salad_container_group_name": "group",
        **changes,
    }
    return json.dumps({"header": {"kid": "k"}, "claims": claims}).encode()


TARGETS: dict[str, Target] = {
    "job": Target(
        _job, (errors.JobError,), (JOB, *job_inputs.PASSES, b'{"prompt": ""}', b"e30=")
    ),
    "input image": Target(
        job_inputs.read,
        (errors.JobError,),
        job_inputs.PICTURES,
        max_seconds=1.0,
    ),
    "prompt": Target(
        _prompt,
        (errors.JobError,),
        (
            INFOTEXT,
            b"a ((red)) [house:1.2], (x:1.3) BREAK (y) <lora:a b:0.5:0.8> <lyco:c:te=1:unet=-1>",
            b"[from:to:0.5] a|b [a|b] AND \\(x\\)",
        ),
    ),
    "safetensors": Target(
        _safetensors,
        (safetensors.MalformedError,),
        tuple(_header(names) for names in (SD1, LORA, REFINER, ("emb_params",), ())),
    ),
    "infotext": Target(
        _image,
        (picture.DamagedImageError,),
        (
            INFOTEXT,
            _png((b"tEXt", b"parameters\0" + INFOTEXT)),
            _png(
                (b"iTXt", b"parameters\0\0\0\0\0" + INFOTEXT),
                (b"eXIf", b"II*\0\x08\0\0\0\0\0"),
            ),
        ),
    ),
    "blob metadata": Target(
        _blob_metadata,
        (errors.JobError, ValueError, RecursionError),
        (
            b'{"job": "a", "seconds": "2.5", "attempt": "1", "worker": "w", "gpu": "RTX 4090",'
            b' "started_at": "2026-11-01T00:00:00.000+00:00", "price_per_hour": "0.1", "seed": "7",'
            b' "start_up_seconds": "31.5", "images": "2", "metadata": "{\\"a\\": [1]}"}',
        ),
    ),
    "reported record": Target(
        _reported_record,
        (errors.JobError,),
        (
            b'{"outcome": "completed", "blob": "spring/a.png", "id": "a", "seconds": 2.5,'
            b' "at": "2026-11-01T00:00:00Z", "started_at": "2026-11-01T00:00:00Z", "model": "m",'
            b' "price_per_hour": 0.1, "start_up_seconds": 31.5, "size_bytes": 5,'
            b' "worker": "0d8f5c1e-77a2-4c1b-9a3e-5b2f0e7d9c11-17",'
            b' "proof": "YEPKG8_CiCQ6i2LvN5Nkzw"}',
        ),
    ),
    "poison record": Target(
        _poison_record,
        (errors.JobError,),
        (RECORD + b'"body": "{}"}',),
    ),
    "deliveries": Target(
        _deliveries,
        (),
        (JOB, b'{"deliveries": {"lost": 2, "lost_alone": 1, "is_alone": true}}'),
    ),
    "price file": Target(
        _price_file,
        (errors.SetupError,),
        (
            b"source: me\ngpus:\n  RTX 4090: {batch: 0.2, high: 0.3}\n  mine: {batch: 1}\n"
            b"storage: {blob_writes_per_10000: 0.05}\n",
            b'{"source": "me", "gpus": {"RTX 4090": {"low": 0.2}}}',
            b"a: &a [1, 1]\nb: &b [*a, *a]\nc: [*b, *b]\n",
        ),
        max_seconds=MAX_YAML_SECONDS,
    ),
    "fleet file": Target(
        _fleet_file,
        (errors.SetupError,),
        ((ROOT / "deploy" / "salad" / "fleet.yaml").read_bytes(),),
        max_seconds=MAX_YAML_SECONDS,
    ),
    "template.toml": Target(
        _template("toml"),
        (errors.SetupError,),
        ((ROOT / "templates" / "catalogue.toml").read_bytes(),),
        max_seconds=1.0,  # the operator's own file
    ),
    "template.yaml": Target(
        _template("yaml"),
        (errors.SetupError,),
        (
            (ROOT / "templates" / "demo.yaml").read_bytes(),
            b'{"prompt": ["a {b} {b:2}"], "lists": {"b": ["{c}{c:2}", "x"], "c": [{"text": "y",'
            b' "weight": 2}, {"lora": "z", "strength": [0.1, 0.5]}]}, "count": 3}',
            b'{"prompt": "a", "every": ["prompt"], "job": {"size": ["512x512", "64x64"], "steps":'
            b' {"from": 5, "to": 9, "step": 2}, "cfg_scale": {"from": 5.5, "to": 6, "step": 0.1}}}',
        ),
        max_seconds=MAX_YAML_SECONDS,
    ),
    "tokens": Target(
        _tokens,
        (ValueError,),
        (
            json.dumps(
                {
                    **dict.fromkeys(roles.RESOURCES, _SAS),
                    "expires_at": "2030-01-01T00:00:00Z",
                }
            ).encode(),
        ),
    ),
    "identity token": Target(
        BROKER,
        (BROKER.declared,),  # type: ignore[attr-defined]
        (
            _claims(),
            _claims(salad_workload_name="group", nbf=1, iat=1),
            b"eyJhbGciOiJFUzI1NiIsImtpZCI6ImsifQ.eyJhdWQiOiJvcmdhbml6YXRpb24ifQ.AAAA",
        ),
    ),
    "manifest": Target(
        _manifest,
        (errors.TransientError, errors.SetupError),
        (b'{"rocket": "' + b"a" * 64 + b'"}',),
    ),
    "metrics reply": Target(
        _metrics_reply,
        (errors.SetupError,),
        (
            b'{"status": "success", "data": {"resultType": "matrix", "result": [{"metric": {"gpu":'
            b' "x"}, "values": [[1700000000, "1.5"], [1700000060, "NaN"]]}]}}',
            b'{"status": "success", "data": {"resultType": "vector", "result": [{"metric": {},'
            b' "value": [1700000000.5, "2"]}]}}',
            b'{"status": "error", "errorType": "bad_data", "error": "parse error"}',
        ),
    ),
    "bench report": Target(
        _bench_report,
        (errors.SetupError,),
        (
            b'{"hardware": {"device": "NVIDIA GeForce RTX 4090", "memory_bytes": 24000000000},'
            b' "worker_images_per_second": 8.5, "ready_seconds": 61.2, "width": 512, "height": 512,'
            b' "steps": 15, "model": "x"}',
        ),
    ),
    "address": Target(
        _address,
        (errors.SetupError,),
        (
            b"https://u:p@example.com:8443/models/a.safetensors?token=x",
            b"https://acme.blob.core.windows.net/?sv=1&sig=x",
            b"BlobEndpoint=http://127.0.0.1:1/a;QueueEndpoint=http://127.0.0.1:2/a;AccountName=a;"
            b"AccountKey=a2V5a2V5",
            b"https://civitai.com/models/4384?modelVersionId=128713",
            b"https://huggingface.co/o/n/resolve/main/a.safetensors",
        ),
    ),
}
