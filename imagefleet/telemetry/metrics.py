"""Metrics: their text as served and pushed, a queue's gauges, and its rate of change."""

import copy
import math
import uuid
from collections import Counter, deque
from collections.abc import Iterator, Mapping
from functools import partial

from prometheus_client import CollectorRegistry, Gauge, disable_created_metrics
from prometheus_client.core import Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest

from imagefleet.storage.protocol import QueueDepth

CONTENT_TYPE = CONTENT_TYPE_LATEST


class LabelledRegistry(CollectorRegistry):
    """A registry that adds *labels*, if any, to every sample, and `process` to counters.

    That one is new for each registry: a counter that begins anew after a crash is another series,
    though its address and device stay, and what both counted adds up.
    """

    def __init__(self, labels: Mapping[str, str]) -> None:
        super().__init__()
        self._labels = labels
        self._of_counters = (
            {**labels, "process": uuid.uuid4().hex[:12]} if labels else {}
        )

    def collect(self) -> Iterator[Metric]:
        for family in super().collect():
            labelled = copy.copy(family)
            is_counter = family.type in ("counter", "histogram")
            labels = self._of_counters if is_counter else self._labels
            labelled.samples = [
                sample._replace(labels={**sample.labels, **labels})
                for sample in family.samples
            ]
            yield labelled


def render(registry: CollectorRegistry) -> bytes:
    """The metrics of *registry*, without the `_created` series, a fifth of all and of no use."""
    disable_created_metrics()  # type: ignore[no-untyped-call]
    return generate_latest(registry)


#: Models with series of their own: whoever may send jobs names models.
MAX_MODELS = 50
OTHER_MODELS = "(others)"


class QueueGauges:
    """Depth and oldest age of queues; messages are `visible` or `leased`, or on Azure `any`."""

    def __init__(self, registry: CollectorRegistry) -> None:
        gauge = partial(Gauge, registry=registry)
        of_queue, of_model = (
            partial(gauge, labelnames=[each]) for each in ("queue", "model")
        )
        self._messages = gauge(
            "imagefleet_queue_messages",
            "Messages in a queue by state.",
            ["queue", "state"],
        )
        self._oldest_age = of_queue(
            "imagefleet_queue_oldest_age_seconds",
            "Age of the oldest visible message; 0 if there is none.",
        )
        self._model_messages = of_model(
            "imagefleet_model_queue_messages",
            "Messages in the queues of a model's jobs; of those without a model, model is empty.",
        )
        self._model_age = of_model(
            "imagefleet_model_queue_oldest_age_seconds",
            "Age of the oldest visible message of a model's; 0 if there is none.",
        )
        self._models: set[str] = set()

    def update(self, queue: str, depth: QueueDepth) -> None:
        """Sets the gauges of *queue*, or of each of the queues that are drained as one."""
        for name, own in depth.by_queue.items():
            self._update(name, own)
        if depth.by_queue:
            self._update_models(depth)
        else:
            self._update(queue, depth)

    def _update(self, queue: str, depth: QueueDepth) -> None:
        if depth.leased is None:
            self._messages.labels(queue, "any").set(depth.messages)
        else:
            self._messages.labels(queue, "visible").set(depth.messages - depth.leased)
            self._messages.labels(queue, "leased").set(depth.leased)
        self._oldest_age.labels(queue).set(depth.oldest_age_seconds or 0)

    def _update_models(self, depth: QueueDepth) -> None:
        messages: Counter[str] = Counter()
        ages: dict[str, float] = {}
        for queue_depth in depth.by_queue.values():
            model = self._label(queue_depth.model)
            messages[model] += queue_depth.messages
            ages[model] = max(ages.get(model, 0), queue_depth.oldest_age_seconds or 0)
        for model, count in messages.items():
            self._model_messages.labels(model).set(count)
            self._model_age.labels(model).set(ages[model])

    def _label(self, model: str | None) -> str:
        if model is None or model in self._models:
            return model or ""
        if len(self._models) >= MAX_MODELS:
            return OTHER_MODELS
        self._models.add(model)
        return model


#: Long enough to even out Azure's approximate counts, short enough to show a change.
WINDOW_SECONDS = 300.0


class QueueFlow:
    """The rate of change of a queue's depth over the last minutes."""

    def __init__(self) -> None:
        self._samples: deque[tuple[float, int]] = deque()

    def add_sample(self, at: float, messages: int) -> None:
        """*at*: monotonic seconds."""
        self._samples.append((at, messages))
        while len(self._samples) > 1 and at - self._samples[1][0] >= WINDOW_SECONDS:
            self._samples.popleft()

    @property
    def net_per_second(self) -> float | None:
        """Arrivals minus completions; None before the second sample."""
        first_at, first = self._samples[0]
        last_at, last = self._samples[-1]
        return (last - first) / (last_at - first_at) if last_at > first_at else None

    @property
    def seconds_to_empty(self) -> float | None:
        """Time left at the current rate: 0 when empty, infinite while it does not shrink."""
        messages = self._samples[-1][1]
        net = self.net_per_second
        if messages == 0:
            return 0.0
        if net is None:
            return None
        return messages / -net if net < 0 else math.inf
