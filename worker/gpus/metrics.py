"""The metrics of a machine: those of its workers, and what only their parent knows."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from itertools import chain

from prometheus_client import CollectorRegistry, Counter
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from imagefleet.telemetry import metrics

_PRICE = "imagefleet_price_dollars_per_hour"


class MachineMetrics(Collector):
    """The GPUs without a worker: the machine is billed for them all the same.

    A worker counts its own cost, so that the two add up to the machine's.
    """

    def __init__(self, fleet: str, gpus: Iterable[str], price_per_hour: float | None) -> None:
        """*price_per_hour*: of one GPU; None: as its worker reports."""
        self.registry = metrics.LabelledRegistry({"fleet": fleet})
        self.registry.register(self)
        self.restarts = Counter(
            "imagefleet_gpu_restarts",
            "Workers started again after a crash, by GPU.",
            ["device"],
            registry=self.registry,
        )
        now = time.monotonic()
        self._down_since: dict[str, float | None] = dict.fromkeys(gpus, now)
        self._down_seconds = dict.fromkeys(self._down_since, 0.0)
        self._prices = dict.fromkeys(self._down_since, price_per_hour)
        self._busy_slots = dict.fromkeys(self._down_since, 0.0)
        for gpu in self._down_since:
            self.restarts.labels(gpu)

    @property
    def busy_slots(self) -> int:
        return int(sum(self._busy_slots.values()))

    def is_up(self, gpu: str) -> None:
        self._down_seconds[gpu] = self._seconds_down(gpu)
        self._down_since[gpu] = None

    def is_down(self, gpu: str) -> None:
        if self._down_since[gpu] is None:
            self._down_since[gpu] = time.monotonic()
        self._busy_slots[gpu] = 0.0

    def read(self, gpu: str, text: str) -> None:
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                if sample.name == _PRICE:
                    self._prices[gpu] = sample.value
                elif sample.name == "imagefleet_slots" and sample.labels["state"] == "busy":
                    self._busy_slots[gpu] = sample.value

    def collect(self) -> Iterator[Metric]:
        up = GaugeMetricFamily(
            "imagefleet_gpu_up",
            "1 if this GPU of several has a worker, 0 while it has none.",
            labels=["device"],
        )
        for gpu, since in self._down_since.items():
            up.add_metric([gpu], float(since is None))
        yield up
        prices = {gpu: price for gpu, price in self._prices.items() if price is not None}
        if not prices:
            return
        dollars = sum(self._seconds_down(gpu) / 3600 * price for gpu, price in prices.items())
        for name, label, value in (
            ("imagefleet_cost_dollars", "kind", "gpu"),
            ("imagefleet_wasted_dollars", "reason", "down"),
        ):
            family = CounterMetricFamily(name, "Cost of GPUs without a worker.", labels=[label])
            family.add_metric([value], dollars)
            yield family
        down = sum(price for gpu, price in prices.items() if self._down_since[gpu] is not None)
        yield GaugeMetricFamily(_PRICE, "Price of the GPUs without a worker.", value=down)

    def _seconds_down(self, gpu: str) -> float:
        since = self._down_since[gpu]
        now = time.monotonic()
        return self._down_seconds[gpu] + (0.0 if since is None else now - since)


def merged(own: CollectorRegistry, texts: Iterable[str]) -> bytes:
    """The metrics of the parent and of its workers as one text, each family once."""
    families: dict[str, Metric] = {}
    for family in chain(*map(text_string_to_metric_families, texts), own.collect()):
        if family.name in families:
            families[family.name].samples += family.samples
        else:
            families[family.name] = family
    return metrics.render(_Families(families.values()))


class _Families(CollectorRegistry):
    def __init__(self, families: Iterable[Metric]) -> None:
        super().__init__()
        self._families = families

    def collect(self) -> Iterator[Metric]:
        yield from self._families
