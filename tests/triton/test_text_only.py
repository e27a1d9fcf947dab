"""Tests of a server whose checkpoint has no vision tower, and of what `vlora probe` finds while it
starts, answers, hangs and has ended."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from tests.support.conversations import use_official_files
from tests.support.gateway import running
from tests.support.logits import save_decoder
from tests.support.served_family import check_conversations
from tests.support.triton_client import Asker, Refused, asking, picture
from vlora.launcher.probe import Health, probe
from vlora.launcher.repository import ServerOptions
from vlora.launcher.server import TritonServer
from vlora.vision.images import DecodedImage

GREEDY = {"temperature": 0, "max_tokens": 6}
PROMPT = "What color is the star?"


class TextModel(NamedTuple):
    """A decoder alone, and the stock model of its checkpoint."""

    checkpoint: Path
    model: Any

    def prompt_ids(self, prompt: Sequence[int], images: Sequence[DecodedImage]) -> list[int]:
        return list(prompt)

    @torch.inference_mode()
    def logits(
        self,
        prompt: Sequence[int],
        images: Sequence[DecodedImage],
        adapter: str | None,
        answer: list[int],
    ) -> torch.Tensor:
        logits: torch.Tensor = self.model(torch.tensor([[*prompt, *answer]])).logits
        return logits[0, len(prompt) - 1 :]


@pytest.fixture(scope="module")
def text_only(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> TextModel:
    folder = tmp_path_factory.mktemp("text-only")
    model = save_decoder(checkpoint, folder, max_position_embeddings=256)
    return TextModel(use_official_files(folder, "text"), model)


def health(server: TritonServer, deadline: float = 10.0) -> Health:
    """Return what `vlora probe` finds within the deadline."""
    started = time.monotonic()
    finding = probe(server.grpc_url, deadline, metrics_port=server.options.metrics_port)
    assert time.monotonic() - started < deadline + 10, finding
    assert finding.health is not Health.ALIVE or "starting" in finding.reason
    return finding.health


@pytest.fixture(scope="module")
def states() -> list[Health]:
    """Return what was found of the server before its tests."""
    return []


@pytest.fixture(scope="module")
def server(
    text_only: TextModel, states: list[Health], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[TritonServer]:
    """Yield a server that replaces the session's server in this file, also for `ask`."""
    log = tmp_path_factory.mktemp("text-only-server") / "tritonserver.log"
    server = TritonServer(ServerOptions(model=text_only.checkpoint, log=log))
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


def test_conversations_with_the_gateway_are_those_of_the_stock_model(
    ask: Asker, text_only: TextModel, tmp_path: Path
) -> None:
    with running(ask.grpc_url, tmp_path) as gateway:
        check_conversations(gateway, text_only)


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
