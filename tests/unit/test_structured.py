"""Tests of grammars of structured answers: masks, sharing, limits, and their processes."""

from __future__ import annotations

import fcntl
import json
import os
import random
import signal
import socket
import termios
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import jsonschema
import numpy as np
import psutil
import pytest
import regex
from tokenizers import Tokenizer, normalizers
from tokenizers.models import BPE

from benchmarks.structured import grammars_of as grammars_of_size
from benchmarks.structured import make_tokenizer, measure_grammar
from tests.support.grammars import HOSTILE, draw_object
from tests.support.polling import until
from tests.support.processes import children_that_run
from vlora.config import Limits
from vlora.errors import InvalidArgument, Unavailable, VLoraError
from vlora.metrics import GrammarCounters
from vlora.model.tokenizer import Vocabulary
from vlora.structured import messages
from vlora.structured.grammar import Grammar, Matcher, error_of
from vlora.structured.grammars import MAX_IDLE, Grammars, tokenizer_data
from vlora.structured.structure import Structure
from vlora.structured.worker import Speller

EOS = 2
USUAL = set(b'{}",:ab1')  # Bytes that end an answer soon. End-of-text has none.
LIMITS = Limits()


def grammars_of(tokenizer: Any, limits: Limits = LIMITS) -> Grammars:
    size = len(tokenizer)
    tokens = Vocabulary(tokenizer).bytes_of
    return Grammars(lambda: tokenizer_data(tokenizer, tokens, size, [EOS]), size, limits)


@pytest.fixture(scope="module")
def grammars(tokenizer: Any) -> Iterator[Grammars]:
    grammars = grammars_of(tokenizer)
    yield grammars
    grammars.close()
    assert workers() == []


def workers() -> list[psutil.Process]:
    """Return the fork servers of grammars that this process has started."""
    return children_that_run("vlora.structured.worker")


def settle(matcher: Matcher) -> Matcher:
    """Wait until the next mask of a matcher is there, or it has stopped or failed."""
    until(lambda: matcher.grammar.receive() or matcher.ready, pause=1e-4)
    return matcher


def allowed(matcher: Matcher) -> set[int]:
    return set(np.flatnonzero(settle(matcher).mask).tolist())


def spell(matcher: Matcher, tokenizer: Any, text: str) -> None:
    """Add the tokens of a text, each of which must be allowed."""
    for token in tokenizer.encode(text, add_special_tokens=False):
        assert token in allowed(matcher), text
        matcher.advance(token)
    settle(matcher)


@pytest.mark.parametrize(
    ("pattern", "starts"),
    [
        ("(red|green|blue)( square)?", ["", "red"]),
        ("[a-z ]{3,9}", ["", "ab", "abc", "the cat"]),
        ("é+[^x]*", ["", "é", "éé and"]),
        ("-?[0-9]+(\\.[0-9]{1,2})?", ["", "-", "3", "3.", "3.1"]),
        ("a cat|a dog|the.*", ["", "a", "the"]),
    ],
)
def test_a_mask_is_that_of_a_search_through_the_entire_vocabulary(
    grammars: Grammars, tokenizer: Any, vocabulary: Vocabulary, pattern: str, starts: list[str]
) -> None:
    """The oracle matches the text before each token, with that token, by the module `regex`.

    Where the next byte is determined, only the tokens of the tokenizer's own spelling are allowed.
    """
    structure = Structure("regex", pattern)
    grammar = grammars.acquire(structure)
    compiled = regex.compile(pattern)
    for start in starts:
        matcher = grammar.open()
        spell(matcher, tokenizer, start)
        expected = {EOS} if compiled.fullmatch(start) else set()
        for token, token_bytes in enumerate(vocabulary.bytes_of):
            if token_bytes and may_become_match(compiled, start.encode() + token_bytes):
                expected.add(token)
        is_forced = len({vocabulary.bytes_of[token][:1] for token in expected}) == 1
        found = allowed(matcher)
        assert found == expected or (is_forced and found < expected), start
        matcher.close()
    grammars.release(structure, grammar)


def may_become_match(compiled: regex.Pattern[str], text: bytes) -> bool:
    """Return whether some text that begins with these bytes matches."""
    one = [bytes([byte]) for byte in range(128, 192)]
    for rest in (b"", *one, *(byte * n for byte in one[::16] for n in (2, 3))):
        try:
            completed = (text + rest).decode()
        except UnicodeDecodeError:
            continue
        if compiled.fullmatch(completed, partial=True):
            return True
    return False


def test_a_determined_text_is_spelled_as_the_tokenizer_spells_it(
    tokenizer: Any, vocabulary: Vocabulary
) -> None:
    backend = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
    speller = Speller(backend, vocabulary.bytes_of, [EOS])
    for text in ("the red square", "<box>(12,34)</box>", '{"größe": 1}', " a", "漢"):
        assert speller(text) == tokenizer.encode(text, add_special_tokens=False)
        assert b"".join(map(vocabulary.bytes_of.__getitem__, speller(text))) == text.encode()


def test_a_text_is_spelled_without_the_space_that_some_tokenizers_put_before_it() -> None:
    pieces = ["<unk>", "▁", "▁red", "red", "re", "r", "e", "d"]
    merges = [("r", "e"), ("re", "d"), ("▁", "red")]
    model = BPE({piece: token for token, piece in enumerate(pieces)}, merges, unk_token="<unk>")
    backend = Tokenizer(model)
    backend.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    tokens = [b"", b" ", b" red", b"red", b"re", b"r", b"e", b"d"]
    speller = Speller(backend, tokens, [0])
    assert [speller(text) for text in ("red", " red", "der")] == [[3], [2], [7, 6, 5]]
    assert speller("redx") == [3]


@pytest.mark.parametrize("more", [-20, 75])
def test_a_mask_has_the_rows_of_the_model(tokenizer: Any, more: int) -> None:
    size = len(tokenizer) + more
    tokens = Vocabulary(tokenizer, size).bytes_of
    grammars = Grammars(lambda: tokenizer_data(tokenizer, tokens, size, [EOS]), size, LIMITS)
    grammar = grammars.acquire(Structure("regex", "(?s:.*)"))
    mask = settle(grammar.open()).mask
    assert mask.shape == (size,)
    assert not mask[len(tokenizer) :].any()
    assert mask[EOS]
    grammars.close()


def test_many_masks_are_computed_before_the_engine_takes_one(tokenizer: Any) -> None:
    """The buffer of a socket holds a mask of a large vocabulary for each of 16 answers."""
    rows, answers = 151_936, 16
    tokens = Vocabulary(tokenizer).bytes_of
    tokens += [b""] * (rows - len(tokens))
    grammars = Grammars(lambda: tokenizer_data(tokenizer, tokens, rows, [EOS]), rows, LIMITS)
    grammar = grammars.acquire(Structure("regex", "[a-z]+"))
    for _ in range(answers):
        grammar.open()
    assert grammar.file is not None
    expected = answers * (messages.REPLY.size + rows // 32 * 4)

    def waiting() -> int:
        return int.from_bytes(fcntl.ioctl(grammar.file, termios.FIONREAD, bytes(4)), "little")

    until(lambda: waiting() >= expected)
    assert waiting() == expected
    grammars.close()


def test_a_vocabulary_as_large_as_qwen2s_fits_the_limits() -> None:
    tokenizer = make_tokenizer(151_646)
    grammars = grammars_of_size(tokenizer, 151_936, LIMITS)
    schema = {"type": "object", "properties": {"label": {"type": "string", "maxLength": 9}}}
    figures = measure_grammar(
        grammars, {"structured_outputs": {"json": schema}}, answers=16, tokens=8
    )
    grammars.close()
    assert 0 < figures["memory_mib"] * 2**20 < LIMITS.max_grammar_memory / 2
    assert 0 < figures["large_mask_us"] < LIMITS.max_grammar_seconds * 1e6


def test_an_answer_that_nothing_continues_is_stopped(grammars: Grammars, tokenizer: Any) -> None:
    structure = Structure("regex", "ab?")
    grammar = grammars.acquire(structure)
    first, second = grammar.open(), grammar.open()
    spell(first, tokenizer, "a")
    assert EOS in allowed(first)
    assert not first.stopped
    spell(second, tokenizer, "ab")
    assert second.stopped
    assert not first.stopped
    first.close()
    second.close()
    grammars.release(structure, grammar)


def test_requests_with_the_same_structure_share_one_process(grammars: Grammars) -> None:
    structure = Structure("json", '{"type": "object"}')
    with ThreadPoolExecutor(6) as threads:
        results = list(threads.map(grammars.acquire, [structure] * 6))
    assert len(set(map(id, results))) == 1
    matchers = [result.open() for result in results]
    masks = [allowed(matcher) for matcher in matchers]
    assert masks == [masks[0]] * 6
    for matcher in matchers:
        matcher.close()
        grammars.release(structure, results[0])
    assert grammars.acquire(structure) is results[0]
    grammars.release(structure, results[0])


def test_only_some_idle_grammars_are_kept(tokenizer: Any) -> None:
    grammars = grammars_of(tokenizer)
    for index in range(MAX_IDLE + 4):
        structure = Structure("regex", f"a{{{index + 1}}}")
        grammars.release(structure, grammars.acquire(structure))
    assert grammars._server is not None
    server = psutil.Process(grammars._server._process.pid)
    until(lambda: len(server.children()) <= MAX_IDLE)
    grammars.close()


def test_too_many_structures_in_use_are_refused_and_idle_ones_make_room(tokenizer: Any) -> None:
    grammars = grammars_of(tokenizer, replace(LIMITS, max_grammars=2))
    structures = [Structure("regex", letter) for letter in "abc"]
    used = [grammars.acquire(structure) for structure in structures[:2]]
    with pytest.raises(Unavailable, match="2 different structures are in use; the limit is 2"):
        grammars.acquire(structures[2])
    grammars.release(structures[0], used[0])
    grammars.acquire(structures[2])
    assert used[0].ended
    assert not used[1].ended
    grammars.close()
    with pytest.raises(Unavailable, match="shutting down"):
        grammars.acquire(Structure("regex", "d"))


def test_a_tenant_shares_no_structure_and_leaves_some_to_others(tokenizer: Any) -> None:
    grammars = grammars_of(tokenizer, replace(LIMITS, max_grammars=4))
    structures = [Structure("regex", letter) for letter in "abc"]
    used = [grammars.acquire(structure, "alice") for structure in structures[:2]]
    with pytest.raises(Unavailable, match="share of 'max_grammars' is full: 2 structures"):
        grammars.acquire(structures[2], "alice")
    other = grammars.acquire(structures[0], "bob")
    assert other not in used
    grammars.release(structures[0], used[0], "alice")
    assert grammars.acquire(structures[0], "bob") is other
    grammars.close()


def json_of(schema: Any) -> Structure:
    return Structure("json", json.dumps(schema))


# Schemas whose names of 'patternProperties' are all listed.
TWICE: dict[str, Any] = {
    "properties": {"a": {"type": "integer"}},
    "patternProperties": {"^[ab]$": {"minimum": 3}},
    "required": ["b"],
    "additionalProperties": False,
}
TWICE_BY_REFERENCE = {
    "x": {"y/z": TWICE | {"required": []}},
    "allOf": [{"$ref": "#/x/y~1z"}, {"required": ["b"]}],
}


@pytest.mark.parametrize(
    ("structure", "message"),
    [
        (Structure("json", '{"type": "strin"}'), "strin"),
        (Structure("json", '{"not": {"type": "string"}}'), "not"),
        (Structure("regex", "("), "regex parse error|invalid regex"),
        (Structure("regex", "(?=a)b"), "invalid regex"),
        (Structure("grammar", "start: foo"), 'unknown name: "foo"'),
        (Structure("json", '{"type": "integer", "minimum": 3, "maximum": 2}'), "minimum"),
        (Structure("regex", "a(b"), r"invalid regex: unclosed group in /a\(b/"),
        (json_of({"pattern": "a(?=b)"}), r"look-around.* is not supported in /a\(\?=b\)/"),
        (json_of({"patternProperties": {"[b": {}}}), r"unclosed character class in /\[b/"),
        (json_of({"minProperties": 3, "required": ["a"]}), "is 3, but 'required' lists 1"),
        (json_of({"items": TWICE}), r"\('\^\[ab\]\$'\) are all in 'properties'"),
        (json_of(TWICE_BY_REFERENCE), "are all in 'properties'"),
        (json_of({"enum": [{"id": 2**53 + 1}]}), "9007199254740993 .* has more than 53 bits"),
        (json_of({"const": "a\x01"}), "control character"),
        (Structure("json", '{"x-guid\\u0061nce": {"item_separator": ";"}}'), "'x-guidance' would"),
        (Structure("grammar", 'start: %json {"x-guid\\u0061nce": {}}'), "'x-guidance' would"),
        (Structure("grammar", 'start: "a" %json /**/ {}'), "Expecting value"),
        (Structure("grammar", "start: %json true"), "a schema must be an object, not True"),
        (Structure("grammar", 'start: %json {"const": "a\\u0001"}'), "control character"),
        (Structure("grammar", "start: %json " + '{"items":' * 7000), "nested too deeply"),
        (Structure("grammar", "start: <[3]>{20}"), r"special tokens such as <\[3\]>"),
        (Structure("grammar", 'start: "//" <[3]> // "'), "special tokens"),
        (Structure("grammar", '%llguidance {"allow_invalid_utf8": true}\nstart: "a"'), "'%llg"),
        (Structure("grammar", '{"grammars": [{"lark_grammar": "start: <[3]>"}]}'), "must be Lark"),
    ],
)
def test_an_invalid_structure_is_refused_with_the_reason(
    grammars: Grammars, structure: Structure, message: str
) -> None:
    with pytest.raises(InvalidArgument, match=f"'structured_outputs' is refused: .*({message})"):
        grammars.acquire(structure)
    assert structure not in grammars._entries


AGAIN = {"$ref": "#"}
NEEDS_A = {"properties": {"a": AGAIN}, "required": ["a"]}
NEEDS_AB = {"type": "object", "required": ["ab"]}
B_ONLY = {"^b$": AGAIN}
NEEDS_ITEM = {"type": "array", "items": AGAIN, "minItems": 1}


@pytest.mark.parametrize(
    ("schema", "ending"),
    [
        (NEEDS_A | {"type": "object"}, NEEDS_A | {"type": ["object", "null"]}),
        (NEEDS_ITEM, NEEDS_ITEM | {"minItems": 0}),
        (
            {"type": "array", "prefixItems": [{}, AGAIN], "minItems": 2},
            {"type": "array", "prefixItems": [{}, AGAIN], "minItems": 1},
        ),
        (
            {"type": "object", "required": ["a"], "additionalProperties": {"allOf": [AGAIN]}},
            {"type": "object", "required": ["a"], "additionalProperties": {"items": AGAIN}},
        ),
        (
            {"type": "object", "minProperties": 1, "additionalProperties": AGAIN},
            {"type": "object", "minProperties": 0, "additionalProperties": AGAIN},
        ),
        (NEEDS_AB | {"patternProperties": {"b$": AGAIN}}, NEEDS_AB | {"patternProperties": B_ONLY}),
        (
            NEEDS_AB | {"patternProperties": {"^c": {}}, "additionalProperties": AGAIN},
            NEEDS_AB | {"patternProperties": {"^a": {}}, "additionalProperties": AGAIN},
        ),
        (
            NEEDS_AB | {"properties": {"ab": {}}, "patternProperties": {"^a": AGAIN}},
            NEEDS_AB | {"properties": {"ab": {}}, "patternProperties": {"^[^a]": AGAIN}},
        ),
        ({"allOf": [{"type": "object"}, NEEDS_A]}, NEEDS_A),
        (
            {"anyOf": [NEEDS_A, {"$ref": "#/anyOf/0"}], "type": "object"},
            {"anyOf": [NEEDS_A | {"type": "object"}, NEEDS_ITEM, {"const": 0}]},
        ),
        (
            NEEDS_A | {"type": "object", "properties": {"a": NEEDS_ITEM}},
            {"type": "object", "properties": {"a": NEEDS_ITEM}},
        ),
    ],
)
def test_a_schema_without_a_finite_value_is_refused(
    grammars: Grammars, schema: dict[str, Any], ending: dict[str, Any]
) -> None:
    with pytest.raises(InvalidArgument, match="requires in each value another value of itself"):
        grammars.acquire(json_of(schema))
    grammars.release(json_of(ending), grammars.acquire(json_of(ending)))


@pytest.mark.parametrize(
    "structure", [json_of({"$ref": "#"}), Structure("grammar", "start: start")]
)
def test_a_structure_that_leads_only_to_itself_fails_its_answers_with_the_reason(
    grammars: Grammars, structure: Structure
) -> None:
    grammar = grammars.acquire(structure)
    matcher = grammar.open()
    with pytest.raises(InvalidArgument, match=r"failed: nothing may follow here; .* '\$ref'"):
        allowed(matcher)
    matcher.close()
    grammars.release(structure, grammar)


def test_a_structure_longer_than_the_limit_is_refused(grammars: Grammars) -> None:
    with pytest.raises(InvalidArgument, match="has 65537 bytes; the limit is 65536"):
        grammars.acquire(Structure("regex", "a" * 65537))


def test_compiling_for_ever_ends_with_the_limit_and_ordinary_structures_pass(
    tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A terminal of 2^16 copies of an expression takes more than 20 s to compile.

    Compilers have a low priority: on a busy machine, 0.6 s of processor time can take minutes.
    """
    monkeypatch.setattr("vlora.structured.grammars.MAX_WAIT_SECONDS", 600.0)
    limits = replace(LIMITS, max_grammar_seconds=0.6, max_grammar_memory=4 * 1024**3)
    grammars = grammars_of(tokenizer, limits)
    endless = Structure("grammar", HOSTILE["terminals that double"].text)

    def attempt(index: int) -> VLoraError:
        with pytest.raises(VLoraError) as raised:
            grammars.acquire(replace(endless, text=f"{endless.text}\n// {index}"))
        return raised.value

    with ThreadPoolExecutor(6) as threads:
        attempts = threads.map(attempt, range(6))
        for index in range(10):
            grammar = grammars.acquire(Structure("regex", f"a{index}"))
            spell(grammar.open(), tokenizer, f"a{index}")
        errors = list(attempts)
    assert any("needs more than 0.6 s of processor time" in error.message for error in errors)
    assert all(
        isinstance(error, InvalidArgument) or "large grammars are being compiled" in error.message
        for error in errors
    )
    grammars.close()


def test_a_process_that_is_killed_fails_its_answers_only(
    grammars: Grammars, vocabulary: Vocabulary
) -> None:
    doomed, other = Structure("regex", "x+"), Structure("regex", "y+")
    grammar, healthy = grammars.acquire(doomed), grammars.acquire(other).open()
    matcher = grammar.open()
    assert allowed(matcher)
    os.kill(grammar.process, signal.SIGKILL)
    matcher.advance(vocabulary.tokens_of[b"x"][0])
    with pytest.raises(Unavailable, match="was ended"):
        _ = settle(matcher).mask
    matcher.close()
    grammars.release(doomed, grammar)
    assert allowed(healthy)
    replacement = grammars.acquire(doomed)
    assert replacement is not grammar
    assert allowed(replacement.open())


def test_the_error_names_the_limit_that_a_process_exceeded() -> None:
    assert "more than 2 s of processor time" in error_of(-signal.SIGPROF, 2.0, 9).message
    for code in (-signal.SIGSEGV, -signal.SIGABRT, 3):
        assert "more than 9 bytes of memory" in error_of(code, 2.0, 9).message
        assert isinstance(error_of(code, 2.0, 9), InvalidArgument)
    assert error_of(1, 2.0, 9).code == "INTERNAL"
    assert error_of(None, 2.0, 9).code == "UNAVAILABLE"


def test_json_has_bounded_white_space(
    grammars: Grammars, tokenizer: Any, vocabulary: Vocabulary
) -> None:
    structure = Structure("json", '{"type": "array", "items": {"type": "integer"}}')
    grammar = grammars.acquire(structure)
    for text in ("[1, 2]", "[1,2]", "[\n  1,\n  2\n]", "[\n\t1 , 2]"):
        matcher = grammar.open()
        spell(matcher, tokenizer, text)
        assert matcher.stopped, text
        json.loads(text)
    (space,) = vocabulary.tokens_of[b" "]
    matcher = grammar.open()
    spell(matcher, tokenizer, "[ ")
    assert space not in allowed(matcher)
    grammars.release(structure, grammar)


@pytest.mark.parametrize(
    ("schema", "valid", "invalid"),
    [
        ({"type": "string", "format": "mobile"}, '"a b"', "1"),
        ({"properties": {"format": {"format": "ipv6"}}}, '{"format": "::"}', '{"format": "1"}'),
        (
            {"properties": {"a": {"const": 1}}, "additionalProperties": {"const": 2}},
            '{"a": 1, "b": 2}',
            '{"a": 1, "\\u0061": 2}',
        ),
        (TWICE | {"additionalProperties": {}}, '{"a": 3, "b": 4, "c": 0}', '{"a": 2, "b": 4}'),
        ({"type": "object", "minProperties": 2, "required": ["a"]}, '{"a": 1, "b": 1}', '{"a": 1}'),
        ({"exclusiveMinimum": 0, "maximum": 0.5}, "0.5", "0"),
        ({"minimum": -0.5, "maximum": 0, "exclusiveMaximum": True}, "-0.25", "-0"),
        ({"type": "integer", "minimum": 2**53 + 1}, str(2**53 + 2), str(2**53)),
        ({"prefixItems": [{"const": 1}], "additionalItems": False}, "[1, 2]", "[2]"),
    ],
)
def test_a_schema_allows_valid_answers_only(
    grammars: Grammars, tokenizer: Any, schema: Any, valid: str, invalid: str
) -> None:
    for structure in (json_of(schema), Structure("grammar", f"start: %json {json.dumps(schema)}")):
        grammar = grammars.acquire(structure)
        assert is_complete(grammar.open(), tokenizer, valid)
        assert not is_complete(grammar.open(), tokenizer, invalid)
        grammars.release(structure, grammar)


def is_complete(matcher: Matcher, tokenizer: Any, text: str) -> bool:
    """Return whether a text is allowed, and may end there."""
    for token in tokenizer.encode(text, add_special_tokens=False):
        if settle(matcher).stopped or token not in allowed(matcher):
            return False
        matcher.advance(token)
    return settle(matcher).stopped or EOS in allowed(matcher)


def test_each_complete_answer_to_a_small_schema_is_valid(
    grammars: Grammars, vocabulary: Vocabulary
) -> None:
    """A schema is refused, or its answers, of drawn tokens, never fail."""
    seed = random.randrange(2**32)
    rng = random.Random(seed)
    complete = 0
    for _ in range(120):
        schema = draw_object(rng)
        try:
            grammar = grammars.acquire(json_of(schema))
        except InvalidArgument:
            continue
        for _ in range(3):
            matcher, text = grammar.open(), b""
            while len(text) < 100 and not settle(matcher).stopped:
                tokens = sorted(allowed(matcher))
                usual = [token for token in tokens if set(vocabulary.bytes_of[token]) <= USUAL]
                token = rng.choice(usual or tokens)
                if token == EOS:
                    break
                text += vocabulary.bytes_of[token]
                matcher.advance(token)
            if len(text) < 100:
                complete += 1
                valid = jsonschema.Draft202012Validator(schema).is_valid(json.loads(text))
                assert valid, (seed, schema, text)
            matcher.close()
        grammars.release(json_of(schema), grammar)
    assert complete > 60, seed


def test_an_answer_that_is_ended_does_not_wait_for_the_end_of_its_process() -> None:
    never: Future[VLoraError] = Future()
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        grammar = Grammar(0, ours, 8, lambda process: never, 1.0, GrammarCounters())
        matcher = grammar.open()
        grammar.end(Unavailable("too slow"))
        grammar.receive()
        assert matcher.ready
        with pytest.raises(Unavailable, match="too slow"):
            _ = matcher.mask
