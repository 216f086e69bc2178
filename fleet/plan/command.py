"""`imagefleet plan`: the duration, cost and replicas of a batch."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

from cli import console, options
from cli.filling import reading
from cli.options import argument, option
from fleet.plan import estimate
from fleet.plan import kept as keeping
from fleet.plan.estimate import BatchPlan, Bench, Input, ModelSpeed, Part
from fleet.plan.work import ModelJobs, of_count, of_source, read_models
from imagefleet.errors import SetupError
from imagefleet.pricing import families, prices
from imagefleet.pricing.prices import PriceTable, Priority
from imagefleet.storage import bundle as bundles
from loadgen import sources


@dataclass(frozen=True)
class Batch:
    """Options that say what is to be drawn."""

    file: str | None = argument(
        "The batch: a template or a file of jobs, as for `imagefleet load`, whose models,"
        " sizes, steps and numbers of images count.",
        None,
        metavar="[FILE]",
    )
    jobs: int | None = option(
        "Jobs in the batch; with FILE, the first so many of it.", min=1, metavar="COUNT"
    )
    family: str | None = option(
        "Model family of jobs without a model, and of models without --model."
        " [default: sd1, for jobs without a model]",
        metavar="|".join(families.FAMILIES),
    )
    model: list[str] | None = option(
        "Family of a model that jobs name; repeatable.", metavar="NAME=FAMILY"
    )
    bundle: int | None = option(
        "Jobs in a message at most, as for `imagefleet load`. [default: 1 for each 500"
        " jobs, up to 64]",
        min=1,
        max=bundles.MAX_JOBS,
    )


@dataclass(frozen=True)
class Machines:
    """Options that say which GPUs draw it, at which speed and price."""

    gpu: list[str] | None = option(
        "GPU class, and how many replicas of it; repeatable, for a mix. [default:"
        f" {estimate.DEFAULT_GPU}]",
        metavar="NAME[=COUNT]",
    )
    price_per_hour: float | None = option(
        "$/h of one replica.", min=0.0001, metavar="DOLLARS"
    )
    prices_path: options.PriceFile = None
    images_per_second: float | None = option(
        "Speed of one replica.", min=0.0001, metavar="NUMBER"
    )
    bench: list[Path] | None = option(
        "JSON of `imagefleet bench`; repeatable.", metavar="FILE"
    )
    start_up_seconds: float | None = option(
        "Seconds that a replica loses until full speed, which are paid. [default: as"
        " --bench measured, or as assumed for a fleet without stored kernels]",
        min=0,
        metavar="SECONDS",
    )
    accelerator: str | None = option(
        "The workers' --accelerator, whose steps and guidance count.",
        metavar="FILE|NAME",
    )


@options.flat
def command(
    batch: Batch,
    machines: Machines,
    priority: Priority = option("SaladCloud priority.", "batch"),
    deadline: float | None = option(
        "Plan enough replicas to finish in so many hours.", min=0.01, metavar="HOURS"
    ),
    kept: float | None = option(
        "Share of the images that is kept (`imagefleet load --keep`), for kept images per dollar.",
        min=0.0001,
        max=1,
        metavar="SHARE",
    ),
    as_json: options.AsJson = False,
) -> None:
    """Plans a batch: hours, dollars and images per dollar.

    With --deadline, also the replicas needed. Every input is shown with its source. Images of
    another size, number of steps or model family are taken by their operations, where no report is
    of them.

    imagefleet plan --jobs 1000000 --gpu "RTX 3060 Ti=100"

    imagefleet plan jobs.jsonl --model illustrious=sdxl --gpu "RTX 4090=20"

    imagefleet plan --jobs 1000000 --gpu "RTX 3060 Ti=300" --gpu "RTX 4090=20"

    imagefleet plan --jobs 1000000 --gpu "RTX 4090" --deadline 24 --bench bench.json

    imagefleet plan --jobs 20000000 --gpu "RTX 3060 Ti=100" --kept 0.05
    """
    works = _works(batch, machines.accelerator)
    plan, table = planned(works, machines, priority, deadline, batch.bundle)
    judged = keeping.of_plan(plan, table, kept) if kept else None
    old = estimate.old_prices(plan.mix, table, datetime.now(UTC).date())
    if as_json:
        of_storage = {**asdict(table.storage), "as_of": str(table.storage.as_of)}
        console.print_json(
            {
                **asdict(plan),
                "storage_prices": of_storage,
                "old_prices": old,
                "kept": judged and asdict(judged),
            }
        )
    else:
        show(plan, table)
        if judged is not None:
            _show_kept(judged)
    for sentence in old:
        console.print_warning(sentence)


def _show_kept(judged: keeping.KeptPlan) -> None:
    rows = {
        "images kept": console.number(judged.images),
        "all in, with a month of those": f"${judged.dollars:,.2f}",
        "kept images per dollar": console.number(judged.images_per_dollar),
        "the same, stored first": console.number(judged.stored_first_images_per_dollar),
    }
    console.print_tables("", console.totals(rows))


def planned(
    works: Sequence[ModelJobs],
    machines: Machines,
    priority: Priority = "batch",
    deadline: float | None = None,
    bundle: int | None = 1,
) -> tuple[BatchPlan, PriceTable]:
    """The plan, and its prices; raises SetupError for what is not known."""
    table = prices.read_table(machines.prices_path)
    mix = _mix_of(machines, works, table, priority)
    images = sum(work.images for work in works)
    if deadline is not None:
        mix = estimate.mix_for(images, mix, deadline)
    if bundle is None:
        bundle = bundles.jobs_per_bundle(images)
    return estimate.make_plan(works, mix, table, bundle), table


def _mix_of(
    machines: Machines,
    works: Sequence[ModelJobs],
    table: PriceTable,
    priority: Priority,
) -> list[Part]:
    """The GPU classes with their speeds and prices; raises SetupError for what is not known."""
    benches = [estimate.read_bench(path, table) for path in machines.bench or []]
    named = _named(machines.gpu, benches)
    dollars = machines.price_per_hour
    rate = machines.images_per_second
    if len(named) > 1 and (dollars is not None or rate is not None):
        raise SetupError(
            "--price-per-hour and --images-per-second apply to one GPU class; for a mix use"
            " --price-file and --bench"
        )
    if rate is not None and len({work.family for work in works}) > 1:
        raise SetupError(
            "--images-per-second is for jobs of one model family; for several use --bench, one"
            " report for each"
        )
    mix = []
    for name, count in named:
        gpu = name
        if (
            dollars is None or rate is None
        ):  # a class with a report need not be in the table
            measured = prices.matching_gpus(name, [bench.gpu for bench in benches])
            gpu = measured[0] if measured else prices.find_gpu(name, table.gpus)
        speeds = []
        for work in works:
            families.refuse_gpu(gpu, work.family)
            bench = estimate.bench_of(gpu, benches, work)
            speed = estimate.find_speed(gpu, rate, bench, work)
            speeds.append(ModelSpeed(work.model, work.family.slug, work.images, speed))
        price = estimate.find_price(gpu, priority, dollars, table)
        made_on = estimate.bench_of(gpu, benches, works[0])
        start_up = made_on.start_up if made_on else estimate.ASSUMED_START_UP
        given = machines.start_up_seconds
        if given is not None:
            start_up = Input(given, "given", "--start-up-seconds")
        mix.append(
            Part(gpu, count, estimate.mean_speed(speeds), price, start_up, speeds)
        )
    return mix


def _works(batch: Batch, accelerator: str | None) -> list[ModelJobs]:
    """The batch by model, of a file or of so many jobs."""
    models = read_models(batch.model or [], batch.family, accelerator)
    if batch.file is None:
        if batch.jobs is None:
            raise SetupError("give the batch: --jobs COUNT, or a FILE of jobs")
        return of_count(batch.jobs, models)
    with reading(Path(batch.file), "reading", is_shown=True):
        return of_source(sources.open_source(batch.file, count=batch.jobs), models)


def _named(names: list[str] | None, benches: Sequence[Bench]) -> list[tuple[str, int]]:
    """GPU classes as given, and the replicas of each."""
    named = []
    measured = dict.fromkeys(bench.gpu for bench in benches)
    for text in names or measured or [estimate.DEFAULT_GPU]:
        name, _, count = text.partition("=")
        if count and not (count.isdecimal() and int(count)):
            raise SetupError(f"--gpu {text}: should be NAME or NAME=COUNT")
        named.append((name, int(count or 1)))
    return named


def show(plan: BatchPlan, table: PriceTable) -> None:
    done = plan.storage_operations

    def per_million(count: int) -> str:
        return f"{1e6 * count / plan.images:,.0f}"

    month = ", ".join(
        f"{form} ${dollars:,.2f}"
        for form, dollars in plan.storage_month_dollars.items()
    )
    rows = {
        "images": plan.images,
        "replicas": plan.replicas,
        "hours": f"{plan.hours:,.2f}",
        "GPU": f"${plan.gpu_dollars:,.2f}",
        "of that, start-up": f"${plan.start_up_dollars:,.2f}",
        "storage operations": f"${plan.storage_dollars:,.2f}",
        "writes / queue operations per million images": f"{per_million(done.blob_writes)}"
        f" / {per_million(done.queue)}, ${1e6 * plan.storage_dollars / plan.images:,.2f}",
        "all in": f"${plan.dollars:,.2f}",
        "images per dollar, GPU only": f"{plan.images_per_dollar_gpu_only:,.0f}",
        "images per dollar, all in": f"{plan.images_per_dollar:,.0f}",
        "storing the images, a month": month,
    }
    for case, shares in plan.cold.items():
        name = f"paid before first image / full speed / lost, {case.replace('_', ' ')}"
        rows[name] = " / ".join(f"{share:.2%}" for share in shares)
    console.print_tables(console.totals(rows))
    of_gpus = [
        (
            part.gpu,
            part.replicas,
            f"{part.images_in(1):,.2f}",
            f"{part.replicas * part.dollars_per_hour.value:,.2f}",
            console.number(part.images_per_dollar_gpu_only),
        )
        for part in plan.mix
    ]
    of_models = [
        (
            model.model,
            families.find(model.family).name,
            model.images,
            f"{model.gpu_hours:,.2f}",
            f"{model.gpu_dollars:,.2f}",
            console.number(model.images_per_dollar_gpu_only),
        )
        for model in plan.models
    ]
    per_dollar = "images/$,\nGPU only"
    for names, figures, rows_shown in (
        (["GPU"], ["replicas", "images/s", "$/h", per_dollar], of_gpus),
        (
            ["model", "family"],
            ["images", "GPU hours", "GPU $", per_dollar],
            of_models,
        ),
    ):
        if len(rows_shown) > 1:
            console.print_tables("", console.table(names, figures, rows=rows_shown))
    console.print_tables(
        "",
        *(sentence for part in plan.mix for sentence in estimate.sources(part)),
        f"Storage operations: listed: {table.storage.source}.",
        f"Storing: measured: {prices.BYTES_SOURCE}; not in the sum.",
        *(
            f"Until full speed, {case.replace('_', ' ')}: assumed: {warm_up.source}."
            for case, warm_up in prices.WARM_UPS.items()
        ),
        f"Another node begins: assumed: {prices.INTERRUPTIONS_SOURCE}.",
        "Interruptions, idle time, workers' changes between models, second drawings (`imagefleet"
        " load --verify-share`, by default 0.5 % more) are not included.",
    )
