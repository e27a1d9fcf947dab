"""Prometheus metrics of a model, refreshed once a second.

Metrics that other tools read have the names that those tools expect (vLLM, TRT-LLM, Gateway API).
All other names start with `vlora:`. The engine's thread calls nothing in this module.

**Invariant:** the number of label sets is bounded, because the server keeps each one until its
metric family is removed.
"""

from __future__ import annotations

import json
import logging
import math
import threading
import time
from abc import ABC, abstractmethod
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import SimpleNamespace
from typing import ClassVar, NamedTuple, Protocol

from vlora.engine.plan import Mode
from vlora.errors import BY_CODE, Cancelled, VLoraError
from vlora.metrics import (
    EncoderCounters,
    EngineStats,
    Export,
    LoadedAdapter,
    exported_stats,
    exports_of,
)
from vlora.request import Output

log = logging.getLogger(__name__)

REFRESH_SECONDS = 1.0

CATCH_UP_SECONDS = 0.1  # Age of the written statistics above which `catch_up` writes them.
# Series of a metric whose labels name adapters, and characters in the labels of these series.
MAX_LORA_SERIES = 128
MAX_LORA_TEXT = 256 * 1024
OTHER = "other"  # Adapters beyond MAX_LORA_SERIES in a label.
MAX_REASON = 500  # Characters of an error in a label or in a line of the log.
MAX_LINES = 10  # Errors of one model that are logged in a second.
MAX_OBSERVED = 65536  # Observations that wait to be written; beyond it, the oldest are dropped.
# Upper bounds of the buckets for the latencies of a request, and for the time per output token.
SECONDS = (0.005, 0.01, 0.02, 0.04, 0.08, 0.15, 0.3, 0.6, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
TOKEN_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.2, 0.5, 1.0, 2.5)

# Help text and buckets; None: buckets up to the longest request.
HISTOGRAMS: dict[str, tuple[str, Sequence[float] | None]] = {
    "time_to_first_token_seconds": (
        "Seconds from acceptance of a request to its first token.",
        SECONDS,
    ),
    "time_per_output_token_seconds": ("Seconds between output tokens.", TOKEN_SECONDS),
    "e2e_request_latency_seconds": ("Seconds from acceptance of a request to its end.", SECONDS),
    "request_prompt_tokens": ("Prompt tokens of an answered request.", None),
    "request_generation_tokens": ("Output tokens of an answered request.", None),
    "request_params_n": ("Requested number of answers; always 1.", (1, 2, 5, 10, 20)),
}

# Fields of `EngineStats` by value of the label `kv_cache_block_type`.
CACHE_BLOCKS = {"tokens_per": "page_tokens", "used": "pages_used", "max": "pages_total"}


class Metric(Protocol):
    """One time series: a gauge has `set`, a counter `increment`, and a histogram `observe`."""

    def set(self, value: float) -> None: ...
    def increment(self, value: float) -> None: ...
    def observe(self, value: float) -> None: ...


class Registry(Protocol):
    """Factory of metrics. Each set of labels in a family, which has a name, is one metric."""

    def gauge(self, name: str, help: str, labels: Mapping[str, str]) -> Metric: ...
    def counter(self, name: str, help: str, labels: Mapping[str, str]) -> Metric: ...
    def histogram(
        self, name: str, help: str, labels: Mapping[str, str], buckets: Sequence[float]
    ) -> Metric: ...
    def drop(self, name: str) -> None:
        """Remove a family, if there is one. Its metrics must not be used any more."""


class Level:
    """A metric that is set to absolute values. Only changes are sent, as messages."""

    def __init__(self, metric: Metric) -> None:
        self._metric = metric
        self._value = 0.0

    def set(self, value: float) -> None:
        if value != self._value:
            self._metric.set(value)
            self._value = value

    def raise_to(self, total: float) -> None:
        """Increment a counter so that it has this total."""
        if total > self._value:
            self.share(total)

    def share(self, value: float) -> None:
        """Set this process's share of a gauge to which other processes add theirs."""
        if value != self._value:
            self._metric.increment(value - self._value)
            self._value = value


def level(registry: Registry, labels: Mapping[str, str], export: Export) -> Callable[[float], None]:
    """Return a function that sets a metric to absolute values."""
    kind, name, text = export
    if kind == "counter":
        return Level(registry.counter(name, text, labels)).raise_to
    gauge = Level(registry.gauge(name, text, labels))
    return gauge.share if kind == "share" else gauge.set


class Levels:
    """Gauges and counters of one object of statistics, by the attribute that is written."""

    def __init__(
        self, registry: Registry, labels: Mapping[str, str], exports: Mapping[str, Export]
    ) -> None:
        self._writes = {
            attribute: level(registry, labels, export) for attribute, export in exports.items()
        }

    def write(self, stats: object) -> None:
        for attribute, write in self._writes.items():
            write(getattr(stats, attribute))


class ModeStats(NamedTuple):
    """Statistics of one inference mode; `now` is true for that of the last step."""

    now: bool
    steps: int
    seconds: float

    @classmethod
    def of(cls, stats: EngineStats, mode: Mode) -> ModeStats:
        seconds = stats.mode_seconds.get(mode, 0.0)
        return cls(stats.mode == mode, stats.mode_steps.get(mode, 0), seconds)


MODE_EXPORTS = {
    "now": Export("gauge", "vlora:mode", "1 for the mode of the last step, 0 for the others."),
    "steps": Export("counter", "vlora:mode_steps_total", "Forward passes by mode."),
    "seconds": Export("counter", "vlora:mode_seconds_total", "Seconds of forward passes by mode."),
}


class Exporter(ABC):
    """Exports the metrics of one model. `flush` may be called from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._failing = False

    def flush(self) -> None:
        """Write the present values to the server; never raises."""
        self._safely(self._write)

    def _safely(self, write: Callable[[], None]) -> None:
        try:
            with self._lock:
                write()
        except Exception:
            if not self._failing:
                log.exception("could not write metrics; retrying every second")
            self._failing = True
        else:
            self._failing = False

    @abstractmethod
    def _write(self) -> None: ...


class Refresher:
    """Flushes an exporter once a second on its own thread, until it is closed."""

    def __init__(self, exporter: Exporter) -> None:
        self._exporter = exporter
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="metrics", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._closed.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._closed.wait(REFRESH_SECONDS):
            self._exporter.flush()


class ErrorCounts:
    """Number of errors that a process has sent, by code, with a log line for each. Thread-safe.

    Only the model that raised an error counts it, so the sum over models is that of failed
    requests. Cancelled requests are not logged, nor more than MAX_LINES errors in a second.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()
        self._second = 0
        self._in_second = 0

    def add(self, error: VLoraError, request_id: str = "") -> None:
        if error.counted_elsewhere:
            return
        with self._lock:
            self._counts[error.code] += 1
            if isinstance(error, Cancelled):
                return
            second, unlogged = int(time.monotonic()), 0
            if second != self._second:
                unlogged = max(self._in_second - MAX_LINES, 0)
                self._second, self._in_second = second, 0
            self._in_second += 1
            if self._in_second > MAX_LINES:
                return
        line = {"id": request_id, "code": error.code, "message": error.message[:MAX_REASON]}
        more = f" ({unlogged} more before it)" if unlogged else ""
        log.info("refused: %s%s", json.dumps(line), more)

    def __getitem__(self, code: str) -> int:
        with self._lock:
            return self._counts[code]


class ErrorExporter(Exporter):
    """Exports a counter per error code, all from the start: monitoring sees only increases."""

    NAME = "vlora:request_errors_total"
    HELP = "Requests ended by an error that this model raised, by the error's code."

    def __init__(self, registry: Registry, labels: Mapping[str, str], counts: ErrorCounts) -> None:
        super().__init__()
        self._counts = counts
        self._counters = {
            code: Level(registry.counter(self.NAME, self.HELP, {**labels, "code": code}))
            for code in BY_CODE
        }

    def _write(self) -> None:
        for code, counter in self._counters.items():
            counter.raise_to(self._counts[code])


class EngineExporter(Exporter):
    """Exports the metrics of the engine.

    They are written once a second, after each round of responses, and before the last response of a
    request, so that they count an answer when the client has it.
    """

    def __init__(
        self,
        registry: Registry,
        labels: Mapping[str, str],
        stats: Callable[[], EngineStats],
        max_tokens: int,
        clock: Callable[[], float] = time.time,
    ) -> None:
        super().__init__()
        self._stats = stats
        self._clock = clock
        self._observed: deque[tuple[Metric, float]] = deque(maxlen=MAX_OBSERVED)
        self._written = -math.inf
        self._stats_written = False
        self._lora = _LoraInfo(registry)
        self._loaded = _LoadedAdapters(registry, labels)
        self._broken = _BrokenAdapters(registry, labels)
        self._adapters = _ByAdapter(registry, labels)
        self._levels = Levels(registry, labels, exported_stats())
        blocks = Export("gauge", "nv_trt_llm_kv_cache_block_metrics", "KV cache blocks.")
        self._blocks = [
            Levels(registry, {**labels, "kv_cache_block_type": kind}, {attribute: blocks})
            for kind, attribute in CACHE_BLOCKS.items()
        ]
        self._modes = {
            mode: Levels(registry, {**labels, "mode": mode.value}, MODE_EXPORTS) for mode in Mode
        }

        steps = (digit * 10**power for power in range(len(str(max_tokens))) for digit in (1, 2, 5))
        tokens = [float(step) for step in steps if step <= max_tokens]  # 1, 2, 5, 10, …
        self._histograms = {
            name: registry.histogram(f"vllm:{name}", text, labels, buckets or tokens)
            for name, (text, buckets) in HISTOGRAMS.items()
        }

    def request(self, adapter: str | None) -> Callable[[Output], None]:
        """Return a function to call with each output of one request, in order. It never raises.

        adapter: name of the request's adapter; None for the base model.
        """
        last: float | None = None

        def observe(output: Output) -> None:
            nonlocal last
            total = output.timings.total
            if output.token_ids:
                if last is None:
                    self._observe("time_to_first_token_seconds", output.timings.first_token)
                else:
                    self._observe(
                        "time_per_output_token_seconds", (total - last) / len(output.token_ids)
                    )
                last = total
            if output.finish_reason is not None:
                self._observe("e2e_request_latency_seconds", total)
                self._observe("request_prompt_tokens", output.num_input_tokens)
                self._observe("request_generation_tokens", output.num_output_tokens)
                self._observe("request_params_n", 1)
            if output.finished:
                self._adapters.count(adapter, output)
                self._safely(self._write_observed if self._stats_written else self._write_once)

        return observe

    def catch_up(self) -> None:
        """Write observations after a round of responses, and statistics unless they are fresh."""
        fresh = time.monotonic() < self._written + CATCH_UP_SECONDS
        self._safely(self._write_observed if fresh else self._write)
        self._stats_written = False

    def _observe(self, name: str, value: float) -> None:
        self._observed.append((self._histograms[name], value))

    def _write(self) -> None:
        stats = self._stats()
        for levels in (self._levels, *self._blocks):
            levels.write(stats)
        for mode, levels in self._modes.items():
            levels.write(ModeStats.of(stats, mode))
        self._lora.update(stats, self._clock())
        self._loaded.update(stats)
        self._broken.update(stats.broken_adapters)
        self._written = time.monotonic()
        self._write_observed()

    def _write_once(self) -> None:
        # The first request that ends in a round writes the statistics. They include already all
        # other requests that end in the same round.
        self._write()
        self._stats_written = True

    def _write_observed(self) -> None:
        self._adapters.write()
        while self._observed:
            metric, value = self._observed.popleft()
            metric.observe(value)


class _LoraInfo:
    """The metric `vllm:lora_requests_info`, whose labels name the loaded adapters as `running`, and
    those of waiting requests. Load balancers read it so, and vLLM's new metrics follow.

    Readers use the series with the latest time. The server removes a series only with its family,
    so the family is replaced when it has too many series or too much text.
    """

    NAME = "vllm:lora_requests_info"
    HELP = (
        "Loaded adapters and those of waiting requests; the value is the time of the last update."
    )

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        self._series: dict[tuple[str, ...], Metric] = {}
        self._text = 0  # Number of characters in the labels of all series.

    def update(self, stats: EngineStats, now: float) -> None:
        labels = {
            "max_lora": str(stats.adapters_that_fit),
            "running_lora_adapters": _named(a.name for a in stats.loaded_adapters if a.resident),
            "waiting_lora_adapters": _named(n for n, c in stats.waiting_adapters.items() if c),
        }
        key = tuple(labels.values())
        if key not in self._series:
            if len(self._series) >= MAX_LORA_SERIES or self._text > MAX_LORA_TEXT:
                self._series.clear()
                self._text = 0
                self._registry.drop(self.NAME)
            self._series[key] = self._registry.gauge(self.NAME, self.HELP, labels)
            self._text += sum(map(len, key))
        self._series[key].set(now)


class _BrokenAdapters:
    """The metric `vlora:adapter_broken`, whose series name the broken adapters and the reasons."""

    NAME = "vlora:adapter_broken"
    HELP = f"1 for each adapter that cannot be loaded, at most {MAX_LORA_SERIES} of them."

    def __init__(self, registry: Registry, labels: Mapping[str, str]) -> None:
        self._registry = registry
        self._labels = labels
        self._present: Mapping[str, Exception] = {}

    def update(self, broken: Mapping[str, Exception]) -> None:
        if broken == self._present:
            return
        self._present = broken
        # The server removes a series only with its family.
        self._registry.drop(self.NAME)
        for name in sorted(broken)[:MAX_LORA_SERIES]:
            labels = {**self._labels, "adapter": name, "reason": str(broken[name])[:MAX_REASON]}
            self._registry.gauge(self.NAME, self.HELP, labels).set(1)


class _LoadedAdapters:
    """The metrics of vLLM by which a load balancer finds a server that has an adapter in memory.

    A series of `vllm:lora_adapter_loaded` is present while its adapter is loaded. The level `gpu`
    is the pool, from which steps read, also if they run on the CPU.
    """

    NAME = "vllm:lora_adapter_loaded"
    HELP = f"1 for each adapter in memory; beyond {MAX_LORA_SERIES}, their number as '{OTHER}'."
    CACHE = Export("gauge", "vllm:cache_config_info", "Size of the page pool.")

    def __init__(self, registry: Registry, labels: Mapping[str, str]) -> None:
        self._registry = registry
        self._labels = labels
        self._present: Counter[LoadedAdapter] = Counter()
        self._pool: tuple[int, int] | None = None
        self._seen_loads = 0
        name, text = "vllm:lora_adapter_load_seconds", "Seconds of reading an adapter from disk."
        self._seconds = registry.histogram(name, text, labels, SECONDS)

    def update(self, stats: EngineStats) -> None:
        loads, seconds = stats.load_times
        if new := loads - self._seen_loads:
            for value in seconds[-new:]:
                self._seconds.observe(value)
        self._seen_loads = loads
        pool = (stats.page_tokens, stats.pages_total)
        if pool != self._pool:  # It never changes once the engine has one.
            self._pool = pool
            sizes = {"block_size": str(pool[0]), "num_gpu_blocks": str(pool[1])}
            self._registry.gauge(*self.CACHE[1:], {**self._labels, **sizes}).set(1)
        counts = Counter(
            adapter if place < MAX_LORA_SERIES else LoadedAdapter(OTHER, adapter.resident, False, 0)
            for place, adapter in enumerate(stats.loaded_adapters)
        )
        if counts != self._present:
            self._present = counts
            self._write(counts)

    def _write(self, counts: Mapping[LoadedAdapter, int]) -> None:
        # The server removes a series only with its family.
        self._registry.drop(self.NAME)
        for adapter, count in counts.items():
            labels = {
                **self._labels,
                "adapter_name": adapter.name,
                "level": "gpu" if adapter.resident else "cpu",
                "pinned": str(adapter.pinned).lower(),
                "rank": str(adapter.rank),
            }
            self._registry.gauge(self.NAME, self.HELP, labels).set(count)


class _ByAdapter:
    """Counters of ended requests by adapter. Thread-safe.

    The first MAX_LORA_SERIES adapters have their own series, all later ones share one.
    """

    EXPORTS: ClassVar = {
        "requests": Export("counter", "vlora:adapter_requests_total", "Ended requests."),
        "errors": Export("counter", "vlora:adapter_errors_total", "Requests ended by an error."),
        "tokens": Export("counter", "vlora:adapter_tokens_total", "Tokens generated."),
        "seconds": Export("counter", "vlora:adapter_seconds_total", "Seconds of all requests."),
    }

    def __init__(self, registry: Registry, labels: Mapping[str, str]) -> None:
        self._registry = registry
        self._labels = labels
        self._lock = threading.Lock()
        self._totals: dict[str, dict[str, float]] = {}
        self._levels: dict[str, Levels] = {}

    def count(self, adapter: str | None, output: Output) -> None:
        """Count a request by its last output."""
        with self._lock:
            name = adapter or "(base model)"
            if name not in self._totals and len(self._totals) >= MAX_LORA_SERIES:
                name = "(others)"
            total = self._totals.setdefault(name, dict.fromkeys(self.EXPORTS, 0.0))
            total["requests"] += 1
            total["errors"] += output.error is not None
            total["tokens"] += output.num_output_tokens
            total["seconds"] += output.timings.total

    def write(self) -> None:
        for name, totals in list(self._totals.items()):
            if name not in self._levels:
                labels = {**self._labels, "adapter": name}
                self._levels[name] = Levels(self._registry, labels, self.EXPORTS)
            self._levels[name].write(SimpleNamespace(**totals))


def _named(adapters: Iterable[str]) -> str:
    """Return the first names, separated by commas, without the base model; OTHER for the rest."""
    names = [name for name in adapters if name]
    return ",".join(sorted(names[:MAX_LORA_SERIES]) + [OTHER] * (len(names) > MAX_LORA_SERIES))


class EncoderExporter(Exporter):
    """Exports the metrics of the vision encoder and of its feature cache."""

    def __init__(
        self, registry: Registry, labels: Mapping[str, str], counters: Callable[[], EncoderCounters]
    ) -> None:
        super().__init__()
        self._read = counters
        self._levels = Levels(registry, labels, exports_of(EncoderCounters))

    def _write(self) -> None:
        self._levels.write(self._read())


ENGINE_PROGRESS = exported_stats()["steps"]
ENCODER_PROGRESS = exports_of(EncoderCounters)["images"]


class ProgressExporter(Exporter):
    """Exports one counter, by which `vlora probe` distinguishes a busy server from a hung one.

    It is the only metric of a model if the option `disable_log_stats` turns the others off.
    """

    def __init__(
        self,
        registry: Registry,
        labels: Mapping[str, str],
        export: Export,
        read: Callable[[], float],
    ) -> None:
        super().__init__()
        self._read = read
        self._counter = Level(registry.counter(export.name, export.help, labels))

    def _write(self) -> None:
        self._counter.raise_to(self._read())
