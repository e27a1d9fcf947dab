"""Starting, failing to start, draining and ending; and a server with other options."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from tests.triton.asking import Asker, Refused, picture
from tests.triton.conftest import asking
from vlora.serving.processes import children, identify
from vlora.serving.server import (
    ServerError,
    ServerOptions,
    TritonServer,
    default_repository,
    free_ports,
)

LONG = {"temperature": 0, "max_tokens": 900, "ignore_eos": True}
MODELS = {
    "lmm",
    "lmm_unary",
    "task_head",
    "video_analytics",
    "vision_encoder",
    "visual_retrieval",
}


def test_every_model_of_the_repository_is_ready(server: TritonServer) -> None:
    assert server.index() == dict.fromkeys(MODELS, "READY")


def test_the_models_have_the_names_and_kinds_of_the_contract(ask: Asker) -> None:
    for name in MODELS:
        config = ask.client.get_model_config(name).config
        assert config.max_batch_size == (16 if name == "vision_encoder" else 0)
        assert config.model_transaction_policy.decoupled == (name in ("lmm", "visual_retrieval"))
        required = {one.name for one in config.input if not one.optional}
        ours = {"text_input"} if name.startswith("lmm") else set()
        assert required == ({"text_output", "details"} if name == "task_head" else ours)


def test_a_taken_port_is_told_with_the_flag_that_changes_it(server: TritonServer) -> None:
    with pytest.raises(ServerError, match=rf"port {server.options.http_port} .*--http-port"):
        TritonServer(ServerOptions(http_port=server.options.http_port))


@pytest.fixture
def lone_model(tmp_path: Path) -> Path:
    """A repository with `task_head` alone, without the `model.json` that it reads."""
    repository = tmp_path / "repository"
    shutil.copytree(default_repository() / "task_head", repository / "task_head")
    return repository


def test_a_model_that_does_not_load_is_told_with_its_reason(lone_model: Path) -> None:
    with (
        pytest.raises(ServerError, match=r"ended with status 1(?s:.*)cannot read .*model.json"),
        TritonServer(ServerOptions(repository=lone_model)),
    ):
        pass


def test_a_field_that_triton_does_not_know_is_told(lone_model: Path) -> None:
    config = lone_model / "task_head" / "config.pbtxt"
    config.write_text(config.read_text() + "\nno_such_field: 1\n")
    with (
        pytest.raises(ServerError, match="Poll failed for model directory 'task_head'"),
        TritonServer(ServerOptions(repository=lone_model)),
    ):
        pass


@pytest.fixture(scope="module")
def small(
    checkpoint: Path, adapters_dir: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[TritonServer]:
    """A server that runs one request at a time, queues two more and caches no features."""
    options = ServerOptions(
        model_json={
            "model": str(checkpoint),
            "adapters": str(adapters_dir),
            "max_num_seqs": 1,
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


def test_limits_are_options_and_the_error_gives_value_and_limit(ask_small: Asker) -> None:
    with pytest.raises(Refused, match=r"4.*3"):
        ask_small.once("video_analytics", text_input="?", image=[picture()] * 4)


def test_without_a_feature_cache_every_image_is_encoded(ask_small: Asker) -> None:
    series = '{model="vision_encoder",version="1"}'
    for _ in range(3):
        ask_small.once("video_analytics", text_input="?", image=picture())
    time.sleep(1.5)
    metrics = ask_small.metrics()
    assert metrics[f"vlora:feature_cache_misses_total{series}"] == 3
    assert metrics[f"vlora:feature_cache_hits_total{series}"] == 0


def test_the_digest_of_an_image_is_of_its_pixels(ask_small: Asker) -> None:
    def digests(*images: bytes) -> list[str]:
        text = np.array([[b"x"]], dtype=object)
        given = np.array([[*images, None]], dtype=object)[:, :-1]
        response = ask_small.once("vision_encoder", text_input=text, image=given)
        return list(np.ravel(response["image_digest"]))

    one, other = picture((9, 9, 9)), picture((9, 9, 8))
    assert digests(one, other)[0] == digests(one)[0] != digests(other)[0]


def test_sigterm_lets_running_requests_finish_and_refuses_new_ones(
    small: TritonServer, ask_small: Asker
) -> None:
    stubs = children(small.pid)
    assert len(stubs) >= 4
    with ask_small.streaming("lmm", text_input="hi", stream=True, parameters=LONG) as responses:
        next(responses)
        os.kill(small.pid, signal.SIGTERM)
        rest = list(responses)
    assert len(rest) == 899
    assert rest[-1].final
    with pytest.raises(Refused):
        ask_small.stream("lmm", text_input="hello")
    small.stop()
    assert small.poll() == 0
    assert [stub for stub in stubs if identify(stub.pid) == stub] == []


def serve(*arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "vlora.cli", "serve", *arguments]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=os.environ
    )


def served(*arguments: str) -> tuple[subprocess.Popen[str], str]:
    """A `vlora serve` that is ready, and what it said until then."""
    process = serve(*arguments)
    assert process.stdout is not None
    said = ""
    for line in process.stdout:
        said += line
        if "Ctrl-C" in line:
            break
    return process, said


def test_vlora_serve_prints_where_it_listens_and_ends_on_sigterm(
    checkpoint: Path, adapters_dir: Path, tmp_path: Path
) -> None:
    http, grpc, metrics = free_ports(3)
    ports = ["--http-port", str(http), "--grpc-port", str(grpc), "--metrics-port", str(metrics)]
    folders = ["--model", str(checkpoint), "--adapters", str(adapters_dir)]
    process, said = served(*folders, *ports, "--log", str(tmp_path / "log"))
    assert "ready in" in said
    assert f"localhost:{http}" in said
    assert f"localhost:{grpc}" in said
    with closing(Asker(f"localhost:{grpc}", f"localhost:{http}", "")) as asker:
        assert asker.once("video_analytics", text_input="What?")["result"]
    started = {process.pid, *(child.pid for child in children(process.pid))}
    process.send_signal(signal.SIGTERM)
    rest, _ = process.communicate(timeout=60)
    assert process.returncode == 0, rest
    assert all(identify(pid) is None for pid in started)


def test_vlora_serve_ends_with_the_reason_when_a_models_process_dies(
    checkpoint: Path, adapters_dir: Path, tmp_path: Path
) -> None:
    ports = ["--http-port", "0", "--grpc-port", "0", "--metrics-port", "0"]
    folders = ["--model", str(checkpoint), "--adapters", str(adapters_dir)]
    process, _ = served(*folders, *ports, "--log", str(tmp_path / "log"))
    (server,) = children(process.pid)
    stubs = children(server.pid)
    os.kill(min(stubs).pid, signal.SIGKILL)
    said, _ = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "error: a model's process died" in said
    assert all(identify(one.pid) is None for one in {server, *stubs})


def test_vlora_serve_says_that_a_port_is_taken(checkpoint: Path, adapters_dir: Path) -> None:
    with socket.socket() as holder:
        holder.bind(("0.0.0.0", 0))
        holder.listen()
        port = str(holder.getsockname()[1])
        folders = ["--model", str(checkpoint), "--adapters", str(adapters_dir)]
        said, _ = serve(*folders, "--http-port", port).communicate(timeout=60)
    assert f"error: port {port} is taken; choose another with --http-port N" in said


def test_vlora_serve_says_that_there_is_no_checkpoint(tmp_path: Path) -> None:
    process = serve("--model", str(tmp_path))
    said, _ = process.communicate(timeout=60)
    assert process.returncode == 1
    assert f"error: no checkpoint at {tmp_path}" in said.replace("\n", "")


def test_vlora_adapters_check_names_what_is_broken(checkpoint: Path, served_adapters: Path) -> None:
    command = [sys.executable, "-m", "vlora.cli", "adapters", "check"]
    command += ["--model", str(checkpoint), "--adapters", str(served_adapters)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert "ok      all-r8" in done.stdout
    assert "adapter 'broken': adapter_config.json" in done.stdout


def test_a_killed_server_leaves_no_stub_behind(
    checkpoint: Path, adapters_dir: Path, tmp_path: Path
) -> None:
    options = ServerOptions(model=checkpoint, adapters=adapters_dir, log=tmp_path / "log")
    with TritonServer(options) as doomed:
        stubs = children(doomed.pid)
        os.kill(doomed.pid, signal.SIGKILL)
        doomed.wait()
    assert [stub for stub in stubs if identify(stub.pid) == stub] == []
