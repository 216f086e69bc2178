"""`imagefleet load --inputs`: a folder of pictures through img2img."""

import asyncio
import json
from pathlib import Path

from PIL import Image

from cli import console
from imagefleet.storage.open import open_storage
from imagefleet.storage.settings import StorageSettings
from imagefleet.validation import JSONDict
from in_process import Imagefleet, assert_refused
from storages import flags


def photos(folder: Path, *names: str) -> Path:
    for at, name in enumerate(names):
        path = folder / "photos" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (8, 8), (at, 9, 90)).save(path)
    return folder / "photos"


def queued(settings: StorageSettings) -> list[JSONDict]:
    async def read() -> list[JSONDict]:
        async with open_storage(settings) as storage:
            received = await storage.queue.receive(32, 60)
            return [json.loads(each.body) for each in received]

    return asyncio.run(read())


def stored(settings: StorageSettings) -> set[str]:
    async def read() -> set[str]:
        async with open_storage(settings) as storage:
            return {name async for name in storage.files.names("inputs/")}

    return asyncio.run(read())


def test_every_job_is_sent_once_for_each_picture_which_is_stored_first(
    in_process: Imagefleet, tmp_path, storage_settings: StorageSettings
):
    folder = photos(tmp_path, "a.png", "sub/b.jpg", "c.webp")
    (folder / "notes.txt").write_text("none")
    jobs = [{"prompt": "winter"}, {"prompt": "night", "id": "n", "steps": 5}]
    (tmp_path / "jobs.json").write_text(json.dumps(jobs))
    load = ("load", "jobs.json", "--inputs", "photos", *flags(storage_settings))

    dry = in_process(*load, "--dry-run")
    assert dry.stdout.count("photos/a~") == 2
    told = json.loads(in_process(*load, "--json").stdout)
    assert (told["total"], told["sent"]) == (6, 6)
    sent = queued(storage_settings)
    names = {job["init_images"][0] for job in sent}
    assert {f"inputs/{name}" for name in names} == stored(storage_settings)
    assert {name.partition("~")[0] for name in names} == {
        "photos/a",
        "photos/sub/b",
        "photos/c",
    }
    assert len({job["id"] for job in sent}) == 6
    checked = in_process(*load, "--check")
    assert checked.returncode == console.EXIT_DONE, checked.stdout
    again = json.loads(in_process(*load, "--json").stdout)
    assert (again["sent"], again["as_before"]) == (0, 6)

    photos(tmp_path, "new.png", "a.png")  # a changed one is another job
    more = in_process(*load)
    assert "4 pictures in inputs/ of the container of files, 2 new" in more.stderr
    assert "4 jobs sent" in more.stderr


def test_what_cannot_be_is_refused_before_anything_is_stored(
    in_process: Imagefleet, tmp_path, local_settings: StorageSettings
):
    (tmp_path / "t.yaml").write_text("prompt: a\ncount: 1")
    (tmp_path / "jobs.jsonl").write_text('{"prompt": "a", "init_images": ["x.png"]}')
    call = ("load", "jobs.jsonl", *flags(local_settings), "--inputs")
    assert_refused(in_process(*call, "none"), "it is no folder with pictures (.png,")
    folder = photos(tmp_path, "ok.png")
    said = "init_images: --inputs gives it: leave it out"
    assert_refused(in_process(*call, str(folder)), said)
    assert not (tmp_path / "imagefleet-data").exists()
    assert_refused(
        in_process("load", "t.yaml", "--inputs", "photos"), "--inputs is for files of"
    )
    photos(tmp_path, "a|b.png")
    assert_refused(in_process(*call, str(folder)), "should be a name that ends in")
