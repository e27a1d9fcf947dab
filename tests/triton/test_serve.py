"""Tests of `vlora serve` and `vlora adapters`: restarts, draining, ends, and their output.

One server comes from PATH, as in NVIDIA's container.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, closing
from http.client import HTTPConnection
from importlib.metadata import packages_distributions
from pathlib import Path
from urllib.request import Request, urlopen

import numpy as np
import psutil
import pytest
import tritonclient.grpc as grpcclient
from tritonclient.utils import InferenceServerException
from typer.testing import CliRunner

from tests.support.polling import until
from tests.support.triton_client import Asker, Refused, to_inputs
from vlora.cli import app
from vlora.interpreters import python_command, python_environment
from vlora.launcher.assembly import assemble
from vlora.launcher.processes import children, is_alive
from vlora.net import choose_ports
from vlora.server_run import SHARED_MEMORY

LONG = {"temperature": 0, "max_tokens": 900, "ignore_eos": True}


CLOSED = "http://127.0.0.1:9"
PROXIES = dict.fromkeys(("http_proxy", "https_proxy", "grpc_proxy", "all_proxy"), CLOSED)
"""Proxies that answer nothing: `vlora serve` and `vlora probe` must not use them."""


HOSTILE = Path(tempfile.mkdtemp(prefix="vlora-hostile-"))
"""Folder in which all commands run. It has a file for each module that may be imported."""

EXECUTED = HOSTILE.parent / f"{HOSTILE.name}.executed"


@pytest.fixture(scope="module", autouse=True)
def _hostile_folder(adapters_dir: Path) -> Iterator[None]:
    names = {*sys.stdlib_module_names, *packages_distributions(), "sitecustomize", "vlora"}
    for name in filter(str.isidentifier, names):
        (HOSTILE / f"{name}.py").write_text(
            f"with open({str(EXECUTED)!r}, 'a') as file: file.write({name!r} + ' ')\n"
        )
    shutil.copytree(adapters_dir / "all-r8", HOSTILE, dirs_exist_ok=True)
    yield
    shutil.rmtree(HOSTILE)
    EXECUTED.unlink(missing_ok=True)


@pytest.fixture(autouse=True)
def _nothing_in_the_working_folder_is_executed(_hostile_folder: None) -> Iterator[None]:
    yield
    assert not EXECUTED.exists(), EXECUTED.read_text()


def run_vlora(*arguments: str) -> subprocess.Popen[str]:
    hostile = {"HOME": str(HOSTILE), "PYTHONSTARTUP": str(HOSTILE / "json.py")}
    hostile["PYTHONSAFEPATH"] = ""  # The processes must be safe without it.
    hostile["AIP_MODE"] = "PREDICTION"  # Triton would open neither HTTP nor gRPC.
    return subprocess.Popen(
        python_command("vlora.cli", *arguments),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=HOSTILE,
        env={**python_environment(), **PROXIES, **hostile, "no_proxy": ""},
    )


def serve(*arguments: str) -> subprocess.Popen[str]:
    return run_vlora("serve", *arguments)


FREE_PORTS = ("--http-port", "0", "--grpc-port", "0", "--metrics-port", "0")


@pytest.fixture
def folders(checkpoint: Path, adapters_dir: Path, tmp_path: Path) -> list[str]:
    paths = {"--model": checkpoint, "--adapters": adapters_dir, "--log": tmp_path / "log"}
    return [str(word) for option in paths.items() for word in option]


def output_until(process: subprocess.Popen[str], words: str) -> str:
    """Return the process's output up to the line with these words."""
    assert process.stdout is not None
    output = ""
    for line in process.stdout:
        output += line
        if words in line:
            return output
    raise AssertionError(f"the output has no '{words}':\n{output}")


Processes = dict[str, psutil.Process]


def processes_of(serving: subprocess.Popen[str]) -> tuple[psutil.Process, Processes]:
    """Return the server's process, and those of its models by name."""
    (server,) = (child for child in children(serving.pid) if "tritonserver" in child.name())
    return server, {
        Path(process.cmdline()[1]).parts[-3]: process for process in children(server.pid)
    }


def is_gateway(process: psutil.Process) -> bool:
    return "gateway" in process.cmdline()


def shared_memory_of(models: Processes) -> list[Path]:
    return [SHARED_MEMORY / model.cmdline()[2] for model in models.values()]


def test_serve_restarts_a_crashed_server_and_drains_on_sigterm(folders: list[str]) -> None:
    chosen = choose_ports({"http_port": 0, "grpc_port": 0, "metrics_port": 0})
    http, grpc, metrics = map(str, chosen.values())
    ports = ["--http-port", http, "--grpc-port", grpc, "--metrics-port", metrics]
    one_at_a_time = ("--set", "max_num_seqs=1")
    process = serve(*folders, *ports, "--restart", "--grace", "600", *one_at_a_time)
    output = output_until(process, "Press Ctrl-C to stop")
    assert "ready in" in output
    assert {f"HTTP      127.0.0.1:{http}", f"gRPC      127.0.0.1:{grpc}"} <= set(
        output.splitlines()
    )
    probed = run_vlora("probe", f"localhost:{grpc}", "--metrics-port", metrics, "--deadline", "60")
    assert "ready in" in probed.communicate(timeout=120)[0]

    server, models = processes_of(process)
    with closing(Asker(f"localhost:{grpc}", "", "")) as asker:
        request_class_results(asker, "lmm_unary")
    output = output_until(process, "Press Ctrl-C to stop")
    assert "the server ended unexpectedly with signal SIGFPE; the server is down" in output
    assert "restarting in 1 s" in output
    assert not any(map(is_alive, [server, *models.values()]))

    with closing(Asker(f"localhost:{grpc}", "", "")) as asker:
        assert asker.once("video_analytics", text_input="What?")["result"]

        server, models = processes_of(process)
        regions = shared_memory_of(models)
        assert all(region.exists() for region in regions)
        with closing(HTTPConnection("localhost", int(http))) as idle:
            idle.request("GET", "/v2/health/live")
            assert idle.getresponse().read() == b""
            question = {"text_input": "hi", "stream": True, "parameters": LONG}
            question["return_num_output_tokens"] = True
            with asker.streaming("lmm", **question) as responses:
                first = next(responses)
                with ExitStack() as waiting:
                    # These keep the server running until all models have refused a request.
                    for _ in range(8):
                        waiting.enter_context(asker.streaming("lmm", **question))
                    process.send_signal(signal.SIGTERM)
                    output_until(process, "running ones get 600 s to finish")
                    for model in ("lmm", "lmm_unary", "video_analytics", "vision_encoder"):
                        assert_refused(asker, model)
                rest = list(responses)
            tokens = [each.outputs.get("num_output_tokens", 0) for each in (first, *rest)]
            assert sum(map(int, tokens)) == 900
            assert rest[-1].final
            # The idle connection adds neither the grace period nor Triton's timeout.
            process.communicate(timeout=300)
    assert process.returncode == 0
    assert not any(map(is_alive, [server, *models.values()]))
    assert not any(region.exists() for region in regions)


def request_class_results(asker: Asker, model: str) -> None:
    """Crash the server: Triton 2.51 divides by the size of a string, which is 0."""
    output = grpcclient.InferRequestedOutput("text_output", class_count=1)
    inputs = to_inputs({"text_input": "hi", "sampling_parameters": {"max_tokens": 1}})
    with pytest.raises(InferenceServerException):
        asker.client.infer(model, inputs, outputs=[output])


def assert_refused(asker: Asker, model: str) -> None:
    """Wait until the model rejects requests as UNAVAILABLE, in the message and as the status."""
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
    # A stream has no status.
    assert refused.status in (None, "StatusCode.UNAVAILABLE")


def test_serve_restarts_its_gateway_and_ends_with_a_model(
    folders: list[str], served_adapters: Path, tmp_path: Path
) -> None:
    pytest.importorskip("fastapi", reason="the extra `gateway` is not installed")
    process = serve(
        *(*folders, "--adapters", str(served_adapters), *FREE_PORTS, "--gateway-port", "0"),
        *("--gateway-base-name", "demo"),
    )
    output = output_until(process, "gateway   http://")
    assert "1 adapter failed to load:\n  adapter 'broken': " in output
    url = output.split()[-1].removesuffix("/v1")
    with urlopen(f"{url}/playground/", timeout=60) as answer:  # It answers when it is printed.
        assert answer.status == 200
    assert not re.search("^E", (tmp_path / "log").read_text(), re.MULTILINE)
    (gateway,) = filter(is_gateway, children(process.pid))
    gateway.kill()
    output_until(process, "the gateway ended with signal SIGKILL; starting it again in 1 s")
    output_until(process, f"the gateway answers again at {url}/v1")
    with urlopen(f"{url}/v1/models", timeout=60) as answer:
        assert {"demo", "all-r8"} <= {model["id"] for model in json.load(answer)["data"]}

    server, models = processes_of(process)
    models["vision_encoder"].kill()
    output, _ = process.communicate(timeout=300)
    assert "playground" not in output
    assert "CUDA" not in output
    assert "NVML" not in output
    assert process.returncode == 1
    assert "error: the process of model 'vision_encoder' ended with signal SIGKILL" in output
    assert not any(map(is_alive, [server, *models.values()]))


@pytest.fixture
def on_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Put a script on PATH that runs the wheel's server as the container's `tritonserver`."""
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}")
    wheel = assemble(tmp_path)
    libraries = wheel.environment["LD_LIBRARY_PATH"]
    script = tmp_path / "bin" / "tritonserver"
    script.parent.mkdir()
    # The container's server finds its backends and libraries by itself.
    script.write_text(
        f"#!/bin/sh\nexport LD_LIBRARY_PATH={shlex.quote(libraries)}\n"
        f'exec {shlex.join([str(wheel.binary), *wheel.arguments])} "$@"\n'
    )
    script.chmod(0o755)
    return script


def test_a_killed_serve_with_a_server_from_path_leaves_nothing(
    on_path: Path, folders: list[str], tmp_path: Path
) -> None:
    pytest.importorskip("fastapi", reason="the extra `gateway` is not installed")
    assembly = assemble(tmp_path / "unused")
    assert (assembly.binary, assembly.arguments) == (on_path, ())
    assert "LD_LIBRARY_PATH" not in assembly.environment
    process = serve(*folders, *FREE_PORTS, "--gateway-port", "0")
    output = output_until(process, "gateway   http://")
    url = output.split()[-1].removesuffix("/v1")
    server, models = processes_of(process)
    assert server.exe() != str(on_path)
    assert f"--backend-directory={tmp_path / 'backends'}" in server.cmdline()
    body = json.dumps({"model": "base", "prompt": "hello", "max_tokens": 2}).encode()
    request = Request(f"{url}/v1/completions", body, {"content-type": "application/json"})
    with urlopen(request, timeout=60) as answer:
        assert json.load(answer)["choices"][0]["text"]

    (gateway,) = filter(is_gateway, children(process.pid))
    regions = shared_memory_of(models)
    with process:
        process.kill()
    for one in (server, gateway, *models.values()):
        until(lambda one=one: not is_alive(one))
    until(lambda: not any(region.exists() for region in regions))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--http-port", "99999"), "--http-port 99999 is not a port; choose one from 1 to 65535"),
        (("--log", "/proc/none/log"), "cannot write the log /proc/none/log: No such file or dir"),
        (("--model", "/proc/none"), "no checkpoint at /proc/none"),
    ],
    ids=["port", "log", "checkpoint"],
)
def test_serve_reports_a_wrong_option(
    folders: list[str], arguments: tuple[str, str], message: str
) -> None:
    process = serve(*folders, *FREE_PORTS, *arguments)
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 1
    assert f"error: {message}" in output.replace("\n", " ")
    assert "Traceback" not in output


def test_serve_warns_of_a_variable_that_nothing_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLORA_CUDA_LIBRARY", "/opt/library.so")
    output, _ = serve("--http-port", "-1").communicate(timeout=300)
    expected = (
        "warning: nothing reads the environment variable VLORA_CUDA_LIBRARY; known are VLORA_"
    )
    assert output.startswith(expected)


def test_adapters_check_names_the_broken_adapter(checkpoint: Path, served_adapters: Path) -> None:
    command = ["adapters", "check", "--model", str(checkpoint)]
    done = CliRunner().invoke(app, [*command, "--adapters", str(served_adapters)])
    assert done.exit_code == 1
    assert "ok      all-r8" in done.stdout
    assert "adapter 'broken': adapter_config.json" in done.stdout


def test_commands_execute_nothing_in_the_working_folder_and_in_an_adapter(
    checkpoint: Path, tmp_path: Path
) -> None:
    (tmp_path / "adapters").mkdir()
    (tmp_path / "adapters" / "hostile").symlink_to(HOSTILE)
    given = ["--model", str(checkpoint), "--adapters", str(tmp_path / "adapters")]
    for command in (["adapters", "list"], ["adapters", "check"], ["capacity"]):
        done = run_vlora(*command, *given)
        assert "hostile" in done.communicate(timeout=120)[0]
        assert done.returncode == 0
