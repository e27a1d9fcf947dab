"""Tests of alert rules: their conditions, and when events begin and end."""

from __future__ import annotations

import random
from typing import Any

import pytest

pytest.importorskip("pydantic", reason="the extra watch is not installed")

from pydantic import ValidationError

from tests.support.watching import answer
from vlora.strict_yaml import describe
from vlora.watch.rules import AlertRule, AlertState, Condition

PERSON = {"label": "person", "box": [1, 2, 30, 40]}
DRAWN = 60


def rule(**fields: Any) -> AlertRule:
    return AlertRule.model_validate({"name": "people", "when": {"equals": "yes"}, **fields})


@pytest.mark.parametrize(
    ("when", "given", "score"),
    [
        ({"equals": "Yes"}, {"text": " yes\n"}, 1.0),
        ({"equals": "yes"}, {"text": "yes, there is"}, None),
        ({"contains": "PERSON"}, {"text": "a person walks"}, 1.0),
        ({"contains": "cat"}, {"text": "a person walks"}, None),
        ({"regex": r"\b[2-9] people"}, {"text": "there are 3 people"}, 1.0),
        ({"regex": r"^\d"}, {"text": "there are 3 people"}, None),
        ({"yes_probability": 0.5}, {"yes": 0.5}, 0.5),
        ({"yes_probability": 0.5}, {"yes": 0.49}, None),
        ({"yes_probability": 0.0}, {"yes": None}, None),
        ({"label": "person"}, {"text": "a car", "objects": [PERSON]}, 1.0),
        ({"label": "person"}, {"objects": [PERSON | {"score": 0.4}]}, 0.4),
        ({"label": "person", "score": 0.5}, {"objects": [PERSON | {"score": 0.4}]}, None),
        ({"label": "fire"}, {"text": "fire", "scores": {"fire": 0.6, "none": 0.4}}, 0.6),
        ({"label": "fire"}, {"text": "none", "scores": {"fire": 0.4, "none": 0.6}}, None),
        ({"label": "fire", "score": 0.3}, {"text": "none", "scores": {"fire": 0.4}}, 0.4),
        ({"label": "fire", "score": 0.3}, {"text": "fire", "scores": {"none": 1.0}}, None),
        ({"label": "fire", "score": 0.0}, {"scores": {"fire": float("nan")}}, None),
        ({"contains": "fire", "yes_probability": 0.5}, {"text": "fire", "yes": 0.7}, 0.7),
        ({"contains": "fire", "yes_probability": 0.5}, {"text": "smoke", "yes": 0.7}, None),
    ],
)
def test_a_condition_holds_with_the_score_of_its_evidence(
    when: dict[str, Any], given: dict[str, Any], score: float | None
) -> None:
    assert Condition.model_validate(when).score_of(answer(**given)) == score


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"when": {"contians": "x"}}, "when: unknown key 'contians'; did you mean 'contains'?"),
        ({"when": {}}, "when: needs one of label, score, contains, equals, regex, yes_p"),
        ({"when": {"score": 0.5}}, "when: score needs label, whose score it is"),
        ({"when": {"regex": "("}}, "when.regex: '(' is not a regular expression: missing )"),
        (
            {"when": {"yes_probability": 1.5}},
            "yes_probability is 1.5, but should be less than or equal to 1",
        ),
        ({"when": {"equals": True}}, "when.equals: is read by YAML as True; put words such as yes"),
        ({"begin": "3 of 2"}, "begin: must be like '2 of 3', with at most 1000, not '3 of 2'"),
        ({"begin": True}, "begin: must be like '2 of 3'"),
        ({"pause_seconds": -1.0}, "pause_seconds is -1.0, but should be greater than or equal"),
    ],
)
def test_a_wrong_rule_is_refused_with_its_key(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError) as caught:
        rule(**fields)
    assert message in describe(caught.value)


def test_a_regular_expression_that_takes_too_long_changes_nothing() -> None:
    state = AlertState(rule(when={"regex": "(a+)+$"}), "gate")
    with pytest.raises(TimeoutError):
        state.take(answer("a" * 5000 + "b"))
    assert [event.end for event in state.take(answer("aa", began=1.0))] == [None]


def test_an_event_has_the_times_of_its_answers_and_the_best_one() -> None:
    state = AlertState(rule(when={"yes_probability": 0.5}, begin="2 of 3", end="2 of 2"), "gate")
    scores = [0.1, 0.9, 0.2, 0.6, 0.1, 0.7, 0.1, 0.1]
    events = [one for t, yes in enumerate(scores) for one in state.take(answer(yes=yes, began=t))]
    begin, end = events
    assert (begin.begin, begin.end, begin.score, begin.answer.began) == (1, None, 0.9, 1)
    assert (end.begin, end.end, end.score, end.id) == (1, 5.9, 0.9, begin.id)


def plain(rule: AlertRule, times: list[float], hits: list[bool]) -> list[tuple[float, float]]:
    """Return the begin and end of all events, by looking at all answers again for each."""
    events: list[tuple[float, float]] = []
    kept: list[int] = []  # numbers of the answers since the last change
    begin: float | None = None
    last_hit = deaf_until = float("-inf")
    for i, time in enumerate(times):
        is_silent = i > 0 and time - (times[i - 1] + 0.9) > rule.silence_seconds
        if is_silent:
            kept = []
            if begin is not None:
                events.append((begin, last_hit))
                begin, deaf_until = None, last_hit + rule.pause_seconds
        if begin is None and time < deaf_until:
            continue
        kept.append(i)
        last_hit = time + 0.9 if hits[i] else last_hit
        window = kept[-(rule.begin.size if begin is None else rule.end.size) :]
        if begin is None and sum(hits[j] for j in window) >= rule.begin.needed:
            begin, kept = min(times[j] for j in window if hits[j]), []
        elif begin is not None and sum(not hits[j] for j in window) >= rule.end.needed:
            events.append((begin, last_hit))
            begin, kept, deaf_until = None, [], last_hit + rule.pause_seconds
    return events + ([(begin, last_hit)] if begin is not None else [])


@pytest.mark.parametrize("seed", range(DRAWN))
def test_drawn_answers_give_the_events_of_a_plain_twin(seed: int) -> None:
    draw = random.Random(seed)
    windows = [(k, n) for n in range(1, 6) for k in range(1, n + 1)]
    drawn = rule(
        **{key: "{} of {}".format(*draw.choice(windows)) for key in ("begin", "end")},
        pause_seconds=draw.choice([0.0, 0.0, 3.0, 10.0]),
        silence_seconds=draw.choice([5.0, 120.0]),
    )
    times, hits, time, hit = [], [], 0.0, False
    for _ in range(300):
        time += draw.choice([1.0, 1.0, 1.0, 2.0, 7.0])
        hit ^= draw.random() < 0.3
        times.append(time)
        hits.append(hit)
    state = AlertState(drawn, "gate")
    taken = [
        event
        for time, hit in zip(times, hits, strict=True)
        for event in state.take(answer("yes" if hit else "no", began=time))
    ] + state.finish("stopped")
    begins = [event for event in taken if event.end is None]
    ends = [event for event in taken if event.end is not None]
    assert [one.id for one in begins] == [one.id for one in ends]
    assert len({one.id for one in begins}) == len(begins)
    assert [(one.begin, one.end) for one in ends] == plain(drawn, times, hits)


def test_silence_ends_an_event() -> None:
    state = AlertState(rule(silence_seconds=10.0), "gate")
    state.take(answer())
    assert state.expire(10.0) == []
    assert [event.end for event in state.expire(11.0)] == [0.9]
    assert state.expire(100.0) == []


def facts_and_answers(seed: int, wrong: float) -> tuple[list[bool], list[bool]]:
    """Return for each second whether the fact holds, and whether the answer says so.

    Facts last for 6 to 20 s and are 10 to 40 s apart. wrong: share of the answers that are wrong.
    """
    draw = random.Random(seed)
    facts: list[bool] = []
    while len(facts) < 4000:
        facts += [False] * draw.randint(10, 40) + [True] * draw.randint(6, 20)
    return facts, [fact ^ (draw.random() < wrong) for fact in facts]


def figures(facts: list[bool], says: list[bool], drawn: AlertRule) -> tuple[float, float, float]:
    """Return precision and recall of the events, and the mean delay of the right ones in s."""
    state = AlertState(drawn, "gate")
    told = [
        (second, event)
        for second, hit in enumerate(says)
        for event in state.take(answer("yes" if hit else "no", began=float(second)))
        if event.end is None
    ]
    starts = [i for i, fact in enumerate(facts) if fact and not facts[i - 1]]
    start_of: dict[int, int] = {}
    for i, fact in enumerate(facts):
        start_of[i] = i if i in set(starts) else start_of[i - 1] if fact else -1
    right = [(second, start_of[second]) for second, _ in told if facts[second]]
    found: dict[int, int] = {}
    for second, start in right:
        found.setdefault(start, second - start)
    return (
        len(right) / len(told),
        len(found) / len(starts),
        sum(found.values()) / len(found),
    )


def test_right_answers_give_every_event_at_once_and_no_other() -> None:
    facts, says = facts_and_answers(1, 0.0)
    assert figures(facts, says, rule()) == (1.0, 1.0, 0.0)
    assert figures(facts, says, rule(begin="2 of 3", end="3 of 4")) == (1.0, 1.0, 1.0)


def test_counting_answers_keeps_precision_and_recall_if_one_in_twenty_is_wrong() -> None:
    facts, says = facts_and_answers(2, 0.05)
    alone = figures(facts, says, rule())
    counted = figures(facts, says, rule(begin="3 of 4", end="4 of 5"))
    print(f"1 of 1: {alone}\n3 of 4: {counted}")
    assert alone[0] < 0.8
    assert counted[0] >= 0.99
    assert counted[1] >= 0.99
    assert counted[2] <= 3.0
