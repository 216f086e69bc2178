"""Parts of the queries; each asks only for the fleets chosen on the page."""

#: Grafana makes this interval at least four pushes long.
RATE = "[$__rate_interval]"

#: Two pushes of 15 s, varied by 20 %, and their way; a fleet that is scraped less often needs more.
REPORTING_SECONDS = 40

#: The moment at which the time range begins, in Unix seconds, as Grafana writes it.
BEGIN = "${__from:date:seconds}"

#: The longest silence across the start of a window in which a counter's value is interpolated, and
#: the steps in which its samples are sought.
_SILENCE = "1h"
_STEP = "30s"

#: A process that was seen this long before a window did not begin in it.
_KNOWN = "1d:5m"

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
    return f"sum by ({by}) {gained_in(metric)}"


def gained_in(counter: str) -> str:
    """A query for what each series of *counter*, a name with matchers, gained in the time range.

    Last minus first: `increase()` extrapolates, and misses what a process counted before its first
    sample. A series that is absent before the start began at zero, and each process has its own, by
    the label `process`; only a series that begins anew all the same is left to `increase()`.
    """
    now = f"last_over_time({counter}[$__range])"
    before = f"({_at_begin(counter)} or {_after_silence(counter)} or 0 * {now})"
    anew = f"increase({counter}[$__range]) and resets({counter}[$__range]) > 0"
    return f"({anew} or {now} - {before})"


def _at_begin(counter: str) -> str:
    """A query for a counter's value at the start: on the line between the samples around it."""
    at = f"timestamp({counter})"
    is_in_range = f"({at} > {BEGIN})"
    until, since = (
        f"[{_SILENCE}:{_STEP}] @ {BEGIN}",
        f"[{_SILENCE}:{_STEP}] @ {BEGIN} offset -{_SILENCE}",
    )
    last, last_at = f"last_over_time({counter}{until})", f"last_over_time({at}{until})"
    next_ = f"min_over_time(({counter} and {is_in_range}){since})"
    next_at = f"min_over_time({is_in_range}{since})"
    share = f"({BEGIN} - {last_at}) / ({next_at} - {last_at})"
    return f"{last} + ({next_} - {last}) * {share}"


def _after_silence(counter: str) -> str:
    """A query for the first value in the time range of a series that is older than that."""
    known = f"present_over_time({counter}[{_KNOWN}] @ {BEGIN})"
    return f"(min_over_time({counter}[$__range]) and {known})"


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


def dollars_by_campaign(matcher: str) -> str:
    """A query for what the workers cost in the time range that drew each campaign's images.

    A worker's dollars, its start and waiting included, are shared by its images.
    """
    images = gained_in(f"imagefleet_campaign_images_total{{{matcher}}}")
    dollars = gained_in(f"imagefleet_cost_dollars_total{{{matcher}}}")
    each = f"sum by ({_PROCESS}) {dollars} / (sum by ({_PROCESS}) {images} > 0)"
    return (
        f"sum by (fleet, campaign) ({images} * on ({_PROCESS}) group_left () ({each}))"
    )


IMAGES = series("imagefleet_images_total")
INFO = series("imagefleet_worker_info")
MODEL_JOBS = series("imagefleet_model_queue_messages")
MODEL_IMAGES = series("imagefleet_model_images_total")
CAMPAIGN_IMAGES = series("imagefleet_campaign_images_total")
CAMPAIGN_DOLLARS = dollars_by_campaign(CHOSEN)
MODEL_SWITCH_SECONDS = series("imagefleet_model_switch_seconds_total")
QUEUES = series("imagefleet_queue_messages")
WAITING_JOBS = series("imagefleet:queue_messages", JOBS)
FAILED_JOBS = series("imagefleet:queue_messages", POISON)

#: Jobs that left the queue per second.
ENDED = rate(
    series(
        "imagefleet_jobs_total",
        'outcome=~"completed|duplicate|failed|dropped|verified|unverified"',
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
