"""The small parts of serving: encoder batches, task_head, errors, metrics."""

from __future__ import annotations

import io
import itertools
import json
import math
from collections.abc import Sequence

import numpy as np
import pytest
from PIL import Image

from tests.support.fakes import FakeRegistry, first
from vlora.config import Limits, load_adapter_names
from vlora.errors import BY_CODE, Internal, InvalidArgument, NotFound, VLoraError
from vlora.metrics import EngineStats
from vlora.request import Output, Timings
from vlora.serving.error_counts import ErrorCounts, ErrorExporter
from vlora.serving.exporter import (
    MAX_LORA_LABEL_SETS,
    MAX_OBSERVED,
    EncoderExporter,
    EngineExporter,
)
from vlora.serving.responder import as_vlora_error, from_message, to_message
from vlora.serving.task_head import to_result
from vlora.serving.tensors import Tensors, strings
from vlora.serving.vision_encoder import Answers, encode_batch, features_from
from vlora.vision.features import Counters, EncodedImages
from vlora.vision.images import DecodedImage


class FakeEncoder:
    """Two rows of width 3 per image."""

    def __init__(self) -> None:
        self.batches: list[int] = []
        self.at_once = 16
        self.error: Exception | None = None

    def run(self, batch: Sequence[Sequence[DecodedImage]]) -> list[EncodedImages]:
        self.batches.append(len(batch))
        if self.error is not None:
            raise self.error
        return [self._one(images) for images in batch]

    def _one(self, images: Sequence[DecodedImage]) -> EncodedImages:
        count = len(images)
        layout = [(2 * i, 2, 1, 1, 2, 0) for i in range(count)]
        return EncodedImages(
            features=np.ones((2 * count, 3), np.float32),
            layout=np.array(layout, np.int32).reshape(-1, 6),
            size=np.array([(i.height, i.width) for i in images], np.int32).reshape(-1, 2),
            digests=("d",) * count,
        )


def png() -> bytes:
    content = io.BytesIO()
    Image.new("RGB", (6, 4)).save(content, "PNG")
    return content.getvalue()


def encoder_request(*images: bytes) -> Tensors:
    tensors = {"text_input": strings(["x"])[None]}
    return {**tensors, "image": strings(images)[None]} if images else tensors


def encoded(
    batch: Sequence[Tensors | VLoraError], encoder: FakeEncoder, limits: Limits | None = None
) -> list[Tensors | VLoraError]:
    """The answers in the order of the requests, each of which has one."""
    answers: dict[int, Tensors | VLoraError] = {}

    def send(found: Answers) -> None:
        assert found
        assert not answers.keys() & found.keys()
        answers.update(found)

    last = encode_batch(batch, encoder, limits or Limits(), send)
    assert not answers.keys() & last.keys()
    answers |= last
    return [answers[index] for index in range(len(batch))]


def test_a_corrupt_image_is_an_error_of_its_request_alone() -> None:
    encoder = FakeEncoder()
    batch = [encoder_request(png()), encoder_request(b"junk"), encoder_request(png(), png())]
    one, bad, two = encoded(batch, encoder)
    assert isinstance(bad, InvalidArgument)
    assert encoder.batches == [2]
    assert not isinstance(one, VLoraError)
    assert not isinstance(two, VLoraError)
    assert features_from(one).features.shape == (2, 3)
    assert features_from(two).features.shape == (4, 3)
    assert one["image_size"].tolist() == [[[4, 6]]]


def test_a_batch_of_many_pixels_is_encoded_in_parts() -> None:
    encoder = FakeEncoder()
    limits = Limits(max_batch_megapixels=2 * 24e-6)  # two pictures
    batch = [encoder_request(*[png()] * count) for count in (1, 1, 0, 1, 3, 1)]
    batch.insert(1, encoder_request(b"junk"))
    answers = encoded(batch, encoder, limits)
    assert sorted(encoder.batches) == [1, 1, 1, 1, 2]  # who has none does not wait
    shapes = [None if isinstance(a, VLoraError) else a["image_features"].shape[1] for a in answers]
    assert shapes == [2, None, 2, 0, 2, 6, 2]


def test_requests_are_answered_before_the_images_after_them_are_encoded() -> None:
    encoder = FakeEncoder()
    encoder.at_once = 2
    sent: list[tuple[set[int], int]] = []

    def run(batch: list[Tensors | VLoraError]) -> set[int]:
        encoder.batches.clear()
        sent.clear()
        last = encode_batch(
            batch,
            encoder,
            Limits(),
            lambda found: sent.append((set(found), sum(encoder.batches))),
        )
        return set(last)

    batch = [encoder_request(*[png()] * count) for count in (1, 1, 3, 1, 0)]
    # Who has no images, or none that can be read, is answered with those who are there.
    assert run([*batch, encoder_request(b"junk")]) == {3}
    assert sent == [({0, 1}, 2), ({2, 4, 5}, 4)]
    assert run([encoder_request(), encoder_request(b"junk"), encoder_request()]) == {0, 1, 2}
    assert sent == []
    assert run([encoder_request(png()), encoder_request(png())]) == {0, 1}
    assert sent == []


def test_a_request_without_images_gets_zero_rows() -> None:
    (answer,) = encoded([encoder_request()], FakeEncoder())
    assert not isinstance(answer, VLoraError)
    assert answer["image_features"].shape == (1, 0, 3)
    assert answer["image_layout"].shape == (1, 0, 6)
    assert answer["image_digest"].shape == (1, 0)


def test_a_tower_that_fails_is_told_to_the_sound_requests_of_its_batch() -> None:
    encoder = FakeEncoder()
    encoder.error = MemoryError("out of memory at 0x1234")
    sound, bad = encoded([encoder_request(png()), encoder_request(b"x")], encoder)
    assert isinstance(sound, Internal)
    assert "0x1234" not in sound.message
    assert isinstance(bad, InvalidArgument)


def test_the_encoder_wants_a_prompt_and_no_batch() -> None:
    missing, batched = encoded(
        [{"image": strings([png()])[None]}, {"text_input": strings(["a", "b"])[:, None]}],
        FakeEncoder(),
    )
    assert isinstance(missing, InvalidArgument)
    assert "'text_input' is missing" in missing.message
    assert isinstance(batched, InvalidArgument)


def test_task_head_reads_an_answer() -> None:
    details = {"task": "classify", "adapter": None, "timings": {"total": 0.5}}
    result = json.loads(
        first(
            to_result(
                {
                    "text_output": strings(["dog"]),
                    "details": strings([json.dumps(details)]),
                    "head_labels": strings(["cat", "dog"]),
                    "head_scores": np.array([0.25, 0.75], np.float32),
                    "metadata": strings(["m"]),
                },
                Limits(),
            )["result"]
        )
    )
    assert result["scores"] == {"cat": 0.25, "dog": 0.75}
    assert result["metadata"] == "m"


@pytest.mark.parametrize("details", ["{", "[]", "{}"])
def test_task_head_refuses_details_that_are_none(details: str) -> None:
    with pytest.raises(InvalidArgument, match="'details'"):
        to_result({"text_output": strings(["x"]), "details": strings([details])}, Limits())


@pytest.mark.parametrize("kind", BY_CODE.values())
def test_an_error_keeps_its_code_through_a_message(kind: type[VLoraError]) -> None:
    error = from_message(to_message(kind("what: is wrong")))
    assert (type(error), error.message) == (kind, "what: is wrong")
    assert type(from_message(f"in ensemble 'x', {to_message(kind('w'))}")) is kind


def test_a_message_without_a_code_is_a_fault_of_ours() -> None:
    assert isinstance(from_message("Stub process is not healthy."), Internal)
    assert as_vlora_error(NotFound("x"), "asking").code == "NOT_FOUND"
    assert "KeyError" not in as_vlora_error(KeyError("x"), "asking").message


def test_engine_metrics_follow_the_stats() -> None:
    registry = FakeRegistry()
    stats = EngineStats(prompt_tokens=10, waiting=2, running=3, pages_used=1, pages_total=4)
    exporter = EngineExporter(
        registry, {"model": "lmm"}, lambda: stats, 8, max_tokens=1000, clock=lambda: 77.0
    )
    observe = exporter.request()
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


def test_the_time_of_each_mode_is_a_series_of_its_own() -> None:
    registry = FakeRegistry()
    steps, seconds = {"merged": 3, "mixture": 1}, {"merged": 0.5, "mixture": 0.25}
    stats = EngineStats(switches=2, mode="mixture", mode_steps=steps, mode_seconds=seconds)
    EngineExporter(registry, {}, lambda: stats, 8, 1000).flush()
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


def test_a_round_of_answers_tells_the_engines_totals_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every value told is a message to the server."""
    monkeypatch.setattr("vlora.serving.exporter.CATCH_UP_SECONDS", math.inf)
    registry = FakeRegistry()
    steps = itertools.count(1)
    exporter = EngineExporter(registry, {}, lambda: EngineStats(steps=next(steps)), 8, 1000)
    for rounds in (1, 2):
        for number in range(3):
            observe = exporter.request()
            observe(Output("r", token_ids=(1,)))
            observe(Output("r", token_ids=(2,), finish_reason="stop"))
            told = registry["vllm:e2e_request_latency_seconds"].observed
            assert len(told) == 3 * (rounds - 1) + number + 1
        exporter.catch_up()
        assert registry["vlora:engine_steps_total"].value == rounds


def test_the_lora_metric_names_adapters_and_has_boundedly_many_label_sets() -> None:
    registry = FakeRegistry()
    now = 0.0
    stats = EngineStats()
    exporter = EngineExporter(registry, {}, lambda: stats, 8, 1000, clock=lambda: now)
    for index in range(3 * MAX_LORA_LABEL_SETS):
        now = float(index)
        running = {f"a{index}": 1, f"a{index + 1}": 1, "": 4}
        stats = EngineStats(running_adapters=running, waiting_adapters={"w": 1})
        exporter.flush()
    series = {
        labels: metric
        for (name, labels), metric in registry.metrics.items()
        if name == "vllm:lora_requests_info"
    }
    assert len(series) == MAX_LORA_LABEL_SETS
    assert ("running_lora_adapters", "a0,a1") in next(iter(series))
    assert max(metric.value for metric in series.values()) == now


def test_encoder_metrics_follow_its_counters() -> None:
    registry = FakeRegistry()
    counters = Counters(images=5, hits=2, misses=3, batches=1)
    exporter = EncoderExporter(registry, {}, lambda: counters)
    exporter.flush()
    counters = Counters(images=9, hits=6, misses=3, batches=1)
    exporter.flush()
    assert registry["vlora:feature_cache_hits_total"].value == 6
    assert registry["vlora:encoder_batches_total"].value == 1


def test_errors_are_a_series_a_code_from_the_start() -> None:
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


def test_metrics_outlive_an_exception_and_keep_boundedly_much(
    caplog: pytest.LogCaptureFixture,
) -> None:
    registry = FakeRegistry()
    stats = EngineStats(prompt_tokens=10)
    exporter = EngineExporter(registry, {}, lambda: stats, 8, max_tokens=1000)
    observe = exporter.request()
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


def test_multi_lora_json_is_names_and_folders(tmp_path) -> None:  # type: ignore[no-untyped-def]
    path = tmp_path / "multi_lora.json"
    assert load_adapter_names(path) == {}
    path.write_text('{"a": "folder"}')
    assert load_adapter_names(path) == {"a": "folder"}
    path.write_text('{"a": 1}')
    with pytest.raises(InvalidArgument, match="adapter name → folder"):
        load_adapter_names(path)
