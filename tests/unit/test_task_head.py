"""Tests of the `task_head` model without Triton: it converts an answer into JSON."""

from __future__ import annotations

import json

import numpy as np
import pytest

from tests.support.fakes import first
from vlora.config import Limits
from vlora.errors import InvalidArgument
from vlora.serving.task_head import to_result
from vlora.serving.tensors import strings
from vlora.vision.results import MAX_WARNINGS


def test_an_answer_of_a_head_becomes_its_result() -> None:
    details = {"task": "classify", "adapter": None, "timings": {"total": 0.5}}
    result = json.loads(
        first(
            to_result(
                {
                    "text_output": strings(["dog"]),
                    "details": strings([json.dumps(details)]),
                    "head_labels": strings(["cat", "dog"]),
                    "head_scores": np.array([0.25, 0.75], np.float32),
                    "metadata": strings(["m"]),
                },
                Limits(),
            )["result"]
        )
    )
    assert result["scores"] == {"cat": 0.25, "dog": 0.75}
    assert result["metadata"] == "m"


@pytest.mark.parametrize("details", ["{", "[]", "{}"])
def test_invalid_details_are_rejected(details: str) -> None:
    with pytest.raises(InvalidArgument, match="'details'"):
        to_result({"text_output": strings(["x"]), "details": strings([details])}, Limits())


DETAILS = json.dumps({"task": "vqa", "adapter": None, "timings": {}})


def test_limits_of_the_request_do_not_apply_to_its_answer() -> None:
    """An answer may be longer than the prompts and the JSON that the server accepts."""
    limits = Limits(max_prompt_bytes=10, max_json_bytes=10)
    tensors = {"text_output": strings(["a long answer"]), "details": strings([DETAILS])}
    assert json.loads(first(to_result(tensors, limits)["result"]))["text"] == "a long answer"


@pytest.mark.parametrize("name", ["text_output", "details"])
def test_an_answer_above_its_own_limit_is_refused_with_both_numbers(name: str) -> None:
    tensors = {"text_output": strings(["x"]), "details": strings([DETAILS])}
    tensors[name] = strings([" " * 101])
    with pytest.raises(InvalidArgument, match=f"'{name}' has 101 bytes; the limit is 100"):
        to_result(tensors, Limits(max_answer_bytes=100))


def test_an_answer_of_malformed_boxes_has_a_bounded_number_of_warnings() -> None:
    tensors = {"text_output": strings(["<box>" * 100_000]), "details": strings([DETAILS])}
    result = json.loads(first(to_result(tensors, Limits())["result"]))
    assert len(result["warnings"]) == MAX_WARNINGS + 1
    assert result["warnings"][-1] == f"{100_000 - MAX_WARNINGS} more"
