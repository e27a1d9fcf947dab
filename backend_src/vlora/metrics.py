"""Statistics of a running engine. The engine's thread counts, and any thread reads snapshots.

Each metric is a field of `EngineStats`, declared with the name and the help text under which the
exporter publishes it. A new metric needs a field and a line that counts it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple


@dataclass(frozen=True)
class TierCounters:
    """Totals of adapter loading since the start.

    hits: requests whose adapter was resident when they were queued.
    host_hits: requests whose adapter was in host memory, but not resident, when they were queued.
    misses: requests whose adapter was only on disk when they were queued.
    loads: adapters read from disk.
    packs: adapters packed into the pool.
    evictions: adapters evicted from the pool.
    host_evictions: adapters evicted from host memory.
    """

    hits: int = 0
    host_hits: int = 0
    misses: int = 0
    loads: int = 0
    packs: int = 0
    evictions: int = 0
    host_evictions: int = 0


@dataclass
class GrammarCounters:
    """Totals of structured answers since the start. Each total has only one writer at a time.

    compiled: structures that were compiled.
    refused: structures that could not be compiled.
    compile_seconds: processor seconds of the successful compilations.
    masks: number of token masks.
    mask_seconds: processor seconds of computing them.
    failed: answers that ended with an error of their structure.
    """

    compiled: int = 0
    refused: int = 0
    compile_seconds: float = 0.0
    masks: int = 0
    mask_seconds: float = 0.0
    failed: int = 0


class Export(NamedTuple):
    """Metric under which a statistic is published.

    kind: "counter" or "gauge".
    name: name of the metric.
    help: its help text.
    """

    kind: str
    name: str
    help: str


def _counter(name: str, text: str, default: float = 0) -> Any:
    return field(default=default, metadata={"export": Export("counter", name, text)})


def _gauge(name: str, text: str, default: float = 0) -> Any:
    return field(default=default, metadata={"export": Export("gauge", name, text)})


@dataclass(frozen=True)
class EngineStats:
    """Statistics of an engine: totals since the start, and present values.

    decode_rows: rows that belong to an answer.
    decode_steps: steps with at least one decode row. So decode_rows / decode_steps is the mean size
        of the decode batch.
    aborted: cancelled requests, including superseded and expired ones.
    mode: mode of the last step.
    mode_steps, mode_seconds: number of steps, and seconds of forward passes, by mode.
    prediction_error: median relative error of the latest step predictions.
    paused: requests that hold pages and had no rows in the last step.
    highest_credit, median_credit: in seconds; 0 under a policy without credits.
    pages_used: pages with keys and values of running requests.
    pages_total: pages of the pool.
    page_tokens: number of tokens per page.
    pages_cached: pages of cached prefix blocks that no request holds.
    running_adapters, waiting_adapters: number of requests by adapter name; "" is the base model.
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
    graphs_captured: int = _counter(
        "vlora:graphs_captured_total", "Graphs of decoding steps that were captured on a GPU."
    )
    graphs_replayed: int = _counter(
        "vlora:graphs_replayed_total", "Decoding steps that a captured graph has computed."
    )
    graph_seconds: float = _counter(
        "vlora:graph_capture_seconds_total", "Seconds spent on capturing graphs.", 0.0
    )
    graph_bytes: int = _gauge(
        "vlora:graph_bytes", "Bytes of a GPU's memory that captured graphs take."
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
    grammars: int = _gauge(
        "vlora:grammars", "Structures of answers that have a process, idle ones included."
    )
    grammars_compiled: int = _counter("vlora:grammars_compiled_total", "Structures compiled.")
    grammars_refused: int = _counter(
        "vlora:grammars_refused_total", "Structures that could not be compiled."
    )
    grammar_seconds: float = _counter(
        "vlora:grammar_compile_seconds_total",
        "Processor seconds of compiling structures that were not refused.",
        0.0,
    )
    masks: int = _counter(
        "vlora:structured_masks_total", "Token masks computed for structured answers."
    )
    mask_seconds: float = _counter(
        "vlora:structured_mask_seconds_total", "Processor seconds of token masks.", 0.0
    )
    rows_held: int = _counter(
        "vlora:structured_rows_held_total", "Rows of structured answers whose mask was late."
    )
    structured_failed: int = _counter(
        "vlora:structured_failed_total", "Answers ended by an error of their structure."
    )
    running_adapters: Mapping[str, int] = field(default_factory=dict)
    waiting_adapters: Mapping[str, int] = field(default_factory=dict)

    @property
    def kv_usage(self) -> float:
        """Share of the pages that hold keys and values of running requests, from 0 to 1."""
        return self.pages_used / self.pages_total if self.pages_total else 0.0


def exported_stats() -> dict[str, Export]:
    """Return the metric of each statistic that has one, by attribute of `EngineStats`."""
    exports = {f.name: f.metadata["export"] for f in fields(EngineStats) if f.metadata}
    exports["kv_usage"] = Export(
        "gauge", "vllm:kv_cache_usage_perc", "Share of pages with KV of running requests, 0 to 1."
    )
    return exports
