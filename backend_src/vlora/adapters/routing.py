"""Choice of an adapter for requests that name none, by task and question.

The V-LoRA paper mentions routing as an alternative (footnote 4). Each adapter declares its
*skills*: the task, usual words and measured accuracy of one kind of request.
"""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from vlora.adapters.errors import ErrorFactory, check_tasks, is_names

MIN_FIT = 0.5  # Fit, from 0 to 1, below which no adapter is chosen, so that the base model answers.
# Maximum loss of accuracy, from 0 to 1, that is accepted for an adapter that is resident already.
SLACK = 0.02
# Maximum number of characters of a question that are read; the rest is ignored.
MAX_QUESTION = 4096
MAX_SKILLS = 256  # Maximum number of skills per adapter.
MAX_WORDS = 32  # Maximum number of words per skill.
# Minimum share of a skill's questions that must contain a word for the skill to declare it.
MIN_SHARE = 0.02

_WORD = re.compile(r"\w+")


@dataclass(frozen=True)
class Skill:
    """One kind of request that an adapter was trained for.

    words: lower-case words of its questions; empty if its requests have no question.
    accuracy: accuracy on held-out data, from 0 to 1.
    """

    name: str
    task: str
    accuracy: float
    words: frozenset[str]


def words_of(text: str) -> frozenset[str]:
    """Return the lower-case words in the first MAX_QUESTION characters of a text."""
    return frozenset(_WORD.findall(text[:MAX_QUESTION].lower()))


def usual_words(questions: Sequence[str]) -> list[str]:
    """Return the most frequent words of the questions, at most MAX_WORDS, in alphabetical order."""
    counts = Counter(word for question in questions for word in words_of(question))
    least = MIN_SHARE * len(questions)
    ranked = sorted(counts.items(), key=lambda pair: (-pair[1], pair[0]))
    return sorted(word for word, count in ranked[:MAX_WORDS] if count >= least)


def read_skills(value: Any, invalid: ErrorFactory) -> tuple[Skill, ...]:
    """Return the skills in the value of `skills` in `vlora.json`. Raises InvalidArgument."""
    if not isinstance(value, list) or not all(map(_is_skill, value)):
        raise invalid(
            "must give 'skills' as a list of objects with 'name', 'task', an 'accuracy' from 0 to 1"
            " and 'words', a list of strings"
        )
    if len(value) > MAX_SKILLS or any(len(one["words"]) > MAX_WORDS for one in value):
        limits = f"more than {MAX_SKILLS} skills, or a skill of more than {MAX_WORDS} words"
        raise invalid(f"has {limits}")
    check_tasks("'skills'", list(dict.fromkeys(one["task"] for one in value)), invalid)
    return tuple(Skill(**{**one, "words": words_of(" ".join(one["words"]))}) for one in value)


def _is_skill(one: Any) -> bool:
    return (
        isinstance(one, dict)
        and one.keys() == {"name", "task", "accuracy", "words"}
        and is_names([one["name"], one["task"]])
        and type(one["accuracy"]) in (int, float)
        and 0 <= one["accuracy"] <= 1
        and isinstance(one["words"], list)
        and all(isinstance(word, str) for word in one["words"])
    )


class Router:
    """Chooses adapters by their skills. Immutable, so any thread may use it."""

    def __init__(self, skills: Mapping[str, Iterable[Skill]]) -> None:
        self._by_task: dict[str, list[tuple[str, Skill]]] = defaultdict(list)
        for name, listed in skills.items():
            for skill in listed:
                self._by_task[skill.task].append((name, skill))
        holders = Counter(
            word for pairs in self._by_task.values() for _, skill in pairs for word in skill.words
        )
        count = sum(map(len, self._by_task.values()))
        # A word weighs more if fewer skills have it, as in TF-IDF. A word that no skill has gets
        # the largest weight, that of a word of one skill. So a question with such words, which is
        # probably for the base model, resembles every skill less.
        self._weights = {word: math.log(1 + count / held) for word, held in holders.items()}
        self._unknown_weight = math.log(1 + count)

    def choose(self, task: str, question: str, resident: Callable[[str], bool]) -> str | None:
        """Return the adapter whose skill fits a request best, or None if no skill fits.

        Of adapters whose skills fit equally well, those count whose accuracy is at most SLACK below
        the best. One for whose name `resident` is true is preferred, then the most accurate one.
        """
        pairs = self._by_task.get(task, ())
        asked = words_of(question)
        fits = [(self._fit(asked, skill), name, skill) for name, skill in pairs]
        best = max((fit for fit, _, _ in fits), default=0.0)
        if best < MIN_FIT:
            return None
        equal = [(name, skill) for fit, name, skill in fits if math.isclose(fit, best)]
        least = max(skill.accuracy for _, skill in equal) - SLACK
        good = [(name, skill) for name, skill in equal if skill.accuracy >= least]
        name, _ = max(good, key=lambda pair: (resident(pair[0]), pair[1].accuracy, pair[0]))
        return name

    def _fit(self, asked: frozenset[str], skill: Skill) -> float:
        # From 0 to 1: the share of the words that the skill has, where rare words weigh more.
        if not asked:
            return float(not skill.words)
        return self._weight(asked & skill.words) / self._weight(asked)

    def _weight(self, words: frozenset[str]) -> float:
        return math.fsum(self._weights.get(word, self._unknown_weight) for word in sorted(words))
