"""Parity of every vision family behind a real server with transformers and PEFT, over gRPC.

Each family has one server with few KV pages and a policy that merges whichever adapter most of the
ready requests use. So the tests force merged, mixed and unmerged steps, preemption, and reuse of
prefixes by what they ask, not by when they ask it. Adapters of the vision tower are tested in
test_family_adapters.py.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from tests.support.checkpoints import FAMILIES
from tests.support.families import ADAPTERS, Family, FirstQwenVL
from tests.support.oracle import NEAR_TIE
from tests.support.triton_client import Asker, asking, png
from vlora.launcher.server import ServerOptions, TritonServer
from vlora.model.decoder_config import load_config
from vlora.model.inputs import PromptReader
from vlora.request import ImageFeatures
from vlora.vision.images import DecodedImage
from vlora.vision.prompts import ChatTemplate, render

MAX_TOKENS = 32
BLOCK = 4
"""Tokens of a KV page."""
ROUNDS = 40
"""Maximum number of times that questions are asked at once until all modes have been seen."""
MERGED, MIXTURE, UNMERGED = "merged", "mixture", "unmerged"
FIRST, SECOND = ADAPTERS
USED = (FIRST, SECOND, None, FIRST, FIRST, SECOND, FIRST, None, FIRST, FIRST)
"""Adapters of the questions. Most questions use the first adapter, so a step with all of them
merges it. A step with one question of each kind merges none."""


class Question(NamedTuple):
    """A question about images, followed by the frames of a clip. Its text differs from others."""

    text: str
    images: tuple[DecodedImage, ...]
    frames: tuple[DecodedImage, ...]
    adapter: str | None


class Answer(NamedTuple):
    """A greedy answer. modes: number of its steps by mode."""

    tokens: tuple[int, ...]
    text: str
    inputs: int
    cached: int
    modes: dict[str, int]


def draw_questions() -> list[Question]:
    """Return questions about images and clips of several sizes.

    The last three questions have the first picture and the adapter of earlier questions.
    """
    rng = np.random.default_rng(7)

    def draw(count: int, size: Any, *, is_video: bool) -> tuple[DecodedImage, ...]:
        sizes = [size] * count if is_video else rng.integers(9, 90, (count, 2))
        return tuple(
            DecodedImage(rng.integers(0, 256, (*size, 3), np.uint8), is_video) for size in sizes
        )

    drawn: list[Question] = []
    for number, adapter in enumerate(USED):
        frames = draw((0, 0, 4, 0, 5, 3)[number % 6], rng.integers(9, 90, 2), is_video=True)
        images = draw((1, 2, 0, 3, 1, 0)[number % 6], None, is_video=False)
        if number >= 7:
            images = drawn[{7: 2, 8: 3, 9: 0}[number]].images[:1]
            frames = drawn[2].frames if number == 7 else ()
        drawn.append(Question(f"what is in {number}?", images, frames, adapter))
    return drawn


class Served:
    """A family behind a server. Each different answer is compared once with the oracle."""

    def __init__(self, family: Family | FirstQwenVL, ask: Asker) -> None:
        self.family, self.ask = family, ask
        self.template = ChatTemplate.from_checkpoint(family.checkpoint)
        self._checked: set[tuple[str, str | None, tuple[int, ...]]] = set()

    def inputs(self, question: Question) -> dict[str, Any]:
        """Return the inputs of a request."""
        sampling = {"max_tokens": MAX_TOKENS, "ignore_eos": True, "temperature": 0, "logprobs": 0}
        named = {"lora_name": question.adapter} if question.adapter else {}
        return {
            "text_input": question.text,
            "image": [png(image.rgb) for image in question.images],
            "frames": [png(frame.rgb) for frame in question.frames],
            "sampling_parameters": sampling | named,
            "task": "vqa",
        }

    def answer(self, question: Question) -> Answer:
        """Return the server's answer, which must be that of the stock model."""
        answer = self.send(question)
        self.check(question, answer)
        return answer

    def together(self, questions: list[Question]) -> list[Answer]:
        """Return the answers to questions that are sent at once. They must be the stock model's."""
        with ThreadPoolExecutor(len(questions)) as pool:
            answers = list(pool.map(self.send, questions))
        for question, answer in zip(questions, answers, strict=True):
            self.check(question, answer)
        return answers

    def send(self, question: Question) -> Answer:
        """Return the server's answer, unchecked."""
        response = self.ask.once(
            "lmm_unary",
            **self.inputs(question),
            exclude_input_in_output=True,
            return_logprobs=True,
            return_num_input_tokens=True,
        )
        details = json.loads(response["details"])
        (tokens,) = zip(*map(dict.keys, json.loads(response["logprobs"])), strict=True)
        return Answer(
            tuple(map(int, tokens)),
            response["text_output"],
            response["num_input_tokens"],
            details["num_cached_tokens"],
            details["modes"],
        )

    def check(self, question: Question, answer: Answer) -> None:
        """Compare an answer with the stock model's, unless an equal one has been compared."""
        key = question.text, question.adapter, answer.tokens
        if key in self._checked:
            return
        prompt = render(
            "vqa", question.text, len(question.images), len(question.frames), self.template
        )
        pictures = [*question.images, *question.frames]
        assert len(answer.tokens) == MAX_TOKENS
        gap = self.family.gap(prompt, pictures, question.adapter, list(answer.tokens))
        assert gap <= NEAR_TIE, question.text
        self._checked.add(key)


@pytest.fixture(scope="module", params=["qwen_vl", *sorted(FAMILIES)])
def family(
    request: pytest.FixtureRequest, checkpoint: Path, tmp_path_factory: pytest.TempPathFactory
) -> Family | FirstQwenVL:
    folder = tmp_path_factory.mktemp(request.param)
    if request.param == "qwen_vl":
        return FirstQwenVL(folder)
    return Family(request.param, checkpoint, folder)


@pytest.fixture(scope="module")
def questions() -> list[Question]:
    return draw_questions()


def longest_prompt(family: Family | FirstQwenVL, questions: list[Question]) -> int:
    """Return the number of tokens of the longest prompt."""
    template = ChatTemplate.from_checkpoint(family.checkpoint)
    reader = PromptReader(family.checkpoint, load_config(family.checkpoint))
    pictures = [[*question.images, *question.frames] for question in questions]
    longest = 0
    for question, encoded in zip(questions, family.service.run(pictures), strict=True):
        counts = len(question.images), len(question.frames)
        prompt = render("vqa", question.text, *counts, template)
        own = ImageFeatures(encoded.features, encoded.layout)
        longest = max(longest, len(reader.read(prompt, own).ids))
    return longest


@pytest.fixture(scope="module")
def served(
    family: Family | FirstQwenVL,
    questions: list[Question],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("family-server")
    options = ServerOptions(
        model=family.checkpoint,
        adapters=family.adapters,
        model_json={
            "policy": "credit",
            # Every request counts as starved, so only the adapters of the requests choose the mode.
            "max_wait_seconds": 1e-9,
            "max_num_seqs": len(questions),
            "block_size": BLOCK,
            # The pages hold one answer to any question, but not the answers to all of them.
            "kv_cache_tokens": longest_prompt(family, questions) + MAX_TOKENS + BLOCK,
        },
        environment={"XDG_CACHE_HOME": str(folder / "cache")},
        log=folder / "tritonserver.log",
    )
    with TritonServer(options) as server, asking(server) as asker:
        yield Served(family, asker)
        assert server.failure() is None, server.explain()
        # test_lifecycle.py tests a graceful end, which takes seconds.
        server.kill()


def test_answers_to_lone_questions_are_those_of_the_stock_model(
    served: Served, questions: list[Question]
) -> None:
    for question in questions[:6]:
        answer = served.answer(question)
        assert set(answer.modes) == {MERGED if question.adapter else UNMERGED}
        text = served.ask.once("video_analytics", **served.inputs(question))["text_output"]
        assert text == answer.text


def test_a_repeated_prefix_is_computed_once(served: Served, questions: list[Question]) -> None:
    for question in questions[:6]:
        first = served.answer(question)
        again = served.answer(question)
        assert again.tokens == first.tokens
        assert again.cached >= again.inputs - BLOCK
        other = served.answer(question._replace(text=question.text.replace("in ", "")))
        assert other.cached >= other.inputs // 2


def test_a_prefix_of_another_adapter_is_not_reused(
    served: Served, questions: list[Question]
) -> None:
    for question, other in zip(questions[:3], (SECOND, None, FIRST), strict=True):
        served.answer(question)
        answer = served.answer(question._replace(adapter=other))
        assert answer.cached < answer.inputs // 2


def test_answers_in_mixed_steps_and_after_preemption_are_those_of_the_stock_model(
    served: Served, questions: list[Question]
) -> None:
    """All questions at once need more pages than there are, and most of them use one adapter. Two
    questions with different adapters have no majority, so neither adapter is merged."""
    before = preemptions(served)
    modes: dict[str | None, set[str]] = {adapter: set() for adapter in USED}

    def all_seen() -> bool:
        """Ask, and return whether each mode has been seen."""
        for asked in (questions, questions[:2]):
            for question, answer in zip(asked, served.together(asked), strict=True):
                modes[question.adapter].update(answer.modes)
        return (
            preemptions(served) > before
            and modes[FIRST] == {MERGED, MIXTURE, UNMERGED}
            and modes[SECOND] >= {MIXTURE, UNMERGED}
            and MIXTURE in modes[None]
        )

    # Requests that do not overlap, which no server can force, are asked again.
    assert any(all_seen() for _ in range(ROUNDS)), (preemptions(served) - before, modes)


def preemptions(served: Served) -> float:
    """Return the number of requests that have lost their pages to others."""
    name = "vllm:num_preemptions_total"
    return sum(value for key, value in served.ask.metrics().items() if key.startswith(name))
