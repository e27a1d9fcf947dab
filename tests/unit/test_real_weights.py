"""Tests of the measurements of tools/real_weights on the demo's checkpoint.

tests/parity/test_real_weights.py tests them on a real decoder, which is not installed everywhere.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoTokenizer, LlavaForConditionalGeneration

from tools.demo.__main__ import CHECKPOINT
from tools.demo.packing import language_of
from tools.real_weights import checkpoint, measure
from vlora.vision.chat_template import ChatTemplate

FLOAT32 = {"dtype": "float32"}


@pytest.fixture(scope="module")
def asked() -> list[measure.Asked]:
    return measure.held_out(CHECKPOINT, 4)


def longest(asked: list[measure.Asked]) -> int:
    return max(len(one.tokens) for one in asked)


def test_answers_of_a_trained_model_are_right(asked: list[measure.Asked]) -> None:
    accuracies = measure.accuracies(measure.Measured(CHECKPOINT, FLOAT32, longest(asked)), asked)
    assert accuracies.keys() == set(checkpoint.KINDS)
    assert sum(accuracies.values()) / len(accuracies) > 0.8


def test_merging_in_float32_changes_logits_by_rounding_only(asked: list[measure.Asked]) -> None:
    errors = {
        dtype: measure.merging_errors(
            measure.Measured(CHECKPOINT, {"dtype": dtype}, longest(asked), adapted=True),
            [list(range(5, 45))],
            asked[:3],
        )
        for dtype in ("float32", "bfloat16")
    }
    for kind in ("text", "image"):
        assert errors["float32"][f"{kind}_rms_error"] < 1e-5
        assert 1e-4 < errors["bfloat16"][f"{kind}_rms_error"] < 0.1


def test_training_lowers_the_loss_and_changes_the_connector_only(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("WORD_STEPS", "WORD_SCENES"):
        monkeypatch.setattr(checkpoint, name, 8)
    model: Any = LlavaForConditionalGeneration.from_pretrained(CHECKPOINT, dtype=torch.float32)
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    torch.manual_seed(0)
    for layer in model.model.multi_modal_projector.children():
        if isinstance(layer, torch.nn.Linear):
            layer.reset_parameters()
    tokenizer = AutoTokenizer.from_pretrained(CHECKPOINT)
    language = language_of(tokenizer, ChatTemplate.from_checkpoint(CHECKPOINT))
    losses = checkpoint.train_connector(model, language, 16)
    assert sum(losses[-4:]) < 0.8 * sum(losses[:4])
    assert "\nconnector 16/16" in capsys.readouterr().out
    after = model.state_dict()
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed == {name for name in before if "multi_modal_projector" in name}
