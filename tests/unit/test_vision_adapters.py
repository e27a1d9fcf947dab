"""Tests of adapters of the vision tower: the encoder reads them, or refuses unusable ones."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.support.small_adapter import edit_config, edit_tensors
from vlora.adapters.catalog import FolderFinder, stamp_of
from vlora.adapters.files import describe_adapter, load_adapter
from vlora.adapters.handle import AdapterHandle, version_of
from vlora.adapters.model_shape import ModelShape
from vlora.engine.checks import admissible
from vlora.errors import AdapterChanging, InvalidArgument, Unavailable
from vlora.model.decoder_config import load_config
from vlora.model.loader import adapter_shape
from vlora.offline.base_weights import BaseWeights
from vlora.offline.convert import ConversionLimits, convert
from vlora.offline.premerge import check_hot
from vlora.request import ImageFeatures, Request
from vlora.sampling import SamplingParams
from vlora.vision.adapters import VisionAdapters

WEIGHTS = "adapter_model.safetensors"
LAYER = "vision_tower.encoder.layers.0.mlp.fc1"
CONNECTOR = "multi_modal_projector.linear_2"


@pytest.fixture(scope="module")
def shape(checkpoint: Path) -> ModelShape:
    return adapter_shape(checkpoint, load_config(checkpoint))


def write(folder: Path, shape: ModelShape, seed: int = 0, prefix: str = "model.") -> Path:
    """Write an adapter of a layer of the tower and one of the connector."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for path in (LAYER, CONNECTOR):
        d_out, d_in = shape.vision()[path]
        module = f"base_model.model.{prefix}{path}"
        tensors[f"{module}.lora_A.weight"] = torch.randn(2, d_in, generator=generator)
        tensors[f"{module}.lora_B.weight"] = torch.randn(d_out, 2, generator=generator)
    folder.mkdir(parents=True)
    save_file(tensors, folder / WEIGHTS)
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["fc1", "linear_2"]}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "adapters"


@pytest.fixture
def adapters(root: Path, shape: ModelShape, adapters_dir: Path) -> Iterator[VisionAdapters]:
    """Return the vision parts of `seeing`, and of `plain`, which has none."""
    write(root / "seeing", shape)
    shutil.copytree(adapters_dir / "attention-r4", root / "plain")
    (root / "empty").mkdir()
    made = VisionAdapters(shape, FolderFinder(root, {}), 1 << 30, None, shape.vision())
    yield made
    made.close()


def test_only_adapters_with_a_vision_part_have_one(adapters: VisionAdapters) -> None:
    assert [adapters.part(name) for name in (None, "plain", "unknown", "empty")] == [None] * 4
    part = adapters.part("seeing")
    assert part is not None
    assert part.pairs.keys() == {LAYER, CONNECTOR}
    assert adapters.part("seeing") is part


def test_a_part_that_exceeds_the_budget_is_used_and_not_kept(root: Path, shape: ModelShape) -> None:
    write(root / "seeing", shape)
    layers = shape.vision()
    adapters = VisionAdapters(shape, FolderFinder(root, {}), 1 << 30, budget=100, layers=layers)
    first, second = adapters.part("seeing"), adapters.part("seeing")
    adapters.close()
    assert first is not None
    assert second is not None
    assert first is not second
    assert first.digest == second.digest


def test_matrices_that_are_no_linear_layers_are_refused(root: Path, shape: ModelShape) -> None:
    """An adapter of any other matrix would fail the batch that its images are encoded in."""
    write(root / "x", shape)
    layers = {LAYER}
    adapters = VisionAdapters(shape, FolderFinder(root, {}), 1 << 30, None, layers)
    with pytest.raises(InvalidArgument, match=f"'x': .* changes '{CONNECTOR}', which is not a lin"):
        adapters.part("x")
    adapters.close()
    table = "vision_tower.embeddings.position_embedding"
    for key in load_file(root / "x" / WEIGHTS):
        edit_tensors(
            root / "x", lambda t, key=key: t.update({key.replace(LAYER, table): t.pop(key)})
        )
    with pytest.raises(InvalidArgument, match=f"{table}.*, which is not a linear layer"):
        describe_adapter("x", root / "x", shape)


@pytest.mark.parametrize("change", ["removed", "replaced"])
@pytest.mark.parametrize("described", [False, True])
def test_an_error_of_files_that_are_being_changed_is_not_kept(
    root: Path, tmp_path: Path, shape: ModelShape, change: str, described: bool
) -> None:
    """The folder is changed and changed back while the encoder does not look at it."""
    write(root / "x", shape)
    adapters = VisionAdapters(shape, FolderFinder(root, {}), 1 << 30, 0, shape.vision())
    adapters.close()
    expected = adapters.part("x") if described else None
    (root / "x").rename(tmp_path / "x")
    if change == "replaced":
        write(root / "x", shape, prefix="")
    with pytest.raises(AdapterChanging, match="'x' is being changed; send the request again"):
        adapters.part("x")
    if change == "replaced":
        shutil.rmtree(root / "x")
    (tmp_path / "x").rename(root / "x")
    found = adapters.part("x")
    assert found is not None
    assert expected is None or found.digest == expected.digest


def test_what_needs_features_before_the_adapter_is_known_is_refused(
    root: Path, shape: ModelShape
) -> None:
    folder = write(root / "x", shape)
    edit_config(folder, alora_invocation_tokens=[1])
    with pytest.raises(InvalidArgument, match="alora_invocation_tokens, which cannot be used with"):
        load_adapter("x", folder, shape)
    edit_config(folder, alora_invocation_tokens=None)
    skill = {"name": "s", "task": "vqa", "accuracy": 0.5, "words": ["a"]}
    (folder / "vlora.json").write_text(json.dumps({"skills": [skill]}))
    with pytest.raises(InvalidArgument, match=r"vlora\.json has 'skills', which cannot"):
        load_adapter("x", folder, shape)


def test_the_digest_covers_the_vision_part(root: Path, shape: ModelShape) -> None:
    first = load_adapter("x", write(root / "x", shape), shape)
    second = load_adapter("y", write(root / "y", shape, seed=1), shape)
    assert first.info.digest != second.info.digest
    assert first.pairs == {}
    assert first.info.vision_ranks == (2,)


def test_a_request_whose_images_another_version_encoded_is_refused(
    root: Path, shape: ModelShape
) -> None:
    folder = write(root / "x", shape)
    stamp = stamp_of(folder)
    seeing = AdapterHandle("x", folder, stamp, describe_adapter("x", folder, shape))
    features = ImageFeatures(np.zeros((1, 4), np.float32), np.array([[0, 1, 1, 1, 1, 0]], np.int32))
    request = Request("r", "p", SamplingParams(), adapter="x", images=features)

    def limit(version: str | None, handle: AdapterHandle | None) -> int:
        images = replace(features, adapter_version=version)
        return admissible(replace(request, images=images), handle, context=100, prompt=10)

    assert limit(version_of(stamp), seeing) == limit(None, seeing) == limit("", None)
    for version, handle in (("", seeing), (version_of(b"older"), seeing), ("some", None)):
        with pytest.raises(Unavailable, match="was changed while the request's images were"):
            limit(version, handle)


def test_only_plain_parts_are_converted_and_none_is_premerged(
    checkpoint: Path, root: Path, shape: ModelShape
) -> None:
    folder = write(root / "x", shape)
    config = load_config(checkpoint)
    with pytest.raises(InvalidArgument, match="changes the vision tower or connector, which pre"):
        check_hot(load_adapter("x", folder, shape), config)
    torch.save(load_file(folder / WEIGHTS), folder / "adapter_model.bin")
    expected = load_adapter("x", folder, shape).info.digest
    (folder / WEIGHTS).unlink()
    base = BaseWeights(checkpoint, config)
    convert(folder, root / "out", shape, base, ConversionLimits())
    assert load_adapter("out", root / "out", shape).info.digest == expected
    edit_config(folder, init_lora_weights="pissa")
    with pytest.raises(InvalidArgument, match="connector by pissa, which is converted for the"):
        convert(folder, root / "none", shape, base, ConversionLimits())
