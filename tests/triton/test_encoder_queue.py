"""Tests of requests that wait for the vision encoder: deadlines, streams, arrivals, bounds."""

from __future__ import annotations

import itertools
import json
import math
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pytest
from transformers import LlavaForConditionalGeneration

from tests.support.hostile_images import jpeg_with_scans
from tests.support.polling import until
from tests.support.triton_client import REFRESH_SECONDS, Asker, Refused, picture, serving
from tools.demo.build import make_model, save_checkpoint
from vlora.launcher.repository import ServerOptions
from vlora.launcher.server import TritonServer

ENCODER = '{model="vision_encoder",version="1"}'
PROMPT = np.array([[b"?"]], dtype=object)
COLOURS = itertools.count(1)

# The encoder must stay occupied for longer than other processes could hold up the tests' requests.
pytestmark = pytest.mark.alone

BUSY_SECONDS, BUSY_REQUESTS = 4.0, 10
"""Time for which the encoder is occupied, and number of requests that occupy it."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TritonServer]:
    """Yield a server with a deep vision tower and a queue of 16 requests. `ask` is its client."""
    config = make_model(seed=0).config
    config.vision_config.num_hidden_layers = 40
    config.text_config.max_position_embeddings = 4096  # the tokens of 64 images
    folder = tmp_path_factory.mktemp("deep")
    save_checkpoint(folder, LlavaForConditionalGeneration(config))
    limits = {"max_decode_seconds": 2.0}
    options = ServerOptions(
        model_json={
            "model": str(folder),
            "max_num_seqs": 4,
            "max_num_waiting": 12,
            "limits": limits,
        },
        log=tmp_path_factory.mktemp("queue") / "tritonserver.log",
    )
    with serving(options) as started:
        yield started


def fresh_picture() -> bytes:
    number = next(COLOURS)
    return picture((number % 251, number // 251, 33))


def occupy(ask: Asker, frames: int) -> object:
    clip = [fresh_picture() for _ in range(frames)]
    return ask.once("vision_encoder", text_input=PROMPT, frames=np.array([clip], dtype=object))


@dataclass
class Busy:
    """Requests that occupy the encoder, and the number of their frames."""

    requests: list[Future[object]]
    frames: int

    @property
    def ended(self) -> bool:
        return all(request.done() for request in self.requests)

    def wait(self) -> None:
        for request in self.requests:
            request.result()


@contextmanager
def busy_encoder(ask: Asker) -> Iterator[Busy]:
    """Occupy the encoder for some seconds; yield while it encodes."""
    occupy(ask, 1)
    start = time.monotonic()
    occupy(ask, 8)
    # The pace of this machine decides how many frames are enough.
    frames = min(math.ceil(BUSY_SECONDS * 8 / (time.monotonic() - start)), 512)
    # A request waits for a part of each that came before it, so these are many.
    sizes = [math.ceil(frames / BUSY_REQUESTS)] * BUSY_REQUESTS
    with ThreadPoolExecutor(len(sizes)) as pool:
        busy = Busy([pool.submit(occupy, ask, size) for size in sizes], sum(sizes) + 9)
        time.sleep(0.5)
        assert not busy.ended
        yield busy


def counters(ask: Asker) -> dict[str, float]:
    """Return the encoder's counters; they are refreshed once a second."""
    metrics = ask.metrics()
    names = ("encoder_images", "requests_expired", "requests_superseded")
    return {name: metrics.get(f"vlora:{name}_total{ENCODER}", 0.0) for name in names}


def settled_counters(ask: Asker) -> dict[str, float]:
    """Return the encoder's counters, with what earlier tests have added."""
    time.sleep(REFRESH_SECONDS)
    return counters(ask)


def added(ask: Asker, before: dict[str, float], **expected: float) -> None:
    """Wait until the counters have grown by this; then check that they have not grown by more."""

    def grown() -> dict[str, float]:
        after = counters(ask)
        return {name: after[name] - before[name] for name in expected}

    until(lambda: all(grown()[name] >= count for name, count in expected.items()))
    assert grown() == expected


def call_of(ask: Asker, model: str) -> Callable[..., object]:
    """Return the way to send a request to a model: unary or as a stream."""
    return partial(ask.once if model in ("video_analytics", "lmm_unary") else ask.stream, model)


def test_a_deadline_that_passes_in_the_encoders_queue_ends_the_request_without_encoding_it(
    ask: Asker,
) -> None:
    models = ("video_analytics", "visual_retrieval", "lmm")
    keys = {"deadline_ms": 150}
    before = settled_counters(ask)
    with busy_encoder(ask) as busy, ThreadPoolExecutor(len(models)) as pool:
        answers = [
            pool.submit(
                call_of(ask, model),
                text_input="?",
                image=fresh_picture(),
                sampling_parameters=keys,
            )
            for model in models
        ]
        for answer in answers:
            with pytest.raises(Refused, match="CANCELLED: past its deadline: 'deadline_ms' = 150"):
                answer.result()
        assert not busy.ended, "the errors do not wait for the encoder"
        busy.wait()
    ask.once("video_analytics", text_input="?", image=fresh_picture())
    added(ask, before, encoder_images=busy.frames + 1)


def test_superseded_frames_are_not_encoded(ask: Asker) -> None:
    """The deadlines and streams of requests also work as request parameters."""
    before = settled_counters(ask)
    keys = {"stream_id": "camera", "supersede": True, "max_tokens": 1}

    def send(index: int) -> object:
        how = {"parameters": keys} if index % 2 else {"sampling_parameters": keys}
        return ask.stream("visual_retrieval", text_input="?", image=fresh_picture(), **how)

    with busy_encoder(ask) as busy, ThreadPoolExecutor(5) as pool:
        frames = [pool.submit(send, index) for index in range(5)]
        until(lambda: sum(frame.done() for frame in frames) == 4)
        assert not busy.ended
        newest = next(frame for frame in frames if not frame.done())
        for frame in frames:
            if frame is not newest:
                with pytest.raises(Refused, match="CANCELLED: a newer request of stream 'camera'"):
                    frame.result()
        assert newest.result()
        busy.wait()
    added(ask, before, encoder_images=busy.frames + 1, requests_superseded=4)


def test_a_request_that_is_cancelled_or_left_in_the_encoders_queue_is_not_encoded(
    ask: Asker,
) -> None:
    """Triton does not tell the models of an ensemble that a client has left."""
    models = ("video_analytics", "visual_retrieval", "lmm", "lmm_unary")
    names = {model: f"cancelled in {model}" for model in models}
    before = settled_counters(ask)
    with busy_encoder(ask) as busy, ThreadPoolExecutor(len(models)) as pool:
        answers = [
            pool.submit(call_of(ask, model), id=name, text_input="?", image=fresh_picture())
            for model, name in names.items()
        ]
        with ask.streaming("lmm", text_input="?", image=fresh_picture()):
            time.sleep(0.3)
        for name, answer in zip(names.values(), answers, strict=True):
            ask.stream("lmm", id=name, cancel=True)
            with pytest.raises(Refused, match=f"CANCELLED: the request '{name}' was cancelled"):
                answer.result()
        assert not busy.ended, "the errors do not wait for the encoder"
        busy.wait()
    ask.once("video_analytics", text_input="?", image=fresh_picture())
    added(ask, before, encoder_images=busy.frames + 1)


def test_latencies_include_the_wait_for_the_encoder(ask: Asker) -> None:
    def first_tokens() -> float:
        name = "vllm:time_to_first_token_seconds_sum"
        return ask.metrics()[f'{name}{{model="lmm",version="1"}}']

    def timed(call: Callable[..., Any], model: str) -> tuple[Any, float]:
        start = time.monotonic()
        keys = {"max_tokens": 2, "temperature": 0}
        answer = call(model, text_input="?", image=fresh_picture(), sampling_parameters=keys)
        return answer, time.monotonic() - start

    with busy_encoder(ask) as busy, ThreadPoolExecutor(2) as pool:
        sum_before = first_tokens()
        unary = pool.submit(timed, ask.once, "video_analytics")
        ((direct,), seconds) = timed(ask.stream, "lmm")
        ensemble, ensemble_seconds = unary.result()
        busy.wait()
    for details, whole in ((direct["details"], seconds), (ensemble["result"], ensemble_seconds)):
        timings = json.loads(details)["timings"]
        assert 0.7 * whole < timings["queued"] < timings["first_token"] < whole
    # The metrics are refreshed once a second.
    until(lambda: first_tokens() - sum_before > 0.7 * (seconds + ensemble_seconds))


def test_an_image_that_takes_long_to_decode_delays_no_other_and_is_refused(ask: Asker) -> None:
    """The slow request is answered after the call that took it has returned."""
    image = np.array([[jpeg_with_scans(3000, 10_000)]], dtype=object)
    with ThreadPoolExecutor(1) as pool:
        # On a busy machine, 2 s of processor time can take minutes.
        encode = partial(ask.once, "vision_encoder", text_input=PROMPT)
        slow = pool.submit(encode, image=image, timeout=600)
        for _ in range(5):
            occupy(ask, 1)
            assert not slow.done()
        with pytest.raises(Refused, match=r"INVALID_ARG: .* more than 2 s of processor time"):
            slow.result()


def test_a_client_cannot_choose_its_arrival(ask: Asker) -> None:
    for model, call in (("lmm", ask.stream), ("lmm_unary", ask.once)):
        with pytest.raises(Refused, match="INVALID_ARG: 'arrival_stamp' was not made by this"):
            call(model, text_input="?", arrival_stamp=b"\0" * 56)


def test_a_stamp_of_the_encoder_counts_once(ask: Asker) -> None:
    (stamp,) = ask.once("vision_encoder", text_input=PROMPT)["arrival_stamp"]
    time.sleep(0.5)
    totals = []
    for _ in range(2):
        started = time.monotonic()
        response = ask.once("lmm_unary", text_input="?", arrival_stamp=stamp)
        totals.append(json.loads(response["details"])["timings"]["queued"])
    assert totals[0] > 0.5
    assert totals[1] < time.monotonic() - started


def test_the_encoders_queue_is_bounded(ask: Asker) -> None:
    def one(_: int) -> str:
        try:
            ask.once("video_analytics", text_input="?", image=fresh_picture())
        except Refused as error:
            return error.message
        return "answered"

    with busy_encoder(ask), ThreadPoolExecutor(24) as pool:
        answers = list(pool.map(one, range(24)))
    full = "in ensemble 'video_analytics', UNAVAILABLE: the queue is full: 16 requests are waiting"
    assert set(answers) == {"answered", full}
