"""The metrics of the engine and the encoder: one row each, with name, kind, help and reader.

A field of `EngineStats` or `EncoderCounters` is such a row. A metric that the engine's parts do not
hold needs, beside its row, only the line that counts it (`EngineStatistics.count`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from operator import attrgetter
from typing import Any, NamedTuple

MAX_LOAD_TIMES = 64  # Durations of loads that are kept for the metrics.


class LoadedAdapter(NamedTuple):
    """An adapter in memory: in the pool, where steps use it, or only in host memory.

    rank: highest rank of its matrices.
    """

    name: str
    resident: bool
    pinned: bool
    rank: int


@dataclass(frozen=True)
class TierCounters:
    """Totals of adapter loading since the start; `EngineStats` says what they count.

    load_seconds: durations of the last loads, at most MAX_LOAD_TIMES.
    """

    hits: int = 0
    host_hits: int = 0
    misses: int = 0
    loads: int = 0
    packs: int = 0
    evictions: int = 0
    host_evictions: int = 0
    load_seconds: tuple[float, ...] = ()


@dataclass
class GrammarCounters:
    """Totals of structured answers in processor seconds (see `EngineStats`), with one writer."""

    compiled: int = 0
    refused: int = 0
    compile_seconds: float = 0.0
    masks: int = 0
    mask_seconds: float = 0.0
    failed: int = 0


class Export(NamedTuple):
    """Metric under which a statistic is published: a "counter", a "gauge" or a "share".

    A share is this process's part of a gauge to which several processes add.
    """

    kind: str
    name: str
    help: str


WAITING = Export("share", "vllm:num_requests_waiting", "Requests waiting in any model.")
BEFORE_ENGINE = Export(
    "gauge", "vlora:requests_before_engine", "Requests that wait in this model for the next part."
)

# Function that reads a value from `engine.parts.EngineParts`; a text is the path of an attribute.
Read = Callable[[Any], Any]


def _row(export: Export | None, read: str | Read | None, **default: Any) -> Any:
    read = attrgetter(read) if isinstance(read, str) else read
    return field(metadata={"export": export, "read": read}, **default)


def _counter(name: str, text: str, read: str | Read | None = None) -> Any:
    return _row(Export("counter", name, text), read, default=0)


def _gauge(name: str, text: str, read: str | Read | None = None) -> Any:
    return _row(Export("gauge", name, text), read, default=0)


def _value(read: str) -> Any:
    """Return a field that no metric of its own publishes."""
    return _row(None, read, default=0)


def _requests_by_adapter(sequences: Iterable[Any]) -> Counter[str]:
    # The copy is atomic, so that the engine's thread may change the list meanwhile.
    return Counter(sequence.request.adapter or "" for sequence in list(sequences))


def _ready_credits(engine: Any) -> list[float]:
    """Return the credits of the last choice in ascending order; [0.0] under other policies."""
    return sorted((engine.scheduler.choice.credits or {}).values()) or [0.0]


def _merge_gain(name: str) -> Read:
    """Return a reader of a sum that `predictive` keeps; 0 under other policies."""
    return lambda engine: getattr(getattr(engine.scheduler.policy, "merging", None), name, 0.0)


def _load_times(engine: Any) -> tuple[int, Sequence[float]]:
    counters = engine.adapters.tiers.counters  # Replaced as a whole, so both belong together.
    return counters.loads, counters.load_seconds


def _middle(ordered: list[float]) -> float:
    return ordered[len(ordered) // 2]


@dataclass(frozen=True)
class EngineStats:
    """Statistics of an engine: totals since the start, and present values.

    decode_rows: rows that belong to an answer; per decode step, the mean size of the decode batch.
    aborted: cancelled requests, including superseded and expired ones.
    mode: mode of the last step. `mode_steps` and `mode_seconds` count forward passes by mode.
    pages_used, pages_cached: pages of running requests, and those that only the prefix cache holds.
    waiting, before_engine: requests that wait, and those of them that the engine does not have yet.
        The engine itself counts only those that it has.
    broken_adapters: the errors of the adapters that cannot be loaded, by name.
    loaded_adapters: adapters in memory, those that are least likely to be evicted first.
    load_times: number of adapters read from disk for requests, and the seconds of the last reads.
    waiting_adapters: number of waiting requests by adapter name; "" is the base model.
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
    predicted_gain: float = _gauge(
        "vlora:merge_gain_predicted_seconds",
        "Seconds that ended merges should have saved.",
        _merge_gain("predicted_gain"),
    )
    realised_gain: float = _gauge(
        "vlora:merge_gain_realised_seconds",
        "Seconds that ended merges have saved.",
        _merge_gain("realised_gain"),
    )
    switch_seconds: float = _counter("vlora:switch_seconds_total", "Seconds spent on switches.")
    graphs_captured: int = _counter(
        "vlora:graphs_captured_total",
        "Graphs of decoding steps that were captured on a GPU.",
        "runner.graphs.captured",
    )
    graphs_replayed: int = _counter(
        "vlora:graphs_replayed_total",
        "Decoding steps that a captured graph has computed.",
        "runner.graphs.replayed",
    )
    graph_seconds: float = _counter(
        "vlora:graph_capture_seconds_total",
        "Seconds spent on capturing graphs.",
        "runner.graphs.seconds",
    )
    graph_bytes: int = _gauge(
        "vlora:graph_bytes",
        "Bytes of a GPU's memory that captured graphs take.",
        "runner.graphs.nbytes",
    )
    mode: str = ""
    mode_steps: Mapping[str, int] = field(default_factory=dict)
    mode_seconds: Mapping[str, float] = field(default_factory=dict)
    step_seconds: float = _counter(
        "vlora:step_seconds_total", "Seconds of all steps, without switches."
    )
    predicted_seconds: float = _counter(
        "vlora:predicted_step_seconds_total", "Seconds predicted for all steps."
    )
    prediction_error: float = _gauge(
        "vlora:step_prediction_error",
        "Median relative error of predicted steps.",
        "costs.median_error",
    )
    paused: int = _gauge(
        "vlora:requests_paused",
        "Requests that hold pages and were left out of the last step.",
        "scheduler.paused",
    )
    highest_credit: float = _gauge(
        "vlora:credit_seconds_highest",
        "Highest credit of the requests that were ready.",
        lambda engine: _ready_credits(engine)[-1],
    )
    median_credit: float = _gauge(
        "vlora:credit_seconds_median",
        "Median credit of the requests that were ready.",
        lambda engine: _middle(_ready_credits(engine)),
    )
    running: int = _gauge(
        "vllm:num_requests_running",
        "Requests being computed.",
        lambda engine: len(engine.scheduler.running),
    )
    waiting: int = _row(WAITING, lambda engine: len(engine.scheduler.waiting), default=0)
    before_engine: int = _row(BEFORE_ENGINE, None, default=0)
    pages_used: int = _value("memory.pool.kv")
    pages_total: int = _value("memory.pool.total")
    page_tokens: int = _value("memory.block_size")
    pages_cached: int = _gauge(
        "vlora:pool_pages_cached", "Pages of cached prefixes.", "memory.pool.cached"
    )
    pages_adapter: int = _gauge(
        "vlora:pool_pages_adapter", "Pages of packed adapters.", "memory.pool.adapter"
    )
    pages_moved: int = _counter(
        "vlora:pool_pages_moved_total",
        "Pages relocated to make space for adapters.",
        "memory.pool.pages_moved",
    )
    adapters_resident: int = _gauge(
        "vlora:adapters_resident",
        "Adapters that steps can use without loading.",
        lambda engine: len(engine.adapters.resident),
    )
    adapters_known: int = _gauge(
        "vlora:adapters_known",
        "Adapters that requests can ask for.",
        lambda engine: len(engine.adapters.table.current),
    )
    adapters_broken: int = _gauge(
        "vlora:adapters_broken",
        "Adapters that cannot be loaded.",
        lambda engine: len(engine.adapters.table.broken),
    )
    broken_adapters: Mapping[str, Exception] = _row(
        None, "adapters.table.broken", default_factory=dict
    )
    adapters_that_fit: int = _gauge(
        "vllm:max_gpu_lora_adapters",
        "Adapters of mean size that fit into the pool beside the longest request.",
        "memory.adapters_that_fit",
    )
    loaded_adapters: Sequence[LoadedAdapter] = _row(
        None, lambda engine: engine.adapters.loaded(), default=()
    )
    load_times: tuple[int, Sequence[float]] = _row(None, _load_times, default=(0, ()))
    adapter_host_bytes: int = _gauge(
        "vlora:adapter_host_bytes",
        "Bytes of adapters in host memory.",
        "adapters.tiers.host.used_bytes",
    )
    cached_tokens: int = _counter(
        "vlora:prefix_cached_tokens_total", "Prompt tokens found in the prefix cache."
    )
    adapter_hits: int = _counter(
        "vlora:adapter_hits_total",
        "Requests that found their adapter resident.",
        "adapters.tiers.counters.hits",
    )
    adapter_host_hits: int = _counter(
        "vlora:adapter_host_hits_total",
        "Requests that found their adapter in host memory.",
        "adapters.tiers.counters.host_hits",
    )
    adapter_misses: int = _counter(
        "vlora:adapter_misses_total",
        "Requests that found their adapter on disk only.",
        "adapters.tiers.counters.misses",
    )
    adapter_loads: int = _counter(
        "vlora:adapter_loads_total",
        "Adapters read from disk for requests.",
        "adapters.tiers.counters.loads",
    )
    adapter_evictions: int = _counter(
        "vlora:adapter_evictions_total",
        "Adapters evicted from the pool.",
        "adapters.tiers.counters.evictions",
    )
    grammars: int = _gauge(
        "vlora:grammars",
        "Structures of answers that have a process, idle ones included.",
        lambda engine: len(engine.admission.grammars),
    )
    grammars_compiled: int = _counter(
        "vlora:grammars_compiled_total",
        "Structures compiled.",
        "admission.grammars.counters.compiled",
    )
    grammars_refused: int = _counter(
        "vlora:grammars_refused_total",
        "Structures that could not be compiled.",
        "admission.grammars.counters.refused",
    )
    grammar_seconds: float = _counter(
        "vlora:grammar_compile_seconds_total",
        "Processor seconds of compiling structures that were not refused.",
        "admission.grammars.counters.compile_seconds",
    )
    masks: int = _counter(
        "vlora:structured_masks_total",
        "Token masks computed for structured answers.",
        "admission.grammars.counters.masks",
    )
    mask_seconds: float = _counter(
        "vlora:structured_mask_seconds_total",
        "Processor seconds of token masks.",
        "admission.grammars.counters.mask_seconds",
    )
    rows_held: int = _counter(
        "vlora:structured_rows_held_total", "Rows of structured answers whose mask was late."
    )
    structured_failed: int = _counter(
        "vlora:structured_failed_total",
        "Answers ended by an error of their structure.",
        "admission.grammars.counters.failed",
    )
    waiting_adapters: Mapping[str, int] = _row(
        None, lambda engine: _requests_by_adapter(engine.scheduler.waiting), default_factory=dict
    )

    @property
    def adapters_loaded(self) -> int:
        return sum(adapter.resident for adapter in self.loaded_adapters)

    @property
    def kv_usage(self) -> float:
        """Share of the pages that hold keys and values of running requests, from 0 to 1."""
        return self.pages_used / self.pages_total if self.pages_total else 0.0


def readers() -> dict[str, Read]:
    """Return the functions that read the values that the engine's parts hold, by attribute."""
    return {f.name: f.metadata["read"] for f in fields(EngineStats) if f.metadata.get("read")}


def exports_of(stats: type) -> dict[str, Export]:
    """Return the metric of each statistic that has one, by attribute of the class `stats`."""
    return {f.name: f.metadata["export"] for f in fields(stats) if f.metadata.get("export")}


def exported_stats() -> dict[str, Export]:
    """Return the metric of each statistic of an engine that has one, by attribute."""
    usage = Export(
        "gauge", "vllm:kv_cache_usage_perc", "Share of pages with KV of running requests, 0 to 1."
    )
    loaded = Export(
        "gauge", "vllm:num_gpu_loaded_lora_adapters", "Adapters that steps can use without loading."
    )
    return exports_of(EngineStats) | {"kv_usage": usage, "adapters_loaded": loaded}


@dataclass(frozen=True)
class EncoderCounters:
    """Statistics of the vision encoder and of its feature cache since the start."""

    requests: int = _counter("vlora:encoder_requests_total", "Requests with images.")
    groups: int = _counter(
        "vlora:encoder_groups_total", "Groups of requests that were encoded together."
    )
    images: int = _counter(
        "vlora:encoder_images_total", "Images and frames encoded, or found in the cache."
    )
    hits: int = _counter("vlora:feature_cache_hits_total", "Images whose features were cached.")
    misses: int = _counter("vlora:feature_cache_misses_total", "Images encoded by the tower.")
    batches: int = _counter("vlora:encoder_batches_total", "Calls of the vision tower.")
    evictions: int = _counter("vlora:feature_cache_evictions_total", "Cache entries evicted.")
    bytes: int = _gauge("vlora:feature_cache_bytes", "Bytes of cached image features.")
