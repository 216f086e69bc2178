"""No command prints a secret, or a traceback, whatever fails.

Every secret here holds one mark. It is planted into all settings that may hold one; then each
command runs in this process under each kind of wrong setting and against each kind of broken
service, and the mark is looked for in what it printed, logged, raised and wrote.
"""

import asyncio
import base64
import dataclasses
import json
import os
import re
import signal
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from aiolimiter import AsyncLimiter

from cli import options
from fleet import main
from fleet.monitor import prometheus
from fleet.salad import client, deployment
from imagefleet.storage.azure.storage import AzureStorage
from imagefleet.storage.open import open_storage
from imagefleet.storage.settings import StorageSettings
from imagefleet.telemetry import push
from salad_fake import fleet_file
from worker.files import download

#: Every command under every failure takes a minute.
EVERY_FAILURE = "EVERY_FAILURE" in os.environ

#: In every secret, and 16 characters of base64 with what follows.
MARK = "S3cr3t"

#: What a server sees of `u:S3cr3tPass`, and the key's bytes.
DERIVED = (
    base64.b64encode(f"u:{MARK}Pass".encode()).decode(),
    repr(base64.b64decode(f"{MARK}AccountK==")),
)

SAS = f"sv=2024-11-04&sp=raup&sig={MARK}Signature%3D"
QUERY = f"?token={MARK}Query&{SAS}"

#: Variables of a worker in the fleet file.
PLANTED = (
    "IMAGEFLEET_PUSH_TOKEN: {env: PLANTED}",
    "IMAGEFLEET_PUSH_URL: {env: PLANTED}",
)

#: Every command with arguments that take it as far as it gets. {url}: an address with secrets.
ARGUMENTS: dict[str, tuple[str, ...]] = {
    "demo": ("--output", "fleet.yaml/x"),
    "worker": ("--model", "{url}", "--model-sha256", "0" * 64),
    "load": ("jobs.jsonl", "--restart"),
    "import": ("jobs.jsonl",),
    "sweep": ("captions.txt", "--campaign", "curve", "--restart"),
    "cancel": ("spring", "--yes"),
    "status": (),
    "serve": ("--port", "0", "--clients", "secret.txt"),
    "exporter": ("--port", "0"),
    "broker": ("--organization", "acme", "--port", "0"),
    "webhooks": ("--url", "{url}", "--secret-file", "webhook.txt", "--port", "0"),
    "plan": ("--jobs", "10", "--price-file", "secret.txt"),
    "report": ("--price-file", "prices.yaml"),
    "scale": ("--max-dollars", "1", "--dollars-per-hour", "1", "--once", "--yes"),
    "prompt": ("a cat",),
    "health": ("live", "--port", "{port}"),
    "failed": (),
    "replay": ("--all",),
    "discard": ("--all", "--yes"),
    "keys mint": ("worker", "--policy", "spring"),
    "keys revoke": ("spring",),
    "verify": (),
    "gate": ("spring", "spring", "--other-storage", "{url}"),
    "results": ("--download", "images"),
    "export": ("default", "shards"),
    "score": ("spring", "--extractor", "demo", "--reference", "secret.txt"),
    "gallery": ("--port", "0", "--no-browser"),
    "redo": ("--worker", "w1", "--yes"),
    "deploy apply": ("--yes", "--wait-minutes", "0"),
    "deploy status": (),
    "deploy drain": ("--delete", "--yes", "--wait-minutes", "0"),
    "files add model": ("{url}", "--sha256", "0" * 64, "--cache", "cache"),
    "files add lora": ("{url}", "--sha256", "0" * 64, "--cache", "cache"),
    "files add kernels": ("unet.kernels",),
    "files list lora": (),
    "files remove lora": ("fox", "--yes"),
    "files make kernels": ("--model", "{url}", "--model-sha256", "0" * 64),
    "files make text": ("jobs.jsonl", "--model", "{url}"),
    "bench": ("--model", "{url}"),
}

#: They need no service, and some of them seconds.
OFFLINE = {
    "demo",
    "plan",
    "prompt",
    "bench",
}

ON_STORAGE = {
    each
    for each in ARGUMENTS.keys() - OFFLINE - {"health"}
    if not each.startswith("deploy")
}


@dataclass
class Broken:
    """A service that is broken in one way, and says whatever it was told."""

    port: int = 0
    status: int = 500
    how: str = "echo"
    asked: list[str] = field(default_factory=list)

    def handler(self) -> type[BaseHTTPRequestHandler]:
        broken = self

        class Handler(BaseHTTPRequestHandler):
            def answer(self) -> None:
                broken.asked.append(self.path)
                length = int(self.headers.get("Content-Length") or 0)
                sent = self.rfile.read(length)
                if broken.how == "reset":
                    self.connection.close()
                    return
                body = f"{self.command} {self.path}\n{self.headers}".encode() + sent
                if broken.how == "json":
                    body = json.dumps(
                        {"status": "error", "error": self.path, "title": [1]}
                    ).encode()
                self.send_response(broken.status)
                if broken.how == "redirect":
                    self.send_header(
                        "Location", f"http://u:{MARK}Pass@127.0.0.1:1/x{QUERY}"
                    )
                self.send_header(
                    "Content-Length", str(len(body) + 9 * (broken.how == "cut"))
                )
                self.end_headers()
                self.wfile.write(body)

            do_GET = do_POST = do_PUT = do_DELETE = do_HEAD = do_PATCH = answer  # noqa: N815

            def log_message(self, *_: object) -> None: ...

        return Handler


@pytest.fixture
def broken() -> Iterator[Broken]:
    service = Broken()
    server = ThreadingHTTPServer(("127.0.0.1", 0), service.handler())
    server.handle_error = lambda *_: None  # type: ignore[method-assign]
    service.port = server.server_port
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    yield service
    server.shutdown()
    server.server_close()


@pytest.fixture
def pauses(monkeypatch) -> Counter[str]:
    """No pause takes long; a command that goes on for ever is interrupted, by their number."""
    made = Counter[str]()

    async def sleep(seconds: float, result: object = None) -> object:
        made["sleep"] += 1
        if made["sleep"] % 15 == 0:  # the second time it stops at once
            os.kill(os.getpid(), signal.SIGINT)
        # What a thread reads meanwhile is read before so many pauses are over.
        return await real_sleep(0.002 if seconds >= 1 else 0, result)

    real_sleep = asyncio.sleep
    monkeypatch.setattr(asyncio, "sleep", sleep)
    for module, name in (
        (prometheus, "TIMEOUT_SECONDS"),
        (client, "TIMEOUT_SECONDS"),
        (push, "TIMEOUT_SECONDS"),
        (push, "LAST_PUSH_SECONDS"),
        (download, "STALL_SECONDS"),
    ):
        monkeypatch.setattr(module, name, 0.2)
    quick = dataclasses.replace(
        client.RETRIES, first_wait_seconds=0, longest_wait_seconds=0
    )
    monkeypatch.setattr(client, "RETRIES", quick)
    monkeypatch.setattr(deployment, "POLL_SECONDS", 0.001)
    monkeypatch.setattr(client, "call_limiter", lambda: AsyncLimiter(10_000))
    monkeypatch.setitem(
        AzureStorage.__init__.__kwdefaults__, "read_timeout_seconds", 0.2
    )
    return made


def some(failures: list[tuple[Any, Any]], command: str) -> list[tuple[Any, Any]]:
    """A fifth of them, other ones for each command; `make fuzz` tries all."""
    first = sorted(ARGUMENTS).index(command)
    return failures if EVERY_FAILURE else failures[first % 5 :: 5]


def commands(built: Any) -> list[str]:
    def below(command: Any, words: tuple[str, ...]) -> Iterator[str]:
        if not hasattr(command, "commands"):
            yield " ".join(words)
            return
        for name, each in command.commands.items():
            yield from below(each, (*words, name))

    return list(below(built, ()))


def test_every_command_is_tried(built):
    # `files` is tried with some of the kinds.
    tried = {re.sub(r"^(files \w+) .*", r"\1", name) for name in ARGUMENTS}
    assert tried == set(commands(built))


Run = Callable[..., int]


@pytest.fixture
def run(
    built,
    kernels: bytes,
    tmp_path,
    monkeypatch,
    capsys,
    caplog,
    pauses: Counter[str],
) -> Run:
    """Runs a command; fails if the mark is in anything that it left."""
    secret = tmp_path / "secret.txt"
    given = {
        "secret.txt": f"token: {MARK}File\n{MARK}: [\n",
        "webhook.txt": f"whsec_{MARK}{'A' * 30}\n",
        "prices.yaml": "source: me\n",
        "jobs.jsonl": '{"prompt": "a cat"}\n',
        "captions.txt": "a cat\n",
        "fleet.yaml": fleet_file("http://127.0.0.1:1", *PLANTED),
    }
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(main, "app", built)
    # A worker leaves so while its thread still imports torch.
    monkeypatch.setattr(os, "_exit", sys.exit)
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    monkeypatch.setenv("SALAD_API_KEY", f"{MARK}SaladKey")
    monkeypatch.setenv("PLANTED", f"{MARK}FleetEnvironment")
    for name, text in given.items():
        (tmp_path / name).write_text(text)
    (tmp_path / "unet.kernels").write_bytes(kernels)
    assert MARK in secret.read_text()

    def run(command: str, *arguments: str) -> int:
        monkeypatch.setattr(sys, "argv", ["imagefleet", *command.split(), *arguments])
        caplog.clear()
        pauses.clear()
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            main.main()
        code = int(ended.value.code or 0)
        printed = "".join(capsys.readouterr())
        # What a server sent stays as it is, in a download's .part.
        written = "".join(
            each.read_text(errors="replace")
            for each in tmp_path.rglob("*")
            if each.is_file() and each.name not in given and each.suffix != ".part"
        )
        for place, text in (
            ("printed", printed),
            ("logged", caplog.text),
            ("written", written),
        ):
            found = [each for each in (MARK, *DERIVED) if each.lower() in text.lower()]
            assert not found, f"{command} has {place} {found}: {text[-3000:]}"
        assert "Traceback" not in printed, f"{command}: {printed[-3000:]}"
        assert "Traceback" not in caplog.text, f"{command}: {caplog.text[-3000:]}"
        if code == 2 and printed.strip():
            assert len(printed) < 6_000, printed
        return code

    return run


def connection_string(
    port: object, credential: str = f"AccountKey={MARK}AccountKey"
) -> str:
    endpoints = (
        f"{kind}Endpoint=http://127.0.0.1:{port}/acme" for kind in ("Blob", "Queue")
    )
    return f"{';'.join(endpoints)};AccountName=acme;{credential}"


#: Addresses with secrets, none of which is one.
ADDRESSES = {
    "a word for a port": f"http://u:{MARK}Pass@h:port/x{QUERY}",
    "a port out of range": f"http://u:{MARK}Pass@h:99999/x{QUERY}",
    "no scheme": f"u:{MARK}Pass@h:9090/x{QUERY}",
    "no scheme and no user": f"h:9090/x{QUERY}",
    "another scheme": f"htp://u:{MARK}Pass@h:9090/x{QUERY}",
    "a space": f"http://u:{MARK} Pass@h/x{QUERY}",
    "half of a bracket": f"http://u:{MARK}Pass@[::1/x{QUERY}",
    "no host": f"http://u:{MARK}Pass@/x{QUERY}",
    "a slash in the password": f"http://u:/{MARK}Pass@h:80/x{QUERY}",
    "an escape": f"http://u:{MARK}Pass@h\x1b[31m/x{QUERY}",
}

STORAGES = {
    "a key that is not base64": connection_string(1, f"AccountKey={MARK}*not*base64*"),
    "a key cut off": connection_string(1, f"AccountKey={MARK}A"),
    "no name": f"DefaultEndpointsProtocol=https;AccountKey={MARK}AccountKey",
    "a bad port": connection_string(MARK),
    "a port out of range": connection_string(99999),
    "a URL with a password": f"https://u:{MARK}Pass@acme.blob.core.windows.net",
    "a URL of a container": f"https://acme.blob.core.windows.net/images?{SAS}",
    "another URL": f"https://example.com/{QUERY}",
    "half a token": connection_string(1, f"SharedAccessSignature={MARK}"),
    "a word": f"AccountKey={MARK}",
}


@pytest.mark.parametrize("command", [each for each in ARGUMENTS if each != "health"])
def test_wrong_addresses_are_one_sentence_without_their_secrets(
    run: Run, monkeypatch, tmp_path, command: str
):
    for kind, address in some(list(ADDRESSES.items()), command):
        for name in ("PROMETHEUS", "PUSH_URL", "BROKER_URL", "MODEL"):
            monkeypatch.setenv(f"IMAGEFLEET_{name}", address)
        (tmp_path / "fleet.yaml").write_text(fleet_file(json.dumps(address), *PLANTED))
        arguments = (each.format(url=address, port=1) for each in ARGUMENTS[command])

        code = run(command, *arguments)

        assert code == 2 or command == "prompt", (command, kind)


@pytest.mark.parametrize("command", sorted(ON_STORAGE))
def test_wrong_storage_addresses_are_one_sentence_without_their_secrets(
    run: Run, monkeypatch, command: str
):
    monkeypatch.setenv("IMAGEFLEET_PROMETHEUS", "http://127.0.0.1:1")
    for kind, address in some(list(STORAGES.items()), command):
        monkeypatch.setenv("IMAGEFLEET_STORAGE", address)
        arguments = (
            each.format(url="model.safetensors", port=1) for each in ARGUMENTS[command]
        )

        code = run(command, *arguments)

        assert code in {1, 2}, (command, kind)


#: The command that is tried with the settings of each model.
COMMAND_OF = {
    "WorkerSettings": "worker",
    "LoadSettings": "load",
    "ExporterSettings": "exporter",
    "BrokerSettings": "broker",
    "WebhookSettings": "webhooks",
}

IN_THE_WRONG_PLACE = (
    f"DefaultEndpointsProtocol=https;AccountName=acme;AccountKey={MARK}AccountKey",
    SAS,
    f"https://u:{MARK}Pass@h/x{QUERY}",
)


@pytest.mark.parametrize(
    "model", options.PROJECT_SETTINGS, ids=lambda each: each.__name__
)
def test_a_secret_in_the_place_of_another_setting_is_not_shown(
    run: Run, monkeypatch, model
):
    command = COMMAND_OF.get(model.__name__, "status")
    for name in model.model_fields:
        for value in IN_THE_WRONG_PLACE:
            with monkeypatch.context() as only:
                only.setenv("IMAGEFLEET_MODEL", "no.safetensors")
                only.setenv(options.variable(name), value)

                code = run(command, *(["jobs.jsonl"] if command == "load" else []))

            assert code != 1 or name == "storage", (name, value)


@pytest.mark.parametrize(
    "name", ["sas_file", "price_file", "config", "lora_directory", "model"]
)
def test_a_file_of_secrets_in_the_place_of_another_is_not_quoted(
    run: Run, monkeypatch, name: str
):
    monkeypatch.setenv("IMAGEFLEET_STORAGE", "https://acme.blob.core.windows.net")
    monkeypatch.setenv("IMAGEFLEET_MODEL", "store:dreams.safetensors")
    monkeypatch.setenv(options.variable(name), "secret.txt")

    assert run("worker") == 2
    if name == "sas_file":
        assert run("status") == 2


#: Ways in which a service is broken: its status, and what else is wrong with it.
SERVICES = [
    *((status, "echo") for status in (200, 400, 401, 403, 404, 409, 429, 500)),
    (200, "json"),
    (403, "json"),
    (302, "redirect"),
    (200, "reset"),
    (200, "cut"),
    (0, "unreachable"),
    (0, "tls"),
]


#: Those that reach another service only with a storage that works.
BEHIND_STORAGE = ("worker", "status", "exporter", "report", "scale")


@pytest.fixture
async def working(tmp_path) -> str:
    """A storage with one image."""
    settings = StorageSettings(storage=f"local:{tmp_path}/data")
    async with open_storage(settings) as storage:
        await storage.create()
        await storage.blobs.create(
            "default/a.png", b"", "image/png", {"job": "a", "seconds": "1"}
        )
    return settings.storage


@pytest.mark.parametrize(
    ("command", "storage_works"),
    [
        *((each, False) for each in sorted(ARGUMENTS.keys() - OFFLINE)),
        *((each, True) for each in BEHIND_STORAGE),
    ],
)
def test_broken_services_are_one_sentence_without_the_secrets_sent_to_them(
    run: Run,
    monkeypatch,
    tmp_path,
    broken: Broken,
    working: str,
    command: str,
    storage_works: bool,
):
    for status, how in some(SERVICES, command):
        broken.status = status
        broken.how = how
        port = 1 if how == "unreachable" else broken.port
        scheme = "https" if how == "tls" else "http"
        address = f"{scheme}://u:{MARK}Pass@127.0.0.1:{port}"
        unusable = connection_string(port).replace("http:", f"{scheme}:")
        for name, value in {
            "STORAGE": working if storage_works else unusable,
            "PROMETHEUS": f"{address}/p",
            "PUSH_URL": f"{address}/push{QUERY}",
        }.items():
            monkeypatch.setenv(f"IMAGEFLEET_{name}", value)
        monkeypatch.delenv("IMAGEFLEET_PUSH_TOKEN", raising=False)
        if how == "echo":  # instead of a password
            monkeypatch.setenv("IMAGEFLEET_PUSH_TOKEN", f"{MARK}PushToken")
            monkeypatch.setenv(
                "IMAGEFLEET_PUSH_URL", f"{scheme}://127.0.0.1:{port}/push{QUERY}"
            )
        (tmp_path / "fleet.yaml").write_text(fleet_file(f"{address}/salad", *PLANTED))
        url = f"{address}/dreams.safetensors{QUERY}"
        arguments = (each.format(url=url, port=port) for each in ARGUMENTS[command])

        code = run(command, *arguments)

        assert code in {0, 1, 2, 130}, (command, status, how)
