"""Prometheus metrics: requests, futures, scheduler status. Label values are bounded."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from penstock.server.protocol.envelopes import Status

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
SECONDS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 60.0)
"""Upper bounds of the latency histogram's buckets in seconds."""


class Metrics:
    """Metrics of one API process."""

    def __init__(self) -> None:
        # The default registry is one per process, and refuses a second metric of the same name.
        self._registry = CollectorRegistry()
        self._requests = Counter(
            "penstock_requests",
            "Requests that were answered.",
            ("route", "method", "status"),
            registry=self._registry,
        )
        self._seconds = Histogram(
            "penstock_request_seconds",
            "Latency of requests in seconds, including polls.",
            ("route",),
            buckets=SECONDS,
            registry=self._registry,
        )
        self._pending = self._gauge("penstock_futures_pending", "Futures that are not done.")
        self._kept = self._gauge("penstock_futures_kept", "Stored futures, pending or completed.")
        self._queued = self._gauge("penstock_engine_queued", "Requests that wait in the scheduler.")
        self._engine = self._gauge("penstock_engine_up", "1 while the scheduler is connected.")
        self._workers = self._gauge("penstock_workers_ready", "1 while the workers are ready.")
        self.total = 0  # Number of requests served

    def observe(self, route: str, method: str, status: int, seconds: float) -> None:
        """Record a request by the path template of its route, not by the client's path."""
        self.total += 1
        self._requests.labels(route, method, str(status)).inc()
        self._seconds.labels(route).observe(seconds)

    def write(self, *, pending: int, completed: int, status: Status | None) -> bytes:
        """Render in the Prometheus text format. `status` None: the scheduler is not available."""
        self._pending.set(pending)
        self._kept.set(completed)
        self._engine.set(status is not None)
        self._queued.set(status.queued if status else 0)
        self._workers.set(status is not None and status.workers == "ready")
        return generate_latest(self._registry)

    def _gauge(self, name: str, description: str) -> Gauge:
        return Gauge(name, description, registry=self._registry)
