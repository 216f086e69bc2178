"""What a type checker sees of the client; mypy reads it, nothing runs it."""

from collections.abc import AsyncIterator, Iterator
from datetime import datetime
from typing import assert_type

from PIL import Image

import imagefleet
from imagefleet import aio
from imagefleet.records.outcomes import Status
from imagefleet.storage.dead_letter_queue import Swept


def sync() -> None:
    with imagefleet.connect(
        "local:./data", queue="jobs", sas_file="tokens.json"
    ) as fleet:
        assert_type(fleet, imagefleet.Fleet)
        jobs = [
            imagefleet.Job(
                prompt="a house",
                defaults="a1111-1.10",
                output=imagefleet.Output(format="jpeg"),
            )
        ]
        batch = fleet.submit(jobs, campaign="spring")
        assert_type(batch.results(timeout=1.5), imagefleet.Results)
        either_way: Iterator[imagefleet.Result] = fleet.results("spring")
        assert_type(next(either_way), imagefleet.Result)
        assert_type(fleet.campaigns()["spring"].pending, int | None)
        assert_type(fleet.cancel("spring"), datetime)
        for result in batch.results():
            assert_type(result.image(), Image.Image)
            assert_type(result.data(1), bytes)
            assert_type(result.seed, int | None)
        assert_type(fleet.job("spring/1").status, Status)
        assert_type(fleet.failed(error="lora"), imagefleet.Results)
        assert_type(fleet.replay(campaign="spring"), Swept)
        assert_type(
            fleet.replay(set={"steps": 20, "model": None}, error="steps"), Swept
        )
    imagefleet.connect(que="jobs")  # type: ignore[call-arg]
    fleet.submit(["a house"])  # type: ignore[list-item]
    fleet.replay(job="1")  # type: ignore[call-arg]


async def asynchronous() -> None:
    async with aio.connect() as fleet:
        batch = await fleet.submit(iter([imagefleet.Job(prompt="a house")]))
        assert_type(batch, aio.Batch)
        assert_type(batch.results(), aio.Results)
        either_way: AsyncIterator[aio.Result] = fleet.results("spring")
        assert_type(await anext(either_way), aio.Result)
        result = await fleet.job("1", campaign="spring").result(timeout=1)
        assert_type(await result.image(), Image.Image)
        assert_type(await fleet.depth(), aio.Depth)
        try:
            await result.data()
        except imagefleet.errors.JobError as error:
            assert_type(error.message, str)
