"""Parity of constrained answers with the oracle, token by token."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.support.engine_client import run_together
from tests.support.questions import Case
from vlora.config import Options
from vlora.engine.engine import Engine
from vlora.errors import InvalidArgument
from vlora.request import Request
from vlora.sampling import SamplingParams

CHOICES = ("red", "reddish brown", "blue", "a blue square", "漢字")


@pytest.fixture(scope="module")
def engine(checkpoint: Path, parity_adapters: Path) -> Engine:
    return Engine(Options(model=checkpoint, adapters=parity_adapters))


def text_of(engine: Engine, request: Request) -> str:
    """Return the answer to a request that runs alone."""
    (outputs,) = run_together(engine, request).values()
    assert outputs[-1].finish_reason == "stop"
    return "".join(output.text for output in outputs)


def greedy_choice(case: Case, choices: tuple[str, ...]) -> str:
    """Return the oracle's answer: at each position the best token that can still lead to a choice.

    Tries every token of the vocabulary with every choice as text.
    """
    tokenizer = case.oracle.tokenizer
    spellings = {text: choice for choice in choices for text in (choice, " " + choice)}
    eos = tokenizer.eos_token_id
    texts = {
        token: tokenizer.decode([token])
        for token in range(len(tokenizer))
        if token not in tokenizer.all_special_ids
    }
    tokens: list[int] = []
    while True:
        answer = "".join(texts[token] for token in tokens)
        longer = [s for s in spellings if s.startswith(answer) and s != answer]
        if answer in spellings and not longer:
            return spellings[answer]
        allowed = [
            token
            for token, text in texts.items()
            if text and any(spelling.startswith(answer + text) for spelling in longer)
        ] + [eos] * (answer in spellings)
        logits = case.oracle.logits(case.question, tokens)[-1]
        best = max(allowed, key=lambda token: float(logits[token]))
        if best == eos:
            return spellings[answer]
        tokens.append(best)


@pytest.mark.parametrize("choices", [CHOICES[:4], ("yes", "no"), ("no", "none", "not one")])
def test_the_choice_equals_the_oracles(
    engine: Engine, cases: list[Case], choices: tuple[str, ...]
) -> None:
    for index, case in enumerate(cases[1::4]):
        if case.question.use_head:
            continue
        params = SamplingParams.parse({"temperature": 0, "choices": list(choices)})
        request = replace(case.request(f"c{index}"), sampling=params)
        assert text_of(engine, request) == greedy_choice(case, choices)


def test_probabilities_of_words_are_the_oracles_at_the_first_token(
    engine: Engine, cases: list[Case]
) -> None:
    keys = {"word_probabilities": ["yes", "Circle"], "choices": ["a", "blue"], "max_tokens": 9}
    params = SamplingParams.parse(keys | {"temperature": 0.7, "repetition_penalty": 1.5})
    for index, case in enumerate(one for one in cases[1::4] if not one.question.use_head):
        request = replace(case.request(f"w{index}"), sampling=params)
        (outputs,) = run_together(engine, request).values()
        found = torch.softmax(case.oracle.logits(case.question)[0].double(), dim=0)
        texts = [case.oracle.tokenizer.decode([token]).strip() for token in range(len(found))]
        assert texts.count("yes") > 1
        expected = {
            word: sum(float(found[i]) for i, text in enumerate(texts) if text in forms)
            for word, forms in (("yes", ("yes", "Yes")), ("Circle", ("circle", "Circle")))
        }
        assert outputs[-1].word_probabilities == pytest.approx(expected, rel=1e-3)
    with pytest.raises(InvalidArgument, match="'zebra', which is no token"):
        engine.prepare(replace(request, sampling=replace(params, word_probabilities=("zebra",))))


@pytest.mark.parametrize("spare", [None, 4])
def test_a_sampled_choice_is_always_one_of_the_set(engine: Engine, spare: int | None) -> None:
    """spare: number of tokens that `max_tokens` leaves beyond those of a choice, if it is given."""
    required = len(engine.admission.reader.tokenizer("reddish brown")["input_ids"])
    limit = {} if spare is None else {"max_tokens": required + spare}
    for seed in range(6):
        keys = {"temperature": 3.0, "seed": seed, "choices": list(CHOICES)}
        params = SamplingParams.parse(keys | limit)
        request = Request(id="s", prompt="<s>which?", sampling=params)
        assert text_of(engine, request) in CHOICES
