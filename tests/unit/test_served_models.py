"""Architectures that are served: refusal of all others, and their rows in the documents."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from vlora.errors import InvalidArgument
from vlora.model.decoder_config import load_config
from vlora.model.families.registry import FAMILIES
from vlora.model.multimodal import MULTIMODAL
from vlora.paths import SOURCE_TREE
from vlora.vision.encoder import VisionEncoder
from vlora.vision.families.base import vision_family

TEXT_ONLY = {name for name in FAMILIES if not name.endswith("_text")} - {*MULTIMODAL}


def test_each_family_with_images_is_one_of_the_encoder() -> None:
    assert [getattr(vision_family(name), "model_type", None) for name in MULTIMODAL] == [
        *MULTIMODAL
    ]
    assert vision_family("llama") is None


@pytest.mark.parametrize("model_type", ["qwen2_moe", "gemma3", "idefics3", "unheard-of", None, 7])
def test_another_architecture_is_refused_with_a_list_of_the_served(
    tmp_path: Path, model_type: object
) -> None:
    code = {"AutoConfig": "code.Config", "AutoModel": "code.Model"}
    config = {"model_type": model_type, "auto_map": code}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "code.py").write_text("raise SystemExit('code of a checkpoint was run')")
    with pytest.raises(
        InvalidArgument, match=f"model type {model_type!r}, which is not"
    ) as decoder:
        load_config(tmp_path)
    with pytest.raises(InvalidArgument) as encoder:
        VisionEncoder(tmp_path, 1)
    for message in (str(decoder.value), str(encoder.value)):
        listed = re.findall(r"[\w.]+", message.partition("supported; supported: ")[2])
        assert {*MULTIMODAL, *TEXT_ONLY} == set(listed) - {"and", "without", "images"}


@pytest.mark.parametrize("document", ["README.md", "docs/models.md"])
def test_each_family_has_a_row_in_the_documents(document: str) -> None:
    rows = [
        line for line in (SOURCE_TREE / document).read_text().splitlines() if line.startswith("| ")
    ]
    for name in MULTIMODAL:
        assert sum(f"| `{name}` |" in row for row in rows) == 1, name
    assert all(f"`{name}`" in (SOURCE_TREE / document).read_text() for name in TEXT_ONLY)
