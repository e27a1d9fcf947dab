"""Parity of constrained answers with the oracle, token by token."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.questions import Case
from vlora.config import Options
from vlora.engine.engine import Engine
from vlora.request import Output, Request
from vlora.sampling import SamplingParams

CHOICES = ("red", "reddish brown", "blue", "a blue square", "漢字")


@pytest.fixture(scope="module")
def engine(checkpoint: Path, parity_adapters: Path) -> Engine:
    return Engine(Options(model=checkpoint, adapters=parity_adapters))


def run_alone(engine: Engine, request: Request) -> list[Output]:
    engine.add(engine.prepare(request), arrival=0.0)
    outputs = []
    while not engine.idle:
        outputs += engine.step()
    return outputs


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
        request = Request(
            id=f"c{index}",
            prompt=case.question.prompt,
            sampling=params,
            adapter=case.question.adapter,
            images=case.images,
        )
        outputs = run_alone(engine, request)
        assert "".join(output.text for output in outputs) == greedy_choice(case, choices)
        assert outputs[-1].finish_reason == "stop"


@pytest.mark.parametrize("seed", range(6))
def test_a_sampled_choice_is_always_one_of_the_set(engine: Engine, seed: int) -> None:
    params = SamplingParams.parse({"temperature": 3.0, "seed": seed, "choices": list(CHOICES)})
    outputs = run_alone(engine, Request(id="s", prompt="<s>which?", sampling=params))
    assert "".join(output.text for output in outputs) in CHOICES


def test_a_choice_fits_into_max_tokens(engine: Engine) -> None:
    required = len(engine.admission.reader.tokenizer("reddish brown")["input_ids"])
    for seed in range(6):
        params = SamplingParams.parse(
            {"temperature": 3.0, "seed": seed, "choices": list(CHOICES), "max_tokens": required + 4}
        )
        outputs = run_alone(engine, Request(id="s", prompt="<s>which?", sampling=params))
        assert "".join(output.text for output in outputs) in CHOICES
        assert outputs[-1].num_output_tokens <= required + 4
