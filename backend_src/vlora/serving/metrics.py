"""Statistics of the engine and the encoder as Prometheus metrics, refreshed once a second.

Metrics that other tools read have the names that those tools expect: the names of the vLLM backend,
of TRT-LLM's cache blocks (for the ORCA header), and of the Gateway API's LoRA metric. All other
names start with `vlora:`. The engine's thread calls nothing in this module.

**Invariant:** the number of label sets is bounded, because the server keeps each one until its
metric family is removed.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from abc import ABC, abstractmethod
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from vlora.engine.plan import Mode
from vlora.errors import BY_CODE, VLoraError
from vlora.metrics import EngineStats, Export, exported_stats
from vlora.request import Output
from vlora.vision.features import EncoderCounters

# Base class of the metric exporters, and the interface of the registry that they write to.
#
# Every change of a value is a message to the server, so unchanged values are not sent. This module
# does not depend on Triton; `triton/metrics.py` implements `Registry` with Triton's metrics.


log = logging.getLogger(__name__)

REFRESH_SECONDS = 1.0


class Metric(Protocol):
    """One time series: a gauge has `set`, a counter `increment`, and a histogram `observe`."""

    def set(self, value: float) -> None: ...
    def increment(self, value: float) -> None: ...
    def observe(self, value: float) -> None: ...


class Registry(Protocol):
    """Factory of metrics.

    A metric family has a name. Each set of labels in a family is one metric.
    """

    def gauge(self, name: str, help: str, labels: Mapping[str, str]) -> Metric: ...
    def counter(self, name: str, help: str, labels: Mapping[str, str]) -> Metric: ...
    def histogram(
        self, name: str, help: str, labels: Mapping[str, str], buckets: Sequence[float]
    ) -> Metric: ...
    def drop(self, name: str) -> None:
        """Remove a family. Its metrics must not be used any more."""


class Exporter(ABC):
    """Exports the metrics of one model. `flush` may be called from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._failing = False

    def flush(self) -> None:
        """Write the present values to the server; never raises.

        Of several failures in a row, only the first is logged.
        """
        self._safely(self._write)

    def _safely(self, write: Callable[[], None]) -> None:
        """Call a function that writes metrics, and catch its errors.

        Of several failures in a row, only the first is logged.
        """
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


class Level:
    """A gauge or counter that is set to absolute values. Only changes are sent to the server."""

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
            self._metric.increment(total - self._value)
            self._value = total


# Counts of the errors that a model's process sends, by code, and their metric.
#
# An error may pass through several models on its way to the client (encoder → `lmm` → `lmm_unary`).
# Only the model that raised the error counts it. So the sum over all models is the number of failed
# requests.


NAME = "vlora:request_errors_total"
HELP = "Requests ended by an error that this model raised, by the error's code."


class ErrorCounts:
    """Number of errors that a process has sent, by code. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()

    def add(self, error: VLoraError) -> None:
        """Count `error`, unless another model has counted it."""
        if not error.counted_elsewhere:
            with self._lock:
                self._counts[error.code] += 1

    def __getitem__(self, code: str) -> int:
        with self._lock:
            return self._counts[code]


class ErrorExporter(Exporter):
    """Exports one counter per error code.

    All counters exist from the start, because monitoring sees an error only as an increase of a
    counter.
    """

    def __init__(self, registry: Registry, labels: Mapping[str, str], counts: ErrorCounts) -> None:
        super().__init__()
        self._counts = counts
        self._counters = {
            code: Level(registry.counter(NAME, HELP, {**labels, "code": code})) for code in BY_CODE
        }

    def _write(self) -> None:
        for code, counter in self._counters.items():
            counter.raise_to(self._counts[code])


CATCH_UP_SECONDS = 0.1
"""Age in seconds of the written statistics above which `catch_up` writes them again."""

MAX_LORA_SERIES = 128
"""Maximum number of series of `vllm:lora_requests_info`."""

MAX_LORA_TEXT = 256 * 1024
"""Maximum number of characters in the labels of these series. If the number is higher, all of the
series are removed.
"""

MAX_OBSERVED = 65536
"""Maximum number of observations that wait to be written. Beyond it, the oldest are dropped."""

SECONDS = (0.005, 0.01, 0.02, 0.04, 0.08, 0.15, 0.3, 0.6, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
"""Upper bounds in seconds of the histogram buckets for the latencies of a request."""

TOKEN_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.2, 0.5, 1.0, 2.5)
"""Upper bounds in seconds of the histogram buckets for the time per output token."""

CACHE_BLOCKS = {"tokens_per": "page_tokens", "used": "pages_used", "max": "pages_total"}
"""Values of the label `kv_cache_block_type`, each with the field of `EngineStats` that it
exports.
"""


class EngineExporter(Exporter):
    """Exports the metrics of the engine.

    The response thread sends the outputs of one or more engine steps in a round. Metrics are
    written once a second, after each round, and before the last response of a request is sent. So
    when a client has received its answer, the metrics already count it.
    """

    def __init__(
        self,
        registry: Registry,
        labels: Mapping[str, str],
        stats: Callable[[], EngineStats],
        max_tokens: int,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """Create all metrics.

        stats: returns the present statistics of the engine.
        max_tokens: maximum number of tokens of a request. The buckets of the histograms of tokens
            end there.
        """
        super().__init__()
        self._stats = stats
        self._clock = clock
        self._observed: deque[tuple[Metric, float]] = deque(maxlen=MAX_OBSERVED)
        self._written = -math.inf
        self._stats_written = False
        self._lora = _LoraInfo(registry)
        exports = exported_stats()
        self._gauges = {
            attribute: Level(registry.gauge(export.name, export.help, labels))
            for attribute, export in exports.items()
            if export.kind == "gauge"
        }
        self._gauges |= {
            attribute: Level(
                registry.gauge(
                    "nv_trt_llm_kv_cache_block_metrics",
                    "KV cache blocks.",
                    {**labels, "kv_cache_block_type": kind},
                )
            )
            for kind, attribute in CACHE_BLOCKS.items()
        }
        self._counters = {
            attribute: Level(registry.counter(export.name, export.help, labels))
            for attribute, export in exports.items()
            if export.kind == "counter"
        }
        self._modes = {mode: _ModeLevels(registry, {**labels, "mode": mode.value}) for mode in Mode}

        def histogram(name: str, text: str, buckets: Sequence[float]) -> Metric:
            return registry.histogram(f"vllm:{name}", text, labels, buckets)

        tokens = _one_two_five(max_tokens)
        self.first_token = histogram(
            "time_to_first_token_seconds",
            "Seconds from acceptance of a request to its first token.",
            SECONDS,
        )
        self.per_token = histogram(
            "time_per_output_token_seconds", "Seconds between output tokens.", TOKEN_SECONDS
        )
        self.latency = histogram(
            "e2e_request_latency_seconds",
            "Seconds from acceptance of a request to its end.",
            SECONDS,
        )
        self.prompt = histogram(
            "request_prompt_tokens", "Prompt tokens of an answered request.", tokens
        )
        self.generation = histogram(
            "request_generation_tokens", "Output tokens of an answered request.", tokens
        )
        self.n = histogram(
            "request_params_n", "Requested number of answers; always 1.", (1, 2, 5, 10, 20)
        )

    def request(self) -> Callable[[Output], None]:
        """Return a function to call with each output of one request, in order. It never raises."""
        last: float | None = None

        def observe(output: Output) -> None:
            nonlocal last
            total = output.timings.total
            if output.token_ids:
                if last is None:
                    self._observe(self.first_token, output.timings.first_token)
                else:
                    self._observe(self.per_token, (total - last) / len(output.token_ids))
                last = total
            if output.finish_reason is not None:
                self._observe(self.latency, total)
                self._observe(self.prompt, output.num_input_tokens)
                self._observe(self.generation, output.num_output_tokens)
                self._observe(self.n, 1)
            if output.finished:
                self._safely(self._write_observed if self._stats_written else self._write_once)

        return observe

    def catch_up(self) -> None:
        """Write metrics after a round of responses.

        Observations are always written, so that they do not accumulate. Statistics are written only
        if they were last written more than `CATCH_UP_SECONDS` ago, because each value is a message
        to the server.
        """
        fresh = time.monotonic() < self._written + CATCH_UP_SECONDS
        self._safely(self._write_observed if fresh else self._write)
        self._stats_written = False

    def _observe(self, metric: Metric, value: float) -> None:
        self._observed.append((metric, value))

    def _write(self) -> None:
        stats = self._stats()
        for field, gauge in self._gauges.items():
            gauge.set(getattr(stats, field))
        for field, counter in self._counters.items():
            counter.raise_to(getattr(stats, field))
        for mode, levels in self._modes.items():
            levels.write(mode, stats)
        self._lora.update(stats, self._clock())
        self._written = time.monotonic()
        self._write_observed()

    def _write_once(self) -> None:
        """Write all metrics once per round of responses.

        The first request that ends in a round calls this method. The written statistics already
        include all other requests that end in the same round.
        """
        self._write()
        self._stats_written = True

    def _write_observed(self) -> None:
        while self._observed:
            metric, value = self._observed.popleft()
            metric.observe(value)


class _ModeLevels:
    """The metrics of one inference mode."""

    def __init__(self, registry: Registry, labels: Mapping[str, str]) -> None:
        self._now = Level(
            registry.gauge(
                "vlora:mode", "1 for the mode of the last step, 0 for the others.", labels
            )
        )
        self._steps = Level(
            registry.counter("vlora:mode_steps_total", "Forward passes by mode.", labels)
        )
        self._seconds = Level(
            registry.counter(
                "vlora:mode_seconds_total", "Seconds of forward passes by mode.", labels
            )
        )

    def write(self, mode: Mode, stats: EngineStats) -> None:
        self._now.set(stats.mode == mode)
        self._steps.raise_to(stats.mode_steps.get(mode, 0))
        self._seconds.raise_to(stats.mode_seconds.get(mode, 0.0))


def _one_two_five(limit: int) -> list[float]:
    """Return 1, 2, 5, 10, … up to `limit`."""
    steps = (digit * 10**power for power in range(len(str(limit))) for digit in (1, 2, 5))
    return [float(step) for step in steps if step <= limit]


class _LoraInfo:
    """The metric `vllm:lora_requests_info`, whose labels name the adapters of the present requests.

    The value of a series is the time of its last update. Readers use the series with the latest
    time. Every combination of adapters is a new label set, and the server removes label sets only
    together with their family. So the family is replaced when it has MAX_LORA_SERIES series, or
    more than MAX_LORA_TEXT characters in their labels.
    """

    NAME = "vllm:lora_requests_info"
    HELP = "Adapters of running and waiting requests; the value is the time of the last update."

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        self._series: dict[tuple[str, ...], Metric] = {}
        self._text = 0
        """Number of characters in the labels of all series."""

    def update(self, stats: EngineStats, now: float) -> None:
        labels = {
            "max_lora": str(stats.adapters_known),
            "running_lora_adapters": _named(stats.running_adapters),
            "waiting_lora_adapters": _named(stats.waiting_adapters),
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


def _named(adapters: Mapping[str, int]) -> str:
    """Return the names of the adapters that have requests, separated by commas.

    The base model is left out.
    """
    return ",".join(sorted(name for name, count in adapters.items() if name and count))


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


ENCODER_PROGRESS = Export(
    "counter", "vlora:encoder_images_total", "Images and frames encoded, or found in the cache."
)
ENGINE_PROGRESS = exported_stats()["steps"]


class EncoderExporter(Exporter):
    """Exports the metrics of the vision encoder and of its feature cache."""

    def __init__(
        self, registry: Registry, labels: Mapping[str, str], counters: Callable[[], EncoderCounters]
    ) -> None:
        super().__init__()
        self._read = counters
        families = {
            ENCODER_PROGRESS.name: ("images", ENCODER_PROGRESS.help),
            "vlora:encoder_requests_total": ("requests", "Requests with images."),
            "vlora:encoder_groups_total": (
                "groups",
                "Groups of requests that were encoded together.",
            ),
            "vlora:encoder_batches_total": ("batches", "Calls of the vision tower."),
            "vlora:feature_cache_hits_total": ("hits", "Images whose features were cached."),
            "vlora:feature_cache_misses_total": ("misses", "Images encoded by the tower."),
            "vlora:feature_cache_evictions_total": ("evictions", "Cache entries evicted."),
        }
        self._counters = {
            field: Level(registry.counter(name, text, labels))
            for name, (field, text) in families.items()
        }

        self._bytes = Level(
            registry.gauge("vlora:feature_cache_bytes", "Bytes of cached image features.", labels)
        )

    def _write(self) -> None:
        now = self._read()
        self._bytes.set(now.bytes)
        for field, counter in self._counters.items():
            counter.raise_to(getattr(now, field))
