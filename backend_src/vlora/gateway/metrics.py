"""Prometheus metrics of the gateway."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

SECONDS = (0.005, 0.01, 0.02, 0.04, 0.08, 0.15, 0.3, 0.6, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)


class GatewayMetrics:
    """Metrics of the gateway. Their labels, such as route and status, cannot be chosen
    by clients.
    """

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self.requests = Counter(
            "vlora_gateway_requests",
            "Requests answered.",
            ("route", "status"),
            registry=self._registry,
        )
        self.seconds = Histogram(
            "vlora_gateway_request_seconds",
            "Seconds from a request's arrival to the end of its answer.",
            ("route",),
            buckets=SECONDS,
            registry=self._registry,
        )
        self.running = Gauge(
            "vlora_gateway_requests_running", "Requests being answered.", registry=self._registry
        )
        self.disconnects = Counter(
            "vlora_gateway_disconnects",
            "Requests whose client disconnected before their end.",
            registry=self._registry,
        )

    def text(self) -> bytes:
        """Return all metrics in Prometheus' text format."""
        return bytes(generate_latest(self._registry))
