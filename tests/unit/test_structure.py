"""Rules about the model repository's source (those of the package: `test_architecture.py`)."""

from __future__ import annotations

from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2] / "model_repository"
MODELS = sorted(REPOSITORY.glob("*/1/model.py"))


@pytest.mark.parametrize("path", MODELS, ids=lambda path: path.parent.parent.name)
def test_model_files_are_thin_and_reach_triton_through_the_glue(path: Path) -> None:
    text = path.read_text()
    assert len(text.splitlines()) <= 120
    assert "triton_python_backend_utils" not in text


def test_every_model_has_a_config_of_its_own_name() -> None:
    configs = list(REPOSITORY.glob("*/config.pbtxt"))
    assert len(configs) == 6
    for config in configs:
        assert f'name: "{config.parent.name}"' in config.read_text()
