"""Tests of a server on all networks, with shared memory, small limits and options of vLLM."""

from __future__ import annotations

import json
import re
import socket
import threading
import time
import urllib.error
import urllib.request
import uuid
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import tritonclient.grpc as grpcclient
from tritonclient.utils import InferenceServerException, shared_memory

from tests.support.gateway import Gateway, running
from tests.support.polling import until
from tests.support.triton_client import (
    REFRESH_SECONDS,
    Asker,
    Refused,
    asking,
    picture,
    pixels,
)
from vlora.launcher.processes import children, is_alive
from vlora.launcher.repository import ServerOptions
from vlora.launcher.server import TritonServer

RUNNING, WAITING = 2, 6
OPTIONS = {
    "engine_threads": 2,
    "feature_cache_bytes": 0,
    "max_num_seqs": RUNNING,
    "max_num_waiting": WAITING,
    "enable_lora": "true",
    "disable_log_stats": "true",
    "max_loras": 4,
    "max_lora_rank": 16,
    "gpu_memory_utilization": 0.5,
    "limits": {"max_images": 3, "max_prompt_bytes": 5000, "max_request_megapixels": 0.01},
}
LONG = {"max_tokens": 900, "ignore_eos": True, "temperature": 0}


@pytest.fixture(scope="module")
def small(
    checkpoint: Path, adapters_dir: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[TritonServer]:
    log = tmp_path_factory.mktemp("small-server") / "tritonserver.log"
    options = ServerOptions(
        model=checkpoint,
        adapters=adapters_dir,
        model_json=OPTIONS,
        log=log,
        host="0.0.0.0",
        allow_shared_memory=True,
        triton_arguments=("--http-restricted-api=model-repository:operator=key",),
    )
    with TritonServer(options) as running:
        yield running


@pytest.fixture
def ask(small: TritonServer) -> Iterator[Asker]:
    with asking(small) as asker:
        yield asker


@pytest.mark.parametrize("model", ["video_analytics", "lmm_unary", "lmm"])
def test_each_of_many_requests_is_answered_or_rejected_with_the_queue_length(
    ask: Asker, model: str
) -> None:
    """Every request ends, and the length in a refusal does not exceed the queue's bound.

    The encoder's queue also holds the requests that will run, so its bound includes them.
    """
    crowd = 200 if model == "video_analytics" else 60
    ready = threading.Barrier(crowd)

    def one(index: int) -> str:
        ready.wait()
        question = {
            "text_input": f"What is {index}?",
            "sampling_parameters": {**LONG, "max_tokens": 9},
        }
        try:
            if model == "lmm":
                ask.stream(model, image=picture(), **question)
            else:
                ask.once(model, image=picture(), **question)
        except Refused as error:
            return error.message
        return "answered"

    with ThreadPoolExecutor(crowd) as pool:
        outcomes = Counter(pool.map(one, range(crowd)))
    # Even if all requests arrive within one step, as many as may wait are answered.
    assert outcomes.pop("answered") >= WAITING
    assert outcomes, "the queue was never full"
    for message in outcomes:
        matched = re.search(r"UNAVAILABLE: the queue is full: (\d+) requests are waiting$", message)
        assert matched, message
        assert int(matched[1]) <= RUNNING + WAITING


def test_a_waiting_request_ends_when_it_is_cancelled_or_its_client_disconnects(ask: Asker) -> None:
    """The running requests would take longer than the rest of the test."""
    question = {"text_input": "What?", "sampling_parameters": LONG}
    running = [uuid.uuid4().hex for _ in range(RUNNING)]
    waiting = uuid.uuid4().hex
    with ThreadPoolExecutor(8) as pool:
        calls = [pool.submit(ask.once, "video_analytics", id=one, **question) for one in running]
        last = pool.submit(ask.once, "video_analytics", id=waiting, **question)

        def ended() -> bool:
            ask.stream("lmm", id=waiting, cancel=True)
            return last.done()

        until(ended)
        with pytest.raises(Refused, match="CANCELLED: "):
            last.result()
        with pytest.raises(Refused, match="Deadline"):
            ask.once("video_analytics", timeout=0.1, **question)
        for one in running:
            ask.stream("lmm", id=one, cancel=True)
        for call in calls:
            assert call.exception() is None or "CANCELLED" in str(call.exception())


def test_a_newer_request_of_a_stream_supersedes_the_waiting_one(
    small: TritonServer, ask: Asker
) -> None:
    """Streams are shared by all connections: the newer requests use another connection."""
    question = {"text_input": "What?", "sampling_parameters": LONG}
    running = [uuid.uuid4().hex for _ in range(RUNNING)]
    keys = {**LONG, "max_tokens": 3, "stream_id": "camera", "supersede": True, "deadline_ms": 3e4}
    chunk = {"text_input": "What?", "sampling_parameters": keys}
    with ThreadPoolExecutor(32) as pool, asking(small) as other:
        calls = [pool.submit(ask.once, "video_analytics", id=one, **question) for one in running]
        chunks = [pool.submit(ask.once, "video_analytics", **chunk)]

        def superseded() -> bool:
            """Send another chunk. The first ones may arrive before the requests that run."""
            chunks.append(pool.submit(other.once, "video_analytics", **chunk))
            return any(one.done() and one.exception() for one in chunks)

        until(superseded)
        for one in running:
            ask.stream("lmm", id=one, cancel=True)
        outcomes = [call.exception() for call in chunks]
        for call in calls:
            assert call.exception() is None or "CANCELLED" in str(call.exception())
    errors = [str(error) for error in outcomes if error is not None]
    # A newer request may arrive while the queue is still full of older ones.
    message = (
        "CANCELLED: a newer request of stream 'camera' superseded|UNAVAILABLE: the queue is full"
    )
    assert all(re.search(message, error) for error in errors), errors
    assert any("superseded" in error for error in errors)
    assert len(errors) < len(chunks), "the newest request is answered"


def test_metrics_can_be_turned_off(ask: Asker) -> None:
    ask.once("video_analytics", text_input="What?")
    names = {name.partition("{")[0] for name in ask.metrics()}
    assert "nv_inference_count" in names
    # Apart from the two counters that the probe reads.
    ours = {name for name in names if name.startswith(("vllm:", "vlora:", "nv_trt_llm"))}
    assert ours == {"vlora:engine_steps_total", "vlora:encoder_images_total"}


def test_without_a_feature_cache_every_image_is_encoded(ask: Asker) -> None:
    def encoded() -> float:
        return ask.metrics()['vlora:encoder_images_total{model="vision_encoder",version="1"}']

    time.sleep(REFRESH_SECONDS)
    before = encoded()
    for _ in range(3):
        ask.once("video_analytics", text_input="?", image=picture())
    until(lambda: encoded() == before + 3)


@pytest.mark.parametrize("lora", [{}, {"lora_name": "all-r8"}], ids=["base", "adapter"])
def test_two_engine_threads_give_the_same_answer_as_the_default(
    server: TritonServer, ask: Asker, lora: dict[str, str]
) -> None:
    keys = {"temperature": 0, "max_tokens": 40, "ignore_eos": True}
    question = {"text_input": "hello", "sampling_parameters": {**keys, **lora}}
    with asking(server) as other:
        assert ask.text("lmm", **question) == other.text("lmm", **question)


def test_keys_without_effect_are_logged(small: TritonServer, ask: Asker) -> None:
    log = small.log.read_text(errors="replace")
    for key in ("max_loras", "max_lora_rank", "gpu_memory_utilization"):
        assert len(re.findall(f"'{key}' has no effect here: ", log)) == 1


def test_limits_can_be_set_in_model_json(ask: Asker) -> None:
    with pytest.raises(Refused, match="'text_input' has 5001 bytes; the limit is 5000"):
        ask.once("video_analytics", text_input="x" * 5001)
    with pytest.raises(Refused, match=r"4.*3"):
        ask.once("video_analytics", text_input="What?", image=[picture()] * 4)
    with pytest.raises(Refused, match=r"the request has 0\.014 megapixels; the limit .* 0\.01$"):
        ask.once("video_analytics", text_input="What?", image=[picture()] * 3)


def unregistered(ask: Asker, name: str) -> bool:
    """Unregister a region; return False while the server still holds the request that used it."""
    try:
        ask.client.unregister_system_shared_memory(name)
    except InferenceServerException as error:
        if "in use" not in str(error):
            raise
        return False
    return True


def test_allowed_clients_send_raw_frames_in_shared_memory(ask: Asker) -> None:
    clip = pixels([picture((60 * i, 0, 0)) for i in range(2)])
    name = f"vlora-test-{uuid.uuid4().hex}"
    region = shared_memory.create_shared_memory_region(name, f"/{name}", clip.nbytes)
    try:
        shared_memory.set_shared_memory_region(region, [clip])
        ask.client.register_system_shared_memory(name, f"/{name}", clip.nbytes)
        frames = grpcclient.InferInput("frames_raw", list(clip.shape), "UINT8")
        frames.set_shared_memory(name, clip.nbytes)
        question = {"text_input": "", "task": "video"}
        shared = ask.once("video_analytics", frames_raw=frames, **question)
        until(lambda: unregistered(ask, name))
    finally:
        shared_memory.destroy_shared_memory_region(region)
    sent = ask.once("video_analytics", frames_raw=clip, **question)
    assert shared["text_output"] == sent["text_output"]
    assert len(json.loads(shared["result"])["frames"]) == 2


def test_other_protocols_stay_closed_where_shared_memory_is_allowed(ask: Asker) -> None:
    for call in (ask.client.get_trace_settings, ask.client.get_model_repository_index):
        with pytest.raises(InferenceServerException, match="protocol is restricted"):
            call()


def test_an_operators_own_key_opens_a_protocol(small: TritonServer) -> None:
    url = f"http://{small.http_url}/v2/repository/index"
    with pytest.raises(urllib.error.HTTPError, match="403"):
        urllib.request.urlopen(urllib.request.Request(url, data=b"{}"), timeout=60)
    request = urllib.request.Request(url, data=b"{}", headers={"operator": "key"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        assert len(json.loads(answer.read())) == len(small.options.models)


def test_a_server_on_all_networks_listens_on_every_address(small: TritonServer) -> None:
    options = small.options
    for port in (options.http_port, options.grpc_port, options.metrics_port):
        socket.create_connection(("127.0.0.2", port), timeout=30).close()


class Tenant:
    """A client of a gateway, with a key of its own."""

    def __init__(self, gateway: Gateway, key: str) -> None:
        self._gateway = gateway
        self._headers = {"authorization": f"Bearer {key}"}

    def ask(self, **fields: Any) -> tuple[int, Any]:
        """Return the status and the content of a completion."""
        body = json.dumps({"model": "base", "prompt": "What?", "max_tokens": 2, **fields})
        status, text = self._gateway.http("/v1/completions", body.encode(), self._headers)
        return status, json.loads(text)

    def cached(self, prompt: str) -> int:
        usage = self.ask(prompt=prompt)[1]["usage"]
        return int(usage["prompt_tokens_details"]["cached_tokens"])


@pytest.fixture(scope="module")
def tenants(
    small: TritonServer, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Tenant, Tenant]]:
    pytest.importorskip("fastapi", reason="the extra `gateway` is not installed")
    folder = tmp_path_factory.mktemp("tenants")
    keys = [letter * 16 for letter in "ab"]
    (folder / "keys").write_text(f"alice {keys[0]}\nbob {keys[1]}\n")
    with running(small.grpc_url, folder, "--keys", str(folder / "keys")) as gateway:
        yield Tenant(gateway, keys[0]), Tenant(gateway, keys[1])


def test_a_tenant_cannot_tell_what_another_sent(tenants: tuple[Tenant, Tenant]) -> None:
    alice, bob = tenants
    prompts = [f"The number of the account is, as you know, {n}{n}." * 8 for n in range(7)]
    alice.cached(prompts[3])
    assert alice.cached(prompts[3]) > alice.cached(prompts[5]), "her own prompts are reused"
    bob.cached(prompts[6])
    guesses = {bob.cached(prompt) for prompt in prompts[:6]}
    assert len(guesses) == 1, guesses
    for fields, param in (({"priority": -1}, "priority"), ({"cancel": True}, "cancel")):
        status, refusal = bob.ask(**fields)
        assert (status, refusal["error"]["param"]) == (400, param)


@contextmanager
def occupied(ask: Asker) -> Iterator[ThreadPoolExecutor]:
    """Run long requests of nobody, of which RUNNING always wait. Yield a pool of threads."""
    ended, begun = threading.Event(), threading.Semaphore(0)

    def occupy() -> None:
        question = {"text_input": "What?", "stream": True, "sampling_parameters": LONG}
        while not ended.is_set():
            with ask.streaming("lmm", **question) as responses:
                for _ in responses:
                    begun.release()
                    if ended.is_set():
                        break

    with ThreadPoolExecutor(16) as pool:
        calls = [pool.submit(occupy) for _ in range(2 * RUNNING)]
        for _ in range(RUNNING):
            assert begun.acquire(timeout=60)
        try:
            yield pool
        finally:
            ended.set()
        for call in calls:
            call.result()


def test_a_tenant_ends_no_request_of_another(ask: Asker, tenants: tuple[Tenant, Tenant]) -> None:
    """Both use one name for their stream, whose requests wait behind those that go first."""
    chunk = {"stream_id": "camera", "supersede": True, "priority": 1}

    def newest(tenant: Tenant, *older: Future[tuple[int, Any]]) -> Future[tuple[int, Any]]:
        """Send chunks of a stream; return the last one when it has ended the one before."""
        chunks = [*older]
        while len(chunks) < 2:
            chunks.append(pool.submit(tenant.ask, **chunk))
        until(lambda: any(one.done() for one in chunks))
        ended, left = sorted(chunks, key=lambda one: not one.done())
        assert ended.result()[0] == 499
        return left

    alice, bob = tenants
    with occupied(ask) as pool:
        of_alice = newest(alice)
        of_bob = newest(bob)
        assert not of_alice.done()
        of_alice = newest(alice, of_alice)
        assert not of_bob.done()
    assert of_alice.result()[0] == of_bob.result()[0] == 200


def test_a_tenant_that_fills_its_share_of_the_queue_has_no_effect_on_another(
    tenants: tuple[Tenant, Tenant],
) -> None:
    alice, bob = tenants
    questions = ({}, {"model": "gone"}, {"deadline_ms": 0.001}, {"temperature": -1})

    def answers() -> list[Any]:
        """Return what bob's questions get, without what differs from answer to answer."""
        found = [bob.ask(**fields) for fields in questions]
        return [one.get("error") or one["choices"] for _, one in found]

    quiet = answers()
    ended, refusals = threading.Event(), []

    def flood() -> None:
        while not ended.is_set():
            status, answer = alice.ask(max_tokens=100, ignore_eos=True)
            if status != 200:
                refusals.append((status, answer["error"]["message"]))
                time.sleep(0.05)

    with ThreadPoolExecutor(RUNNING + WAITING + 2) as pool:
        calls = [pool.submit(flood) for _ in range(RUNNING + WAITING + 2)]
        try:
            until(lambda: len(refusals) > 0)
            assert [answers() for _ in range(3)] == [quiet] * 3
        finally:
            ended.set()
        for call in calls:
            call.result()
    assert {status for status, _ in refusals} == {503}
    assert all("the tenant's share of the queue is full" in text for _, text in refusals), refusals


@pytest.mark.last
def test_requests_that_run_longer_than_the_grace_period_are_cancelled(
    small: TritonServer, ask: Asker
) -> None:
    stubs = children(small.pid)
    assert len(stubs) == 4
    assert small.models.keys() == {"lmm", "lmm_unary", "task_head", "vision_encoder"}
    begun = threading.Semaphore(0)

    def ask_until_refused(_: int) -> str:
        # A fast machine may answer a request before the server stops, so it is sent again.
        question = {"text_input": "hi", "stream": True, "parameters": LONG}
        while True:
            try:
                with ask.streaming("lmm", **question) as responses:
                    next(responses)
                    begun.release()
                    list(responses)
            except Refused as error:
                return error.message

    with ThreadPoolExecutor(RUNNING + 3) as pool:
        errors = pool.map(ask_until_refused, range(RUNNING + 3))
        for _ in range(RUNNING):
            assert begun.acquire(timeout=60)
        small.stop(grace_seconds=0)
        # The running requests may have ended just before the waiting ones were cancelled.
        assert list(errors).count("CANCELLED: the server is shutting down") >= 2
    assert small.poll() is not None
    assert not any(map(is_alive, stubs))
