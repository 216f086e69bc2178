"""What waits in a queue, as gauges; a worker and the exporter tell it alike."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Gauge

from imagefleet.storage.protocol import QueueDepth


class QueueGauges:
    """Depth and oldest age of queues by name.

    The states of a queue add up to its messages: `visible` and `leased` where the home tells them
    apart, `any` where it knows the sum alone, as Azure does.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        self._messages = Gauge(
            "imagefleet_queue_messages",
            "Messages in a queue by state.",
            ["queue", "state"],
            registry=registry,
        )
        self._oldest_age = Gauge(
            "imagefleet_queue_oldest_age_seconds",
            "Age of the oldest message that is visible; 0 where there is none.",
            ["queue"],
            registry=registry,
        )

    def tell(self, queue: str, depth: QueueDepth) -> None:
        if depth.leased is None:
            self._messages.labels(queue, "any").set(depth.messages)
        else:
            self._messages.labels(queue, "visible").set(depth.messages - depth.leased)
            self._messages.labels(queue, "leased").set(depth.leased)
        self._oldest_age.labels(queue).set(depth.oldest_age_seconds or 0)
