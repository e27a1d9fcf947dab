"""Tests of a server that has started, that fails to start, and that takes long to start."""

from __future__ import annotations

import re
import shutil
import time
from pathlib import Path

import pytest

from tests.support.triton_client import Asker
from vlora.errors import ServerError
from vlora.launcher.processes import describe_loading
from vlora.launcher.repository import ServerOptions, default_repository
from vlora.launcher.server import TritonServer

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
        assert config.max_batch_size == (16 if name == "vision_encoder" else 0)
        assert config.model_transaction_policy.decoupled == (name in ("lmm", "visual_retrieval"))
        required = {tensor.name for tensor in config.input if not tensor.optional}
        expected = {"text_input"} if name.startswith("lmm") else set()
        assert required == ({"text_output", "details"} if name == "task_head" else expected)


@pytest.fixture
def lone_model(tmp_path: Path) -> Path:
    """Return a repository with only `task_head`, without the `model.json` that it reads."""
    repository = tmp_path / "repository"
    shutil.copytree(default_repository() / "task_head", repository / "task_head")
    return repository


def test_a_model_that_fails_to_load_is_reported_with_its_reason_and_log(
    lone_model: Path, tmp_path: Path
) -> None:
    log = tmp_path / "log"
    reason = rf"ended with status 1(?s:.*)cannot read .*model.json(?s:.*)the server's log is {log}$"
    with (
        pytest.raises(ServerError, match=reason),
        TritonServer(ServerOptions(repository=lone_model, log=log, keep_log=True)),
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
    server = TritonServer(ServerOptions(repository=slow_model(tmp_path, seconds=2)))
    reports: list[str] = []
    try:
        server.open(reports.append)
        assert server.options.models == ["slow"]
    finally:
        server.kill()
    assert len(reports) > 3
    loading = r"still loading after \d+ s: slow \(\d+ s of CPU, \d+ MiB\)"
    assert re.fullmatch(loading, reports[-1])


def test_a_start_that_exceeds_its_time_limit_ends_the_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The time passes when the model has begun to load."""
    options = ServerOptions(repository=slow_model(tmp_path, seconds=600), start_seconds=3)
    server = TritonServer(options)
    first = iter([0.0])

    class LateClock:
        sleep = staticmethod(time.sleep)

        @staticmethod
        def monotonic() -> float:
            return next(first, 3.0 * ("slow (" in describe_loading(server.pid)))

    monkeypatch.setattr("vlora.launcher.server.time", LateClock)
    with pytest.raises(ServerError, match=r"not ready within 3 s \(--start-timeout\): slow \("):
        server.open()
    assert server.poll() is not None
