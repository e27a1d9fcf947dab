"""Tests that supported adapter folders are read correctly."""

from __future__ import annotations

import math
import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.support.adapter_store import load_and_pack
from tests.support.device_tensors import DEVICE, separate_devices
from tests.support.memory import peak_growth
from tests.support.small_adapter import (
    HIDDEN,
    PREFIX,
    RANK,
    edit_config,
    edit_tensors,
    key,
)
from vlora.adapters.catalog import find_folders
from vlora.adapters.files import load_adapter
from vlora.adapters.model_shape import ModelShape
from vlora.adapters.store import AdapterStore
from vlora.errors import InvalidArgument, NotFound
from vlora.model.checkpoint import StoredRows


def test_the_scale_is_folded_into_b(folder: Path, model: ModelShape) -> None:
    tensors = load_file(folder / "adapter_model.safetensors")
    pair = load_adapter("x", folder, model).pairs[1, "q_proj"]
    torch.testing.assert_close(pair.a, tensors[key(1, "A")])
    torch.testing.assert_close(pair.b, tensors[key(1, "B")] * (8 / RANK))


def test_rslora_and_alpha_patterns_change_the_scale(folder: Path, model: ModelShape) -> None:
    edit_config(folder, use_rslora=True, alpha_pattern={r"layers\.1\.self_attn\.q_proj": 6})
    tensors = load_file(folder / "adapter_model.safetensors")
    pairs = load_adapter("x", folder, model).pairs
    for layer, alpha in ((0, 8), (1, 6)):
        scale = alpha / RANK**0.5
        torch.testing.assert_close(pairs[layer, "q_proj"].b, tensors[key(layer, "B")] * scale)


def test_mixed_types_and_different_scales_are_read_as_matrix_by_matrix(
    folder: Path, model: ModelShape, monkeypatch: pytest.MonkeyPatch
) -> None:
    types = (torch.float16, torch.float64, torch.bfloat16, torch.float32)

    def cast(tensors: dict[str, torch.Tensor]) -> None:
        for index, name in enumerate(list(tensors)):
            tensors[name] = tensors[name].to(types[index % len(types)])

    edit_tensors(folder, cast)
    edit_config(folder, alpha_pattern={r"layers\.1\..*": 3, r"up_proj": 5})
    read = load_adapter("x", folder, model)
    stored = load_file(folder / "adapter_model.safetensors")
    assert {tensor.dtype for tensor in stored.values()} == set(types)
    for (layer, target), pair in read.pairs.items():
        block = "self_attn" if target == "q_proj" else "mlp"
        a, b = (
            stored[f"{PREFIX}.{layer}.{block}.{target}.lora_{which}.weight"].float()
            for which in "AB"
        )
        scale = (3 if layer == 1 else 5 if target == "up_proj" else 8) / RANK
        assert torch.equal(pair.a, a)
        assert torch.equal(pair.b, b * scale)
    preadv = os.preadv
    # A read may return fewer bytes than requested.
    monkeypatch.setattr(
        os, "preadv", lambda file, buffers, offset: preadv(file, [buffers[0][:7]], offset)
    )
    reread = load_adapter("x", folder, model)
    assert reread.info == read.info
    assert all(torch.equal(reread.pairs[p].b, pair.b) for p, pair in read.pairs.items())


@pytest.mark.parametrize(
    "prefix",
    [
        "base_model.model.model.language_model.layers",
        "base_model.model.language_model.model.layers",
        "base_model.model.model.layers",
        "base_model.model.layers",
        "model.layers",
    ],
)
def test_key_layouts_of_all_transformers_versions_are_read(
    folder: Path, model: ModelShape, prefix: str
) -> None:
    expected = load_adapter("x", folder, model)

    def rename(tensors: dict[str, torch.Tensor]) -> None:
        for name in list(tensors):
            tensors[name.replace(PREFIX, prefix)] = tensors.pop(name)

    edit_tensors(folder, rename)
    assert load_adapter("y", folder, model).info.digest == expected.info.digest


def test_the_digest_depends_on_the_content_and_not_on_the_name(
    folder: Path, model: ModelShape
) -> None:
    digest = load_adapter("x", folder, model).info.digest
    edit_config(folder, lora_dropout=0.5, base_model_name_or_path="elsewhere")
    assert load_adapter("y", folder, model).info.digest == digest
    edit_config(folder, lora_alpha=9)
    assert load_adapter("x", folder, model).info.digest != digest


def test_a_copy_of_the_base_lm_head_is_accepted(folder: Path, model: ModelShape) -> None:
    """PEFT saves such a copy with an adapter of the lm_head."""
    edit_tensors(
        folder, lambda t: t.update({"base_model.model.lm_head.base_layer.weight": model.lm_head()})
    )
    load_adapter("x", folder, model)


def test_a_copy_of_the_lm_head_is_compared_with_the_one_of_a_gpu(
    folder: Path, model: ModelShape
) -> None:
    name = "base_model.model.lm_head.base_layer.weight"
    edit_tensors(folder, lambda t: t.update({name: model.lm_head()}))
    with separate_devices():
        on_gpu = model.lm_head().to(DEVICE)
        load_adapter("x", folder, replace(model, lm_head=lambda: on_gpu))
        on_gpu = on_gpu + 1
        with pytest.raises(InvalidArgument, match="differs from the base model's own lm_head"):
            load_adapter("x", folder, replace(model, lm_head=lambda: on_gpu))


@pytest.mark.parametrize("stored", [False, True], ids=["in-memory", "stored"])
@pytest.mark.parametrize("change", [0.0, 1.0, math.nan])
def test_a_copy_of_the_lm_head_is_compared_without_memory_for_it(
    folder: Path, model: ModelShape, change: float, stored: bool, tmp_path: Path
) -> None:
    head = torch.zeros(1 << 18, HIDDEN * 8, dtype=torch.bfloat16)
    save_file({"lm_head.weight": head}, tmp_path / "head.safetensors")
    rows = StoredRows(
        tmp_path / "head.safetensors", "lm_head.weight", (1 << 18, HIDDEN * 8), head.dtype
    )
    model = replace(
        model,
        vocabulary=head.shape[0],
        hidden=head.shape[1],
        lm_head=lambda: rows if stored else head,
    )
    name = "base_model.model.lm_head.base_layer.weight"
    head[-1, -1] = change
    edit_tensors(folder, lambda t: t.update({name: head}))
    head[-1, -1] = 0.0

    def load() -> None:
        if not change:
            assert load_adapter("x", folder, model).pairs
            return
        with pytest.raises(InvalidArgument, match="differs from the base model's own lm_head"):
            load_adapter("x", folder, model)

    load()  # Everything that is loaded once is loaded now.
    assert peak_growth(load) < head.nbytes / 2


@pytest.mark.parametrize("kind", [True, False, None, "gaussian", "eva", "orthogonal", "mica"])
def test_kinds_of_initialisation_that_keep_the_base_are_accepted(
    folder: Path, model: ModelShape, kind: Any
) -> None:
    edit_config(folder, init_lora_weights=kind, eva_config={"rho": 2.0})
    assert load_adapter("x", folder, model).pairs


def test_an_activated_adapter_has_its_invocation_in_its_digest(
    folder: Path, model: ModelShape
) -> None:
    digests = {load_adapter("x", folder, model).info.digest}
    for tokens in ([3], [3, 4], [29]):
        edit_config(folder, alora_invocation_tokens=tokens)
        info = load_adapter("x", folder, model).info
        assert info.invocation == tuple(tokens)
        digests.add(info.digest)
    assert len(digests) == 4


def test_a_broken_adapter_does_not_affect_others(
    folder: Path, model: ModelShape, tmp_path: Path
) -> None:
    shutil.copytree(folder, tmp_path / "root" / "good")
    shutil.copytree(folder, tmp_path / "root" / "bad")
    edit_config(tmp_path / "root" / "bad", use_dora=True)
    store = AdapterStore(model)
    load_and_pack(store, find_folders(tmp_path / "root", {}))
    assert store.names() == ("good",)
    q_pairs, k_pairs = store.slots.group([(0, "q_proj"), (0, "k_proj")]).pairs
    assert q_pairs[store.slot("good")] is not None
    assert k_pairs[store.slot("good")] is None
    with pytest.raises(InvalidArgument, match=r"adapter 'bad'.*DoRA"):
        store.info("bad")
    with pytest.raises(NotFound, match=r"unknown adapter 'god'; did you mean 'good'.*Known: good"):
        store.info("god")
    for unknown in ("zzz", "golf club"):
        with pytest.raises(NotFound, match=rf"^unknown adapter '{unknown}'\. Known: good$"):
            store.info(unknown)


def test_configured_names_win_over_folders(
    folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("a", "b"):
        shutil.copytree(folder, tmp_path / "root" / name)
    folders = find_folders(tmp_path / "root", {"alias": "a", "a": "b"})
    assert {name: path.name for name, path in folders.items()} == {"a": "b", "b": "b", "alias": "a"}
    assert "'a'" in caplog.text
