"""Tests of a server whose checkpoint has no vision tower, and of what `vlora probe` finds while it
starts, answers, hangs and has ended."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import LlamaForCausalLM, LlavaForConditionalGeneration

from tests.support.triton_client import Asker, Refused, asking, picture
from vlora.launcher.probe import Health, probe
from vlora.launcher.repository import ServerOptions
from vlora.launcher.server import TritonServer

GREEDY = {"temperature": 0, "max_tokens": 6}
PROMPT = "What color is the star?"


@pytest.fixture(scope="module")
def text_only(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the decoder of the checkpoint alone."""
    folder = tmp_path_factory.mktemp("text-only")
    whole = LlavaForConditionalGeneration.from_pretrained(checkpoint, dtype=torch.float32)
    decoder = LlamaForCausalLM(whole.config.text_config)
    decoder.model.load_state_dict(whole.model.language_model.state_dict())
    decoder.lm_head.load_state_dict(whole.lm_head.state_dict())
    decoder.save_pretrained(folder)
    for file in [*checkpoint.glob("tokenizer*"), *checkpoint.glob("*.jinja")]:
        (folder / file.name).write_bytes(file.read_bytes())
    return folder


def health(server: TritonServer, deadline: float = 10.0) -> Health:
    """Return what `vlora probe` finds within the deadline."""
    started = time.monotonic()
    finding = probe(server.grpc_url, deadline, metrics_port=server.options.metrics_port)
    assert time.monotonic() - started < deadline + 1, finding
    assert finding.health is not Health.ALIVE or "starting" in finding.reason
    return finding.health


@pytest.fixture(scope="module")
def states() -> list[Health]:
    """Return what was found of the server before its tests."""
    return []


@pytest.fixture(scope="module")
def server(
    text_only: Path, states: list[Health], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[TritonServer]:
    """Yield a server that replaces the session's server in this file, also for `ask`."""
    log = tmp_path_factory.mktemp("text-only-server") / "tritonserver.log"
    server = TritonServer(ServerOptions(model=text_only, log=log))
    server.start()
    try:
        states.append(health(server))
        server.wait_ready()
        states.append(health(server))
        yield server
    finally:
        server.kill()


def test_every_model_answers_a_question_without_images(ask: Asker) -> None:
    question = {"text_input": PROMPT, "task": "raw", "sampling_parameters": GREEDY}
    whole = ask.once("video_analytics", **question)["text_output"]
    assert ask.once("lmm_unary", **question, exclude_input_in_output=True)["text_output"] == whole
    pieces = ask.stream("visual_retrieval", **question)
    assert "".join(piece["text_output"] for piece in pieces) == whole


@pytest.mark.parametrize("model", ["video_analytics", "visual_retrieval"])
def test_an_image_is_refused_with_the_type_of_the_checkpoint(ask: Asker, model: str) -> None:
    call = ask.once if model == "video_analytics" else ask.stream
    with pytest.raises(Refused, match=r"UNSUPPORTED: the request has images, but .*'llama'"):
        call(model, text_input=PROMPT, image=picture())


@pytest.mark.last
def test_a_starting_server_is_alive_and_a_hung_or_killed_one_is_dead(
    server: TritonServer, states: list[Health]
) -> None:
    assert states == [Health.ALIVE, Health.READY]
    # The process is stopped, then killed. Continuing it instead would crash Triton 2.51.
    for number in (signal.SIGSTOP, signal.SIGKILL):
        os.kill(server.models["lmm"], number)
        assert health(server, deadline=5) is Health.DEAD
    with asking(server) as asker:
        assert asker.client.is_server_ready(), "Triton still reports that it is ready"
    server.kill()
    assert health(server) is Health.DEAD
