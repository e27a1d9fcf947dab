"""Counters and gauges of engine and encoder as Prometheus metrics, refreshed once a second.

Names are those that the ecosystem reads (the vLLM backend's, TRT-LLM's cache blocks for the ORCA
header, the Gateway API's LoRA metric); what has no name there begins with `vlora:`. A refresh is
a dozen messages to the server, so it is done here, on a thread of its own, and never on the
engine's or the response thread.

**Invariant:** the number of label sets is bounded, since the server never forgets one.
Not known here: Triton; it is reached through `Registry`.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from vlora.metrics import EngineStats
from vlora.request import Output
from vlora.vision.features import Counters

log = logging.getLogger(__name__)

REFRESH_SECONDS = 1.0
MAX_LORA_LABEL_SETS = 128

SECONDS = (0.005, 0.01, 0.02, 0.04, 0.08, 0.15, 0.3, 0.6, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
TOKEN_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.2, 0.5, 1.0, 2.5)


class Metric(Protocol):
    """One time series. set is for gauges, increment for counters, observe for histograms."""

    def set(self, value: float) -> None: ...
    def increment(self, value: float) -> None: ...
    def observe(self, value: float) -> None: ...


class Registry(Protocol):
    """Makes metrics: one family per name, one metric per label set."""

    def gauge(self, name: str, help: str, labels: Mapping[str, str]) -> Metric: ...
    def counter(self, name: str, help: str, labels: Mapping[str, str]) -> Metric: ...
    def histogram(
        self, name: str, help: str, labels: Mapping[str, str], buckets: Sequence[float]
    ) -> Metric: ...


class Refresher:
    """Calls `refresh` once a second on its own thread, until closed."""

    def __init__(self, refresh: Callable[[], None]) -> None:
        self._refresh = refresh
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="metrics", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._closed.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._closed.wait(REFRESH_SECONDS):
            try:
                self._refresh()
            except Exception:
                log.exception("metrics are no longer refreshed")
                return


class _Totals:
    """Counters fed from totals: the server's are told what was added since the last time."""

    def __init__(self) -> None:
        self._known: dict[str, float] = {}

    def raise_to(self, metric: Metric, name: str, total: float) -> None:
        added = total - self._known.get(name, 0.0)
        if added > 0:
            metric.increment(added)
            self._known[name] = total


class EngineExporter:
    """Metrics of the engine. `record` may be called from any thread and does no work."""

    def __init__(
        self,
        registry: Registry,
        labels: Mapping[str, str],
        stats: Callable[[], EngineStats],
        max_lora: int,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._stats = stats
        self._clock = clock
        self._finished: deque[Output] = deque()
        self._totals = _Totals()
        self._lora = _LoraInfo(registry, max_lora)
        gauges = {
            "vllm:num_requests_waiting": "Requests waiting to be scheduled.",
            "vllm:num_requests_running": "Requests being computed.",
            "vllm:kv_cache_usage_perc": "Share of KV pages in use, 0 to 1.",
        }
        counters = {
            "vllm:prompt_tokens_total": "Prompt tokens computed.",
            "vllm:generation_tokens_total": "Tokens generated.",
            "vllm:num_preemptions_total": "Requests put back to make room for others.",
            "vlora:engine_steps_total": "Forward passes.",
            "vlora:engine_rows_total": "Token rows of all forward passes.",
            "vlora:decode_steps_total": "Forward passes that continued at least one answer.",
            "vlora:decode_rows_total": "Rows that continued an answer; over the steps: the batch.",
            "vlora:requests_finished_total": "Requests answered.",
            "vlora:requests_aborted_total": "Requests cancelled or stopped.",
            "vlora:requests_failed_total": "Requests ended by an error.",
        }
        self._gauges = {name: registry.gauge(name, text, labels) for name, text in gauges.items()}
        self._counters = {
            name: registry.counter(name, text, labels) for name, text in counters.items()
        }
        self._first_token = registry.histogram(
            "vllm:time_to_first_token_seconds", "From acceptance.", labels, SECONDS
        )
        self._per_token = registry.histogram(
            "vllm:time_per_output_token_seconds", "Between tokens.", labels, TOKEN_SECONDS
        )
        self._whole = registry.histogram(
            "vllm:e2e_request_latency_seconds", "From acceptance to the end.", labels, SECONDS
        )
        self._blocks = {
            kind: registry.gauge(
                "nv_trt_llm_kv_cache_block_metrics",
                "KV cache blocks.",
                {**labels, "kv_cache_block_type": kind},
            )
            for kind in ("tokens_per", "used", "max")
        }

    def record(self, output: Output) -> None:
        """Note the last output of a request that was answered."""
        self._finished.append(output)

    def refresh(self) -> None:
        stats = self._stats()
        self._gauges["vllm:num_requests_waiting"].set(stats.waiting)
        self._gauges["vllm:num_requests_running"].set(stats.running)
        self._gauges["vllm:kv_cache_usage_perc"].set(stats.kv_usage)
        self._blocks["tokens_per"].set(stats.page_tokens)
        self._blocks["used"].set(stats.pages_used)
        self._blocks["max"].set(stats.pages_total)
        totals = {
            "vllm:prompt_tokens_total": stats.prompt_tokens,
            "vllm:generation_tokens_total": stats.generated_tokens,
            "vllm:num_preemptions_total": stats.preemptions,
            "vlora:engine_steps_total": stats.steps,
            "vlora:engine_rows_total": stats.rows,
            "vlora:decode_steps_total": stats.decode_steps,
            "vlora:decode_rows_total": stats.decode_rows,
            "vlora:requests_finished_total": stats.finished,
            "vlora:requests_aborted_total": stats.aborted,
            "vlora:requests_failed_total": stats.failed,
        }
        for name, total in totals.items():
            self._totals.raise_to(self._counters[name], name, total)
        self._lora.update(stats.running_adapters, stats.waiting_adapters, self._clock())
        for _ in range(len(self._finished)):
            self._observe(self._finished.popleft())

    def _observe(self, output: Output) -> None:
        timings = output.timings
        self._whole.observe(timings.total)
        if output.head is None:
            self._first_token.observe(timings.first_token)
        if output.num_output_tokens > 1:
            since_first = timings.total - timings.first_token
            self._per_token.observe(since_first / (output.num_output_tokens - 1))


class _LoraInfo:
    """`vllm:lora_requests_info`: which adapters run and wait, the time as its value.

    Readers take the series with the latest time. Every combination of adapters is a label set,
    so beyond the bound the known combination that is nearest to the true one is told instead.
    """

    NAME = "vllm:lora_requests_info"
    HELP = "Adapters of running and waiting requests; the value is the time of the news."

    def __init__(self, registry: Registry, max_lora: int) -> None:
        self._registry = registry
        self._max_lora = str(max_lora)
        self._known: dict[tuple[frozenset[str], frozenset[str]], Metric] = {}

    def update(self, running: Mapping[str, int], waiting: Mapping[str, int], now: float) -> None:
        key = (_named(running), _named(waiting))
        if key not in self._known:
            if len(self._known) < MAX_LORA_LABEL_SETS:
                self._known[key] = self._make(*key)
            else:
                key = min(self._known, key=lambda one: len(one[0] ^ key[0]) + len(one[1] ^ key[1]))
        self._known[key].set(now)

    def _make(self, running: frozenset[str], waiting: frozenset[str]) -> Metric:
        labels = {
            "max_lora": self._max_lora,
            "running_lora_adapters": ",".join(sorted(running)),
            "waiting_lora_adapters": ",".join(sorted(waiting)),
        }
        return self._registry.gauge(self.NAME, self.HELP, labels)


def _named(adapters: Mapping[str, int]) -> frozenset[str]:
    return frozenset(name for name, count in adapters.items() if name and count)


class EncoderExporter:
    """Metrics of the vision encoder and its feature cache."""

    def __init__(
        self, registry: Registry, labels: Mapping[str, str], counters: Callable[[], Counters]
    ) -> None:
        self._read = counters
        self._totals = _Totals()
        families = {
            "vlora:encoder_images_total": "Images and frames asked for.",
            "vlora:encoder_batches_total": "Calls of the vision tower.",
            "vlora:feature_cache_hits_total": "Images whose features were known.",
            "vlora:feature_cache_misses_total": "Images given to the tower.",
            "vlora:feature_cache_evictions_total": "Entries dropped to make room.",
        }
        self._counters = {
            name: registry.counter(name, text, labels) for name, text in families.items()
        }

    def refresh(self) -> None:
        now = self._read()
        totals = {
            "vlora:encoder_images_total": now.images,
            "vlora:encoder_batches_total": now.batches,
            "vlora:feature_cache_hits_total": now.hits,
            "vlora:feature_cache_misses_total": now.misses,
            "vlora:feature_cache_evictions_total": now.evictions,
        }
        for name, total in totals.items():
            self._totals.raise_to(self._counters[name], name, total)
