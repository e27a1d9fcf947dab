"""Figures of a running engine: counted by the engine thread, read by anyone as a snapshot."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class TierCounters:
    """Of adapters, since the start. hits: requests that found theirs resident when they were
    queued; host_hits: in host memory; misses: on disk only. loads: from disk. packs: into the pool.
    evictions, host_evictions: what left either."""

    hits: int = 0
    host_hits: int = 0
    misses: int = 0
    loads: int = 0
    packs: int = 0
    evictions: int = 0
    host_evictions: int = 0


@dataclass(frozen=True)
class EngineStats:
    """Totals since start, and gauges of now.

    decode_steps: steps with at least one row that continues an answer; decode_rows: such rows,
    so that decode_rows / decode_steps is the mean batch of decoding.
    switches: changes of the live adapter; merges: those that had to compute merged weights;
    switch_seconds: spent on both. mode: of the last step; mode_steps, mode_seconds: by mode.
    step_seconds, predicted_seconds: of all steps, and what the cost model said of each before it;
    prediction_error: median error of the last ones. paused: requests with pages that the last step
    left out. highest_credit, median_credit: of the requests that were ready then, in seconds; 0
    under a policy without credits.
    superseded, expired: requests ended by a newer one of their stream, and by their deadline; both
    are counted in aborted as well.
    pages_used: of keys and values of running requests; pages_cached: of such that later prompts may
    begin with; pages_adapter: of packed adapters; pages_moved: relocated so far. cached_tokens:
    tokens of prompts that were found computed.
    running_adapters, waiting_adapters: requests by adapter name ("" is the base model).
    """

    steps: int = 0
    rows: int = 0
    decode_steps: int = 0
    decode_rows: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    finished: int = 0
    aborted: int = 0
    failed: int = 0
    preemptions: int = 0
    switches: int = 0
    merges: int = 0
    switch_seconds: float = 0.0
    mode: str = ""
    mode_steps: Mapping[str, int] = field(default_factory=dict)
    mode_seconds: Mapping[str, float] = field(default_factory=dict)
    step_seconds: float = 0.0
    predicted_seconds: float = 0.0
    prediction_error: float = 0.0
    paused: int = 0
    highest_credit: float = 0.0
    median_credit: float = 0.0
    superseded: int = 0
    expired: int = 0
    running: int = 0
    waiting: int = 0
    pages_used: int = 0
    pages_total: int = 0
    page_tokens: int = 0
    pages_cached: int = 0
    pages_adapter: int = 0
    pages_moved: int = 0
    adapters_resident: int = 0
    adapters_known: int = 0
    adapter_host_bytes: int = 0
    cached_tokens: int = 0
    adapter_hits: int = 0
    adapter_host_hits: int = 0
    adapter_misses: int = 0
    adapter_loads: int = 0
    adapter_evictions: int = 0
    running_adapters: Mapping[str, int] = field(default_factory=dict)
    waiting_adapters: Mapping[str, int] = field(default_factory=dict)

    @property
    def kv_usage(self) -> float:
        """Share of pages in use, 0–1."""
        return self.pages_used / self.pages_total if self.pages_total else 0.0
