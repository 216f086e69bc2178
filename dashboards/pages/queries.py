"""Parts of the queries; each asks only for the fleets chosen on the page."""

#: Grafana makes this interval at least four pushes long.
RATE = "[$__rate_interval]"

#: Two pushes of 15 s, varied by 20 %, and their way; a fleet that is scraped less often needs more.
REPORTING_SECONDS = 40

#: The oldest sample that counts as a counter's value at the start of a window.
_LOOK_BACK = "5m"

#: The labels of one process of a worker: `device` only with --gpus, where several have one
#: `instance`.
ONE_GPU = "fleet, job, instance, device"

#: The fleets chosen on the page.
CHOSEN = 'fleet=~"$fleet"'

#: The job queue, without its poison queue.
JOBS = 'queue!~".+-poison"'
POISON = 'queue=~".+-poison"'


def series(metric: str, *matchers: str) -> str:
    """The series of the chosen fleets."""
    return f"{metric}{{{', '.join((*matchers, CHOSEN))}}}"


def gained(metric: str, by: str = "fleet") -> str:
    """The exact increase of a counter over the time range shown."""
    return f"sum by ({by}) {gained_in(metric, '$__range')}"


def gained_in(counter: str, window: str) -> str:
    """A query for what each series of *counter*, a name with matchers, gained in *window*.

    Last minus first: `increase()` extrapolates, and misses what a process counted before its first
    sample. A series that is absent at the start began at zero, and each process has its own, by the
    label `process`; only a series that begins anew all the same is left to `increase()`.
    """
    now = f"last_over_time({counter}[{window}])"
    before = f"last_over_time({counter}[{_LOOK_BACK}] offset {window})"
    anew = f"increase({counter}[{window}]) and resets({counter}[{window}]) > 0"
    return f"({anew} or {now} - ({before} or 0 * {now}))"


def reporting(metric: str) -> str:
    """The gauge of processes that still report, two pushes long.

    One that was killed keeps its value for five minutes, beside its successor's.
    """
    return f"({metric} and timestamp({metric}) > time() - {REPORTING_SECONDS})"


def rate(metric: str, by: str = "") -> str:
    """Without *by*, of the chosen fleets together."""
    return f"sum{f' by ({by}) ' if by else ''}(rate({metric}{RATE}))"


def share(part: str, whole: str) -> str:
    """A ratio by the labels of *part*; without data where *whole* is zero."""
    return f"{part} / on () group_left () ({whole} > 0)"


_PROCESS = f"{ONE_GPU}, process"


def dollars_by_campaign(matcher: str, window: str) -> str:
    """A query for what the workers cost in *window* that drew each campaign's images.

    A worker's dollars, its start and waiting included, are shared by its images.
    """
    images = gained_in(f"imagefleet_campaign_images_total{{{matcher}}}", window)
    dollars = gained_in(f"imagefleet_cost_dollars_total{{{matcher}}}", window)
    each = f"sum by ({_PROCESS}) {dollars} / (sum by ({_PROCESS}) {images} > 0)"
    return (
        f"sum by (fleet, campaign) ({images} * on ({_PROCESS}) group_left () ({each}))"
    )


IMAGES = series("imagefleet_images_total")
INFO = series("imagefleet_worker_info")
MODEL_JOBS = series("imagefleet_model_queue_messages")
MODEL_IMAGES = series("imagefleet_model_images_total")
CAMPAIGN_IMAGES = series("imagefleet_campaign_images_total")
CAMPAIGN_DOLLARS = dollars_by_campaign(CHOSEN, "$__range")
MODEL_SWITCH_SECONDS = series("imagefleet_model_switch_seconds_total")
QUEUES = series("imagefleet_queue_messages")
WAITING_JOBS = series("imagefleet:queue_messages", JOBS)
FAILED_JOBS = series("imagefleet:queue_messages", POISON)

#: Jobs that left the queue per second.
ENDED = rate(
    series(
        "imagefleet_jobs_total",
        'outcome=~"completed|duplicate|failed|verified|unverified"',
    )
)

#: Jobs/s by which the queue grows.
GROWTH = f"sum by (fleet) (deriv({WAITING_JOBS}[10m]))"

#: Seconds until the queue is empty, at its rate of the last minutes; no data while it grows.
SECONDS_TO_EMPTY = (
    f"(sum by (fleet) ({WAITING_JOBS}) / (-{GROWTH} > 0)"
    f" or (sum by (fleet) ({WAITING_JOBS}) == 0))"
)
START_UP = series("imagefleet_start_up_seconds")
STAGE_SUM = series("imagefleet_stage_seconds_sum")
STAGE_COUNT = series("imagefleet_stage_seconds_count")
BUSY_SECONDS = series("imagefleet_gpu_busy_seconds_total")
IDLE_SECONDS = series("imagefleet_gpu_idle_seconds_total")
JOBS_ENDED = series("imagefleet_jobs_total")
DOLLARS = series("imagefleet_cost_dollars_total")
GPU_DOLLARS = series("imagefleet_cost_dollars_total", 'kind="gpu"')


#: Only this series has a worker's name and GPU class; everything else joins it.
WITH_GPU = f"on ({ONE_GPU}) group_left (gpu) {INFO}"
NAMED = f"on ({ONE_GPU}) group_left (worker, gpu) {INFO}"

IMAGES_BY_GPU = f"sum by (gpu) (rate({IMAGES}{RATE}) * {WITH_GPU})"
REPLICAS_BY_GPU = f"count by (gpu) ({INFO})"
