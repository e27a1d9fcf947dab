"""Metrics of accuracy, from 0 to 1, which compare a model's answers with the right ones."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence

from vlora.vision.results import parse_boxes

# Function of the answers and the references (the right answers) that returns the accuracy.
Metric = Callable[[Sequence[str], Sequence[str]], float]
Box = tuple[float, float, float, float]  # Left, top, right and bottom, in any unit.
ENOUGH_OVERLAP = 0.5
_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = re.compile(r"[^\w\s]")
_NUMBER_WORDS = "zero one two three four five six seven eight nine ten"
_NUMBERS = {"none": "0", **{word: str(number) for number, word in enumerate(_NUMBER_WORDS.split())}}


def top1(answers: Sequence[str], references: Sequence[str]) -> float:
    """Return the share of answers that equal their reference. Outer white space is ignored."""
    pairs = zip(answers, references, strict=True)
    return sum(answer.strip() == label.strip() for answer, label in pairs) / len(references)


def vqa_score(answers: Sequence[str], references: Sequence[str]) -> float:
    """Return the VQA accuracy (Antol et al., 2015) for one reference per question.

    Answers are compared in lower case, without articles and punctuation, with numbers as digits.
    """
    pairs = zip(answers, references, strict=True)
    return sum(_normal(answer) == _normal(wanted) for answer, wanted in pairs) / len(references)


def _normal(text: str) -> str:
    words = _ARTICLES.sub(" ", _PUNCTUATION.sub(" ", text.lower())).split()
    return " ".join(_NUMBERS.get(word, word) for word in words)


def f1_iou50(answers: Sequence[str], references: Sequence[str]) -> float:
    """Return the F1 score of all boxes; 1 if there are none.

    Boxes match if they have the same label and an intersection over union of at least 0.5. Each
    reference box matches at most one box of the answer.
    """
    matched = total = 0
    for answer, reference in zip(answers, references, strict=True):
        left, wanted = parse_boxes(answer)[0], parse_boxes(reference)[0]
        total += len(left) + len(wanted)
        for box in wanted:
            same = [other for other in left if other.label == box.label]
            best = max(same, key=lambda other: iou(box.grid, other.grid), default=None)
            if best is not None and iou(box.grid, best.grid) >= ENOUGH_OVERLAP:
                left.remove(best)
                matched += 1
    return 2 * matched / total if total else 1.0


def iou(a: Box, b: Box) -> float:
    """Return the intersection over union of two boxes."""
    width = min(a[2], b[2]) - max(a[0], b[0])
    height = min(a[3], b[3]) - max(a[1], b[1])
    if width <= 0 or height <= 0:
        return 0.0
    shared = width * height
    areas = (a[2] - a[0]) * (a[3] - a[1]) + (b[2] - b[0]) * (b[3] - b[1])
    return shared / (areas - shared)


def chrf(answers: Sequence[str], references: Sequence[str]) -> float:
    """Return sacrebleu's chrF (Popović, 2015) of captions, divided by 100."""
    from sacrebleu import corpus_chrf

    return float(corpus_chrf(list(answers), [list(references)]).score) / 100


# Metrics by the names that a specification uses.
METRICS: Mapping[str, Metric] = {
    "top1": top1,
    "vqa_score": vqa_score,
    "f1_iou50": f1_iou50,
    "chrf": chrf,
}
