"""Tests of the model repository: its configs, the served architectures, and its copies."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from google.protobuf import text_format
from transformers import Qwen3VLTextConfig
from tritonclient.grpc.model_config_pb2 import ModelConfig
from typer.testing import CliRunner

from vlora.cli import app
from vlora.config import load_options
from vlora.errors import InvalidArgument
from vlora.launcher.repository import copy_with_overrides, write_repository
from vlora.model.decoder_config import load_config
from vlora.model.families.registry import FAMILIES, own_decoders
from vlora.model.multimodal import MULTIMODAL, Multimodal
from vlora.paths import SOURCE_TREE, model_repository
from vlora.serving.arrivals import ArrivalStamps
from vlora.serving.codec import INPUTS
from vlora.serving.vision_encoder import VisionService
from vlora.vision.encoder import VisionEncoder
from vlora.vision.families.base import vision_family
from vlora.vision.features import EncodedImages


def files_of(folder: Path) -> set[str]:
    names = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    return {name for name in names if "__pycache__" not in name}


def test_the_copy_has_all_models_and_absolute_paths_of_the_demo(tmp_path: Path) -> None:
    written = write_repository(tmp_path / "mine")
    assert files_of(written) == files_of(model_repository())
    options = load_options(written / "lmm" / "1" / "model.json", environment={})
    assert (options.model / "config.json").is_file()
    assert options.adapters is not None
    assert options.adapters.is_dir()


def test_explicit_folders_are_written_unchanged_and_another_model_has_no_adapters(
    tmp_path: Path,
) -> None:
    written = write_repository(tmp_path / "x", Path("/models/llava"), Path("/models/adapters"))
    keys = json.loads((written / "lmm" / "1" / "model.json").read_text())
    assert (keys["model"], keys["adapters"]) == ("/models/llava", "/models/adapters")
    written = write_repository(tmp_path / "y", Path("/models/llava"))
    copy_with_overrides(model_repository(), tmp_path / "z", {"model": "/models/llava"}, {})
    for folder in (written, tmp_path / "z"):
        options = load_options(folder / "lmm" / "1" / "model.json", environment={})
        assert options.model == Path("/models/llava")
        assert options.adapters is None, "the demo's adapters are not those of another model"


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("x")
    with pytest.raises(InvalidArgument, match="is not empty"):
        write_repository(tmp_path)
    assert files_of(tmp_path) == {"precious"}
    with pytest.raises(InvalidArgument, match="is a file"):
        write_repository(tmp_path / "precious")


def test_the_command_prints_how_to_serve_the_copy(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["repository", str(tmp_path / "new")])
    assert result.exit_code == 0, result.output
    assert "vlora serve --repository" in result.output
    again = CliRunner().invoke(app, ["repository", str(tmp_path / "new")])
    assert again.exit_code == 1
    assert "is not empty" in again.output


FEATURE_INPUTS = {"image_features", "image_layout", "image_size", "image_videos", "image_adapter"}
REPOSITORY = Path(__file__).parents[2] / "model_repository"
CONFIGS = {
    file.parent.name: text_format.Parse(file.read_text(), ModelConfig())
    for file in sorted(REPOSITORY.glob("*/config.pbtxt"))
}


def names(tensors: Iterable[Any]) -> set[str]:
    return {tensor.name for tensor in tensors}


def test_a_tensor_has_the_same_type_and_shape_in_every_model() -> None:
    forms: dict[str, Any] = {}
    for model, config in CONFIGS.items():
        assert config.name == model
        for tensor in (*config.input, *config.output):
            form = tensor.data_type, list(tensor.dims)
            assert forms.setdefault(tensor.name, form) == form, f"{model}: {tensor.name}"
    assert len(CONFIGS) == 6


def test_lmm_unary_takes_what_lmm_takes_and_returns_what_it_returns_with_the_answer() -> None:
    lmm, unary = CONFIGS["lmm"], CONFIGS["lmm_unary"]
    assert list(unary.input) == [one for one in lmm.input if one.name != "describe"]
    assert [one for one in unary.output if one.name != "answer"] == list(lmm.output)


def test_both_ensembles_take_the_inputs_that_the_codec_reads() -> None:
    inputs = CONFIGS["video_analytics"].input
    assert list(CONFIGS["visual_retrieval"].input) == list(inputs)
    assert names(inputs) == set(INPUTS)
    assert set(INPUTS) | FEATURE_INPUTS <= names(CONFIGS["lmm"].input)


def test_the_vision_encoder_returns_what_its_service_makes() -> None:
    service: Any = SimpleNamespace(_stamps=ArrivalStamps(b""))
    none = EncodedImages(np.zeros((0, 3)), np.zeros((0, 6)), np.zeros((0, 2)), ())
    made = VisionService._to_tensors(service, none, 0.0).keys()
    assert names(CONFIGS["vision_encoder"].output) == made
    assert made >= FEATURE_INPUTS


@pytest.mark.parametrize("model", ["video_analytics", "visual_retrieval"])
def test_an_ensembles_steps_use_tensors_that_the_models_have(model: str) -> None:
    steps = CONFIGS[model].ensemble_scheduling.step
    assert len(steps) >= 2
    for step in steps:
        served = CONFIGS[step.model_name]
        assert set(step.input_map) <= names(served.input), step.model_name
        assert set(step.output_map) <= names(served.output), step.model_name
        assert step.input_map
        assert step.output_map


TEXT_ONLY = {name for name in FAMILIES if not name.endswith("_text")} - {*MULTIMODAL}


def test_each_family_with_images_is_one_of_the_encoder() -> None:
    assert [getattr(vision_family(name), "model_type", None) for name in MULTIMODAL] == [
        *MULTIMODAL
    ]
    assert vision_family("llama") is None


def test_the_decoder_of_a_family_with_images_follows_from_its_row() -> None:
    rows = {
        "new_text": Multimodal("new", "qwen3", "interleaved"),
        "plain": Multimodal("new", "mistral"),
    }
    new, plain = own_decoders(rows).values()
    assert new.model_type == "new_text"
    assert new.names == FAMILIES["qwen3"].names
    text = Qwen3VLTextConfig(head_dim=16, rope_parameters={"mrope_section": [4, 2, 2]})
    assert new.rope_axes(text) == (0, 1, 2, 0, 1, 2, 0, 0)
    assert plain.rope_axes(text) == ()
    assert type(plain) is type(FAMILIES["mistral"])


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
