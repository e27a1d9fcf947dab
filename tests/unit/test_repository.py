"""Tests of the model repository: its configs, the served architectures, and its copies."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
from typer.testing import CliRunner

from vlora.cli import app
from vlora.config import load_options
from vlora.errors import InvalidArgument
from vlora.launcher.repository import copy_with_overrides, write_repository
from vlora.model.decoder_config import load_config
from vlora.model.families.registry import FAMILIES
from vlora.model.multimodal import MULTIMODAL
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


FEATURE_INPUTS = {"image_features", "image_layout", "image_size", "image_adapter"}
REPOSITORY = Path(__file__).parents[2] / "model_repository"
MODELS = sorted(folder.parent.name for folder in REPOSITORY.glob("*/config.pbtxt"))

LIST = re.compile(r"^(input|output) \[\n(.*?)^\]", re.MULTILINE | re.DOTALL)
TENSOR = re.compile(
    r'name: "(?P<name>\w+)"\s+data_type: TYPE_(?P<kind>\w+)\s+dims: \[ (?P<dims>[-\d, ]+) \]'
    r"(?P<flags>[^}]*)"
)


class Tensor(NamedTuple):
    """One entry of an input or output list."""

    name: str
    kind: str
    dims: str
    optional: bool


def tensors(model: str, which: str) -> list[Tensor]:
    """Return the inputs or the outputs of a model, in order."""
    text = re.sub(r"^\s*#.*\n", "", (REPOSITORY / model / "config.pbtxt").read_text(), flags=re.M)
    (block,) = (match[2] for match in LIST.finditer(text) if match[1] == which)
    entries = [
        Tensor(match["name"], match["kind"], match["dims"], "optional: true" in match["flags"])
        for match in TENSOR.finditer(block)
    ]
    assert len(entries) == block.count("name:"), f"{model}: {which} has an entry in another form"
    return entries


def names(model: str, which: str) -> list[str]:
    return [tensor.name for tensor in tensors(model, which)]


def all_tensors() -> Iterator[tuple[str, Tensor]]:
    for model in MODELS:
        for which in ("input", "output"):
            for tensor in tensors(model, which):
                yield model, tensor


def test_a_tensor_has_the_same_type_and_shape_in_every_model() -> None:
    forms: dict[str, tuple[str, str]] = {}
    for model, tensor in all_tensors():
        form = tensor.kind, tensor.dims
        assert forms.setdefault(tensor.name, form) == form, f"{model}: {tensor.name}"


def test_lmm_unary_takes_what_lmm_takes_and_returns_what_it_returns_with_the_answer() -> None:
    inputs = [one for one in tensors("lmm", "input") if one.name != "describe"]
    assert tensors("lmm_unary", "input") == inputs
    outputs = [one for one in tensors("lmm_unary", "output") if one.name != "answer"]
    assert outputs == tensors("lmm", "output")


def test_both_ensembles_take_the_inputs_that_the_codec_reads() -> None:
    assert tensors("visual_retrieval", "input") == tensors("video_analytics", "input")
    assert set(names("video_analytics", "input")) == set(INPUTS)
    assert set(INPUTS) | FEATURE_INPUTS <= set(names("lmm", "input"))


def test_the_vision_encoder_returns_what_its_service_makes() -> None:
    service: Any = SimpleNamespace(_stamps=ArrivalStamps(b""))
    none = EncodedImages(np.zeros((0, 3)), np.zeros((0, 6)), np.zeros((0, 2)), ())
    made = VisionService._to_tensors(service, none, 0.0).keys()
    assert set(names("vision_encoder", "output")) == made
    assert made >= FEATURE_INPUTS


@pytest.mark.parametrize("model", MODELS)
def test_an_ensembles_steps_use_tensors_that_the_models_have(model: str) -> None:
    text = (REPOSITORY / model / "config.pbtxt").read_text()
    for step in text.split("model_name: ")[1:]:
        served = step.split('"')[1]
        for which in ("input", "output"):
            keys = re.findall(rf'{which}_map {{\s+key: "(\w+)"', step)
            assert keys
            assert set(keys) <= set(names(served, which)), f"{model}: {served}"


def test_every_model_has_a_config_with_its_own_name() -> None:
    assert len(MODELS) == 6
    for model in MODELS:
        assert f'name: "{model}"' in (REPOSITORY / model / "config.pbtxt").read_text()


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
