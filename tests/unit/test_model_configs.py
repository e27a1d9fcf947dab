"""Tests that the `config.pbtxt` files agree on the tensors that models exchange."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest

from vlora.serving.arrivals import ArrivalStamps
from vlora.serving.codec import INPUTS
from vlora.serving.vision_encoder import VisionService
from vlora.vision.features import EncodedImages

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
