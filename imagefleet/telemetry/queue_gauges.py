"""Gauges of a queue, which both the worker and the exporter set."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Gauge

from imagefleet.storage.protocol import QueueDepth


class QueueGauges:
    """Depth and oldest age of queues by name.

    The states add up to the messages in the queue: `visible` and `leased` on the local storage,
    `any` on Azure, which reports only the sum.
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
            "Age of the oldest visible message; 0 if there is none.",
            ["queue"],
            registry=registry,
        )

    def update(self, queue: str, depth: QueueDepth) -> None:
        """Sets the gauges of *queue*, or of each of the queues that are drained as one."""
        for name, own in depth.by_queue.items():
            self.update(name, own)
        if depth.by_queue:
            return
        if depth.leased is None:
            self._messages.labels(queue, "any").set(depth.messages)
        else:
            self._messages.labels(queue, "visible").set(depth.messages - depth.leased)
            self._messages.labels(queue, "leased").set(depth.leased)
        self._oldest_age.labels(queue).set(depth.oldest_age_seconds or 0)
