"""Tests of the choice of an adapter for requests that name none."""

from __future__ import annotations

from typing import Any

import pytest

from vlora.adapters.errors import ErrorFactory
from vlora.adapters.routing import MAX_WORDS, Router, Skill, read_skills, usual_words
from vlora.errors import InvalidArgument

FACES = Skill("faces", "vqa", 0.9, frozenset({"is", "there", "a", "face"}))
SIGNS = Skill("signs", "vqa", 0.8, frozenset({"what", "is", "written", "on", "the", "sign"}))
DIGITS = Skill("digits", "classify", 0.9, frozenset())
SKILL = {"name": "faces", "task": "vqa", "accuracy": 0.9, "words": ["face"]}


def nothing(_: str) -> bool:
    return False


@pytest.mark.parametrize(
    ("task", "question", "chosen"),
    [
        ("vqa", "Is there a face in this picture?", "portraits"),
        ("vqa", "What does the SIGN say?", "streets"),
        ("vqa", "How many cars?", None),
        ("vqa", "What color is the big circle?", None),
        ("vqa", "", None),
        ("classify", "", "portraits"),
        ("detect", "face", None),
    ],
)
def test_task_and_words_choose_the_adapter(task: str, question: str, chosen: str | None) -> None:
    router = Router({"portraits": [FACES, DIGITS], "streets": [SIGNS], "plain": []})
    assert router.choose(task, question, nothing) == chosen


def test_a_resident_adapter_is_preferred_unless_another_is_clearly_better() -> None:
    better = Skill("faces", "vqa", 0.91, FACES.words)
    best = Skill("faces", "vqa", 0.95, FACES.words)
    router = Router({"one": [FACES], "two": [better]})
    assert router.choose("vqa", "a face?", nothing) == "two"
    assert router.choose("vqa", "a face?", "one".__eq__) == "one"
    router = Router({"one": [FACES], "two": [best]})
    assert router.choose("vqa", "a face?", "one".__eq__) == "two"


def test_a_rare_word_says_more_than_a_common_one() -> None:
    common = {"is", "there", "a"}
    router = Router(
        {name: [Skill(name, "vqa", 0.9, frozenset({*common, name}))] for name in ("cat", "dog")}
    )
    assert router.choose("vqa", "Is there a dog?", nothing) == "dog"


def test_usual_words_leave_out_rare_ones() -> None:
    questions = ["How many red dots?"] * 60 + ["How many blue dots?"] * 60 + ["Odd word?"]
    assert usual_words(questions) == ["blue", "dots", "how", "many", "red"]
    assert len(usual_words([" ".join(f"w{i}" for i in range(100))])) == MAX_WORDS
    assert usual_words(["", ""]) == []


def test_skills_are_read() -> None:
    (skill,) = read_skills([SKILL], ErrorFactory("a"))
    assert skill == Skill("faces", "vqa", 0.9, frozenset({"face"}))


@pytest.mark.parametrize(
    "value",
    [
        {},
        [1],
        [{**SKILL, "accuracy": "high"}],
        [{**SKILL, "accuracy": 2}],
        [{**SKILL, "accuracy": float("nan")}],
        [{**SKILL, "words": "face"}],
        [{**SKILL, "words": [1]}],
        [{**SKILL, "name": 3}],
        [{**SKILL, "more": 1}],
        [{**SKILL, "words": ["w"] * 33}],
        [SKILL] * 257,
    ],
)
def test_wrong_skills_are_refused(value: Any) -> None:
    with pytest.raises(InvalidArgument, match="skill"):
        read_skills(value, ErrorFactory("a"))
