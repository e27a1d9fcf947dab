"""Starting, failing to start, draining and ending; and a server with other options."""

from __future__ import annotations

import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from http.client import HTTPConnection
from pathlib import Path

import numpy as np
import psutil
import pytest
import tritonclient.grpc as grpcclient
from tritonclient.utils import InferenceServerException

from tests.support.polling import until
from tests.support.triton_client import Asker, Refused, asking, picture, to_inputs
from vlora.launcher.ports import choose_ports
from vlora.launcher.processes import children, is_alive
from vlora.launcher.run_folder import SHARED_MEMORY
from vlora.launcher.server import ServerError, ServerOptions, TritonServer, default_repository

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
    """A server that runs one request at a time on two threads, queues two more and caches no
    features."""
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


def test_limits_are_options_and_the_error_gives_value_and_limit(ask_small: Asker) -> None:
    with pytest.raises(Refused, match=r"4.*3"):
        ask_small.once("video_analytics", text_input="?", image=[picture()] * 4)


def test_without_a_feature_cache_every_image_is_encoded(ask_small: Asker) -> None:
    series = '{model="vision_encoder",version="1"}'
    for _ in range(3):
        ask_small.once("video_analytics", text_input="?", image=picture())
    misses = f"vlora:feature_cache_misses_total{series}"  # refreshed once a second
    until(lambda: ask_small.metrics()[misses] == 3)
    assert ask_small.metrics()[f"vlora:feature_cache_hits_total{series}"] == 0


def test_the_digest_of_an_image_is_of_its_pixels(ask_small: Asker) -> None:
    def digests(*images: bytes) -> list[str]:
        text = np.array([[b"x"]], dtype=object)
        given = np.array([[*images, None]], dtype=object)[:, :-1]
        response = ask_small.once("vision_encoder", text_input=text, image=given)
        return list(np.ravel(response["image_digest"]))

    one, other = picture((9, 9, 9)), picture((9, 9, 8))
    assert digests(one, other)[0] == digests(one)[0] != digests(other)[0]


@pytest.mark.parametrize("lora", [{}, {"lora_name": "all-r8"}], ids=["base", "adapter"])
def test_two_engine_threads_answer_as_one_does(
    ask: Asker, ask_small: Asker, lora: dict[str, str]
) -> None:
    keys = {"temperature": 0, "max_tokens": 40, "ignore_eos": True}
    asked = {"text_input": "hello", "sampling_parameters": {**keys, **lora}}
    assert ask_small.text("lmm", **asked) == ask.text("lmm", **asked)


def test_what_has_not_finished_when_the_grace_is_over_is_cancelled(
    small: TritonServer, ask_small: Asker
) -> None:
    """The last test of this server."""
    stubs = children(small.pid)
    assert len(stubs) == 4
    assert small.models.keys() == {"lmm", "lmm_unary", "task_head", "vision_encoder"}
    asked = {"text_input": "hi", "stream": True, "parameters": LONG}
    with (
        ask_small.streaming("lmm", **asked) as running,
        ask_small.streaming("lmm", **asked) as waiting,
    ):
        next(running)
        small.stop(grace_seconds=0)
        for responses in (running, waiting):
            with pytest.raises(Refused, match="CANCELLED: the server is shutting down"):
                list(responses)
    assert small.poll() is not None
    assert not any(map(is_alive, stubs))


def serve(*arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "vlora.cli", "serve", *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


PORTS_OF_ITS_CHOICE = ("--http-port", "0", "--grpc-port", "0", "--metrics-port", "0")


@pytest.fixture
def folders(checkpoint: Path, adapters_dir: Path, tmp_path: Path) -> list[str]:
    paths = {"--model": checkpoint, "--adapters": adapters_dir, "--log": tmp_path / "log"}
    return [str(word) for option in paths.items() for word in option]


def said_until(process: subprocess.Popen[str], words: str) -> str:
    """What the process says up to the line with these words."""
    assert process.stdout is not None
    said = ""
    for line in process.stdout:
        said += line
        if words in line:
            return said
    raise AssertionError(f"it never said '{words}' but:\n{said}")


Processes = dict[str, psutil.Process]


def processes_of(serving: subprocess.Popen[str]) -> tuple[psutil.Process, Processes]:
    """The server's process, and those of its models by name."""
    (server,) = children(serving.pid)
    return server, {Path(one.cmdline()[1]).parts[-3]: one for one in children(server.pid)}


def shared_memory_of(models: Processes) -> list[Path]:
    return [SHARED_MEMORY / model.cmdline()[2] for model in models.values()]


def test_vlora_serve_restarts_what_went_down_and_drains_on_sigterm(folders: list[str]) -> None:
    chosen = choose_ports({"http_port": 0, "grpc_port": 0, "metrics_port": 0})
    http, grpc, metrics = map(str, chosen.values())
    ports = ["--http-port", http, "--grpc-port", grpc, "--metrics-port", metrics]
    process = serve(*folders, *ports, "--restart", "--grace", "600")
    said = said_until(process, "Press Ctrl-C to stop")
    assert "ready in" in said
    assert {f"HTTP      localhost:{http}", f"gRPC      localhost:{grpc}"} <= set(said.splitlines())

    server, models = processes_of(process)
    models["lmm"].kill()
    said = said_until(process, "Press Ctrl-C to stop")
    assert "the process of model 'lmm' ended with signal SIGKILL; the server is down" in said
    assert "restarting in 1 s" in said
    assert not any(map(is_alive, [server, *models.values()]))

    with closing(Asker(f"localhost:{grpc}", "", "")) as asker:
        ask_for_class_results(asker, "lmm_unary")
    said = said_until(process, "Press Ctrl-C to stop")
    assert "the server ended unexpectedly with signal SIGFPE; the server is down" in said

    with closing(Asker(f"localhost:{grpc}", "", "")) as asker:
        assert asker.once("video_analytics", text_input="What?")["result"]

        server, models = processes_of(process)
        regions = shared_memory_of(models)
        assert all(region.exists() for region in regions)
        with closing(HTTPConnection("localhost", int(http))) as idle:
            idle.request("GET", "/v2/health/live")
            assert idle.getresponse().read() == b""
            asked = {"text_input": "hi", "stream": True, "parameters": LONG}
            asked["return_num_output_tokens"] = True
            with asker.streaming("lmm", **asked) as responses:
                first = next(responses)
                process.send_signal(signal.SIGTERM)
                said_until(process, "running ones get 600 s to finish")
                for model in ("lmm", "lmm_unary", "video_analytics", "vision_encoder"):
                    assert_refused(asker, model)
                rest = list(responses)
            tokens = [each.outputs.get("num_output_tokens", 0) for each in (first, *rest)]
            assert sum(map(int, tokens)) == 900
            assert rest[-1].final
            # The idle connection is not given the grace, nor what Triton would give it.
            process.communicate(timeout=300)
    assert process.returncode == 0
    assert not any(map(is_alive, [server, *models.values()]))
    assert not any(region.exists() for region in regions)


def ask_for_class_results(asker: Asker, model: str) -> None:
    """Triton 2.51 divides by the size of a string, which is 0, and ends."""
    wanted = grpcclient.InferRequestedOutput("text_output", class_count=1)
    given = to_inputs({"text_input": "hi", "sampling_parameters": {"max_tokens": 1}})
    with pytest.raises(InferenceServerException):
        asker.client.infer(model, given, outputs=[wanted])


def assert_refused(asker: Asker, model: str) -> None:
    """Waits for the models to learn of it, then: UNAVAILABLE, in the message and as the code."""
    text = np.array([[b"x"]], dtype=object) if model == "vision_encoder" else "hello"

    def refusal() -> Refused | None:
        try:
            asker.stream(model, text_input=text) if model == "lmm" else asker.once(
                model, text_input=text
            )
        except Refused as error:
            return error
        return None

    refused = until(refusal)
    assert "UNAVAILABLE: the server is shutting down" in refused.message
    assert refused.status in (None, "StatusCode.UNAVAILABLE")  # a stream carries none


def test_vlora_serve_names_adapters_that_do_not_load_and_why_it_ended_where_a_model_dies(
    folders: list[str], served_adapters: Path
) -> None:
    process = serve(*folders, "--adapters", str(served_adapters), *PORTS_OF_ITS_CHOICE)
    assert "1 adapter failed to load: broken (for the reasons, see the log" in said_until(
        process, "Press Ctrl-C to stop"
    )
    server, models = processes_of(process)
    models["vision_encoder"].kill()
    said, _ = process.communicate(timeout=60)
    assert "CUDA" not in said
    assert "NVML" not in said
    assert process.returncode == 1
    assert "error: the process of model 'vision_encoder' ended with signal SIGKILL" in said
    assert not any(map(is_alive, [server, *models.values()]))


def test_a_killed_vlora_serve_leaves_nothing_running_and_no_shared_memory(
    folders: list[str],
) -> None:
    process = serve(*folders, *PORTS_OF_ITS_CHOICE)
    said_until(process, "Press Ctrl-C to stop")
    server, models = processes_of(process)
    regions = shared_memory_of(models)
    process.kill()
    until(lambda: not any(map(is_alive, [server, *models.values()])))
    until(lambda: not any(region.exists() for region in regions))
    process.communicate()


def test_vlora_serve_says_that_a_port_is_none(folders: list[str]) -> None:
    process = serve(*folders, "--http-port", "99999")
    said, _ = process.communicate(timeout=60)
    assert process.returncode == 1
    assert said.startswith("error: --http-port 99999 is not a port; choose one from 1 to 65535")


def test_vlora_serve_says_that_a_port_is_taken(checkpoint: Path, adapters_dir: Path) -> None:
    with socket.socket() as holder:
        holder.bind(("0.0.0.0", 0))
        holder.listen()
        port = str(holder.getsockname()[1])
        folders = ["--model", str(checkpoint), "--adapters", str(adapters_dir)]
        said, _ = serve(*folders, "--http-port", port).communicate(timeout=60)
    assert f"error: port {port} is already in use; choose another with --http-port N" in said


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
