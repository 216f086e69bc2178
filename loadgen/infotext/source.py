"""Pictures and texts of other programs as a source of jobs."""

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from imagefleet.errors import JobError
from imagefleet.files import picture
from imagefleet.job import message
from loadgen import file_source
from loadgen.formats.lines import Entry
from loadgen.infotext import a1111, comfyui, invokeai, plain_json
from loadgen.infotext.reading import Reading


def read_parameters(text: str) -> Reading:
    """The job of A1111's text, or of settings as JSON that others write in its place."""
    return plain_json.read(text) if plain_json.is_settings(text) else a1111.read(text)


#: The texts that tell the program, by their keywords in a file.
_READERS = {
    "invokeai_metadata": invokeai.read,
    "sd-metadata": invokeai.read,
    "prompt": comfyui.read,
    "parameters": read_parameters,
}

#: Before ComfyUI's graph in a text of a WebP or JPEG file.
_IN_EXIF = "prompt:"

SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".txt")

#: A graph of some thousand nodes.
_MAX_CHARACTERS = 2**22


def entries(path: Path) -> Iterator[tuple[Entry, Callable[[], Reading]]]:
    """A picture or the rows of a table, with what reads each, which raises JobError.

    A row is a job, whose `infotext` sets what it leaves out. Raises SetupError for no table.
    """
    if path.suffix.lower() in SUFFIXES:
        yield Entry(str(path)), partial(read_file, path)
        return
    form = file_source.find_format(path, other_suffixes=SUFFIXES)
    with file_source.UnchangedFile(path, form).opened() as stream:
        for entry in form.entries(stream):
            if entry.text or entry.problem:
                yield (
                    entry._replace(place=f"{path}, {entry.place}"),
                    partial(_read_row, entry),
                )


def read_file(path: Path) -> Reading:
    """The job that draws a picture again; raises JobError, which says why there is none."""
    size = None
    try:
        if path.suffix.lower() == ".txt":
            with path.open(encoding="utf-8-sig") as file:
                found = {"parameters": file.read(_MAX_CHARACTERS + 1)}
        else:
            with picture.opened(path) as image:
                texts = {str(key): value for key, value in image.info.items()}
                if plain_json.is_easy_diffusion(texts):
                    return plain_json.read_easy_diffusion(texts)
                found = {key: str(texts.get(key, "")) for key in _READERS}
                found["parameters"] = picture.parameters(image, _MAX_CHARACTERS + 1)
                # A PNG without one in its head would be decoded.
                exif = image.getexif() if "exif" in texts else {}
                for text in map(str, exif.values()):
                    if text[: len(_IN_EXIF)].lower() == _IN_EXIF:
                        found["prompt"] = text[len(_IN_EXIF) :]
                size = image.size
    except picture.DamagedImageError as error:
        raise JobError(f"the file {error}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise JobError(f"the file cannot be read: {error}") from None
    key = next((key for key in _READERS if found.get(key)), "parameters")
    if len(text := found[key]) > _MAX_CHARACTERS:
        raise JobError(f"its text has more than {_MAX_CHARACTERS:,} characters")
    reading = _READERS[key](text)
    drawn = tuple(map(reading.job.get, ("width", "height")))
    if _READERS[key] is invokeai.read and size not in {None, drawn}:
        # Its canvas draws a box at the model's size, and fits it into the picture.
        reading.cannot.append(
            f"it was drawn in {drawn[0]}x{drawn[1]} and scaled to {size[0]}x{size[1]}: the job's"
            " is as it was drawn"
        )
    return reading


def _read_row(entry: Entry) -> Reading:
    fields = message.fields_if_any(entry.text)
    if entry.problem or not fields:
        raise JobError(entry.problem or "it is no JSON object")
    if plain_json.is_easy_diffusion(fields):
        return plain_json.read_easy_diffusion(fields)
    text = fields.pop("infotext", None)
    reading = a1111.read(str(text)) if text else Reading({})
    reading.give(fields)
    return reading
