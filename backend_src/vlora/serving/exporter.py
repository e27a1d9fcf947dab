"""Counters and gauges of engine and encoder as Prometheus metrics, refreshed once a second.

Names are those that the ecosystem reads (the vLLM backend's, TRT-LLM's cache blocks for the ORCA
header, the Gateway API's LoRA metric); what has no name there begins with `vlora:`. Nothing here is
called on the engine's thread.

**Invariant:** the number of label sets is bounded, since the server never forgets one.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence

from vlora.engine.plan import Mode
from vlora.metrics import EngineStats, exported_stats
from vlora.request import Output
from vlora.serving.registry import Exporter, Level, Metric, Registry
from vlora.vision.features import EncoderCounters

CATCH_UP_SECONDS = 0.1
MAX_LORA_LABEL_SETS = 128
MAX_OBSERVED = 65536
"""Observations kept while the server takes none; the oldest go first."""

SECONDS = (0.005, 0.01, 0.02, 0.04, 0.08, 0.15, 0.3, 0.6, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
TOKEN_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.2, 0.5, 1.0, 2.5)

CACHE_BLOCKS = {"tokens_per": "page_tokens", "used": "pages_used", "max": "pages_total"}
"""Kinds of `nv_trt_llm_kv_cache_block_metrics`, with the attribute of `EngineStats`."""


class EngineExporter(Exporter):
    """Metrics of the engine: brought up to date between rounds of answers, once a second, and
    before an answer's last response is sent, so that who has the answer finds it counted."""

    def __init__(
        self,
        registry: Registry,
        labels: Mapping[str, str],
        stats: Callable[[], EngineStats],
        max_lora: int,
        max_tokens: int,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """max_tokens: the context, the end of the histograms of tokens."""
        super().__init__()
        self._stats = stats
        self._clock = clock
        self._observed: deque[tuple[Metric, float]] = deque(maxlen=MAX_OBSERVED)
        self._written = -math.inf
        self._told = False
        self._lora = _LoraInfo(registry, max_lora)
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
        self.first_token = histogram("time_to_first_token_seconds", "From acceptance.", SECONDS)
        self.per_token = histogram(
            "time_per_output_token_seconds", "Between tokens, a response each.", TOKEN_SECONDS
        )
        self.whole = histogram(
            "e2e_request_latency_seconds", "From acceptance to the end.", SECONDS
        )
        self.prompt = histogram("request_prompt_tokens", "Of a request answered.", tokens)
        self.generation = histogram("request_generation_tokens", "Of a request answered.", tokens)
        self.n = histogram("request_params_n", "Answers asked for; always 1.", (1, 2, 5, 10, 20))

    def request(self) -> Callable[[Output], None]:
        """The observer of one request, to be told its outputs in order; it never raises."""
        last: float | None = None

        def observe(output: Output) -> None:
            nonlocal last
            total = output.timings.total
            if output.token_ids:
                if last is None:
                    self._note(self.first_token, output.timings.first_token)
                else:
                    self._note(self.per_token, (total - last) / len(output.token_ids))
                last = total
            if output.finish_reason is not None:
                self._note(self.whole, total)
                self._note(self.prompt, output.num_input_tokens)
                self._note(self.generation, output.num_output_tokens)
                self._note(self.n, 1)
            if output.finished:
                self._safely(self._write_observed if self._told else self._tell)

        return observe

    def catch_up(self) -> None:
        """Between two rounds of answers: what was observed, lest it become many at once, and all
        else if it is a tenth of a second old. Every value told costs the server's attention."""
        fresh = time.monotonic() < self._written + CATCH_UP_SECONDS
        self._safely(self._write_observed if fresh else self._write)
        self._told = False

    def _note(self, metric: Metric, value: float) -> None:
        self._observed.append((metric, value))

    def _write(self) -> None:
        stats = self._stats()
        for field, gauge in self._gauges.items():
            gauge.set(getattr(stats, field))
        for field, counter in self._counters.items():
            counter.raise_to(getattr(stats, field))
        for mode, levels in self._modes.items():
            levels.set(mode, stats)
        self._lora.update(stats.running_adapters, stats.waiting_adapters, self._clock())
        self._written = time.monotonic()
        self._write_observed()

    def _tell(self) -> None:
        """Once a round: all that end in it are in the engine's totals by now."""
        self._write()
        self._told = True

    def _write_observed(self) -> None:
        while self._observed:
            metric, value = self._observed.popleft()
            metric.observe(value)


class _ModeLevels:
    """How much of the engine's time one inference mode takes."""

    def __init__(self, registry: Registry, labels: Mapping[str, str]) -> None:
        self._now = Level(registry.gauge("vlora:mode", "1 for the last step's mode.", labels))
        self._steps = Level(
            registry.counter("vlora:mode_steps_total", "Forward passes by mode.", labels)
        )
        self._seconds = Level(
            registry.counter("vlora:mode_seconds_total", "Of forward passes, by mode.", labels)
        )

    def set(self, mode: Mode, stats: EngineStats) -> None:
        self._now.set(stats.mode == mode)
        self._steps.raise_to(stats.mode_steps.get(mode, 0))
        self._seconds.raise_to(stats.mode_seconds.get(mode, 0.0))


def _one_two_five(most: int) -> list[float]:
    """1, 2, 5, 10, … up to `most`."""
    steps = (digit * 10**power for power in range(len(str(most))) for digit in (1, 2, 5))
    return [float(step) for step in steps if step <= most]


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


class EncoderExporter(Exporter):
    """Metrics of the vision encoder and its feature cache."""

    def __init__(
        self, registry: Registry, labels: Mapping[str, str], counters: Callable[[], EncoderCounters]
    ) -> None:
        super().__init__()
        self._read = counters
        families = {
            "vlora:encoder_images_total": ("images", "Images and frames asked for."),
            "vlora:encoder_batches_total": ("batches", "Calls of the vision tower."),
            "vlora:feature_cache_hits_total": ("hits", "Images whose features were known."),
            "vlora:feature_cache_misses_total": ("misses", "Images given to the tower."),
            "vlora:feature_cache_evictions_total": ("evictions", "Entries dropped to make room."),
        }
        self._counters = {
            field: Level(registry.counter(name, text, labels))
            for name, (field, text) in families.items()
        }

        self._bytes = Level(
            registry.gauge("vlora:feature_cache_bytes", "Of image features held.", labels)
        )

    def _write(self) -> None:
        now = self._read()
        self._bytes.set(now.bytes)
        for field, counter in self._counters.items():
            counter.raise_to(getattr(now, field))
