"""`imagefleet load`: fills the job queue from a template or a file of jobs."""

import contextlib
import functools
import itertools
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import typer

from cli import console, files, filling, options, target
from cli.options import argument, option
from fleet.files import missing
from fleet.files.missing import Elsewhere, Uses
from imagefleet import concurrency
from imagefleet.errors import SetupError
from imagefleet.job.message import Job, job_key
from imagefleet.keeping.rule import Keep
from imagefleet.records.ledger import Digests, id_hash
from imagefleet.storage.open import open_storage, signer_of
from imagefleet.validation import JSONDict
from loadgen import file_source, inputs, sources
from loadgen.rejects import MOST_SHOWN, Rejected, Report
from loadgen.settings import LoadSettings
from loadgen.sources import Source

DRY_RUN_JOBS = 10


@dataclass(frozen=True)
class Jobs:
    file: str = argument(
        "A template (.yaml, .toml), a file of jobs (.jsonl, .json, .csv, .parquet, .txt"
        " with a prompt per line; all but Parquet also as .gz), or - for standard input.",
        metavar="FILE",
    )
    form: options.JobFormat = None
    count: int | None = option("Number of jobs; overrides FILE's.", min=1)
    seed: int | None = option(
        "Overrides the template's seed; another seed gives other jobs.",
        min=0,
        max=2**63 - 1,
    )
    campaign: str | None = option(
        "Campaign of the jobs without one: the folder of their images.", metavar="NAME"
    )
    defaults: str | None = option(
        "What jobs leave out: a1111-1.10 for the values of AUTOMATIC1111's API; default: those of"
        " imagefleet.",
        metavar="NAME",
    )
    keep: Keep | None = options.keep(
        "Judge images before they are stored, of jobs that do not say what to keep:"
        " clip=25,aesthetic=5,best=2, say."
    )
    inputs: Path | None = option(
        "Send each job once for each picture of this folder, with which it begins (img2img); they"
        " are stored first.",
        metavar="FOLDER",
    )
    unique: bool = option(
        "Leave out jobs whose prompt an earlier one has.", default=False
    )
    balance: str | None = option(
        "Take the values of this column in turns, metadata.style say.", metavar="COLUMN"
    )
    skip_invalid: bool = option("Skip what is not a valid job.", default=False)
    rejects: Path | None = option(
        "Write what is not a valid job there, with what is wrong, to be mended and loaded.",
        metavar="FILE",
    )


@dataclass(frozen=True)
class Sending(filling.Sending):
    new_only: bool = option(
        "Leave out jobs whose id was sent with another content.", default=False
    )


@options.flat
def command(
    settings: LoadSettings,
    jobs: Jobs,
    sending: Sending,
    dry_run: bool = options.dry_run(
        "the number of jobs, and ten of them as JSON lines"
    ),
    check: bool = option(
        "Show which LoRAs, models and images the jobs name that are not in the"
        " storage; send nothing.",
        default=False,
    ),
    lora_directory: Path | None = option(
        "With --check: the folder of LoRAs that workers have besides those in the storage."
        f" [env: {options.variable('lora_directory')}]",
        metavar="PATH",
        envvar=options.variable("lora_directory"),
        show_envvar=False,
    ),
    as_json: bool = option("Print the summary as JSON.", False, "--json"),
) -> None:
    """Fills the job queue from a template or a file of jobs.

    The same file and seed give the same jobs. What was sent is noted in the storage: the same
    command again adds nothing, and after an interruption it goes on where it was.

    imagefleet load templates/demo.yaml --dry-run

    imagefleet load templates/demo.yaml --count 1000000 --rate 500

    imagefleet load prompts.csv --check

    shuf prompts.txt | imagefleet load - --format txt

    imagefleet load winter.json --inputs photos
    """
    target.check_name("--campaign", jobs.campaign)
    file = Path(jobs.file)
    rejects = jobs.rejects
    is_shown = not (sending.quiet or as_json)
    read = functools.partial(filling.reading, file, is_shown=is_shown)
    if rejects is not None and rejects.resolve() == file.resolve():
        raise SetupError(f"--rejects {rejects}: is the file of jobs itself")
    with reporting(rejects, skips=jobs.skip_invalid, as_json=as_json) as report:
        with read("reading"):
            pictures = inputs.pictures_of(jobs.inputs) if jobs.inputs else []
            source = sources.open_source(
                jobs.file,
                form=jobs.form,
                count=jobs.count,
                seed=jobs.seed,
                pictures=pictures,
                unique=jobs.unique,
                balance=jobs.balance,
                report=report,
                signer=None if dry_run else signer_of(settings),
                campaign=jobs.campaign,
                defaults=jobs.defaults,
                keep=jobs.keep,
            )
        if rejects:
            with read("checking"):
                source.check()
        if check:
            elsewhere = Elsewhere(
                lora_directory,
                sending.model or (),
                [picture.name for picture in pictures],
            )
            _check(settings, source, report, elsewhere, read, as_json=as_json)
        elif dry_run:
            _preview(settings, source, read, quiet=sending.quiet)
        else:
            alone = (
                console.only_one(file, settings.queue)
                if jobs.file != "-"
                else contextlib.nullcontext()
            )
            if pictures:
                with read("checking"):
                    source.check()
                _store(settings, pictures, quiet=not is_shown)
            with alone:
                filling.fill(
                    settings,
                    source,
                    jobs.file,
                    sending,
                    read,
                    as_json=as_json,
                    facts=functools.partial(_facts, source, report),
                    new_only=sending.new_only,
                )


def _preview(
    settings: LoadSettings,
    source: Source,
    read: filling.Reading,
    *,
    quiet: bool,
) -> None:
    with read("checking"):
        changes = filling.preview(settings, source)
    if not quiet:
        console.print_note(f"{source.describe()}; {changes}")
        filling.show_differences(source.differences)
    for body in itertools.islice(filter(None, source.bodies()), DRY_RUN_JOBS):
        console.print_json_line(json.loads(body))


def _store(
    settings: LoadSettings, pictures: Sequence[inputs.Picture], *, quiet: bool
) -> None:
    """Stores the pictures that jobs begin with."""

    async def store() -> int:
        async with open_storage(settings, concurrency.PATIENT) as storage:
            await storage.create()
            with console.counting(
                "storing pictures", len(pictures), quiet=quiet
            ) as move:
                return await inputs.upload(storage.files, pictures, move)

    new = console.run(store())
    if not quiet:
        console.print_note(
            f"{console.counted(len(pictures), 'picture')} in inputs/ of the container of files,"
            f" {new:,} new"
        )


def _check_suffix(rejects: Path) -> None:
    """Raises SetupError for a name that tells another format than that of refused rows."""
    name = rejects.name.lower()
    form = file_source.FORMATS["jsonl"]
    others = [
        suffix for each in file_source.FORMATS.values() for suffix in each.suffixes
    ]
    if name.endswith((*others, ".gz")) and not name.endswith(form.suffixes):
        raise SetupError(
            f"--rejects {rejects}: refused rows are written as JSON lines: let the name end in"
            f" {form.suffixes[0]}"
        )


def _facts(source: Source, report: Report) -> JSONDict:
    """Counts of a file's rows that are no jobs; a template has nothing besides its jobs."""
    return {
        "invalid": report.count,
        **{
            name: getattr(source, name, 0)
            for name in ("empty", "comments", "mended", "repeated")
        },
        "differs": dict(source.differences),
    }


@contextlib.contextmanager
def reporting(path: Path | None, *, skips: bool, as_json: bool) -> Iterator[Report]:
    """Shows the first rows that are refused, if the others are sent, and writes all to a file."""
    with contextlib.ExitStack() as stack:
        file = None
        if path is not None:
            _check_suffix(path)
            console.check_writable(path)
            stack.enter_context(files.writing(path))
            file = stack.enter_context(path.open("w", encoding="utf-8"))

        def note(rejected: Rejected) -> None:
            if file is not None:
                file.write(console.json_text(rejected.as_job(), indent=None))
            if skips and report.count <= MOST_SHOWN:
                console.print_note(f"{rejected.place} is skipped: {rejected.why}")

        report = Report(skips, note, console.print_warning, str(path or ""))
        try:
            yield report
        except SetupError:
            if as_json and report.count:
                console.print_json({"finished": False, "invalid": report.count})
            raise
        finally:
            if skips and report.count:
                console.print_note(f"rows that are no jobs: {report.summary}")


def _check(
    settings: LoadSettings,
    source: Source,
    report: Report,
    elsewhere: Elsewhere,
    read: filling.Reading,
    *,
    as_json: bool,
) -> None:
    """Reads all jobs, and tells what they name that workers would not find."""
    uses = Uses()
    doubled = DoubledIds()

    def note(place: str, job: Job) -> None:
        uses.add(place, job)
        doubled.add(place, job)

    with read("checking"):
        source.check(note)
    found = console.run(missing.look(settings, uses, elsewhere))
    comments = getattr(source, "comments", 0)
    if as_json:
        console.print_json(
            {
                **missing.summary(uses, found),
                "invalid": report.count,
                "doubled": doubled.count,
                "comments": comments,
            }
        )
    else:
        missing.show(uses, found)
        filling.show_comments(comments)
    for sentence in doubled.shown:
        console.print_warning(sentence)
    if doubled.count > len(doubled.shown):
        console.print_warning(f"in all, {doubled.count:,} jobs have another's id")
    if found or doubled.count:
        raise typer.Exit(console.EXIT_OPERATOR_MUST_ACT)


class DoubledIds:
    """Finds jobs with the id of an earlier one and another content: one name is one job."""

    def __init__(self) -> None:
        self.count = 0
        self.shown: list[str] = []
        self._known = Digests()

    def add(self, place: str, job: Job) -> None:
        key = job_key(job.campaign, job.id)
        hashed = id_hash(key)
        digest = id_hash(job.digest)
        known = self._known.get(hashed)
        if known is None:
            self._known.put(hashed + digest)
        elif known != digest:
            self.count += 1
            if len(self.shown) < MOST_SHOWN:
                self.shown.append(
                    f"{place}: the id of {key} is an earlier job's, with another content"
                )
