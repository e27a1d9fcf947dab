"""Packing of several single-turn prompts about the same images into one sequence.

The images are a prefix that all questions share. Each question with its answer is a branch. It
attends to the prefix and to itself, and its positions continue those of the prefix. A branch
therefore computes exactly what its prompt would compute alone, at a fraction of the cost.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from tools.demo.build import IMAGE_TOKENS
from tools.demo.questions import Question
from tools.demo.tokenizer import make_tokenizer
from vlora.vision.prompts import PLACEHOLDER, ChatTemplate, render

FRONT, PADDING = 0, -1
"""Values of `Pack.branches` in the prefix and in the padding."""
IGNORED = -100
"""Target of a position that predicts no token of an answer."""
TEMPLATE = ChatTemplate(prefix="<s><|user|>", suffix="<|assistant|>")
Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Pack:
    """A training batch. Unless stated otherwise, arrays are int64 [rows, length].

    images: uint8 [n, 64, 64, 3], in the order of the rows.
    branches: 0 in the prefix, the number of the branch (from 1) in a branch, and -1 in the padding.
    targets: the next token at each position that predicts a token of an answer; else IGNORED.
    ends: [branches, 2], row and column of the last prompt token of each branch.
    kinds: kind of each branch's question.
    classes: [branches], class of each branch's answer; empty unless a task head is trained.
    """

    images: NDArray[np.uint8]
    tokens: Ints
    positions: Ints
    branches: Ints
    targets: Ints
    ends: Ints
    kinds: tuple[str, ...]
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


@lru_cache(maxsize=1)
def _tokenizer() -> object:
    return make_tokenizer()


@lru_cache(maxsize=200_000)
def encode(text: str) -> tuple[int, ...]:
    """Return the token ids of a text with the demo's tokenizer."""
    return tuple(_tokenizer()(text, add_special_tokens=False).input_ids)  # type: ignore[operator]


@dataclass(frozen=True)
class Language:
    """Prompts of one decoder: chat template, tokens of a text, and text at the end of an answer."""

    template: ChatTemplate
    encode: Callable[[str], Sequence[int]]
    end: str


DEMO = Language(TEMPLATE, encode, "</s>")


def prompt_parts(
    question: Question, images: int, is_clip: bool, language: Language = DEMO
) -> tuple[list[int], list[int]]:
    """Return (prefix, branch): the token ids of a prompt up to its last image, and after it.

    In the prefix, each image has IMAGE_TOKENS image tokens.
    """
    frames = images if is_clip else 0
    template = language.template
    prompt = render(question.task, question.text, images - frames, frames, template)
    front, branch = prompt[: len(template.prefix)], prompt[len(template.prefix) :]
    if images:
        cut = prompt.rindex(PLACEHOLDER) + len(PLACEHOLDER)
        front, branch = prompt[:cut], prompt[cut:]
    expanded = front.replace(PLACEHOLDER, PLACEHOLDER * IMAGE_TOKENS)
    return list(language.encode(expanded)), list(language.encode(branch))


def pack(rows: list[Row], language: Language = DEMO) -> Pack:
    """Return rows as one padded batch."""
    laid_out = [_lay_out(row, language) for row in rows]
    length = max(len(columns[0]) for columns in laid_out)
    length = -(-length // 16) * 16
    filled = [np.full((len(rows), length), fill, np.int64) for fill in (0, 0, PADDING, IGNORED)]
    ends: list[tuple[int, int]] = []
    for index, (tokens, positions, branches, targets, row_ends) in enumerate(laid_out):
        for array, values in zip(filled, (tokens, positions, branches, targets), strict=True):
            array[index, : len(values)] = values
        ends += [(index, end) for end in row_ends]
    images = [image for row in rows for image in row.images]
    return Pack(
        np.stack(images) if images else np.zeros((0, 64, 64, 3), np.uint8),
        *filled,
        ends=np.array(ends, np.int64),
        kinds=tuple(question.kind for row in rows for question in row.questions),
        classes=np.array([label for row in rows for label in row.classes], np.int64),
    )


def _lay_out(
    row: Row, language: Language
) -> tuple[list[int], list[int], list[int], list[int], list[int]]:
    """Return five lists for one training sequence: tokens, their positions, their branches, their
    targets, and the index of the last token of each question's prompt.

    Tokens of the prefix that all questions share have the branch FRONT, others the question's
    number. A question does not attend to another question's branch.
    """
    tokens: list[int] = []
    positions: list[int] = []
    branches: list[int] = []
    targets: list[int] = []
    ends: list[int] = []
    for number, question in enumerate(row.questions, start=1):
        front, prompt = prompt_parts(question, len(row.images), row.is_clip, language)
        if number == 1:
            tokens += front
            positions += range(len(front))
            branches += [FRONT] * len(front)
            targets += [IGNORED] * len(front)
        answer = list(language.encode(question.answer + language.end))
        ends.append(len(tokens) + len(prompt) - 1)
        tokens += prompt + answer
        positions += range(len(front), len(front) + len(prompt) + len(answer))
        branches += [number] * (len(prompt) + len(answer))
        targets += [IGNORED] * (len(prompt) - 1) + answer + [IGNORED]
    return tokens, positions, branches, targets, ends
