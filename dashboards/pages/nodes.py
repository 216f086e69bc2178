"""What the nodes do, and one worker's details."""

from pages.panel import Count, Dashboard, Figure, Panel, Stack, Table
from pages.queries import (
    BUSY_SECONDS,
    CHOSEN,
    IDLE_SECONDS,
    IMAGES,
    INFO,
    JOBS_ENDED,
    NAMED,
    ONE_GPU,
    RATE,
    STAGE_COUNT,
    STAGE_SUM,
    START_UP,
    gained,
    series,
    share,
)

WAITING = f"max_over_time({series('imagefleet_waiting_for_operator')}[5m])"
PASSED = series("imagefleet_node_check_passed")
FAULTS = series("imagefleet_node_faults_total")
FIRST_IMAGE = series("imagefleet_first_image_seconds")
FULL_SPEED = series("imagefleet_full_speed_seconds")
WARM_UP_SPEED = series("imagefleet_warm_up_speed_ratio")
WINDOWS = series("imagefleet_node_watch_windows_total")
FAILED_WINDOWS = series("imagefleet_node_watch_windows_total", 'result="failed"')
REALLOCATIONS = series("imagefleet_node_reallocations_total")
GRANTED = series("imagefleet_node_reallocations_total", 'result="granted"')

#: Workers that are gone as well; one series each, should its labels have changed.
SEEN = f"topk by ({ONE_GPU}) (1, last_over_time({INFO}[$__range]))"
SEEN_NAMED = f"on ({ONE_GPU}) group_left (worker, gpu) {SEEN}"

ONE = (
    f'on ({ONE_GPU}) group_left () imagefleet_worker_info{{worker="$worker", {CHOSEN}}}'
)
NODE_SPEED = f"sum by ({ONE_GPU}) (rate({IMAGES}[5m])) * {NAMED}"


def of_one(metric: str, by: str = "") -> str:
    """The rate of the chosen worker."""
    return f"sum{f' by ({by}) ' if by else ''}(rate({metric}{RATE}) * {ONE})"


NODES = Dashboard(
    "nodes",
    "Which nodes are slow, broken or waiting?",
    (
        Count(
            "Waiting for the operator",
            "How many workers wait for storage, credentials or a model? They are billed meanwhile.",
            f"sum by (fleet) ({WAITING})",
            bad_above=1,
        ),
        Count(
            "Failed node checks in the time range",
            "How many nodes failed the check before their first job?",
            f"sum by (fleet) (last_over_time({PASSED}[$__range]) == bool 0)",
            bad_above=1,
        ),
        Count(
            "Failed windows in the time range",
            "In how many windows of five minutes was a node too slow? Three in a row replace it.",
            gained(FAILED_WINDOWS),
            bad_above=1,
        ),
        Count(
            "Nodes given up in the time range",
            "How many nodes were exchanged for another? Each is kept from its group for 48 hours.",
            gained(GRANTED),
            bad_above=3,
        ),
        Figure(
            "Start-up, slowest tenth",
            "For how long are the slowest nodes billed before their first job?",
            f"quantile by (fleet) (0.9, {START_UP})",
            unit="s",
            decimals=0,
            bad_above=600,
        ),
        Figure(
            "First image, median",
            "How long does a new worker take to its first image?",
            f"quantile by (fleet) (0.5, {FIRST_IMAGE})",
            unit="s",
            decimals=0,
            bad_above=600,
        ),
        Panel(
            "Workers waiting for the operator",
            "Since when do they wait, and does a renewed token or an upload help?",
            {"{{fleet}}": f"sum by (fleet) ({WAITING})"},
            bad_above=1,
        ),
        Stack(
            "Faults of nodes, in an hour",
            "What was wrong, at the start or in a window of work? One fault on many nodes points at"
            " a limit or the model.",
            {"{{fault}}": f"sum by (fault) (increase({FAULTS}[1h]))"},
        ),
        Stack(
            "Windows of work, in an hour",
            "How do the nodes do, five minutes at a time? Unknown: too little work to judge.",
            {"{{result}}": f"sum by (result) (increase({WINDOWS}[1h]))"},
        ),
        Stack(
            "Requests for another node, in an hour",
            "When were nodes exchanged? A refused request is repeated.",
            {"{{result}}": f"sum by (result) (increase({REALLOCATIONS}[1h]))"},
        ),
        Panel(
            "Start-up and first image",
            "Does starting take longer than before? A larger or slower model shows here.",
            {
                "start-up, median": f"quantile(0.5, {START_UP})",
                "start-up, slowest tenth": f"quantile(0.9, {START_UP})",
                "first image, median": f"quantile(0.5, {FIRST_IMAGE})",
                "first image, slowest tenth": f"quantile(0.9, {FIRST_IMAGE})",
                "full speed, median": f"quantile(0.5, {FULL_SPEED})",
            },
            unit="s",
        ),
        Panel(
            "Speed before full speed, median",
            "How fast do workers draw while they compile? As a share of their full speed.",
            {"{{fleet}}": f"quantile by (fleet) (0.5, {WARM_UP_SPEED})"},
            unit="percentunit",
        ),
        Table(
            "Slowest nodes of their GPU class",
            "Which nodes are slower than the median of their class? Replace those under 0.67.",
            {
                "of the median": f"bottomk(10, {NODE_SPEED} / on (fleet, gpu) group_left ()"
                f" (quantile by (fleet, gpu) (0.5, {NODE_SPEED}) > 0))"
            },
            unit="percentunit",
            decimals=0,
            bad_below=0.67,
        ),
        Table(
            "Waiting workers",
            "Whose log says what is missing?",
            {
                "waits": f"({WAITING} > 0) * {SEEN_NAMED} or on ({ONE_GPU}) ({WAITING} > 0)"
            },
            bad_above=1,
        ),
        Table(
            "Faults by node in the time range",
            "Which nodes were broken, and why? Those given up are listed as well.",
            {
                "faults": f"sum by ({ONE_GPU}, fault)"
                f" (last_over_time({FAULTS}[$__range]) > 0) * {SEEN_NAMED}"
            },
        ),
        Table(
            "Workers",
            "How does each worker do? Its name leads to its details below.",
            {
                "images/s": NODE_SPEED,
                "start-up": f"{START_UP} * {NAMED}",
                "first image": f"{FIRST_IMAGE} * {NAMED}",
                "check passed": f"{PASSED} * {NAMED}",
                "failed windows": f"sum by ({ONE_GPU}) ({FAILED_WINDOWS}) * {NAMED}",
                "$/h": f"{series('imagefleet_price_dollars_per_hour')} * {NAMED}",
            },
            unit="none",
            units={
                "start-up": "s",
                "first image": "s",
                "check passed": "bool_yes_no",
                "failed windows": "none",
                "$/h": "currencyUSD",
            },
        ),
    ),
    worker_panels=(
        Panel(
            "Images/s of $worker",
            "Is it as fast as ever?",
            {"images/s": of_one(IMAGES)},
            unit="none",
        ),
        Stack(
            "GPU idle time of $worker",
            "What does its GPU wait for?",
            {
                "{{reason}}": share(
                    of_one(IDLE_SECONDS, "reason"),
                    f"{of_one(BUSY_SECONDS)} + {of_one(IDLE_SECONDS)}",
                )
            },
            unit="percentunit",
            bad_above=0.05,
        ),
        Panel(
            "Mean time by stage of $worker",
            "Which stage is slow there? Compare with the Pipeline dashboard.",
            {
                "{{stage}}": f"{of_one(STAGE_SUM, 'stage')} / ({of_one(STAGE_COUNT, 'stage')} > 0)"
            },
            unit="s",
        ),
        Stack(
            "Jobs/s of $worker by outcome",
            "How do its jobs end?",
            {"{{outcome}}": of_one(JOBS_ENDED, "outcome")},
            unit="none",
        ),
    ),
)
