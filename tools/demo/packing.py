"""Packing of several single-turn prompts about the same images into one sequence.

The images are a prefix that all questions share. Each question with its answer is a branch. It
attends to the prefix and to itself, and its positions continue those of the prefix. A branch
therefore computes exactly what its prompt would compute alone, at a fraction of the cost.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tools.demo.build import IMAGE_TOKENS, make_tokenizer
from tools.demo.questions import Question
from vlora.vision.chat_template import PLACEHOLDER, ChatTemplate
from vlora.vision.prompts import render

FRONT, PADDING = 0, -1
"""Values of `Pack.branches` in the prefix and in the padding."""
IGNORED = -100
"""Target of a position that predicts no token of an answer."""
Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Pack:
    """A training batch. Unless stated otherwise, arrays are int64 [rows, length].

    images: uint8 [n, 64, 64, 3], in the order of the rows.
    branches: 0 in the prefix, the number of the branch (from 1) in a branch, and -1 in the padding.
    targets: the next token at each position that predicts a token of an answer; else IGNORED.
    ends: [branches, 2], row and column of the last prompt token of each branch.
    classes: [branches], class of each branch's answer; empty unless a task head is trained.
    """

    images: NDArray[np.uint8]
    tokens: Ints
    positions: Ints
    branches: Ints
    targets: Ints
    ends: Ints
    classes: Ints


@dataclass(frozen=True)
class Row:
    """Images of one row, and the questions about them.

    classes: class of each question's answer, for the training of a task head.
    is_clip: whether the images are the frames of a clip.
    """

    images: list[NDArray[np.uint8]]
    questions: list[Question]
    classes: tuple[int, ...] = ()
    is_clip: bool = False


@dataclass(frozen=True)
class Language:
    """Prompts of one decoder: chat template, tokens of a text, and text at the end of an answer."""

    template: ChatTemplate
    encode: Callable[[str], Sequence[int]]
    end: str


def language_of(tokenizer: Any, template: ChatTemplate) -> Language:
    """Return the prompts of a decoder with this tokenizer."""

    @lru_cache(maxsize=200_000)
    def encode(text: str) -> tuple[int, ...]:
        return tuple(tokenizer(text, add_special_tokens=False)["input_ids"])

    return Language(template, encode, tokenizer.eos_token)


@lru_cache(maxsize=1)
def demo_language() -> Language:
    return language_of(make_tokenizer(), ChatTemplate("<s><|user|>", "<|assistant|>"))


def pack(rows: list[Row], language: Language) -> Pack:
    """Return rows as one padded batch."""
    laid_out = [_lay_out(row, language) for row in rows]
    length = -(-max(len(places) for places, _ in laid_out) // 16) * 16
    table = np.full((len(rows), length, 4), (0, 0, PADDING, IGNORED), np.int64)
    for row, (places, _) in zip(table, laid_out, strict=True):
        row[: len(places)] = places
    ends = [(row, end) for row, (_, row_ends) in enumerate(laid_out) for end in row_ends]
    images = [image for row in rows for image in row.images]
    return Pack(
        np.stack(images) if images else np.zeros((0, 64, 64, 3), np.uint8),
        *np.ascontiguousarray(np.moveaxis(table, -1, 0)),
        ends=np.array(ends, np.int64),
        classes=np.array([label for row in rows for label in row.classes], np.int64),
    )


def _lay_out(row: Row, language: Language) -> tuple[list[tuple[int, ...]], list[int]]:
    """Return (token, position, branch, target) of each place, and the ends of the prompts."""
    places: list[tuple[int, ...]] = []
    ends: list[int] = []
    for number, question in enumerate(row.questions, start=1):
        front, prompt = _prompt_parts(question, len(row.images), row.is_clip, language)
        if number == 1:
            places += [(token, at, FRONT, IGNORED) for at, token in enumerate(front)]
        answer = list(language.encode(question.answer + language.end))
        ends.append(len(places) + len(prompt) - 1)
        targets = [IGNORED] * (len(prompt) - 1) + answer + [IGNORED]
        branch = zip(prompt + answer, targets, strict=True)
        places += [
            (token, at, number, target) for at, (token, target) in enumerate(branch, len(front))
        ]
    return places, ends


def _prompt_parts(
    question: Question, images: int, is_clip: bool, language: Language
) -> tuple[list[int], list[int]]:
    """Return the token ids of a prompt up to its last image, and after it.

    In the first part, each image has IMAGE_TOKENS image tokens.
    """
    frames = images if is_clip else 0
    prompt = render(question.task, question.text, images - frames, frames, language.template)
    cut = len(language.template.prefix)
    if images:
        cut = prompt.rindex(PLACEHOLDER) + len(PLACEHOLDER)
    front = prompt[:cut].replace(PLACEHOLDER, PLACEHOLDER * IMAGE_TOKENS)
    return list(language.encode(front)), list(language.encode(prompt[cut:]))
