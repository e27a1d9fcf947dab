"""A vision family behind a real server: questions, and comparisons of answers with its oracle."""

from __future__ import annotations

import json
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch

from tests.support.conversations import (
    CONVERSATIONS,
    conversation,
    expected_tokens,
    images_of,
    options_of,
)
from tests.support.families import OracleFamily, gap_of
from tests.support.gateway import Gateway
from tests.support.oracle import NEAR_TIE
from tests.support.triton_client import Asker, png
from vlora.model.decoder_config import load_config
from vlora.model.inputs import PromptReader
from vlora.model.tokenizer import Vocabulary, load_tokenizer
from vlora.request import ImageFeatures
from vlora.vision.chat_template import ChatTemplate
from vlora.vision.images import DecodedImage
from vlora.vision.prompts import render

MAX_TOKENS = 32
MAX_CHAT_TOKENS = 8
MAX_DIFFERENCE = 1e-3
"""Allowed difference of a token's log-probability."""
INVOCATION = 3
"""Number of tokens that invoke the activated adapter: the last ones of every prompt."""


class Question(NamedTuple):
    """A question about images, followed by the frames of a clip. Its text differs from others."""

    text: str
    images: tuple[DecodedImage, ...]
    frames: tuple[DecodedImage, ...]
    adapter: str | None


class Answer(NamedTuple):
    """A greedy answer.

    logprobs: log-probability of each token.
    modes: number of its steps by mode.
    """

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    text: str
    inputs: int
    cached: int
    modes: dict[str, int]


def draw_questions(adapters: Sequence[str | None]) -> list[Question]:
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
    for number, adapter in enumerate(adapters):
        frames = draw((0, 0, 4, 0, 5, 3)[number % 6], rng.integers(9, 90, 2), is_video=True)
        images = draw((1, 2, 0, 3, 1, 0)[number % 6], None, is_video=False)
        if number >= 7:
            images = drawn[{7: 2, 8: 3, 9: 0}[number]].images[:1]
            frames = drawn[2].frames if number == 7 else ()
        drawn.append(Question(f"what is in {number}?", images, frames, adapter))
    return drawn


class Served:
    """A family behind a server. Each different answer is compared once with the oracle."""

    def __init__(self, family: OracleFamily, ask: Asker) -> None:
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
        drawn = [next(iter(own.items())) for own in json.loads(response["logprobs"])]
        return Answer(
            tuple(int(token) for token, _ in drawn),
            tuple(float(value["logprob"]) for _, value in drawn),
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
        tokens = list(answer.tokens)
        logits = self.family.logits(prompt, pictures, question.adapter, tokens)[:-1]
        _check_greedy(logits, tokens, answer.logprobs, question.text)
        self._checked.add(key)


def _check_greedy(
    logits: torch.Tensor, tokens: list[int], logprobs: Sequence[float], what: str
) -> None:
    """Compare a greedy answer with the oracle's logits before each of its tokens."""
    assert gap_of(logits, tokens) <= NEAR_TIE, what
    # Small models often repeat one token, whatever the image. Its probability still changes.
    expected = logits.log_softmax(1)[range(len(tokens)), tokens]
    got = torch.tensor(logprobs)
    assert torch.allclose(got, expected, rtol=0.0, atol=MAX_DIFFERENCE), (what, got - expected)


class Stock(Protocol):
    """Stock model of a checkpoint. For the arguments, see OracleFamily."""

    checkpoint: Path

    def prompt_ids(self, prompt: Sequence[int], images: Sequence[DecodedImage]) -> list[int]: ...

    def logits(
        self,
        prompt: Sequence[int],
        images: Sequence[DecodedImage],
        adapter: str | None,
        answer: list[int],
    ) -> torch.Tensor: ...


def check_conversations(gateway: Gateway, stock: Stock) -> None:
    """Compare the base model's answers to all conversations with those of its stock model."""
    checkpoint = stock.checkpoint
    tokenizer = load_tokenizer(checkpoint)
    vocabulary = Vocabulary(tokenizer)
    token_of = {vocabulary.shown(token, False): token for token in range(len(tokenizer))}
    for name in CONVERSATIONS:
        messages, options = conversation(checkpoint, name), options_of(name)
        answer = gateway.client.chat.completions.create(
            model="base",
            messages=messages,
            max_tokens=MAX_CHAT_TOKENS,
            logprobs=True,
            extra_body={"ignore_eos": True, "skip_special_tokens": False, **options},
        )
        prompt, images = expected_tokens(checkpoint, messages, **options), images_of(messages)
        assert answer.usage.prompt_tokens == len(stock.prompt_ids(prompt, images)), name
        drawn = answer.choices[0].logprobs.content
        tokens = [token_of[bytes(one.bytes)] for one in drawn]
        assert len(tokens) == MAX_CHAT_TOKENS, name
        text = tokenizer.decode(tokens)
        assert answer.choices[0].message.content == text, name
        logits = stock.logits(prompt, images, None, tokens)[:-1]
        _check_greedy(logits, tokens, [one.logprob for one in drawn], name)


def differ(one: Answer, other: Answer) -> bool:
    """Return whether two answers differ by more than the rounding of the log-probabilities."""
    pairs = zip(one.logprobs, other.logprobs, strict=True)
    return any(abs(first - second) > MAX_DIFFERENCE for first, second in pairs)


def longest_prompt(family: OracleFamily, questions: list[Question]) -> int:
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


def preemptions(served: Served) -> float:
    """Return the number of requests that have lost their pages to others."""
    return _total(served, "vllm:num_preemptions_total")


def encoded_images(served: Served) -> float:
    """Return the number of images that the vision tower has encoded."""
    return _total(served, "vlora:feature_cache_misses_total")


def _total(served: Served, name: str) -> float:
    """Return the value of a metric, summed over its labels."""
    return sum(value for key, value in served.ask.metrics().items() if key.startswith(name))


def add_kinds(family: OracleFamily) -> tuple[str, ...]:
    """Add adapters of several kinds to a family and to its oracle, and return their names. One is
    invoked by the last tokens of every prompt."""
    template = ChatTemplate.from_checkpoint(family.checkpoint)
    prompt = render("vqa", "what?", 1, 0, template)
    tokens = family.tokenizer(prompt, add_special_tokens=False)["input_ids"]
    family.add_kinds(tokens[-INVOCATION:])
    return "rslora", "activated"
