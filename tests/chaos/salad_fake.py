"""A fake SaladCloud: its published API, with nodes that start step by step at each list call.

It follows the OpenAPI specification of SaladTechnologies/salad-cloud-docs, version
0.9.0-alpha.17: methods, content types, required fields and bounds. A request that violates it is
answered with 400 and recorded in `violations`, which must be empty at the end of every test.
"""

from __future__ import annotations

import asyncio
import random
import threading
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Annotated, Any, Literal

from aiohttp import web
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

KEY = "salad-key-0123456789"
GPU_CLASSES = {
    "RTX 3060 Ti (8 GB)": "cb6c1931-89b6-4f76-976f-54047320ccc6",
    "RTX 3070 (8 GB)": "951131f6-5acf-489c-b303-0906be8b26ef",
    "RTX 6070 (16 GB)": "11111111-2222-4333-8444-555555555555",  # newer than our table
}
MOMENT = "2026-11-21T12:00:00Z"

Line = Annotated[str, Field(min_length=1, max_length=1000, pattern=r"^.*$")]
Priority = Literal["high", "medium", "low", "batch"]


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class Exec(Strict):
    command: list[Annotated[str, Field(min_length=1, max_length=2048)]] = Field(
        min_length=1, max_length=100
    )


class Probe(Strict):
    exec: Exec | None = None
    http: dict[str, Any] | None = None
    tcp: dict[str, Any] | None = None
    grpc: dict[str, Any] | None = None
    initial_delay_seconds: int = Field(ge=0, le=1200)
    period_seconds: int = Field(ge=1, le=120)
    timeout_seconds: int = Field(ge=1, le=60)
    success_threshold: int = Field(ge=1, le=10)
    failure_threshold: int = Field(ge=1, le=20)


class Resources(Strict):
    cpu: int = Field(ge=1, le=1024)
    memory: int = Field(ge=1024, le=1_073_741_824)
    gpu_classes: list[str] = Field(default=[], max_length=100)
    shm_size: int = Field(default=64, ge=64, le=1_073_741_824)
    storage_amount: int = Field(default=2**30, ge=2**30, le=2**50)

    @model_validator(mode="after")
    def _uuids(self) -> Resources:
        for each in self.gpu_classes:
            uuid.UUID(each)
        return self


class Container(Strict):
    image: Annotated[str, Field(min_length=1, max_length=2048)]
    resources: Resources
    command: list[Line] | None = Field(default=None, max_length=100)
    priority: Priority | None = None
    image_caching: bool = False
    environment_variables: dict[str, Line] = {}
    logging: dict[str, Any] | None = None
    registry_authentication: dict[str, Any] | None = None


class Prototype(Strict):
    name: str = Field(pattern=r"^[a-z][a-z0-9-]{0,61}[a-z0-9]$")
    display_name: str | None = Field(default=None, pattern=r"^[ ,-.0-9A-Za-z]{2,63}$")
    container: Container
    replicas: int = Field(ge=0, le=500)
    autostart_policy: bool
    restart_policy: Literal["always", "on_failure", "never"]
    country_codes: list[Annotated[str, Field(pattern=r"^[a-z]{2}$")]] | None = None
    startup_probe: Probe | None = None
    liveness_probe: Probe | None = None
    readiness_probe: Probe | None = None
    networking: dict[str, Any] | None = None


class ScalingAction(Strict):
    replicas: int = Field(ge=0, le=500)
    schedule: str = Field(pattern=r"^([0-9A-Za-z*/,-]+)([\t ]+[0-9A-Za-z*/,-]+){4}$")


class Patch(Strict):
    """The fields that can be patched without a restart; the specification has more."""

    replicas: int | None = Field(default=None, ge=0, le=500)
    display_name: str | None = None
    is_scheduled: bool = Field(default=False, alias="scheduled-scaling-enabled")
    actions: list[ScalingAction] = Field(
        default=[], max_length=100, alias="scaling-actions"
    )


@dataclass
class Group:
    """A container group; its instances approach the replicas with each list call."""

    body: dict[str, Any]
    is_stopped: bool = False
    is_deleted: bool = False
    creating: int = 0
    running: int = 0
    stopping: int = 0

    @property
    def replicas(self) -> int:
        return int(self.body["replicas"])

    @property
    def left(self) -> int:
        """Instances that run, or have not stopped yet."""
        return self.running + self.stopping

    def step(self, nodes: int, most_stops: int) -> None:
        """*nodes*: the free nodes of the whole cloud."""
        wanted = 0 if self.is_stopped or self.is_deleted else self.replicas
        more = max(0, self.running - wanted)
        self.stopping += more - min(self.stopping, most_stops)
        self.running -= more
        self.running += min(self.creating, wanted - self.running)
        self.creating = max(0, min(wanted - self.running, nodes))

    def record(self) -> dict[str, Any]:
        wanted = 0 if self.is_stopped else self.replicas
        container = {**self.body["container"]}
        priority = container.pop("priority", "high")
        container.pop("registry_authentication", None)
        return {
            "id": str(uuid.uuid5(uuid.NAMESPACE_DNS, self.body["name"])),
            "name": self.body["name"],
            "display_name": self.body["name"],
            "organization_name": "acme",
            "project_name": "default",
            "container": {"command": None, **container},
            "priority": priority,
            "replicas": self.replicas,
            "autostart_policy": True,
            "restart_policy": self.body["restart_policy"],
            "country_codes": self.body.get("country_codes", []),
            "pending_change": False,
            "version": 1,
            "create_time": MOMENT,
            "update_time": MOMENT,
            "scheduled-scaling-enabled": self.body.get(
                "scheduled-scaling-enabled", False
            ),
            "scaling-actions": self.body.get("scaling-actions", []),
            "current_state": {
                "status": "stopped" if self.is_stopped else "running",
                "start_time": MOMENT,
                "finish_time": MOMENT,
                "instance_status_counts": {
                    "allocating_count": max(0, wanted - self.running - self.creating),
                    "creating_count": self.creating,
                    "running_count": self.running,
                    "stopping_count": self.stopping,
                },
            },
        }


@dataclass
class Fault:
    """One faulty answer; *lands*: the request takes effect all the same."""

    status: int
    body: str = ""
    content_type: str = "application/json"
    headers: dict[str, str] = field(default_factory=dict)
    method: str | None = None
    skips: int = 0  # this many calls are answered normally first
    lands: bool = False
    cuts_the_line: bool = False


class SaladFake:
    """The state of the cloud, for tests to set and inspect."""

    def __init__(self) -> None:
        self.url = ""
        self.groups: dict[str, Group] = {}
        self.quota = 2000
        self.nodes = 10_000
        self.prices = {
            "batch": "0.03",
            "low": "0.047",
            "medium": "0.063",
            "high": "0.08",
        }
        self.class_prices: dict[
            str, dict[str, str]
        ] = {}  # of classes with prices of their own
        self.faults: list[Fault] = []
        self.requests: list[tuple[str, str]] = []
        self.violations: list[str] = []
        self.most_at_once = 0
        self.most_stops = 10_000  # of each group's instances, between two lists
        self.billed: list[
            tuple[int, float]
        ] = []  # replicas left and their $/h, after each request
        self.slow_seconds = 0.0  # before each answer that is no fault
        self.random = random.Random()

    def pass_a_minute(self, now: float) -> None:
        """What happens by itself: scheduled scaling, by dates in UTC, and nodes that stop."""
        moment = datetime.fromtimestamp(now, UTC)
        today = f"{moment.minute} {moment.hour} {moment.day} {moment.month} *"
        for group in self.groups.values():
            if group.body.get("scheduled-scaling-enabled"):
                for action in group.body["scaling-actions"]:
                    if action["schedule"] == today:
                        group.body["replicas"] = action["replicas"]
            group.step(self.nodes, self.most_stops)

    def count(self, method: str) -> int:
        return sum(each == method for each, _ in self.requests)

    def app(self) -> web.Application:
        app = web.Application(middlewares=[self._guard])
        containers = "/organizations/acme/projects/default/containers"
        app.router.add_get(containers, self._list)
        app.router.add_post(containers, self._create)
        app.router.add_get(containers + "/{name}", self._get)
        app.router.add_patch(containers + "/{name}", self._patch)
        app.router.add_delete(containers + "/{name}", self._delete)
        app.router.add_post(containers + "/{name}/start", self._start)
        app.router.add_post(containers + "/{name}/stop", self._stop)
        app.router.add_get("/organizations/acme/quotas", self._quotas)
        app.router.add_get("/organizations/acme/gpu-classes", self._gpu_classes)
        return app

    @web.middleware
    async def _guard(self, request: web.Request, handler: Any) -> web.StreamResponse:
        self.requests.append((request.method, request.path))
        if request.headers.get("Salad-Api-Key") != KEY:
            return problem(401, "Unauthorized")
        fault = next(
            (each for each in self.faults if each.method in {None, request.method}),
            None,
        )
        if fault is not None and fault.skips:
            fault.skips -= 1
            fault = None
        if fault is None:
            await asyncio.sleep(self.slow_seconds)
            answer = await self._served(request, handler)
            self._bill()
            return answer
        self.faults.remove(fault)
        if fault.lands:
            await self._served(request, handler)
            self._bill()
        if fault.cuts_the_line:
            assert request.transport is not None
            request.transport.close()
        return web.Response(
            status=fault.status,
            text=fault.body,
            content_type=fault.content_type,
            headers=fault.headers,
        )

    async def _served(self, request: web.Request, handler: Any) -> web.StreamResponse:
        try:
            response: web.StreamResponse = await handler(request)
        except web.HTTPException as error:
            return problem(error.status, error.reason)
        except (ValidationError, ValueError) as error:
            self.violations.append(f"{request.method} {request.path}: {error}")
            return problem(400, str(error))
        return response

    def _bill(self) -> None:
        """What may be billed by now, at the price of each group's most expensive class."""
        prices = {
            key: self.class_prices.get(name, self.prices)
            for name, key in GPU_CLASSES.items()
        }
        dollars = 0.0
        for group in self.groups.values():
            container = group.body["container"]
            priority = container.get("priority", "high")
            classes = container["resources"]["gpu_classes"]
            dollars += group.left * max(
                float(prices[each].get(priority, 0)) for each in classes
            )
        self.billed.append((sum(group.left for group in self.groups.values()), dollars))

    async def _list(self, request: web.Request) -> web.Response:
        for name, group in list(self.groups.items()):
            free = self.nodes - sum(
                each.running + each.creating for each in self.groups.values()
            )
            group.step(max(0, free + group.creating), self.most_stops)
            if group.is_deleted and not group.left:
                del self.groups[name]
        running = sum(each.running for each in self.groups.values())
        self.most_at_once = max(self.most_at_once, running)
        # In no order that the specification promises.
        items = [each.record() for each in self.groups.values()]
        return web.json_response({"items": self.random.sample(items, len(items))})

    async def _create(self, request: web.Request) -> web.Response:
        if request.content_type != "application/json":
            raise ValueError(f"a creation of content type {request.content_type}")
        body = Prototype.model_validate(await request.json()).model_dump(
            exclude_unset=True
        )
        if body["name"] in self.groups:
            return problem(
                400, f"a container group named {body['name']} exists already"
            )
        if self._is_over_quota(body["replicas"]):
            return problem(403, "the quota is exceeded")
        self.groups[body["name"]] = Group(body)
        return web.json_response(self.groups[body["name"]].record(), status=201)

    async def _get(self, request: web.Request) -> web.Response:
        return web.json_response(self._group(request).record())

    async def _patch(self, request: web.Request) -> web.Response:
        group = self._group(request)
        if request.content_type != "application/merge-patch+json":
            raise ValueError(f"a patch of content type {request.content_type}")
        patch = Patch.model_validate(await request.json()).model_dump(
            exclude_unset=True, by_alias=True
        )
        more = patch.get("replicas", group.replicas) - group.replicas
        if self._is_over_quota(more):
            return problem(403, "the quota is exceeded")
        group.body.update(patch)
        return web.json_response(group.record())

    async def _delete(self, request: web.Request) -> web.Response:
        self._group(request).is_deleted = True
        return web.Response(status=202)

    async def _start(self, request: web.Request) -> web.Response:
        self._group(request).is_stopped = False
        return web.Response(status=202)

    async def _stop(self, request: web.Request) -> web.Response:
        group = self._group(request)
        if group.is_stopped:
            return problem(400, "the group is stopped already")
        group.is_stopped = True
        return web.Response(status=202)

    async def _quotas(self, request: web.Request) -> web.Response:
        quotas = {
            "container_replicas_quota": self.quota,
            "container_replicas_used": self._used,
        }
        return web.json_response({"container_groups_quotas": quotas})

    async def _gpu_classes(self, request: web.Request) -> web.Response:
        items = [
            {
                "id": key,
                "name": name,
                "prices": [
                    {"priority": priority, "price": price}
                    for priority, price in self.class_prices.get(
                        name, self.prices
                    ).items()
                ],
            }
            for name, key in GPU_CLASSES.items()
        ]
        return web.json_response({"items": items})

    @property
    def _used(self) -> int:
        return sum(group.replicas for group in self.groups.values())

    def _is_over_quota(self, more: int) -> bool:
        """Stricter than the documentation is: what has not stopped yet counts, too."""
        used = sum(max(group.replicas, group.left) for group in self.groups.values())
        return more > 0 and used + more > self.quota

    def _group(self, request: web.Request) -> Group:
        try:
            return self.groups[request.match_info["name"]]
        except KeyError:
            raise web.HTTPNotFound from None


def fleet_file(api: str, *environment: str, replicas: int = 1) -> str:
    """A `fleet.yaml`; *environment* has further variables, a line each."""
    variables = [
        "IMAGEFLEET_STORAGE: https://acmeimages.blob.core.windows.net",
        *environment,
    ]
    lines = [
        "name: sd15-batch",
        "organization: acme",
        "project: default",
        f"api: {api}",
        f"image: registry.example.com/acme/imagefleet@sha256:{'5' * 64}",
        f"replicas: {replicas}",
        "gpus: [RTX 3060 Ti]",
        "environment:",
        *(f"  {each}" for each in variables),
    ]
    return "\n".join(lines) + "\n"


def problem(status: int, detail: str) -> web.Response:
    """An error as the API's `ProblemDetails`."""
    return web.json_response(
        {"title": "Problem", "status": status, "detail": detail[:2000]},
        status=status,
        content_type="application/problem+json",
    )


@contextmanager
def serving(fake: SaladFake) -> Iterator[SaladFake]:
    """Serves the fake at `fake.url` from a thread: the main one runs the command."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="salad-fake")
    thread.start()

    async def start() -> web.AppRunner:
        runner = web.AppRunner(fake.app(), shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        fake.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        return runner

    runner = asyncio.run_coroutine_threadsafe(start(), loop).result(10)
    try:
        yield fake
    finally:
        asyncio.run_coroutine_threadsafe(runner.cleanup(), loop).result(10)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(10)
        loop.close()
