"""Tests of the metrics of a generation run."""

from __future__ import annotations

import pytest

from vlora.generation.metrics import chrf, f1_iou50, top1, vqa_score


def test_top1_is_the_share_of_equal_labels() -> None:
    assert top1(["a ", "b", "c", "d"], ["a", "b", "x", "D"]) == 0.5


def test_vqa_answers_are_compared_as_the_official_metric_does() -> None:
    answers = ["The dog.", "two", "YES!", "none", "a red-brown cat", "left"]
    references = ["dog", "2", "yes", "0", "red brown cat", "right"]
    assert vqa_score(answers, references) == pytest.approx(5 / 6)


def test_f1_matches_each_box_once_by_label_and_overlap() -> None:
    def text(label: str, *boxes: tuple[int, int, int, int]) -> str:
        ends = "".join(f"<box>({a},{b}),({c},{d})</box>" for a, b, c, d in boxes)
        return f"<ref>{label}</ref>{ends}"

    reference = text("cat", (0, 0, 100, 100), (500, 500, 600, 600))
    assert f1_iou50([reference], [reference]) == 1.0
    assert f1_iou50([text("dog", (0, 0, 100, 100))], [reference]) == 0.0
    twice = text("cat", (0, 0, 100, 100), (0, 0, 100, 100))
    assert f1_iou50([twice], [reference]) == pytest.approx(0.5)
    shifted = text("cat", (0, 33, 100, 133), (0, 0, 1, 1))
    assert f1_iou50([shifted], [reference]) == pytest.approx(0.5)
    too_far = text("cat", (0, 34, 100, 134))
    assert f1_iou50([too_far], [reference]) == 0.0
    assert f1_iou50(["nothing"], ["nothing"]) == 1.0


def test_chrf_is_one_for_equal_captions_and_lower_for_others() -> None:
    pytest.importorskip("sacrebleu")
    assert chrf(["a red star"], ["a red star"]) == pytest.approx(1.0)
    assert 0.2 < chrf(["a red circle"], ["a red star"]) < 0.8
