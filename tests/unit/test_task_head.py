"""The `task_head` model without Triton: an answer in, its JSON result out."""

from __future__ import annotations

import json

import numpy as np
import pytest

from tests.support.fakes import first
from vlora.config import Limits
from vlora.errors import InvalidArgument
from vlora.serving.task_head import to_result
from vlora.serving.tensors import strings


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
