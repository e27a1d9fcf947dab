"""Tests of structured answers of the engine: their content, and that nothing else changes."""

from __future__ import annotations

import json
import os
import random
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import regex

from tests.support.engine_client import Collector, endless, request, run_together, tokens_of
from tests.support.grammars import HOSTILE, draw_schema
from tests.support.many_adapters import finish
from vlora.config import Limits, Options
from vlora.engine.engine import Engine
from vlora.engine.loop import EngineLoop
from vlora.engine.rows import HeldRows
from vlora.errors import Unsupported, VLoraError
from vlora.request import Output, Request, TokenLogprob
from vlora.sampling import SamplingParams
from vlora.structured.grammar import Grammar

SCHEMAS = int(os.environ.get("VLORA_DRAWN_SCHEMAS", "40"))
"""Number of schemas that are drawn."""

DEMO = Path(__file__).parents[2] / "tools" / "demo" / "checkpoint"

ANY = {"regex": "(?s:.*)"}


@pytest.fixture
def engine(engine: Engine) -> Iterator[Engine]:
    yield engine
    engine.close()
    engine.check_integrity()


def structured(request_id: str, structure: dict[str, Any] | None, **keys: Any) -> Request:
    """Return a request whose answer follows a structure."""
    raw = {"temperature": 1.0, "seed": len(request_id), "structured_outputs": structure} | keys
    return request(request_id, sampling=SamplingParams.parse(raw))


def run(engine: Engine, item: Request) -> list[Output]:
    """Run one request alone; return its outputs."""
    return run_together(engine, item)[item.id]


def text(outputs: list[Output]) -> str:
    return "".join(output.text for output in outputs)


PATTERNS = {
    "colours": "(red|green|blue)( (square|circle))?",
    "date": "20[0-9]{2}-(0[1-9]|1[0-2])-[0-3][0-9]",
    "umlauts": "[äöü]{3,7}ß",
    "words": "([a-z]{2,6} ){1,4}[a-z]{2,6}",
}


@pytest.mark.parametrize("temperature", [0, 0.7, 3.0])
def test_every_complete_answer_is_of_the_structure(engine: Engine, temperature: float) -> None:
    common = {"temperature": temperature, "max_tokens": 60}
    requests = [
        structured(f"{name} {seed}", {"regex": pattern}, seed=seed, **common)
        for name, pattern in PATTERNS.items()
        for seed in range(3)
    ]
    for name, outputs in run_together(engine, *requests).items():
        assert outputs[-1].finish_reason == "stop"
        assert regex.fullmatch(PATTERNS[name.split()[0]], text(outputs)), (name, text(outputs))


def test_a_structure_that_allows_everything_changes_no_token() -> None:
    """Compare only answers without special tokens among the candidates: ANY excludes these."""
    engine = Engine(Options(model=DEMO))
    compared = 0
    for prompt in ("<s>what is it?", "<s>how many?", "<s>a red", "<s>1 2 3", "<s>the"):
        for temperature in (0, 0.8, 2.0):
            keys = {"temperature": temperature, "top_k": 4, "max_tokens": 8, "logprobs": 4}
            free = run(engine, replace(structured("one", None, **keys), prompt=prompt))
            if not all(is_text(engine, entry.token_id) for entry in candidates(free)):
                continue
            bound = run(engine, replace(structured("one", ANY, **keys), prompt=prompt))
            assert tokens_of(bound) == tokens_of(free)
            assert text(bound) == text(free)
            assert candidates(bound) == candidates(free)
            assert bound[-1].finish_reason == free[-1].finish_reason
            compared += temperature > 0
    assert compared >= 3
    engine.close()


def candidates(outputs: list[Output]) -> list[TokenLogprob]:
    return [entry for output in outputs for token in output.logprobs or () for entry in token]


def is_text(engine: Engine, token: int) -> bool:
    token_bytes = engine.admission._vocabulary.bytes_of[token]
    return token in engine.config.eos_tokens or bool(token_bytes and token_bytes.isascii())


MIXED = [
    structured("json", {"json": {"type": "array", "items": {"type": "integer"}, "minItems": 9}}),
    structured("pattern", {"regex": "([a-z]{2,6} ){9,20}"}, temperature=2.0),
    structured("greedy", {"regex": "[a-f]{30}"}, temperature=0),
    structured("free", None, max_tokens=40),
    structured("choices", {"choice": ["red", "green"]}),
    structured("penalties", {"regex": "[a-z ]+"}, repetition_penalty=1.3, top_k=20, max_tokens=40),
]
"""Requests of every kind."""


@pytest.fixture(params=[4096, 81], ids=["pages for all", "few pages"])
def mixed(request: pytest.FixtureRequest, checkpoint: Path) -> Iterator[Engine]:
    """Yield an engine for the requests of MIXED. With few pages it preempts some of them."""
    sizes = {"kv_cache_tokens": request.param, "max_model_len": 81, "block_size": 3}
    engine = Engine(Options(model=checkpoint, max_num_seqs=6, **sizes))
    yield engine
    assert (engine.stats().preemptions > 0) == (request.param == 81)
    engine.close()


@pytest.fixture(scope="module")
def answers_of_mixed(checkpoint: Path) -> dict[str, list[Output]]:
    engine = Engine(Options(model=checkpoint, max_num_seqs=6, max_model_len=81))
    outputs = run_together(engine, *MIXED)
    engine.close()
    return outputs


@pytest.mark.parametrize("late", [False, True])
def test_a_preemption_or_a_late_mask_does_not_change_an_answer(
    mixed: Engine,
    answers_of_mixed: dict[str, list[Output]],
    monkeypatch: pytest.MonkeyPatch,
    late: bool,
) -> None:
    """Read replies at random, so that most masks are late, some even for preempted requests."""
    if late:
        rng, receive = random.Random(1), Grammar.receive

        def rarely(grammar: Grammar) -> None:
            if rng.random() < 0.2:
                receive(grammar)

        monkeypatch.setattr(Grammar, "receive", rarely)
        monkeypatch.setattr(HeldRows, "wait_for", lambda rows, states: None)
    found = run_together(mixed, *MIXED)
    for name, outputs in answers_of_mixed.items():
        assert tokens_of(found[name]) == tokens_of(outputs)
        assert text(found[name]) == text(outputs)
        assert found[name][-1].finish_reason == outputs[-1].finish_reason
    if late:
        assert mixed.stats().rows_held > 20
    assert mixed.stats().generated_tokens == sum(map(len, map(tokens_of, found.values())))


def test_structured_answers_are_counted(engine: Engine) -> None:
    before = engine.stats()
    assert (before.grammars, before.masks, before.grammar_seconds) == (0, 0, 0.0)
    found = run_together(
        engine,
        structured("free", None, max_tokens=5),
        structured("colour", {"regex": "red|green"}, max_tokens=20),
        structured("another", {"regex": "red|green"}, max_tokens=20),
    )
    with pytest.raises(VLoraError):
        engine.prepare(structured("wrong", {"regex": "("}))
    stats = engine.stats()
    assert (stats.grammars, stats.grammars_compiled, stats.grammars_refused) == (1, 1, 1)
    # The last token needs no mask after it.
    assert stats.masks == len(tokens_of(found["colour"])) + len(tokens_of(found["another"]))
    assert stats.mask_seconds > 0
    assert stats.grammar_seconds > 0
    assert stats.structured_failed == 0


def test_an_answer_that_its_structure_ends_is_counted(engine: Engine) -> None:
    engine.add(engine.prepare(structured("doomed", ANY, max_tokens=50)), arrival=0.0)
    engine.step()
    (entry,) = engine.admission.grammars._entries.values()
    os.kill(entry.compiled.result().process, signal.SIGKILL)
    assert finish(engine)["doomed"].error is not None
    assert engine.stats().structured_failed == 1
    assert engine.stats().failed == 1


def test_a_held_request_can_be_aborted(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Grammar, "receive", lambda grammar: None)
    engine.add(engine.prepare(structured("held", ANY)), arrival=0.0)
    for _ in range(4):
        assert engine.step() == []
    assert len(engine._held_rows) == 1
    assert not engine.stalled
    (last,) = engine.abort("held")
    assert last.error is not None
    assert not engine._held_rows
    assert engine.idle


def test_log_probabilities_are_those_of_the_unconstrained_model(engine: Engine) -> None:
    common = {"temperature": 0, "max_tokens": 1, "logprobs": 20}
    free = run(engine, structured("free", None, **common))
    (bound, *_) = run(engine, structured("bound", {"regex": "[0-9]"}, **common))
    assert free[0].logprobs is not None
    assert bound.logprobs is not None
    (of_free,), (of_bound,) = free[0].logprobs, bound.logprobs
    assert [entry.token_id for entry in of_bound if entry.rank <= 20] == [
        entry.token_id for entry in sorted(of_free, key=lambda entry: entry.rank)
    ] or of_bound[0].rank <= 20
    assert of_bound[0].text.isdigit()
    assert of_bound[0].logprob <= of_free[0].logprob


def test_an_answer_that_reaches_its_limit_is_the_beginning_of_the_structure(
    engine: Engine,
) -> None:
    schema = {"type": "object", "properties": {"text": {"type": "string", "minLength": 300}},
              "required": ["text"]}  # fmt: skip
    outputs = run(engine, structured("cut", {"json": schema}, max_tokens=9))
    assert outputs[-1].finish_reason == "length"
    assert len(tokens_of(outputs)) == 9
    assert regex.fullmatch(r'\{\s*"text"\s*:\s*".*', text(outputs), partial=True)


def test_answers_that_share_a_slow_grammar_end_with_the_limit_of_one(checkpoint: Path) -> None:
    """Each mask takes 50 ms. A busy machine makes the processor time less, and the wait longer."""
    engine = Engine(Options(model=checkpoint, limits=Limits(max_mask_seconds=1.0)))
    slow = {"regex": "a{99999}"}
    outputs = run_together(
        engine, *(structured(str(i), slow, max_tokens=200, seed=i) for i in range(6))
    )
    for answer in outputs.values():
        assert "slow token masks of 'structured_outputs'; the limit is 1" in str(answer[-1].error)
    assert engine.admission.grammars.counters.mask_seconds < 3
    engine.close()


def test_a_stop_string_ends_a_structured_answer(engine: Engine) -> None:
    outputs = run(engine, structured("stop", {"regex": "a{40}b"}, stop="aaaa"))
    assert outputs[-1].finish_reason == "stop"
    assert text(outputs) == ""


def test_a_structured_answer_of_a_task_head_is_refused(engine: Engine) -> None:
    item = replace(structured("head", ANY), adapter="head-r8", use_head=True)
    with pytest.raises(VLoraError, match="cannot be combined with a vision task head"):
        engine.prepare(item)


def test_without_the_package_a_structured_request_is_unsupported(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(Unsupported, match=r"pip install 'vlora\[structured\]'"):
        engine.prepare(structured("none", ANY))
    assert run(engine, structured("choice", {"choice": ["a", "b"]}))[-1].text in "ab"


def test_grammars_are_given_back(engine: Engine) -> None:
    """Check requests that end, are aborted, and are never queued."""
    item = structured("one", ANY, max_tokens=3)
    run_together(engine, item)
    engine.add(engine.prepare(item), arrival=0.0)
    engine.abort("one")
    engine.discard(engine.prepare(item))
    (entry,) = engine.admission.grammars._entries.values()
    assert entry.users == 0


@pytest.mark.slow
def test_every_answer_to_a_drawn_schema_is_valid(checkpoint: Path) -> None:
    """Answers of an untrained model are drawn at temperature 1. Those that end are validated."""
    options = Options(model=checkpoint, max_num_seqs=16, limits=Limits(max_grammars=SCHEMAS + 1))
    engine = Engine(options)
    seed = random.randrange(2**32)
    rng = random.Random(seed)
    schemas = {f"schema {index}": draw_schema(rng) for index in range(SCHEMAS)}
    requests = [
        structured(name, {"json": schema}, seed=rng.randrange(2**32))
        for name, schema in schemas.items()
    ]
    ended = 0
    for name, outputs in run_together(engine, *requests).items():
        last, answer = outputs[-1], text(outputs)
        assert last.error is None, (seed, name, last.error)
        if last.finish_reason == "stop":
            jsonschema.validate(json.loads(answer), schemas[name])
            ended += 1
        else:
            assert last.finish_reason == "length", (seed, name)
    engine.close()
    print(f"{ended} of {SCHEMAS} answers ended and are valid (seed {seed})")
    assert ended >= 0.97 * SCHEMAS


@pytest.mark.slow
def test_hostile_structures_harm_no_other_request(checkpoint: Path) -> None:
    """Each gets a typed error or a bounded answer; all others are answered as without them."""
    engine = Engine(Options(model=checkpoint, max_num_seqs=24))
    schema = {"type": "array", "items": {"type": "integer"}, "maxItems": 5}
    healthy = [
        structured("healthy json", {"json": schema}, max_tokens=40),
        structured("healthy words", {"regex": PATTERNS["words"]}, max_tokens=40),
        request("healthy", max_tokens=200),
        structured("healthy draws", None, max_tokens=200, ignore_eos=True),
    ]
    expected = {
        name: tokens_of(outputs) for name, outputs in run_together(engine, *healthy).items()
    }
    loop, sink = EngineLoop(engine, max_waiting=200), Collector()

    def attack(name: str) -> VLoraError | None:
        """Return the error that refuses a hostile structure, None if it is accepted."""
        hostile = SamplingParams(
            temperature=1.0, seed=1, max_tokens=10, structured_outputs=HOSTILE[name]
        )
        try:
            loop.submit(request(name, sampling=hostile), sink)
        except VLoraError as error:
            return error
        return None

    with ThreadPoolExecutor(len(HOSTILE)) as threads:
        attacks = {name: threads.submit(attack, name) for name in HOSTILE}
        for attempt in range(6):
            for item in healthy:
                name = f"{item.id} {attempt}"
                loop.submit(replace(item, id=name), sink)
                assert sink.last(name).error is None
                assert sink.tokens(name) == expected[item.id]
    for name, attempted in attacks.items():
        error = attempted.result(120) or sink.last(name, patience=120).error
        assert error is None or error.code in ("INVALID_ARG", "UNAVAILABLE", "UNSUPPORTED"), name
    loop.submit(endless("after"), sink)
    sink.wait(lambda: len(sink.tokens("after")) > 3)
    loop.shutdown(drain_seconds=0.0)
