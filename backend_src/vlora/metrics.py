"""Statistics of a running engine: counted on the engine's thread, read anywhere as a snapshot.

A metric is one field of `EngineStats`: its declaration here gives the name and help text under
which the exporter publishes it. Adding a metric takes the field, and the line that counts it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple


@dataclass(frozen=True)
class TierCounters:
    """Totals of adapter loading since the start.

    hits: requests that found their adapter resident when they were queued.
    host_hits: requests that found it in host memory. misses: requests that found it on disk only.
    loads: adapters read from disk. packs: adapters written into the pool.
    evictions, host_evictions: adapters removed from the pool, and from host memory.
    """

    hits: int = 0
    host_hits: int = 0
    misses: int = 0
    loads: int = 0
    packs: int = 0
    evictions: int = 0
    host_evictions: int = 0


class Export(NamedTuple):
    """The published form of a statistic; kind is "counter" or "gauge"."""

    kind: str
    name: str
    help: str


def _counter(name: str, text: str, default: float = 0) -> Any:
    return field(default=default, metadata={"export": Export("counter", name, text)})


def _gauge(name: str, text: str, default: float = 0) -> Any:
    return field(default=default, metadata={"export": Export("gauge", name, text)})


@dataclass(frozen=True)
class EngineStats:
    """Totals since the start, and present values.

    decode_rows: rows that continue an answer; decode_steps: steps with at least one of them, so
        that decode_rows / decode_steps is the mean decode batch.
    prediction_error: median relative error of the latest step predictions.
    paused: requests that hold pages and were left out of the last step.
    highest_credit, median_credit: in seconds; 0 under a policy without credits.
    aborted: includes superseded and expired.
    mode: mode of the last step. mode_steps, mode_seconds: totals by mode.
    pages_used: pages of running requests' keys and values.
    pages_cached: pages of cached prefix blocks that no request holds.
    running_adapters, waiting_adapters: requests by adapter name ("" is the base model).
    """

    steps: int = _counter("vlora:engine_steps_total", "Forward passes.")
    rows: int = _counter("vlora:engine_rows_total", "Token rows of all forward passes.")
    decode_steps: int = _counter(
        "vlora:decode_steps_total", "Forward passes with at least one decode row."
    )
    decode_rows: int = _counter(
        "vlora:decode_rows_total", "Decode rows; divided by decode steps, the mean decode batch."
    )
    prompt_tokens: int = _counter("vllm:prompt_tokens_total", "Prompt tokens computed.")
    generated_tokens: int = _counter("vllm:generation_tokens_total", "Tokens generated.")
    finished: int = _counter("vlora:requests_finished_total", "Requests answered.")
    aborted: int = _counter("vlora:requests_aborted_total", "Requests cancelled.")
    failed: int = _counter("vlora:requests_failed_total", "Requests ended by an error.")
    superseded: int = _counter(
        "vlora:requests_superseded_total", "Requests cancelled by a newer one of their stream."
    )
    expired: int = _counter("vlora:requests_expired_total", "Requests ended by their deadline.")
    preemptions: int = _counter(
        "vllm:num_preemptions_total", "Requests that lost their pages to others."
    )
    switches: int = _counter(
        "vlora:switches_total", "Changes of the adapter in the active weights."
    )
    merges: int = _counter("vlora:merges_total", "Switches that had to compute merged weights.")
    switch_seconds: float = _counter(
        "vlora:switch_seconds_total", "Seconds spent on switches.", 0.0
    )
    mode: str = ""
    mode_steps: Mapping[str, int] = field(default_factory=dict)
    mode_seconds: Mapping[str, float] = field(default_factory=dict)
    step_seconds: float = _counter(
        "vlora:step_seconds_total", "Seconds of all steps, without switches.", 0.0
    )
    predicted_seconds: float = _counter(
        "vlora:predicted_step_seconds_total", "Seconds predicted for all steps.", 0.0
    )
    prediction_error: float = _gauge(
        "vlora:step_prediction_error", "Median relative error of predicted steps.", 0.0
    )
    paused: int = _gauge(
        "vlora:requests_paused", "Requests that hold pages and were left out of the last step."
    )
    highest_credit: float = _gauge(
        "vlora:credit_seconds_highest", "Highest credit of the requests that were ready.", 0.0
    )
    median_credit: float = _gauge(
        "vlora:credit_seconds_median", "Median credit of the requests that were ready.", 0.0
    )
    running: int = _gauge("vllm:num_requests_running", "Requests being computed.")
    waiting: int = _gauge("vllm:num_requests_waiting", "Requests waiting to be scheduled.")
    pages_used: int = 0
    pages_total: int = 0
    page_tokens: int = 0
    pages_cached: int = _gauge("vlora:pool_pages_cached", "Pages of cached prefixes.")
    pages_adapter: int = _gauge("vlora:pool_pages_adapter", "Pages of packed adapters.")
    pages_moved: int = _counter(
        "vlora:pool_pages_moved_total", "Pages relocated to make space for adapters."
    )
    adapters_resident: int = _gauge(
        "vlora:adapters_resident", "Adapters that steps can use without loading."
    )
    adapters_known: int = _gauge("vlora:adapters_known", "Adapters that requests can ask for.")
    adapter_host_bytes: int = _gauge(
        "vlora:adapter_host_bytes", "Bytes of adapters in host memory."
    )
    cached_tokens: int = _counter(
        "vlora:prefix_cached_tokens_total", "Prompt tokens found in the prefix cache."
    )
    adapter_hits: int = _counter(
        "vlora:adapter_hits_total", "Requests that found their adapter resident."
    )
    adapter_host_hits: int = _counter(
        "vlora:adapter_host_hits_total", "Requests that found their adapter in host memory."
    )
    adapter_misses: int = _counter(
        "vlora:adapter_misses_total", "Requests that found their adapter on disk only."
    )
    adapter_loads: int = _counter(
        "vlora:adapter_loads_total", "Adapters read from disk for requests."
    )
    adapter_evictions: int = _counter(
        "vlora:adapter_evictions_total", "Adapters evicted from the pool."
    )
    running_adapters: Mapping[str, int] = field(default_factory=dict)
    waiting_adapters: Mapping[str, int] = field(default_factory=dict)

    @property
    def kv_usage(self) -> float:
        """Share of pages in use, 0 to 1."""
        return self.pages_used / self.pages_total if self.pages_total else 0.0


def exported_stats() -> dict[str, Export]:
    """Return how each attribute of `EngineStats` that has a metric of its own is published."""
    exports = {f.name: f.metadata["export"] for f in fields(EngineStats) if f.metadata}
    exports["kv_usage"] = Export(
        "gauge", "vllm:kv_cache_usage_perc", "Share of KV pages in use, 0 to 1."
    )
    return exports
