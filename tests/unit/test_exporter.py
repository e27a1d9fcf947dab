"""Tests of statistics, errors and waiting requests as Prometheus metrics."""

from __future__ import annotations

import itertools
import math

import pytest

from tests.support.fakes import FakeRegistry
from vlora.errors import BY_CODE, AdapterBroken, Cancelled, Internal, NotFound
from vlora.metrics import EncoderCounters, EngineStats, LoadedAdapter
from vlora.request import Output, Timings
from vlora.serving.metrics import (
    MAX_LINES,
    MAX_LORA_SERIES,
    MAX_LORA_TEXT,
    MAX_OBSERVED,
    MAX_REASON,
    EncoderExporter,
    EngineExporter,
    ErrorCounts,
    ErrorExporter,
)


def test_engine_metrics_have_the_values_of_the_statistics() -> None:
    registry = FakeRegistry()
    stats = EngineStats(prompt_tokens=10, waiting=2, running=3, pages_used=1, pages_total=4)
    exporter = EngineExporter(
        registry, {"model": "lmm"}, lambda: stats, max_tokens=1000, clock=lambda: 77.0
    )
    observe = exporter.request(None)
    for total, new in ((0.5, (1,)), (0.75, (2,)), (1.5, (3, 4, 5))):
        timings = Timings(first_token=0.5, total=total)
        last = {"finish_reason": "stop", "num_output_tokens": 5, "num_input_tokens": 10}
        observe(Output("r", token_ids=new, timings=timings, **(last if total == 1.5 else {})))
    assert registry["vllm:num_requests_waiting"].value == 2
    assert registry["vllm:kv_cache_usage_perc"].value == 0.25
    assert registry["vllm:prompt_tokens_total"].value == 10
    assert registry["vllm:time_to_first_token_seconds"].observed == [0.5]
    assert registry["vllm:time_per_output_token_seconds"].observed == [0.25, 0.25]
    assert registry["vllm:request_prompt_tokens"].observed == [10]
    assert registry["vllm:request_generation_tokens"].observed == [5]
    assert registry["vllm:request_params_n"].observed == [1]
    assert registry["vllm:e2e_request_latency_seconds"].observed == [1.5]
    assert registry["vllm:lora_requests_info"].value == 77.0


def test_each_mode_has_its_own_series() -> None:
    registry = FakeRegistry()
    steps, seconds = {"merged": 3, "mixture": 1}, {"merged": 0.5, "mixture": 0.25}
    stats = EngineStats(switches=2, mode="mixture", mode_steps=steps, mode_seconds=seconds)
    EngineExporter(registry, {}, lambda: stats, 1000).flush()
    series = {
        (name, dict(labels)["mode"]): metric.value
        for (name, labels), metric in registry.metrics.items()
        if name.startswith("vlora:mode")
    }
    for mode in ("merged", "mixture", "unmerged"):
        assert series["vlora:mode", mode] == (mode == "mixture")
        assert series["vlora:mode_steps_total", mode] == steps.get(mode, 0)
        assert series["vlora:mode_seconds_total", mode] == seconds.get(mode, 0.0)
    assert registry["vlora:switches_total"].value == 2


def test_the_statistics_are_written_once_per_round_of_answers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each written value is a message to the server."""
    monkeypatch.setattr("vlora.serving.metrics.CATCH_UP_SECONDS", math.inf)
    registry = FakeRegistry()
    steps = itertools.count(1)
    exporter = EngineExporter(registry, {}, lambda: EngineStats(steps=next(steps)), 1000)
    for rounds in (1, 2):
        for number in range(3):
            observe = exporter.request(None)
            observe(Output("r", token_ids=(1,)))
            observe(Output("r", token_ids=(2,), finish_reason="stop"))
            observed = registry["vllm:e2e_request_latency_seconds"].observed
            assert len(observed) == 3 * (rounds - 1) + number + 1
        exporter.catch_up()
        assert registry["vlora:engine_steps_total"].value == rounds


@pytest.mark.parametrize("length", [1, 5000])
def test_the_lora_metric_names_the_present_adapters_and_is_bounded(length: int) -> None:
    registry = FakeRegistry()
    now = 0.0
    stats = EngineStats()
    exporter = EngineExporter(registry, {}, lambda: stats, 1000, clock=lambda: now)
    for index in range(3 * MAX_LORA_SERIES):
        now = float(index)
        loaded = [LoadedAdapter(name, True, False, 8) for name in (f"a{index}", "b" * length)]
        loaded.append(LoadedAdapter("in memory only", False, False, 8))
        waiting = {"w": 1, "": 4}
        stats = EngineStats(
            loaded_adapters=loaded, waiting_adapters=waiting, adapters_that_fit=index
        )
        exporter.flush()
        series = {
            labels: metric.value
            for (name, labels), metric in registry.metrics.items()
            if name == "vllm:lora_requests_info"
        }
        assert len(series) <= MAX_LORA_SERIES
        assert sum(len(text) for labels in series for _, text in labels) < 2 * MAX_LORA_TEXT
        assert dict(max(series, key=lambda labels: series[labels])) == {
            "max_lora": str(index),
            "running_lora_adapters": f"a{index}," + "b" * length,
            "waiting_lora_adapters": "w",
        }


def series_of(registry: FakeRegistry, metric: str, *labels: str) -> dict[tuple[str, ...], float]:
    """Return the values of a metric by those of these labels."""
    found = ((dict(key[1]), value) for key, value in registry.metrics.items() if key[0] == metric)
    return {tuple(given[label] for label in labels): one.value for given, one in found}


def test_each_loaded_adapter_has_a_series_while_it_is_loaded_and_others_are_counted() -> None:
    registry = FakeRegistry()
    loaded = [LoadedAdapter("a", True, True, 16), LoadedAdapter("b", False, False, 4)]
    stats = EngineStats(loaded_adapters=loaded, page_tokens=16, pages_total=100)
    exporter = EngineExporter(registry, {"model": "lmm"}, lambda: stats, 1000)

    def series() -> dict[tuple[str, ...], float]:
        labels = ("adapter_name", "level", "pinned", "rank")
        return series_of(registry, "vllm:lora_adapter_loaded", *labels)

    exporter.flush()
    assert series() == {("a", "gpu", "true", "16"): 1, ("b", "cpu", "false", "4"): 1}
    assert registry["vllm:num_gpu_loaded_lora_adapters"].value == 1
    pool = series_of(registry, "vllm:cache_config_info", "block_size", "num_gpu_blocks")
    assert pool == {("16", "100"): 1}
    many = [LoadedAdapter(f"c{index}", True, False, 8) for index in range(MAX_LORA_SERIES + 5)]
    stats = EngineStats(loaded_adapters=many)
    exporter.flush()
    assert len(series()) == MAX_LORA_SERIES + 1
    assert series()["other", "gpu", "false", "0"] == 5
    (running,) = {
        dict(labels)["running_lora_adapters"].split(",")[-1]
        for (name, labels), _ in registry.metrics.items()
        if name == "vllm:lora_requests_info" and "c0" in dict(labels)["running_lora_adapters"]
    }
    assert running == "other"


def test_the_time_of_each_load_is_observed_once() -> None:
    registry = FakeRegistry()
    stats = EngineStats(load_times=(2, (0.5, 0.25)))
    exporter = EngineExporter(registry, {}, lambda: stats, 1000)
    exporter.flush()
    exporter.flush()
    stats = EngineStats(load_times=(3, (0.5, 0.25, 0.125)))
    exporter.flush()
    assert registry["vllm:lora_adapter_load_seconds"].observed == [0.5, 0.25, 0.125]


def test_a_broken_adapter_is_exported_with_its_reason_until_it_is_mended() -> None:
    registry = FakeRegistry()
    broken = {"b": AdapterBroken("x" * 5000), "a": AdapterBroken("is missing")}
    stats = EngineStats(broken_adapters=broken, adapters_broken=2)
    exporter = EngineExporter(registry, {"model": "lmm"}, lambda: stats, 1000)
    exporter.flush()
    assert series_of(registry, "vlora:adapter_broken", "adapter", "reason") == {
        ("a", "is missing"): 1,
        ("b", "x" * MAX_REASON): 1,
    }
    stats = EngineStats(broken_adapters={f"c{index:04}": broken["a"] for index in range(500)})
    exporter.flush()
    assert len(series_of(registry, "vlora:adapter_broken", "adapter")) == MAX_LORA_SERIES
    stats = EngineStats()
    exporter.flush()
    assert not series_of(registry, "vlora:adapter_broken", "adapter")


def test_requests_are_counted_by_adapter_with_a_bounded_number_of_series() -> None:
    registry = FakeRegistry()
    exporter = EngineExporter(registry, {"model": "lmm"}, EngineStats, 1000)
    answered = Output("r", finish_reason="stop", num_output_tokens=5, timings=Timings(total=2.0))
    for adapter in (None, "a", "a", *(f"b{index}" for index in range(2 * MAX_LORA_SERIES))):
        exporter.request(adapter)(answered)
    exporter.request("a")(Output("r", error=Internal("?")))
    exporter.request("a")(Output("r", token_ids=(1,)))
    exporter.flush()
    names = ("requests", "errors", "tokens", "seconds")
    all_of = {name: series_of(registry, f"vlora:adapter_{name}_total", "adapter") for name in names}
    assert [all_of[name]["a",] for name in names] == [3, 1, 10, 4.0]
    assert [all_of[name]["(base model)",] for name in names] == [1, 0, 5, 2.0]
    assert len(all_of["requests"]) == MAX_LORA_SERIES + 1
    assert sum(all_of["requests"].values()) == 4 + 2 * MAX_LORA_SERIES


def test_encoder_metrics_have_the_values_of_the_counters() -> None:
    registry = FakeRegistry()
    counters = EncoderCounters(images=5, hits=2, misses=3, batches=1)
    exporter = EncoderExporter(registry, {}, lambda: counters)
    exporter.flush()
    counters = EncoderCounters(images=9, hits=6, misses=3, batches=1)
    exporter.flush()
    assert registry["vlora:feature_cache_hits_total"].value == 6
    assert registry["vlora:encoder_batches_total"].value == 1


def test_metrics_recover_from_an_exception_and_store_a_bounded_number_of_observations(
    caplog: pytest.LogCaptureFixture,
) -> None:
    registry = FakeRegistry()
    stats = EngineStats(prompt_tokens=10)
    exporter = EngineExporter(registry, {}, lambda: stats, max_tokens=1000)
    observe = exporter.request(None)
    broken = registry["vllm:prompt_tokens_total"]
    broken.error = RuntimeError("the server is busy")
    for _ in range(MAX_OBSERVED + 100):
        observe(Output("r", token_ids=(1,)))
    for _ in range(3):
        observe(Output("r", token_ids=(1,), finish_reason="stop"))
    assert len(caplog.records) == 1
    assert len(exporter._observed) == MAX_OBSERVED
    broken.error = None
    exporter.flush()
    assert broken.value == 10
    assert not exporter._observed


def test_each_code_is_exported_from_the_start() -> None:
    registry = FakeRegistry()
    counts = ErrorCounts()
    exporter = ErrorExporter(registry, {"model": "lmm"}, counts)
    series = {dict(labels)["code"]: metric for (_, labels), metric in registry.metrics.items()}
    assert set(series) == set(BY_CODE)
    for error in (NotFound("a"), NotFound("b"), Internal("c")):
        counts.add(error)
    exporter.flush()
    exporter.flush()
    assert series["NOT_FOUND"].value == 2
    assert series["INTERNAL"].value == 1
    assert series["CANCELLED"].value == 0


def test_each_refused_request_is_one_line_of_the_log_up_to_a_bound(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level("INFO")
    now = 5.0
    monkeypatch.setattr("vlora.serving.metrics.time.monotonic", lambda: now)
    counts = ErrorCounts()
    elsewhere = Internal("counted by another model")
    elsewhere.counted_elsewhere = True
    for error in (Cancelled("by its client"), elsewhere, NotFound("unknown\nadapter")):
        counts.add(error, "client-7")
    expected = r'refused: {"id": "client-7", "code": "NOT_FOUND", "message": "unknown\\nadapter"}'
    assert caplog.messages == [expected]
    for _ in range(100):
        counts.add(NotFound("x" * 5000))
    assert len(caplog.messages) == MAX_LINES
    assert len(caplog.messages[-1]) < MAX_REASON + 100
    now = 6.0
    counts.add(NotFound("?"))
    assert caplog.messages[-1].endswith("(91 more before it)")
    assert counts["NOT_FOUND"] == 102
