"""Tests of a server that starts, fails to start, and stops, and of a server with other options."""

from __future__ import annotations

import re
import shutil
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from tests.support.polling import until
from tests.support.triton_client import Asker, Refused, asking, picture
from vlora.errors import ServerError
from vlora.launcher.processes import children, is_alive
from vlora.launcher.repository import ServerOptions, default_repository
from vlora.launcher.server import TritonServer

LONG = {"temperature": 0, "max_tokens": 900, "ignore_eos": True}
MODELS = {
    "lmm",
    "lmm_unary",
    "task_head",
    "video_analytics",
    "vision_encoder",
    "visual_retrieval",
}


def test_every_model_of_the_repository_is_ready(server: TritonServer, ask: Asker) -> None:
    assert set(server.options.models) == MODELS
    assert all(ask.client.is_model_ready(name) for name in MODELS)


def test_the_models_have_the_documented_names_kinds_and_required_inputs(ask: Asker) -> None:
    for name in MODELS:
        config = ask.client.get_model_config(name).config
        assert config.max_batch_size == (1 if name == "vision_encoder" else 0)
        assert config.model_transaction_policy.decoupled == (name in ("lmm", "visual_retrieval"))
        required = {tensor.name for tensor in config.input if not tensor.optional}
        expected = {"text_input"} if name.startswith("lmm") else set()
        assert required == ({"text_output", "details"} if name == "task_head" else expected)


def test_a_port_in_use_is_rejected_with_the_option_that_sets_another(server: TritonServer) -> None:
    with pytest.raises(ServerError, match=rf"port {server.options.http_port} .*--http-port"):
        TritonServer(ServerOptions(http_port=server.options.http_port))


@pytest.fixture
def lone_model(tmp_path: Path) -> Path:
    """Return a repository with only `task_head`, without the `model.json` that it reads."""
    repository = tmp_path / "repository"
    shutil.copytree(default_repository() / "task_head", repository / "task_head")
    return repository


def test_a_model_that_fails_to_load_is_reported_with_its_reason(lone_model: Path) -> None:
    with (
        pytest.raises(ServerError, match=r"ended with status 1(?s:.*)cannot read .*model.json"),
        TritonServer(ServerOptions(repository=lone_model)),
    ):
        pass


def test_an_unknown_field_in_a_config_is_reported(lone_model: Path) -> None:
    config = lone_model / "task_head" / "config.pbtxt"
    config.write_text(config.read_text() + "\nno_such_field: 1\n")
    with (
        pytest.raises(ServerError, match="Poll failed for model directory 'task_head'"),
        TritonServer(ServerOptions(repository=lone_model)),
    ):
        pass


SLOW_MODEL = """
import time
class TritonPythonModel:
    def initialize(self, args):
        time.sleep(SECONDS)
"""


def slow_model(folder: Path, seconds: float) -> Path:
    """Return a repository with one model that takes this long to load."""
    (folder / "slow" / "1").mkdir(parents=True)
    (folder / "slow" / "config.pbtxt").write_text(
        """backend: "python"
        input { name: "x" data_type: TYPE_INT32 dims: [1] }
        output { name: "y" data_type: TYPE_INT32 dims: [1] }
        instance_group { kind: KIND_CPU }"""
    )
    code = SLOW_MODEL.replace("SECONDS", str(seconds))
    (folder / "slow" / "1" / "model.py").write_text(code)
    return folder


def test_a_model_that_loads_for_long_is_waited_for_and_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server's clock runs a hundred times faster: loading takes minutes by it."""

    class FastClock:
        sleep = staticmethod(time.sleep)

        @staticmethod
        def monotonic() -> float:
            return 100 * time.monotonic()

    monkeypatch.setattr("vlora.launcher.server.time", FastClock)
    server = TritonServer(ServerOptions(repository=slow_model(tmp_path, seconds=5)))
    reports: list[str] = []
    try:
        server.open(reports.append)
        assert server.options.models == ["slow"]
    finally:
        server.kill()
    assert len(reports) > 3
    loading = r"still loading after \d+ s: slow \(\d+ s of processor time, \d+ MiB\)"
    assert re.fullmatch(loading, reports[-1])


def test_a_start_that_exceeds_its_time_limit_ends_the_server(tmp_path: Path) -> None:
    options = ServerOptions(repository=slow_model(tmp_path, seconds=600), start_seconds=3)
    server = TritonServer(options)
    with pytest.raises(ServerError, match=r"not ready within 3 s \(--start-timeout\): slow \("):
        server.open()
    assert server.poll() is not None


@pytest.fixture(scope="module")
def small(
    checkpoint: Path, adapters_dir: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[TritonServer]:
    """Yield a server with two threads, one running request, a queue of two, and no cache."""
    options = ServerOptions(
        model_json={
            "model": str(checkpoint),
            "adapters": str(adapters_dir),
            "max_num_seqs": 1,
            "engine_threads": 2,
            "max_num_waiting": 2,
            "feature_cache_bytes": 0,
            "limits": {"max_images": 3},
        },
        log=tmp_path_factory.mktemp("small") / "tritonserver.log",
    )
    with TritonServer(options) as running:
        yield running


@pytest.fixture
def ask_small(small: TritonServer) -> Iterator[Asker]:
    with asking(small) as asker:
        yield asker


def test_a_full_queue_is_unavailable_with_its_length(ask_small: Asker) -> None:
    def one(_: int) -> str:
        try:
            return (
                ask_small.text("lmm", text_input="hello", sampling_parameters=LONG) and "answered"
            )
        except Refused as error:
            return error.message

    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(one, range(8)))
    refused = [answer for answer in answers if answer != "answered"]
    assert refused
    assert set(refused) == {"UNAVAILABLE: the queue is full: 2 requests are waiting"}
    assert answers.count("answered") >= 3


def test_the_error_for_a_limit_has_the_value_and_the_limit(ask_small: Asker) -> None:
    with pytest.raises(Refused, match=r"4.*3"):
        ask_small.once("video_analytics", text_input="?", image=[picture()] * 4)


def test_without_a_feature_cache_every_image_is_encoded(ask_small: Asker) -> None:
    series = '{model="vision_encoder",version="1"}'
    for _ in range(3):
        ask_small.once("video_analytics", text_input="?", image=picture())
    # Metrics are refreshed once a second.
    misses = f"vlora:feature_cache_misses_total{series}"
    until(lambda: ask_small.metrics()[misses] == 3)
    assert ask_small.metrics()[f"vlora:feature_cache_hits_total{series}"] == 0


def test_images_with_other_pixels_have_other_digests(ask_small: Asker) -> None:
    def digests(*images: bytes) -> list[str]:
        text = np.array([[b"x"]], dtype=object)
        pictures = np.array([[*images, None]], dtype=object)[:, :-1]
        response = ask_small.once("vision_encoder", text_input=text, image=pictures)
        return list(np.ravel(response["image_digest"]))

    one, other = picture((9, 9, 9)), picture((9, 9, 8))
    assert digests(one, other)[0] == digests(one)[0] != digests(other)[0]


@pytest.mark.parametrize("lora", [{}, {"lora_name": "all-r8"}], ids=["base", "adapter"])
def test_two_engine_threads_give_the_same_answer_as_one(
    ask: Asker, ask_small: Asker, lora: dict[str, str]
) -> None:
    keys = {"temperature": 0, "max_tokens": 40, "ignore_eos": True}
    question = {"text_input": "hello", "sampling_parameters": {**keys, **lora}}
    assert ask_small.text("lmm", **question) == ask.text("lmm", **question)


def test_requests_that_run_longer_than_the_grace_period_are_cancelled(
    small: TritonServer, ask_small: Asker
) -> None:
    """Requests are cancelled at the end; this must be the last test of this server."""
    stubs = children(small.pid)
    assert len(stubs) == 4
    assert small.models.keys() == {"lmm", "lmm_unary", "task_head", "vision_encoder"}

    def ask_until_refused(_: int) -> str:
        # A fast machine may answer a request before the metrics show it, so it is sent again.
        while True:
            try:
                ask_small.text("lmm", text_input="hi", stream=True, parameters=LONG)
            except Refused as error:
                return error.message

    def admitted() -> float:
        metrics, series = ask_small.metrics(), '{model="lmm",version="1"}'
        return sum(
            metrics[f"vllm:num_requests_{state}{series}"] for state in ("running", "waiting")
        )

    with ThreadPoolExecutor(3) as pool:
        errors = pool.map(ask_until_refused, range(3))
        until(lambda: admitted() >= 2)
        small.stop(grace_seconds=0)
        # The running request may have ended just before the others were cancelled.
        assert list(errors).count("CANCELLED: the server is shutting down") >= 2
    assert small.poll() is not None
    assert not any(map(is_alive, stubs))
