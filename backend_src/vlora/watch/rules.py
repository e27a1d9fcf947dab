"""Alert rules: when the answers of a camera begin and end an event.

The state machine is pure: it takes answers with their times, and has no clock of its own.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterator
from typing import Annotated, Any, NamedTuple

import regex
from pydantic import BeforeValidator, Field, field_validator, model_validator

from vlora.strict_yaml import Float, StrictModel
from vlora.watch.answers import Answer
from vlora.watch.events import Event

MAX_WINDOW = 1000  # Maximum number of answers that a rule looks back on.
# Limits of one search with a regular expression: characters of the text, and seconds.
MAX_SEARCHED, SEARCH_SECONDS = 20_000, 0.05

Share = Annotated[Float, Field(ge=0, le=1)]
Seconds = Annotated[Float, Field(ge=0)]


def _quoted(value: Any) -> Any:
    if isinstance(value, bool):
        raise ValueError(f"is read by YAML as {value}; put words such as yes and no in quotes")
    return value


Text = Annotated[str, BeforeValidator(_quoted), Field(min_length=1, max_length=1000)]


class Window(NamedTuple):
    """At least `needed` of the last `size` answers."""

    needed: int
    size: int


def _read_window(value: Any) -> Any:
    """Return the window that text such as "2 of 3" describes. Raises ValueError."""
    if isinstance(value, Window):
        return value
    found = re.fullmatch(r"\s*([0-9]{1,4}) of ([0-9]{1,4})\s*", str(value))
    if found is None or not 1 <= int(found[1]) <= int(found[2]) <= MAX_WINDOW:
        raise ValueError(f"must be like '2 of 3', with at most {MAX_WINDOW}, not {value!r}")
    return Window(int(found[1]), int(found[2]))


Count = Annotated[Window, BeforeValidator(_read_window)]


class Condition(StrictModel):
    """What must hold of an answer. If several keys are given, all must hold.

    label: label of a box, or of the vision task head: the top one, or with `score` one that has at
      least this probability. contains, equals: text of the answer, in any case.
    regex: regular expression that is searched in the answer.
    yes_probability: minimum probability of the answer "yes". (A key `yes` would be YAML's `true`.)
    """

    label: Text | None = None
    score: Share | None = None
    contains: Text | None = None
    equals: Text | None = None
    regex: Text | None = None
    yes_probability: Share | None = None

    @field_validator("regex")
    @classmethod
    def _compiles(cls, pattern: str | None) -> str | None:
        try:
            if pattern is not None:
                regex.compile(pattern)
        except regex.error as error:
            raise ValueError(f"{pattern!r} is not a regular expression: {error}") from None
        return pattern

    @model_validator(mode="after")
    def _says_something(self) -> Condition:
        if not self.model_fields_set:
            raise ValueError(f"needs one of {', '.join(type(self).model_fields)}")
        if self.score is not None and self.label is None:
            raise ValueError("score needs label, whose score it is")
        return self

    def score_of(self, answer: Answer) -> float | None:
        """Return the score of an answer for which the condition holds; None if it does not.

        It is the lowest of the label's score and the probability of "yes"; 1 for texts alone.

        Raises TimeoutError if the regular expression takes too long on this text.
        """
        scores = list(self._scores(answer))
        return None if None in scores else min(score for score in scores if score is not None)

    def _scores(self, answer: Answer) -> Iterator[float | None]:
        text = answer.text.strip()
        if self.label is not None:
            yield self._label_score(answer, self.label)
        if (least := self.yes_probability) is not None:
            yield answer.yes if answer.yes is not None and answer.yes >= least else None
        if self.contains is not None:
            yield 1.0 if self.contains.casefold() in text.casefold() else None
        if self.equals is not None:
            yield 1.0 if self.equals.strip().casefold() == text.casefold() else None
        if self.regex is not None:
            searched = text[:MAX_SEARCHED]
            found = regex.search(self.regex, searched, timeout=SEARCH_SECONDS)
            yield 1.0 if found else None

    def _label_score(self, answer: Answer, label: str) -> float | None:
        known = [one.get("score") for one in answer.objects if one.get("label") == label]
        # Boxes that the language model writes have no score.
        scores = [1.0 if score is None else float(score) for score in known]
        if label in answer.scores and (self.score is not None or answer.text.strip() == label):
            scores.append(answer.scores[label])
        # NaN, which a broken head may give, fails the comparison.
        return max((score for score in scores if score >= (self.score or 0.0)), default=None)


class AlertRule(StrictModel):
    """A rule of a camera.

    begin, end: an event begins when `when` holds for so many of the last answers, and ends when it
      does not hold for so many. pause_seconds: after an event, answers are ignored for so long.
    silence_seconds: an event also ends if no answer comes for so long, as while a camera is away.
    """

    name: Annotated[str, Field(min_length=1, max_length=100)]
    when: Condition
    begin: Count = Window(1, 1)
    end: Count = Window(1, 1)
    pause_seconds: Seconds = 0.0
    silence_seconds: Annotated[Float, Field(gt=0)] = 120.0


class AlertState:
    """The state of one rule for one camera: idle, or in an event.

    last_hit: Unix seconds of the last frame for which the condition held.
    """

    def __init__(self, rule: AlertRule, camera: str) -> None:
        self.rule = rule
        self.event: Event | None = None
        self._camera = camera
        # Answers since the last change, each with its score, or None if the condition did not hold.
        self._recent: deque[tuple[Answer, float | None]] = deque(maxlen=rule.begin.size)
        self._last_seen = self.last_hit = self._deaf_until = float("-inf")

    def take(self, answer: Answer) -> list[Event]:
        """Return the events that begin and end with this answer. Raises TimeoutError, without a
        change, if the condition cannot be decided."""
        score = self.rule.when.score_of(answer)
        events = self.expire(answer.began)
        self._last_seen = max(self._last_seen, answer.ended)
        if self.event is None and answer.began < self._deaf_until:
            return events
        self._recent.append((answer, score))
        if score is not None:
            self.last_hit = answer.ended
        return events + (self._try_begin() if self.event is None else self._try_end())

    def expire(self, now: float) -> list[Event]:
        """Return the end of the event if no answer has come for `silence_seconds`."""
        if now - self._last_seen <= self.rule.silence_seconds:
            return []
        return self.finish("silence")

    def finish(self, reason: str) -> list[Event]:
        """Forget all answers. Return the end of the event, if there is one."""
        self._recent = deque(maxlen=self.rule.begin.size)
        if self.event is None:
            return []
        ended = self.event.ended_at(self.last_hit, reason)
        self._deaf_until = self.last_hit + self.rule.pause_seconds
        self.event = None
        return [ended]

    def _try_begin(self) -> list[Event]:
        hits = [(answer, score) for answer, score in self._recent if score is not None]
        if len(hits) < self.rule.begin.needed:
            return []
        best, score = max(hits, key=lambda hit: hit[1])
        self.event = Event(self._camera, self.rule.name, hits[0][0].began, None, score, best)
        self._recent = deque(maxlen=self.rule.end.size)
        return [self.event]

    def _try_end(self) -> list[Event]:
        misses = sum(score is None for _, score in self._recent)
        return self.finish("over") if misses >= self.rule.end.needed else []
