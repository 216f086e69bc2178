"""A receiver of webhooks that verifies them with the specification's own library."""

import asyncio
import threading
from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
from aiohttp import web
from standardwebhooks import Webhook

SECRET = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"


@dataclass
class Receiver:
    """Answers with the next of `answers`, then with 204; has the events that it took."""

    url: str = ""
    answers: deque[web.Response | int] = field(default_factory=deque)
    always: int = 204
    events: list[dict[str, Any]] = field(default_factory=list)
    requests: Counter[str] = field(default_factory=Counter)
    timestamps: list[int] = field(default_factory=list)
    secret: str = SECRET

    async def handle(self, request: web.Request) -> web.Response:
        body = await request.read()
        event = Webhook(self.secret).verify(body, dict(request.headers))
        event_id = request.headers["webhook-id"]
        self.requests[event_id] += 1
        self.timestamps.append(int(request.headers["webhook-timestamp"]))
        answer = self.answers.popleft() if self.answers else self.always
        if isinstance(answer, int):
            answer = web.Response(status=answer)
        if answer.status < 300:
            self.events.append({"webhook-id": event_id, **event})
        return answer

    def told(self, kind: str) -> list[dict[str, Any]]:
        """The data of the events of one type."""
        return [each["data"] for each in self.events if each["type"] == kind]


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    """In a thread, so that a command that runs in the test's process reaches it."""
    receiver = Receiver()
    loop = asyncio.new_event_loop()

    async def start() -> web.AppRunner:
        app = web.Application()
        app.router.add_post("/{path:.*}", receiver.handle)
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=0)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        return runner

    runner = loop.run_until_complete(start())
    receiver.url = f"http://127.0.0.1:{runner.addresses[0][1]}/hook?token=x"
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    yield receiver
    asyncio.run_coroutine_threadsafe(runner.cleanup(), loop).result(10)
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()
